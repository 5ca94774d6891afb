"""The shape of the project as rules. Who may import whom is in `pyproject.toml` and checked by ``make lint``."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "nemo_gym"
PLUGIN_ROOTS = ("resources_servers", "responses_api_agents", "responses_api_models")
VENDOR_SDKS = frozenset(
    [
        "anthropic",
        "datasets",
        "docker",
        "litellm",
        "minisweagent",
        "modal",
        "opensandbox",
        "pandas",
        "podman",
        "ray",
        "sglang",
        "swebench",
        "torch",
        "transformers",
        "verl",
        "vllm",
    ]
)


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(CORE.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield name, ast.parse(path.read_text())


def _imports(tree: ast.AST) -> Iterator[str]:
    """Names a module imports when it is imported itself: not in functions, and not for types only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for orelse in node.orelse:
                yield from _imports(ast.Module([orelse], []))
        else:
            yield from _imports(node)


def test_the_core_imports_no_vendor_sdk_at_import_time() -> None:
    named = [
        f"{name} imports {imported}"
        for name, tree in _modules()
        for imported in _imports(tree)
        if imported.split(".")[0] in VENDOR_SDKS
    ]
    assert not named, f"{named}; import it where it is used"


def test_nothing_is_raised_in_except_star() -> None:
    # Debian 12's Python 3.11.2 wraps it in another group, which nobody up the stack catches.
    paths = [path for root in ("nemo_gym", *PLUGIN_ROOTS) for path in sorted((ROOT / root).rglob("*.py"))]
    assert paths
    raised = [
        f"{path.relative_to(ROOT)}:{inner.lineno}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.TryStar)
        for handler in node.handlers
        for inner in ast.walk(handler)
        if isinstance(inner, ast.Raise) and inner.exc is not None
    ]
    assert not raised, f"{raised}; raise `nemo_gym._util.tasks.first_of` in `except ExceptionGroup`"


def test_classes_of_one_folder_have_different_names() -> None:
    files: dict[tuple[Path, str], list[str]] = {}
    for root in ("nemo_gym", *PLUGIN_ROOTS):
        for path in sorted((ROOT / root).rglob("*.py")):
            for node in ast.parse(path.read_bytes()).body:
                if isinstance(node, ast.ClassDef) and not {"tests", "examples"} & set(path.parts):
                    files.setdefault((path.parent, node.name), []).append(path.name)
    twice = [f"{name}: {folder.relative_to(ROOT)}/{paths}" for (folder, name), paths in files.items() if paths[1:]]
    assert not twice, f"who searches one of these finds the other: {twice}"


def test_every_plugin_server_folder_has_the_same_shape() -> None:
    lacking = []
    for root in PLUGIN_ROOTS:
        for app in sorted((ROOT / root).glob("*/app.py")):
            for part in ("README.md", "configs", "tests"):
                if not (app.parent / part).exists():
                    lacking.append(f"{app.parent.relative_to(ROOT)}/{part}")
    assert not lacking, f"missing: {lacking}"


def test_importing_the_core_loads_no_vendor_sdk_and_no_plugin() -> None:
    script = (
        "import sys, nemo_gym, nemo_gym.contract.session, nemo_gym.sandbox, nemo_gym.base_resources_server,"
        " nemo_gym.base_responses_api_agent, nemo_gym.base_responses_api_model, nemo_gym.config.run\n"
        f"heavy = {sorted(VENDOR_SDKS | set(PLUGIN_ROOTS))!r}\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
