"""``ng env init`` and ``ng agent init``: write plugin folders that run and pass their own tests at once.

Their files come from ``scaffolds/<kind>.txt``: a line ``-- path --`` begins each file. ``$name``,
``$Class`` and ``$Title`` stand for the new plugin's name, in paths too.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Final

from nemo_gym._util.files import INSTALL_ROOT
from nemo_gym.cli import command
from nemo_gym.contract.errors import ConfigError

_SCAFFOLDS = Path(__file__).with_name("scaffolds")
_KINDS: Final = {
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


def init_environment(argv: Sequence[str]) -> int:
    """Write ``resources_servers/NAME`` below the working directory, or below ``--search-dir``."""
    parser = command.parser("ng env init", "Write a new environment, which runs and passes its tests.", words="NAME")
    parser.set_defaults(kind="qa")
    kinds = parser.add_mutually_exclusive_group()
    for kind, what in _KINDS.items():
        kinds.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, help=what)
    parser.add_argument("--search-dir", default=".", help="the folder above resources_servers (default: here)")
    parser.add_argument("--resources-server", help="NeMo Gym's way to say NAME")
    arguments = parser.parse_intermixed_args(argv)
    name = _name("resources_servers", arguments.settings, arguments.resources_server)
    root = Path(arguments.search_dir).expanduser().resolve()
    agent = "agent=mini_swe_agent" if arguments.kind == "box" else "agent=simple_agent"
    sandbox = " sandbox=local" if arguments.kind == "box" else ""
    fields = {**_fields(name, root), "what": _KINDS[arguments.kind]}
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
    name = _name("responses_api_agents", arguments.settings, None)
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


def _name(parent: str, words: Sequence[str], flag: str | None) -> str:
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
