"""Compares an answer with the expected one. `app.py` runs this in a worker process.

Symbolic algebra on a policy's text can take unbounded time and memory. math-verify's own time limits use signals,
which work in the main thread only, so they are off here and the parent process kills the worker instead. An answer
that cannot be parsed or compared is wrong; only a missing package is an error.
"""

from __future__ import annotations

from typing import Any


def compare(expected: str, answer: str) -> dict[str, Any]:
    """Return ``right`` and ``read``, the part of the text taken as the answer (``None`` if there is none).

    ``expected`` is LaTeX or a plain expression. ``answer`` is prose. The answer is taken from its last ``\\boxed{…}``,
    else from other LaTeX, else from a number or an expression.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    gold = parse(f"\\boxed{{{expected}}}", parsing_timeout=None)
    extraction = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    parsed = parse(answer, extraction, parsing_timeout=None)
    read = next((part for part in parsed if isinstance(part, str)), None)
    return {"right": bool(gold and parsed) and verify(gold, parsed, timeout_seconds=None), "read": read}
