"""Draw sequence diagrams in Mermaid's syntax as SVG: participants, messages, and loop, alt, opt and par blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape

COLUMN, LEFT, ROW, HEAD = 170, 90, 34, 44
CHAR_WIDTH = 6.4
_PARTICIPANT = re.compile(r"(?:participant|actor)\s+(\w+)(?:\s+as\s+(.+))?")
_MESSAGE = re.compile(r"(\w+)\s*(-->>|->>|-->|->)\s*(\w+)\s*:\s*(.+)")
_BLOCK = re.compile(r"(loop|alt|opt|par)\s+(.+)")


class DiagramError(ValueError):
    """A line that cannot be drawn."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line


@dataclass(frozen=True, slots=True)
class _Message:
    start: int
    end: int
    text: str
    is_reply: bool


def sequence_diagram(source: str) -> str:
    """Return the drawing as SVG. Raises `DiagramError`."""
    names: dict[str, str] = {}
    drawn: list[str] = []
    blocks: list[tuple[int, str, int]] = []
    y = HEAD + ROW
    first, *lines = [*source.splitlines(), ""]
    if first.strip() != "sequenceDiagram":
        raise DiagramError(1, f"'{first.strip()[:40]}': only sequenceDiagram is drawn")
    for number, line in enumerate(lines, 2):
        text = line.strip()
        if not text or text.startswith("%%"):
            continue
        if match := _PARTICIPANT.fullmatch(text):
            names[match[1]] = match[2] or match[1]
        elif match := _MESSAGE.fullmatch(text):
            unknown = [each for each in (match[1], match[3]) if each not in names]
            if unknown:
                raise DiagramError(number, f"no participant is named '{unknown[0]}'")
            places = [*names]
            message = _Message(places.index(match[1]), places.index(match[3]), match[4], match[2].startswith("--"))
            drawn.append(_arrow(message, y))
            y += ROW
        elif match := _BLOCK.fullmatch(text):
            blocks.append((y - ROW // 2, f"{match[1]} {match[2]}", number))
            y += ROW
        elif text == "end" and blocks:
            top, label, _ = blocks.pop()
            drawn.insert(0, _frame(top, y - ROW // 2, len(names), label))
            y += ROW // 3
        else:
            raise DiagramError(number, f"'{text[:60]}' is neither a participant nor a message nor a block")
    if blocks:
        raise DiagramError(blocks[-1][2], f"'{blocks[-1][1]}' has no end")
    width, height = LEFT * 2 + COLUMN * (len(names) - 1), y + 10
    heads = "".join(_head(place, name, height) for place, name in enumerate(names.values()))
    label = f"sequence of messages between {', '.join(names.values())}"
    return (
        f'<svg class="sequence" role="img" aria-label="{escape(label)}"'
        f' viewBox="0 0 {width} {height}" width="{width}" height="{height}">{heads}{"".join(drawn)}</svg>'
    )


def _x(place: int) -> int:
    return LEFT + COLUMN * place


def _head(place: int, name: str, height: int) -> str:
    x = _x(place)
    return (
        f'<line class="life" x1="{x}" y1="{HEAD}" x2="{x}" y2="{height}"/>'
        f'<rect x="{x - 62}" y="8" width="124" height="{HEAD - 12}" rx="6"/>'
        f'<text x="{x}" y="{HEAD // 2 + 7}" text-anchor="middle">{escape(name)}</text>'
    )


def _arrow(message: _Message, y: int) -> str:
    start, end = _x(message.start), _x(message.end)
    if message.start == message.end:
        end = start + 40
    way = 1 if end > start else -1
    kind = "reply" if message.is_reply else "call"
    # A text that is longer than its arrow is moved right, so that it does not begin outside the drawing.
    centre = (start + end) / 2
    half = len(message.text) * CHAR_WIDTH / 2
    centre = max(centre, half + 4)
    return (
        f'<text class="said" x="{centre:.0f}" y="{y - 6}" text-anchor="middle">{escape(message.text)}</text>'
        f'<line class="{kind}" x1="{start}" y1="{y}" x2="{end - 2 * way}" y2="{y}"/>'
        f'<path class="tip" d="M{end} {y} l{-8 * way} -4 v8 z"/>'
    )


def _frame(top: int, bottom: int, columns: int, label: str) -> str:
    width = COLUMN * (columns - 1) + LEFT + 50
    return (
        f'<rect class="frame" x="20" y="{top}" width="{width}" height="{bottom - top}" rx="4"/>'
        f'<text class="label" x="28" y="{top + 15}">{escape(label)}</text>'
    )
