"""Shows what text this repository's sources share with NeMo Gym's: runs of six or more equal lines.

    python -m campaigns.compat.overlap DIR [--json]

``DIR`` holds NeMo Gym's sources, as its repository or wheel does. Lines are compared without their white space; blank
lines, comments and trivial lines (a bracket, ``pass``, ``else:``) are left out on both sides. Each run is listed with
both places. A run of only declarations (imports, class headers, fields, members, signatures) cannot differ in a
compatible interface, and is listed with that reason; any other run has to be written anew.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from campaigns.bench.report import Bar, argument_parser, print_report

ROOT = Path(__file__).resolve().parents[2]
RUN_LINES = 6
"""The least number of lines of a run that is shown."""
_TRIVIAL = re.compile(r'[\W_]*|(?:pass|else:|try:|finally:|return|return None|continue|break|"""|"?\w{1,3}"?,?)')
_IMPORT = re.compile(r"from [\w.]+ import [\w., (]+|import [\w., ]+|\w+,|\)")
_MANY_PLACES = 50
"""How many places with the same first lines are tried; lines with more places are boilerplate."""


@dataclass(frozen=True, slots=True)
class Line:
    number: int
    text: str


@dataclass(frozen=True, slots=True)
class Run:
    """Equal lines in both trees."""

    ours: str
    """``path:first-last``, like ``theirs``."""
    theirs: str
    lines: int
    reason: str | None
    """Why the interface forces these lines; ``None`` if it does not."""
    begins: str


def telling_lines(source: str) -> list[Line]:
    """Return the lines that are compared, with their white space normalized."""
    stripped = ((number, " ".join(text.split())) for number, text in enumerate(source.splitlines(), 1))
    return [
        Line(number, text) for number, text in stripped if not text.startswith("#") and not _TRIVIAL.fullmatch(text)
    ]


def declarations(source: str) -> dict[int, str]:
    """Return line → the kind of declaration that the line belongs to; other lines are missing."""
    kinds: dict[int, str] = {}

    def mark(first: int, last: int | None, kind: str) -> None:
        kinds.update(dict.fromkeys(range(first, (last or first) + 1), kind))

    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                if _IMPORT.fullmatch(lines[number - 1].strip()):
                    mark(number, number, "imports of a template")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            mark(node.lineno, node.end_lineno, "imports")
        elif isinstance(node, ast.ClassDef):
            mark(node.lineno, max(node.lineno, node.body[0].lineno - 1), "class headers")
            for member in node.body:
                if isinstance(member, ast.AnnAssign):
                    mark(member.lineno, member.end_lineno, "fields")
                elif isinstance(member, ast.Assign):
                    mark(member.lineno, member.end_lineno, "members")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min((decorator.lineno for decorator in node.decorator_list), default=node.lineno)
            mark(first, max(node.lineno, node.body[0].lineno - 1), "signatures")
        elif isinstance(node, ast.Assign) and any(getattr(name, "id", "") == "__all__" for name in node.targets):
            mark(node.lineno, node.end_lineno, "exported names")
    return kinds


def index(files: dict[str, list[Line]]) -> dict[tuple[str, ...], list[tuple[str, int]]]:
    """Return the places of each sequence of `RUN_LINES` lines."""
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for path, lines in files.items():
        for start in range(len(lines) - RUN_LINES + 1):
            places[tuple(line.text for line in lines[start : start + RUN_LINES])].append((path, start))
    return places


def runs(ours: dict[str, str], theirs: dict[str, str]) -> Iterator[Run]:
    """Yield the longest run that begins at each of our places, in order and without overlaps."""
    their_lines = {path: telling_lines(source) for path, source in theirs.items()}
    places = index(their_lines)
    for path, source in ours.items():
        lines = telling_lines(source)
        at = 0
        while at + RUN_LINES <= len(lines):
            begin = tuple(line.text for line in lines[at : at + RUN_LINES])
            candidates = [
                (_equal(lines, at, their_lines[other], start), other, start)
                for other, start in places.get(begin, ())[:_MANY_PLACES]
            ]
            if not candidates:
                at += 1
                continue
            length, other, start = max(candidates)
            their_run = their_lines[other][start : start + length]
            run = lines[at : at + length]
            yield Run(
                f"{path}:{run[0].number}-{run[-1].number}",
                f"{other}:{their_run[0].number}-{their_run[-1].number}",
                length,
                reason_of(run, declarations(source)),
                run[0].text[:80],
            )
            at += length


def reason_of(run: Sequence[Line], kinds: dict[int, str]) -> str | None:
    """Return the kinds of declarations in a run, or ``None`` if a line belongs to none."""
    if any(line.number not in kinds for line in run):
        return None
    counted = Counter(kinds[line.number] for line in run)
    return "declarations: " + ", ".join(kind for kind, _ in counted.most_common())


def _equal(lines: Sequence[Line], at: int, other: Sequence[Line], start: int) -> int:
    length = 0
    while (
        at + length < len(lines)
        and start + length < len(other)
        and lines[at + length].text == other[start + length].text
    ):
        length += 1
    return length


def sources(root: Path, paths: Iterator[str]) -> dict[str, str]:
    """Return the Python files that can be read and parsed, by path."""
    found = {}
    for path in sorted(paths):
        try:
            text = (root / path).read_text(encoding="utf-8")
            ast.parse(text)
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        found[path] = text
    return found


def main() -> int:
    parser = argument_parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("directory", type=Path, metavar="DIR", help="NeMo Gym's sources")
    parser.add_argument("--bar", type=int, default=0, help="runs that may be no declarations")
    args = parser.parse_args()
    if not (args.directory / "nemo_gym").is_dir():
        parser.error(f"{args.directory} holds no 'nemo_gym'; name the directory above it")
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    ours = sources(ROOT, iter(tracked.stdout.splitlines()))
    their_paths = (str(path.relative_to(args.directory)) for path in args.directory.rglob("*.py"))
    theirs = sources(args.directory, their_paths)
    all_runs = list(runs(ours, theirs))
    unforced = [run for run in all_runs if run.reason is None]
    figures = {
        "files, ours": len(ours),
        "files, theirs": len(theirs),
        "lines compared, ours": sum(len(telling_lines(source)) for source in ours.values()),
        "runs": len(all_runs),
        "runs that are declarations": len(all_runs) - len(unforced),
        "longest run, lines": max((run.lines for run in all_runs), default=0),
    }
    listed = sorted(all_runs, key=lambda run: (run.reason is not None, -run.lines))
    if args.json:
        figures_shown = {**figures, "listed": [asdict(run) for run in listed]}
    else:
        figures_shown = dict(figures)
        for run in listed:
            print(f"{run.lines:3} lines  {run.ours}  {run.theirs}  {run.reason or 'TO BE WRITTEN ANEW'}: {run.begins}")
    bars = [Bar.at_most("runs that the interface does not force", len(unforced), args.bar)]
    return print_report(figures_shown, bars, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
