"""Measure servers: start, requests, memory (`campaigns.bench.stack`), whole rollouts (`campaigns.bench.rollouts`).

python -m campaigns.bench.servers [--json]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench import rollouts, stack
from campaigns.bench.report import argument_parser, print_report


def main() -> int:
    arguments = argument_parser(__doc__).parse_args()
    figures, bars = stack.measure()
    more_figures, more_bars = rollouts.measure()
    return print_report({**figures, **more_figures}, [*bars, *more_bars], as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
