"""Compares an answer with the expected one. `app.py` runs this in a worker process.

Symbolic algebra on a policy's text can take unbounded time and memory. math-verify's own time limits use signals,
which work in the main thread only, so they are off here and the parent process kills the worker instead. An answer
that cannot be parsed or compared is wrong; only a missing package is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

_LATEX = re.compile(r"[\\{}$]")
_PERCENT = re.compile(r"([-+]?[\d,]*\.?\d+) *\\?%")
_NUMBER_WITH_UNIT = re.compile(r"([-+]?[\d.,/]*\d(?:[eE][-+]?\d+)?(?: +\d+/\d+)?)((?: +[A-Za-z]{3,})+)")
_NO_UNIT = re.compile(
    "illion|hundred|thousand|dozen|percent|pct|hal[fv]|third|fourth|fifth|sixth|eighth|tenth|squared|cubed|factorial|"
    "base|mod|sqrt| (?:plus|minus|over|choose|times +[a-z])",
    re.IGNORECASE,
)
_SCIENTIFIC = r"(?<![\w.])(\d+\.?\d*|\.\d+)[eE]([+-]?\d{1,3})(?![\w.])"
_MIXED = r"(?<![\w.,/^)])(\d+) +(\d+)/(\d+)(?![\w.(^])"
_MISREAD = re.compile(rf"(?!(?:[2-9]|\d\d+)e[+-][1-9])(?:{_SCIENTIFIC}|{_MIXED})")
"""Notations that math-verify gives a wrong value, except for "2e-1", which may be meant with Euler's number."""
_TO_LATEX = (
    (re.compile(r"(?<=\d)\.$"), ""),
    (re.compile(_MIXED), r"\1\\frac{\2}{\3}"),
    (re.compile(_SCIENTIFIC), r"\1\\times10^{\2}"),
    (re.compile(r"\*\*\s*(-?[\w.]+|\([^()]*\))"), r"^{\1}"),
    (re.compile(r"(?<![A-Za-z\\])((?:exp|log|ln|sin|cos|tan)(?= *\())"), r"\\\1"),
)
_NAMES = re.compile(r"(?<![A-Za-z])(pi|alpha|beta|gamma|delta|theta|lambda|sigma|phi|omega)(?![A-Za-z])")


def compare(expected: str, answer: str) -> dict[str, Any]:
    """Return ``right`` and ``read``, the part of the text taken as the answer (``None`` if there is none).

    ``expected`` is LaTeX or a plain expression. ``answer`` is prose. The answer is taken from its last ``\\boxed{…}``
    (or several that stand close together, as a list), else from other LaTeX, else from a number or an expression.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    def with_meaning(plain: str, parsed: list[Any]) -> list[Any]:
        meant = [part for latex in _in_latex(plain) for part in parse(f"\\boxed{{{latex}}}", parsing_timeout=None)]
        if meant and _MISREAD.search(plain):
            # math-verify reads "3 1/2" as 2 and "1e-05" as Euler's number minus 5. The same words are still right.
            parsed = [part for part in parsed if isinstance(part, str)]
        return parsed + meant

    gold = with_meaning(expected, parse(f"\\boxed{{{expected}}}", parsing_timeout=None))
    extraction = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    parsed = parse(answer, extraction, parsing_timeout=None)
    read = next((part for part in parsed if isinstance(part, str)), None)
    if read is not None:
        parsed = with_meaning(read, parsed)
    finer = _decimals_below_thousandths(gold)
    right = bool(gold and parsed) and verify(gold, parsed, 6 + finer, 15 + finer, timeout_seconds=None)
    return {"right": right, "read": read}


def _decimals_below_thousandths(gold: Sequence[Any]) -> int:
    """Return how many more decimals a small expected number needs: math-verify compares six decimals of a float and
    fifteen of an expression, with which 1e-19 is 0, and any other small number."""
    for part in gold:
        value = getattr(part, "rhs", part)
        if getattr(value, "is_number", False) and 0 < (magnitude := float(abs(value.doit().evalf()))) < 1e-3:
            return math.ceil(-3 - math.log10(magnitude))
    return 0


def _in_latex(plain: str) -> list[str]:
    """Return what an answer in plain notation or percent means where math-verify, which reads LaTeX, misreads it."""
    if (percent := _PERCENT.fullmatch(plain)) is not None:
        return [f"{percent[1]}\\%", percent[1], f"\\frac{{{percent[1]}}}{{100}}"]
    if _LATEX.search(plain):
        return []
    latex = _NAMES.sub(r"\\\1", plain)
    with_unit = _NUMBER_WITH_UNIT.fullmatch(latex)
    if with_unit is not None and not _NO_UNIT.search(with_unit[2]):
        latex = f"{with_unit[1]}\\text{{{with_unit[2]}}}"
    for notation, replacement in _TO_LATEX:
        latex = notation.sub(replacement, latex)
    in_digits = [format(Decimal(plain), "f")] if re.fullmatch(f"[+-]?{_SCIENTIFIC}", plain) else []
    return [latex, *in_digits] if latex != plain else []
