"""The comparison of an answer with the expected one, as a process of `checker.py` makes it.

Symbolic algebra on what a policy wrote can take any time and any memory, and math-verify's own time limits are
signals, which work in a main thread only. Here they are off: whoever started the process ends it. What cannot be read
or compared is a wrong answer; only a missing package is an error.
"""

from __future__ import annotations

from typing import Any


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
