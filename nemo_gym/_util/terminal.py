"""Texts and figures as terminals, tables and pages write them. Text of models, boxes and datasets is made safe for a
terminal: it cannot move the cursor, recolour or reverse text."""

from __future__ import annotations

import re
from collections.abc import Iterable

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)


def shown(text: object) -> str:
    """Return ``text`` with every invisible or control character written out, such as ``^[`` or ``<U+200B>``."""
    return _HIDDEN.sub(_escaped, str(text))


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"^{chr(code + 64)}" if code < 0x20 else f"<U+{code:04X}>"


def one_line(text: object, chars: int = 100) -> str:
    """``text`` in one line of at most ``chars``."""
    line = " ".join(shown(text).split())
    return line if len(line) <= chars else f"{line[: chars - 1]}…"


def figure(value: float | None, form: str = "g") -> str:
    """A figure in the form of a format specification; a dash if there is none."""
    return "–" if value is None else format(value, "d" if isinstance(value, int) and form == "g" else form)


def figures(values: Iterable[float]) -> str:
    """Figures after one another; a dash if there are none."""
    return ", ".join(map(figure, values)) or "–"


def seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
