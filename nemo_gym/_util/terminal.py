"""Make text of models, boxes and datasets safe for a terminal: it cannot move the cursor, recolour or reverse text."""

from __future__ import annotations

import re

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
