"""The program that compares answers: one JSON line in, one out, for as long as its standard input is open.

It runs in a process of its own because symbolic algebra on what a policy wrote can take any time and any memory, and
because math-verify's own time limits are signals, which work in a main thread only. Here they are off: whoever started
this process ends it. What cannot be read or compared is a wrong answer; only a missing package is an error.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import signal
import sys
from typing import Any

MEMORY_BYTES = 2 * 1024**3
PR_SET_PDEATHSIG = 1


def main() -> None:
    # Nothing else may write where the answers go, and nobody reads what it says once it has started.
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    silence = os.open(os.devnull, os.O_WRONLY)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)  # it would repeat the answers
    for line in sys.stdin:
        asked = json.loads(line)
        said = compare(asked["expected"], asked["answer"])
        os.dup2(silence, 2)
        os.dup2(silence, 1)
        print(json.dumps(said), file=replies)


def compare(expected: str, answer: str) -> dict[str, Any]:
    """``right``, and ``read``: what was taken for the answer, ``None`` where nothing could be.

    ``expected`` is LaTeX or a plain expression. ``answer`` is prose; of what is in it, the last ``\\boxed{…}`` counts
    most, then other LaTeX, then a number or an expression.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    gold = parse(f"\\boxed{{{expected}}}", parsing_timeout=None)
    places = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    found = parse(answer, places, parsing_timeout=None)
    read = next((part for part in found if isinstance(part, str)), None)
    return {"right": bool(gold and found) and verify(gold, found, timeout_seconds=None), "read": read}


if __name__ == "__main__":
    main()
