"""Reading the documentation: pages, links, tables, command lines and the example files that pages hold."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "fern" / "pages"
_FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="(?P<path>[^"]+)"')
_COMMAND = re.compile(r"^(?:\$ |    )?(?P<command>ng_\w+(?: .*)?)$")
ELLIPSIS = "…"


def documents() -> list[Path]:
    """Everything written for readers: the README files, the changelog and the site's pages."""
    plugins = ROOT.glob("res*/*/README.md")
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *sorted(PAGES.glob("*.md")),
        *sorted(plugins),
    ]


def links(text: str) -> list[str]:
    """Targets of a document's links that are no URLs."""
    found = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", without_code_blocks(text))
    return [target for target in found if "://" not in target and not target.startswith("mailto:")]


def without_code_blocks(text: str) -> str:
    """A document without its fenced code; link texts are often code themselves, so spans of code stay."""
    return _FENCE.sub("", text)


def anchors(path: Path) -> set[str]:
    """Anchors of a document's headings, as they are made from their words."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def example_files(page: Path | str) -> dict[str, str]:
    """Path → content of the code blocks of a page that have a title; a name alone is that of a page of the site."""
    text = (PAGES / page).read_text(encoding="utf-8")
    return {title["path"]: block["body"] for block in _FENCE.finditer(text) if (title := _TITLE.search(block["info"]))}


def write_examples(page: Path | str, directory: Path) -> None:
    for name, content in example_files(page).items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


@dataclass(frozen=True)
class CommandLine:
    """One ``ng_*`` command of a document, and what is printed below it."""

    where: str
    words: tuple[str, ...]
    output: str

    @property
    def program(self) -> str:
        return self.words[0]

    @property
    def has_gaps(self) -> bool:
        """Whether words are left out."""
        return any(ELLIPSIS in word for word in self.words)

    @property
    def is_refused(self) -> bool:
        return self.output.startswith(f"{self.program}: error:")


def command_lines(path: Path) -> Iterator[CommandLine]:
    """The commands in a document's code, continued lines joined."""
    lines = path.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        found = _COMMAND.match(lines[number])
        number += 1
        if not found:
            continue
        start, command = number, found["command"]
        while command.endswith("\\"):
            command = f"{command[:-1]} {lines[number].strip()}"
            number += 1
        below = lines[number] if number < len(lines) else ""
        words = shlex.split(command, comments=True)
        yield CommandLine(f"{path.relative_to(ROOT)}:{start}", tuple(words), below)


def table(path: Path, header: str) -> dict[str, list[str]]:
    """The table whose header row begins with ``header``: each name in backticks in a first cell → the row's other
    cells. A cell with several names gives several entries."""
    lines = path.read_text(encoding="utf-8").splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith(f"| {header}")]
    assert len(starts) == 1, f"{path.name}: {len(starts)} tables begin with '| {header}'"
    rows: dict[str, list[str]] = {}
    for line in lines[starts[0] + 2 :]:
        if not line.startswith("|"):
            break
        first, *others = (cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")))
        for name in re.findall(r"`(\w+)[^`]*`", first):
            rows[name] = others
    return rows
