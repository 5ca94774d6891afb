"""Numbers in an answer."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"(?<![\d.,])[-−]?\d+(?:[.,]\d+)?(?![\d]|[.,]\d)")


def contains_number(text: str, expected: float) -> bool:
    """Whether ``text`` states ``expected``, to a tenth, and no more than two other numbers: a list of guesses is no
    answer."""
    said = [float(number.replace("−", "-").replace(",", ".")) for number in _NUMBER.findall(text)]
    return len(said) <= 3 and any(abs(number - expected) < 0.05 for number in said)
