"""Finds the option that an answer chooses, for each answer format that data sets ask for.

Every format takes the last matching place in the answer; a letter counts only if it is an option's letter. The
formats here take time proportional to the answer's length. A row's own regular expression may take longer, so
`last_matches` must run in a process that can be killed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum

ANSWER_CHARS = 20_000
"""Only this many characters at the end of an answer are searched, because the choice stands there."""
_BOX = "\\boxed{"
_WRAPPED = re.compile(r"\\(?:boxed|text|textbf|textrm|mathrm|mathbf|mathsf|boldsymbol)\{([^{}]*)\}")
_AROUND = " \t\r\n.,:;!*_`\"'$()[]{}\\"
_ANSWER = re.compile(r"\banswer(?:\s+is)?[ \t*_`]*[:=][\s*_`]*(?!answer\b)([^\n]*)", re.IGNORECASE)
_LETTER_FIRST = re.compile(r"[ \t*_`$(\[]*([A-Z])(?:[.:,)\]*_`]|\s*$)")
_LABEL = re.compile(r"([A-Z])\s*[:.)-]")
_LABELLED = re.compile(r"([A-Za-z])\W+(.+)", re.DOTALL)
_OTHER_LETTER = re.compile(r"(?<![A-Za-z])[A-Z](?:\s*[:.)-]|\W*$)")


class Grading(StrEnum):
    """The values of a row's ``grading_mode``, with NeMo Gym's names."""

    STRICT_SINGLE_LETTER_BOXED = "strict_single_letter_boxed"
    """The last ``\\boxed{…}`` holds one capital letter, possibly wrapped or labelling its option (``B: Paris``)."""
    LENIENT_BOXED = "lenient_boxed"
    """The last ``\\boxed{…}`` holds a letter, possibly wrapped (``\\text{B}``, ``(B)``), or the option's text."""
    LENIENT_ANSWER_COLON = "lenient_answer_colon"
    """The last ``Answer: …`` holds a letter or the option's text."""


def choice(text: str, options: Mapping[str, str], mode: Grading) -> str | None:
    """Return the letter that ``text`` chooses, or ``None`` if it chooses none of ``options``."""
    text = text[-ANSWER_CHARS:]
    if mode is Grading.LENIENT_ANSWER_COLON:
        candidates = [match[1] for match in _ANSWER.finditer(text)]
        return lenient_choice(candidates[-1], options) if candidates else None
    boxed = _last_box(text)
    if boxed is None:
        return None
    if mode is Grading.STRICT_SINGLE_LETTER_BOXED:
        plain = _unwrapped(boxed).strip(_AROUND)
        if (label := _LABEL.match(plain)) is None:
            return plain if plain in options else None
        letter, rest = label[1], plain[label.end() :]
        is_its_text = letter in options and _folded(rest) == _folded(options[letter])
        return letter if letter in options and (is_its_text or not _OTHER_LETTER.search(rest)) else None
    return lenient_choice(boxed, options)


def lenient_choice(answer: str, options: Mapping[str, str]) -> str | None:
    """Return the option that a found text names: by its letter, possibly wrapped, or by its own text."""
    answer = _unwrapped(answer)
    plain = answer.strip(_AROUND)
    if plain.upper() in options:
        return plain.upper()
    texts = {letter: _folded(_unwrapped(text)) for letter, text in options.items()}
    folded = _folded(plain)
    for letter, text in texts.items():
        if folded and folded == text:
            return letter
    labelled = _LABELLED.fullmatch(plain)
    if labelled is not None and texts.get(labelled[1].upper()) == _folded(labelled[2]):
        return labelled[1].upper()
    leading_letter = _LETTER_FIRST.match(answer)
    return leading_letter[1] if leading_letter is not None and leading_letter[1] in options else None


def last_matches(patterns: Sequence[str], text: str) -> list[str]:
    """Return what each pattern finds: the first group of its last match, or the whole match. As in NeMo Gym, case does
    not matter. Call it in a process that can be killed."""
    found = []
    for pattern in patterns:
        last = None
        for match in re.finditer(pattern, text, re.IGNORECASE):
            last = match[1] if match.re.groups else match[0]
        if last is not None:
            found.append(last)
    return found


def _unwrapped(text: str) -> str:
    for _ in range(2):  # as in \boxed{\text{B}}
        text = _WRAPPED.sub(r"\1", text)
    return text


def _last_box(text: str) -> str | None:
    """Return the contents of the last complete ``\\boxed{…}``. Braces may be nested."""
    start = text.rfind(_BOX)
    while start >= 0:
        depth, begin = 1, start + len(_BOX)
        # `text` ends where the next box began, which an earlier iteration found to be incomplete.
        for at in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                return text[begin:at].strip()
        text = text[:start]
        start = text.rfind(_BOX)
    return None


def _folded(text: str) -> str:
    return " ".join(text.split()).strip(_AROUND).casefold()
