"""Commands about plugins: ``ng list`` and ``ng search``, ``ng env init`` and ``ng agent init``, ``ng env test``."""

from __future__ import annotations

import keyword
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Final

from nemo_gym._util.files import INSTALL_ROOT
from nemo_gym._util.suggest import nearest
from nemo_gym.cli import command
from nemo_gym.cli.gym import SEARCH_DIR, add_root
from nemo_gym.config.files import EXTRA_ROOTS_VARIABLE, find_plugin, plugin_roots
from nemo_gym.contract.errors import ConfigError

KINDS = {"agents": "agent", "environments": "environment", "sandboxes": "sandbox", "models": "model"}
"""The command's argument → the setting that takes the listed names."""
MAX_CHARS = 100
_ALIASES = {"benchmarks": "environments"}
_SCAFFOLDS = Path(__file__).with_name("scaffolds")
_ENVIRONMENTS: Final = {
    "qa": "A question and its answer.",
    "mcp": "Tools over MCP and as routes.",
    "box": "Work in a box.",
    "step": "A state that tools change, step by step.",
    "judge": "An answer that another model judges.",
}
"""The kinds of environments; each is also a flag of ``ng env init``."""
_RUN = """
    export NEMO_GYM_EXTRA_ROOTS=$root
    ng env test $name
    ng_run $words input=resources_servers/$name/data/example.jsonl output=results/$name.jsonl
"""
_README = """# $Title

$what

The files: `app.py` grades, `configs/$name.yaml` configures, `data/example.jsonl` holds rows,
`data/scripted_policy.yaml` says what a scripted model does with them, `tests/` tries the grading without a server.
$run"""


def list_parts(argv: Sequence[str]) -> int:
    """Print names with one line each, of all kinds or of the given kinds."""
    parser = command.parser("ng list", f"What exists: {', '.join(KINDS)}.", words="kind")
    parser.add_argument("--search-dir", action="append", default=[], help="look here as well")
    arguments = parser.parse_intermixed_args(argv)
    return _show(arguments.settings, arguments.search_dir, None)


def search(argv: Sequence[str]) -> int:
    """Print the names and lines that contain a word."""
    parser = command.parser("ng search", "What exists and holds WORD in its name or its line.", words="WORD")
    words = parser.parse_intermixed_args(argv).settings
    if len(words) != 1:
        raise ConfigError("search for one word: ng search math", key="query")
    return _show([], [], words[0])


def _show(kinds: Sequence[str], folders: Sequence[str], query: str | None) -> int:
    from nemo_gym.config.files import Choice, available, find_group_file

    for folder in folders:
        add_root(folder)
    chosen = [_ALIASES.get(kind, kind) for kind in kinds] or [*KINDS]
    for kind in chosen:
        if kind not in KINDS:
            raise ConfigError(f"there are {', '.join(KINDS)}, no '{kind}'{nearest(kind, KINDS)}", key="component_name")
    roots = plugin_roots()
    for kind in chosen:
        group = KINDS[kind]
        files = {name: find_group_file(Choice(group, name, "ng list"), roots) for name in available(group, roots)}
        lines = {
            name: _line_of(path)
            for name, path in files.items()
            if path is not None and not (group == "environment" and _is_broker(path))
        }
        if query is not None:
            lines = {name: line for name, line in lines.items() if query.lower() in f"{name} {line}".lower()}
        if lines:
            print(f"{kind} ({group}=…)")
        for name, line in lines.items():
            print(f"  {name:24} {line}")
    return command.EXIT_OK


def _is_broker(path: Path) -> bool:
    """Whether an environment's file is the sandbox broker's, which holds boxes and grades nothing."""
    return re.search(r"^sandbox_broker:", path.read_text(encoding="utf-8"), re.MULTILINE) is not None


def _line_of(path: Path) -> str:
    """Return the first sentence of a part's configuration file, else of its README."""
    text = path.read_text(encoding="utf-8")
    if comment := re.match(r"((?:#.*\n)+)", text):
        description = " ".join(line.lstrip("# ").strip() for line in comment[1].splitlines())
        if not description.startswith("SPDX"):
            return _sentence(description)
    if setting := re.search(r"^\s+description:\s*(.+)$", text, re.MULTILINE):
        return _sentence(setting[1].strip("'\""))
    readme = path.parent.parent / "README.md"
    if readme.is_file():
        paragraphs = [part for part in readme.read_text(encoding="utf-8").split("\n\n") if not part.startswith("#")]
        return _sentence(" ".join(paragraphs[0].split())) if paragraphs else ""
    return ""


def _sentence(text: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    first = re.split(r"(?<=\.)\s", text, maxsplit=1)[0]
    if len(first) > MAX_CHARS and ": " in first:
        first = f"{first.partition(': ')[0]}."
    return first if len(first) <= MAX_CHARS else f"{first[: MAX_CHARS - 3]}…"


def run_tests(argv: Sequence[str]) -> int:
    """Run pytest in the plugin's folder, as NeMo Gym does: the folder and its root are on the import path."""
    parser = command.parser("ng env test", "Run a plugin's own tests.", words="NAME | FOLDER")
    for flag in ("--resources-server", "--environment", "--agent"):
        parser.add_argument(flag, dest="name", help="the plugin")
    parser.add_argument(
        "--all", action="store_true", help=f"every plugin with tests, below {EXTRA_ROOTS_VARIABLE} if that is set"
    )
    parser.add_argument(SEARCH_DIR, action="append", default=[], help="look for plugins below this folder first")
    arguments, pytest_args = parser.parse_known_intermixed_args(argv)
    name = command.plugin_name(arguments.settings, arguments.name)
    for folder in arguments.search_dir:
        add_root(folder)
    if arguments.all:
        if name:
            raise ConfigError(f"--all tests every plugin; leave out '{name}', or --all", key="entrypoint")
        folders = tested_plugins()
        failed = [str(folder) for folder in folders if not _passes(folder, pytest_args)]
        print(f"plugins tested: {len(folders)}; failed: {', '.join(failed) or 'none'}")
        return command.EXIT_FAILED if failed else command.EXIT_OK
    if not name:
        raise ConfigError("name a plugin or its folder, for example: ng env test mcqa", key="entrypoint")
    folder = plugin_folder(name)
    if not _has_tests(folder):
        raise ConfigError(f"{folder} has no tests (test_*.py)", key="entrypoint")
    return command.EXIT_OK if _passes(folder, pytest_args) else command.EXIT_FAILED


def _has_tests(folder: Path) -> bool:
    return next(folder.rglob("test_*.py"), None) is not None


def _passes(folder: Path, pytest_args: Sequence[str]) -> bool:
    root = folder.parents[1]
    roots = os.pathsep.join(part for part in (str(root), os.environ.get(EXTRA_ROOTS_VARIABLE)) if part)
    path = os.pathsep.join(part for part in (str(folder), str(root), os.environ.get("PYTHONPATH")) if part)
    options = ("asyncio_mode=auto", "asyncio_default_fixture_loop_scope=function", "addopts=")
    words = [sys.executable, "-m", "pytest", *(f"-o{option}" for option in options), "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*words, *pytest_args, "."],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, EXTRA_ROOTS_VARIABLE: roots},
        check=False,
    )
    return done.returncode == 0


def tested_plugins() -> list[Path]:
    """The folders of all plugins with tests: those of `EXTRA_ROOTS_VARIABLE` if it is set, else of every root. Raises
    `ConfigError` if there are none."""
    from nemo_gym.config.keys import SERVER_TYPES

    extra = [part for part in os.environ.get(EXTRA_ROOTS_VARIABLE, "").split(os.pathsep) if part]
    roots = [Path(part).expanduser().resolve() for part in extra] or plugin_roots()
    found: dict[tuple[str, str], Path] = {}
    for root in roots:
        for app in sorted(app for kind in SERVER_TYPES for app in root.glob(f"{kind}/*/app.py")):
            found.setdefault((app.parts[-3], app.parts[-2]), app.parent)
    if not (folders := [folder for folder in found.values() if _has_tests(folder)]):
        raise ConfigError(f"no plugin below {', '.join(map(str, roots))} has tests (test_*.py)", key="entrypoint")
    return folders


def plugin_folder(name: str) -> Path:
    """Return the folder of a plugin, given by path or by name. Raises `ConfigError` that suggests the nearest name."""
    given = Path(name).expanduser()
    if given.is_dir() and (given / "app.py").is_file():
        return given.resolve()
    from nemo_gym.config.keys import ENVIRONMENT_TYPE, SERVER_TYPES

    roots = plugin_roots()
    found = [root / kind / name for kind in SERVER_TYPES for root in roots if (root / kind / name).is_dir()]
    return found[0].resolve() if found else find_plugin(ENVIRONMENT_TYPE, name, roots)


def init_environment(argv: Sequence[str]) -> int:
    """Write ``resources_servers/NAME`` below the working directory, or below ``--search-dir``."""
    parser = command.parser("ng env init", "Write a new environment, which runs and passes its tests.", words="NAME")
    parser.set_defaults(kind="qa")
    kinds = parser.add_mutually_exclusive_group()
    for kind, what in _ENVIRONMENTS.items():
        kinds.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, help=what)
    parser.add_argument("--search-dir", default=".", help="the folder above resources_servers (default: here)")
    parser.add_argument("--resources-server", help="NeMo Gym's way to say NAME")
    arguments = parser.parse_intermixed_args(argv)
    name = _new_name("resources_servers", arguments.settings, arguments.resources_server)
    root = Path(arguments.search_dir).expanduser().resolve()
    agent = "agent=mini_swe_agent" if arguments.kind == "box" else "agent=simple_agent"
    sandbox = " sandbox=local" if arguments.kind == "box" else ""
    fields = {**_fields(name, root), "what": _ENVIRONMENTS[arguments.kind]}
    run = Template(_RUN).substitute(fields, words=f"{agent} environment={name}{sandbox} model=scripted")
    readme = Template(_README).substitute(fields, run=run)
    folder = root / "resources_servers" / name
    _write(folder, {**_files(arguments.kind, fields), "README.md": readme})
    print(f"{folder}: try it{run}", end="")
    return command.EXIT_OK


def init_agent(argv: Sequence[str]) -> int:
    """Write ``responses_api_agents/NAME``, or with ``--command`` a composition around the composite agent."""
    parser = command.parser("ng agent init", "Write a new agent, which runs at once.", words="NAME")
    parser.set_defaults(kind="agent")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--python", dest="kind", action="store_const", const="agent", help="a server (the default)")
    kinds.add_argument("--command", dest="kind", action="store_const", const="command", help="a program in a box")
    parser.add_argument("--search-dir", default=".", help="the folder above responses_api_agents (default: here)")
    arguments = parser.parse_intermixed_args(argv)
    name = _new_name("responses_api_agents", arguments.settings, None)
    root = Path(arguments.search_dir).expanduser().resolve()
    folder = root / "responses_api_agents" / name
    if arguments.kind == "command":
        # Only a configuration and a program: the server is the composite agent's.
        tried = f"ng env init numbers --box --search-dir {root}\n    "
        tried += f"ng_run agent={name} environment=numbers sandbox=local model=scripted"
    else:
        tried = f"ng env test {name}\n    ng_run agent={name} environment=mcqa model=scripted"
    _write(folder, _files(arguments.kind, _fields(name, root)))
    print(f"{folder}: try it\n\n    export NEMO_GYM_EXTRA_ROOTS={root}\n    {tried} output=results/{name}.jsonl")
    return command.EXIT_OK


def _new_name(parent: str, words: Sequence[str], flag: str | None) -> str:
    """Return the new plugin's name, which may stand behind the folder that it goes to, as NeMo Gym writes it."""
    found = command.plugin_name(words, flag) or ""
    name = found.removeprefix("./").removeprefix(f"{parent}/").rstrip("/")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        elsewhere = "; for another folder use --search-dir" if "/" in name else ""
        raise ConfigError(
            f"a name of small letters, digits and underscores is needed, got '{found}'; it is a Python package"
            f"{elsewhere}",
            key="name",
        )
    if (own := INSTALL_ROOT / parent / name).is_dir():
        raise ConfigError(f"{own} exists already, and the new one would hide it; choose another name", key="name")
    return name


def _fields(name: str, root: Path) -> dict[str, str]:
    words = name.split("_")
    return {
        "name": name,
        "Class": "".join(word.title() for word in words if word),
        "Title": " ".join(words).capitalize(),
        "root": str(root),
    }


def _files(kind: str, fields: dict[str, str]) -> dict[str, str]:
    """Return a new plugin's files. In ``scaffolds/<kind>.txt``, a line ``-- path --`` begins each; ``$name``,
    ``$Class`` and ``$Title`` stand for the plugin's name, in paths too."""
    text = Template((_SCAFFOLDS / f"{kind}.txt").read_text(encoding="utf-8")).substitute(fields)
    _, *parts = re.split(r"^-- (.+) --\n", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _write(folder: Path, files: dict[str, str]) -> None:
    if folder.exists():
        raise ConfigError(f"{folder} exists already; choose another name, or remove it", key="name")
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
