"""Which option an answer chooses, in each of the ways in which data sets ask for it.

Every way takes the last place in the answer that has the form asked for; a letter counts only when it is an option's.
The forms here need time proportional to the answer's length. A row's own regular expression may not, so whoever
searches with one does so in a process that can be killed (`last_match`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

ANSWER_CHARS = 20_000
"""Of an answer, counted from its end; what is asked for stands there."""
_BOX = "\\boxed{"
_WRAPPED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mathsf|boldsymbol)\{([^{}]*)\}")
_AROUND = " \t\r\n.,:;!*_`\"'$()[]{}"
_ANSWER = re.compile(r"\banswer(?:\s+is)?[ \t*_`]*[:=][ \t]*([^\n]*)", re.IGNORECASE)
_LETTER_FIRST = re.compile(r"[ \t*_`$(\[]*([A-Z])(?:[.:,)\]*_`]|\s*$)")


class Grading(StrEnum):
    """``grading_mode`` of a row, by NeMo Gym's names."""

    STRICT_SINGLE_LETTER_BOXED = "strict_single_letter_boxed"
    """The last ``\\boxed{…}`` holds one capital letter and nothing else."""
    LENIENT_BOXED = "lenient_boxed"
    """What is in the last ``\\boxed{…}`` may be wrapped (``\\text{B}``, ``(B)``), or be the option's own text."""
    LENIENT_ANSWER_COLON = "lenient_answer_colon"
    """The last ``Answer: …``, with a letter, or the option's own text."""


def choice(text: str, options: Mapping[str, str], mode: Grading) -> str | None:
    """The letter that ``text`` chooses, or ``None`` where it chooses none of ``options``."""
    text = text[-ANSWER_CHARS:]
    if mode is Grading.LENIENT_ANSWER_COLON:
        said = [match[1] for match in _ANSWER.finditer(text)]
        return _lenient(said[-1], options) if said else None
    boxed = _last_box(text)
    if boxed is None:
        return None
    if mode is Grading.STRICT_SINGLE_LETTER_BOXED:
        return boxed if boxed in options else None
    return _lenient(boxed, options)


def matched(said: str, options: Mapping[str, str]) -> str | None:
    """The letter in what a row's own expression found."""
    return _lenient(said, options)


def last_match(pattern: str, text: str) -> str | None:
    """The first group of the last match, or the match itself; to be called in a process that can be killed."""
    found = None
    for match in re.finditer(pattern, text):
        found = match[1] if match.re.groups else match[0]
    return found


def _last_box(text: str) -> str | None:
    """What is in the last complete ``\\boxed{…}``, whose braces may be nested."""
    start = text.rfind(_BOX)
    while start >= 0:
        depth, begin = 1, start + len(_BOX)
        # Only up to the next box: with what lies behind it, that one was looked at already.
        for at in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                return text[begin:at].strip()
        text = text[:start]
        start = text.rfind(_BOX)
    return None


def _lenient(said: str, options: Mapping[str, str]) -> str | None:
    plain = _WRAPPED.sub(r"\1", said).strip(_AROUND)
    if plain.upper() in options:
        return plain.upper()
    wanted = _folded(plain)
    for letter, text in options.items():
        if wanted and wanted == _folded(text):
            return letter
    first = _LETTER_FIRST.match(_WRAPPED.sub(r"\1", said))
    return first[1] if first is not None and first[1] in options else None


def _folded(text: str) -> str:
    return " ".join(text.split()).strip(_AROUND).casefold()
