"""The shape of the project as rules: who may import whom, and what the core may not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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
# Lower number = nearer to the ground. A module imports its own layer and those below it.
LAYERS = {
    "nemo_gym._util": 0,
    "nemo_gym.contract.errors": 0,
    "nemo_gym.storage": 0,
    "nemo_gym.sandbox": 1,
    "nemo_gym.sandbox.wire": 2,
    "nemo_gym.sandbox.merge": 2,
    # It finds the stack's broker, and shows it the credential of this process's launch.
    "nemo_gym.sandbox.providers.remote": 5,
    "nemo_gym.contract": 2,
    "nemo_gym.config": 3,
    "nemo_gym.sandbox.harvest": 3,
    "nemo_gym.gateway": 4,
    "nemo_gym.broker": 5,
    "nemo_gym.gateway.refusals": 5,
    "nemo_gym.gateway.service": 5,
    "nemo_gym.http": 5,
    "nemo_gym.stack": 5,
    "nemo_gym.agent.topology": 5,
    "nemo_gym.rollouts": 6,
    "nemo_gym.rollout_collection": 6,
    "nemo_gym.cli": 7,
}
# The wire form of a sandbox spec is part of the session contract and is built from the seam's plain types.
ALLOWED_UPWARD: set[tuple[str, str]] = set()


def _modules() -> Iterator[tuple[str, ast.Module, Path]]:
    for path in sorted(CORE.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield name, ast.parse(path.read_text()), path


def _imports(tree: ast.AST, *, at_import_time: bool) -> Iterator[str]:
    """Names a module imports; with ``at_import_time`` only those that run when it is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif at_import_time and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        elif at_import_time and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for orelse in node.orelse:
                yield from _imports(ast.Module([orelse], []), at_import_time=True)
        else:
            yield from _imports(node, at_import_time=at_import_time)


def _layer(name: str) -> int | None:
    best = max((prefix for prefix in LAYERS if f"{name}.".startswith(f"{prefix}.")), key=len, default=None)
    return LAYERS[best] if best else None


MODULES = list(_modules())


@pytest.mark.parametrize(("name", "tree"), [pytest.param(name, tree, id=name) for name, tree, _ in MODULES])
def test_core_module_never_imports_a_plugin(name: str, tree: ast.Module) -> None:
    named = [imported for imported in _imports(tree, at_import_time=False) if imported.split(".")[0] in PLUGIN_ROOTS]
    assert not named, f"{name} imports {named}; the core finds plugins by configuration or entry points"


@pytest.mark.parametrize(("name", "tree"), [pytest.param(name, tree, id=name) for name, tree, _ in MODULES])
def test_core_module_never_imports_a_vendor_sdk_at_import_time(name: str, tree: ast.Module) -> None:
    named = [imported for imported in _imports(tree, at_import_time=True) if imported.split(".")[0] in VENDOR_SDKS]
    assert not named, f"{name} imports {named} at import time; import it where it is used"


@pytest.mark.parametrize(("name", "tree"), [pytest.param(name, tree, id=name) for name, tree, _ in MODULES])
def test_core_module_imports_only_its_layer_and_those_below(name: str, tree: ast.Module) -> None:
    own = _layer(name)
    if own is None:  # the base servers and NeMo Gym's module names stand between topology and rollouts
        own = LAYERS["nemo_gym.agent.topology"]
    above = [
        imported
        for imported in _imports(tree, at_import_time=True)
        if (layer := _layer(imported)) is not None and layer > own and (name, imported) not in ALLOWED_UPWARD
    ]
    assert not above, f"{name} (layer {own}) imports {above}; the direction is cli → rollouts → servers → session"


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
