"""``ng list`` and ``ng search``: what exists, a line for each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from nemo_gym._util.suggest import nearest
from nemo_gym.cli import command
from nemo_gym.contract.errors import ConfigError

KINDS = {"agents": "agent", "environments": "environment", "sandboxes": "sandbox", "models": "model"}
"""The command's argument → the setting that takes the listed names."""
MAX_CHARS = 100
_ALIASES = {"benchmarks": "environments"}


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
    from nemo_gym.cli.gym import add_root
    from nemo_gym.config.groups import Choice, available, find_group_file
    from nemo_gym.config.roots import plugin_roots

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
