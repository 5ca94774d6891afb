"""Every agent × environment × sandbox × topology: composed, and run where composing does not refuse it.

python -m tests.acceptance.matrix [--write] [--compose] [--only TEXT…] [--json]

``--write`` makes the page of the documentation anew, unless a cell that was run does not work; ``--compose`` runs
nothing; ``--only`` runs the cells whose names have all of the texts (``claude_code``, ``docker``, ``swe_bench``…).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from campaigns.bench.report import Bar, argument_parser, print_report
from tests.acceptance.matrix.cells import Cell, Verdict, all_cells, verdict
from tests.acceptance.matrix.page import PAGE, render
from tests.acceptance.matrix.run import CellError, prepare, run
from tests.acceptance.matrix.servers import servers_for


def main(words: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}, unless a cell fails")
    parser.add_argument("--compose", action="store_true", help="run nothing")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="only cells whose names have all of these"
    )
    given = parser.parse_args(words)
    verdicts = [verdict(cell) for cell in all_cells()]
    cells = [cell for found in verdicts for cell in found.cells() if all(text in str(cell) for text in given.only)]
    failed: dict[str, list[str]] = {}
    if not given.compose:
        with servers_for(cells):
            failed = _run_all(cells)
    if given.write and not failed:
        PAGE.write_text(render(verdicts), encoding="utf-8")
    if given.compose and not given.json and not given.write:
        print(render(verdicts))
    refused = [found for found in verdicts if found.is_refused]
    figures = {
        "cells": len(verdicts),
        "refused": {str(found.cell): found.reason for found in refused},
        "run": [] if given.compose else [str(cell) for cell in cells],
        "failed": failed,
    }
    bars = [
        Bar(
            "cells refused without a reason", _without_reason(verdicts), "cells", "= 0", not _without_reason(verdicts)
        ),
        Bar("cells that compose and do not work", len(failed), "cells", "= 0", not failed),
    ]
    return print_report(figures, bars, as_json=given.json)


def _without_reason(verdicts: Sequence[Verdict]) -> int:
    return sum(not found.topologies and not found.reason for found in verdicts)


def _run_all(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """What is wrong, by cell."""
    failed: dict[str, list[str]] = {}
    for cell in cells:
        with tempfile.TemporaryDirectory(prefix="matrix-") as directory:
            try:
                prepare(cell)
                outcome = run(cell, Path(directory))
                wrong, seconds = outcome.failures(), f"{outcome.seconds:.1f} s"
            except CellError as error:
                wrong, seconds = [str(error)], ""
        print(f"{'MISS' if wrong else 'ok  '} {cell} {seconds} {'; '.join(wrong)}", file=sys.stderr, flush=True)
        if wrong:
            failed[str(cell)] = wrong
    return failed


if __name__ == "__main__":
    sys.exit(main())
