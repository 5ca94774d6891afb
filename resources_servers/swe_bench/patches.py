"""Patches as untrusted data: which files one names, and the part of it that concerns some of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_START = re.compile(rb"^(?:diff --git |--- [^\n]*\n\+\+\+ |@@ -)", re.MULTILINE)
_HUNK = re.compile(rb"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_OLD_NEW = re.compile(rb"^(?:---|\+\+\+) (.*)$", re.MULTILINE)
_RENAMES = re.compile(rb"^(?:rename|copy) (from|to) (.*)$", re.MULTILINE)
_GIT_PATHS = re.compile(rb'diff --git (?P<a>"a/(?:[^"\\]|\\.)*"|a/.*?) (?P<b>"b/(?:[^"\\]|\\.)*"|b/.*)$')
_ESCAPES = {
    b"n": b"\n",
    b"t": b"\t",
    b"r": b"\r",
    b'"': b'"',
    b"\\": b"\\",
    b"a": b"\a",
    b"b": b"\b",
    b"f": b"\f",
    b"v": b"\v",
}


@dataclass(frozen=True)
class FilePatch:
    """One file's section of a patch."""

    paths: tuple[str, ...]
    """Every path the section names, old and new."""
    text: bytes

    @property
    def added_lines(self) -> list[bytes]:
        return [line[1:] for line in self.text.split(b"\n") if line.startswith(b"+") and not line.startswith(b"+++ ")]

    @property
    def is_new(self) -> bool:
        return b"\nnew file mode " in self.text or b"\n--- /dev/null" in self.text


def split_patch(patch: bytes) -> list[FilePatch]:
    """A patch by files, where git and GNU patch begin a new file: at ``diff --git``, and at a ``---``/``+++`` pair
    outside of what a hunk counts as its own lines."""
    starts = _starts(patch)
    if not starts:
        return [FilePatch(_paths(patch), patch)] if patch.strip() else []
    sections = [patch[start:end] for start, end in zip(starts, [*starts[1:], len(patch)], strict=True)]
    return [FilePatch(_paths(section), section) for section in sections]


def _starts(patch: bytes) -> list[int]:
    starts: list[int] = []
    headed = False
    """Whether a header is open, to which a ``---``/``+++`` pair belongs."""
    at = 0
    while (found := _START.search(patch, at)) is not None:
        at = found.end()
        if found[0] == b"@@ -":
            headed = False
            at = _end_of_hunk(patch, found.start())
        elif found[0] == b"diff --git ":
            starts.append(found.start())
            headed = True
        elif headed:
            headed = False
        else:
            starts.append(found.start())
    return starts


def _end_of_hunk(patch: bytes, start: int) -> int:
    """Where the lines that a hunk counts as its own end; after its own header if it has none that can be read."""
    end = patch.find(b"\n", start) + 1 or len(patch)
    header = _HUNK.match(patch, start)
    if header is None:
        return end
    old, new = (1 if count is None else int(count) for count in header.groups())
    while (old > 0 or new > 0) and end < len(patch):
        kind = patch[end : end + 1]
        if kind in (b" ", b"\n", b"\r", b"\t"):  # an empty line has lost its blank
            old, new = old - 1, new - 1
        elif kind == b"-":
            old -= 1
        elif kind == b"+":
            new -= 1
        elif kind != b"\\":
            break
        end = patch.find(b"\n", end) + 1 or len(patch)
    return end


def paths_of(patch: bytes) -> set[str]:
    """Every path a patch names."""
    return {path for section in split_patch(patch) for path in section.paths}


def joined(sections: Iterable[FilePatch]) -> bytes:
    """One patch of these sections; empty when there are none."""
    return b"".join([section.text for section in sections])


def copied_from(section: FilePatch) -> set[str]:
    """Paths that a section names without changing them."""
    head = _head(section.text)
    sources = re.findall(rb"^copy from (.*)$", head, re.MULTILINE)
    return {_text(_unquoted(name.rstrip(b"\r"))) for name in sources}


def _head(section: bytes) -> bytes:
    # Only the lines before the first hunk are headers: what a hunk holds may look like one.
    return re.split(rb"^(?:@@ |GIT binary patch)", section, maxsplit=1, flags=re.MULTILINE)[0]


def _paths(section: bytes) -> tuple[str, ...]:
    head = _head(section)
    found: dict[str, None] = {}
    for match in _OLD_NEW.finditer(head):
        name = _unquoted(match[1].split(b"\t")[0].rstrip(b"\r"))
        if name not in (b"/dev/null", b""):
            found[_text(_without_first_component(name))] = None
    for match in _RENAMES.finditer(head):
        found[_text(_unquoted(match[2].rstrip(b"\r")))] = None
    if not found:
        # A new empty file, a change of the mode or a binary one: its name stands in the first line alone, twice.
        found = dict.fromkeys(_text(name) for name in _names_in_first_line(head.split(b"\n", 1)[0].rstrip(b"\r")))
    return tuple(found)


def _names_in_first_line(line: bytes) -> list[bytes]:
    names = line.removeprefix(b"diff --git ")
    half = len(names) // 2
    if names[:2] == b"a/" and names[half : half + 3] == b" b/" and names[2:half] == names[half + 3 :]:
        return [names[2:half]]  # which may hold blanks
    first = _GIT_PATHS.match(line)
    return [_without_first_component(_unquoted(first[side])) for side in ("a", "b")] if first else []


def _without_first_component(name: bytes) -> bytes:
    """As ``-p1`` does, which both programs are run with."""
    return name.split(b"/", 1)[-1].lstrip(b"/") or name


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _unquoted(name: bytes) -> bytes:
    if not (name.startswith(b'"') and name.endswith(b'"') and len(name) > 1):
        return name

    def plain(match: re.Match[bytes]) -> bytes:
        escape = match[1]
        return bytes([int(escape, 8) & 255]) if escape.isdigit() else _ESCAPES.get(escape, escape)

    return re.sub(rb"\\([0-7]{3}|.)", plain, name[1:-1])
