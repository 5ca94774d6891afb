"""Patches as untrusted data: which files one names, and the part of it that concerns some of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_HEADER = re.compile(rb"^diff --git ", re.MULTILINE)
_HUNK = re.compile(rb"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_OLD_NEW = re.compile(rb"^(?:---|\+\+\+) (.*)$", re.MULTILINE)
_RENAMES = re.compile(rb"^(?:rename|copy) (?:from|to) (.*)$", re.MULTILINE)
_GIT_PATHS = re.compile(rb'diff --git (?P<a>"a/(?:[^"\\]|\\.)*"|a/.*?) (?P<b>"b/(?:[^"\\]|\\.)*"|b/.*)$')
_ESCAPES = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b'"': b'"', b"\\": b"\\", b"a": b"\a", b"b": b"\b", b"f": b"\f"}


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
    """A patch by files. A patch without git's headers is one section that names all its files."""
    starts = [match.start() for match in _HEADER.finditer(patch)]
    if not starts:
        return [FilePatch(_paths(patch), patch)] if patch.strip() else []
    sections = [patch[start:end] for start, end in zip(starts, [*starts[1:], len(patch)], strict=True)]
    return [FilePatch(_paths(part), part) for section in sections for part in _behind_hunks(section)]


def paths_of(patch: bytes) -> set[str]:
    """Every path a patch names."""
    return {path for section in split_patch(patch) for path in section.paths}


def part_of(patch: bytes, wanted: Callable[[FilePatch], bool]) -> bytes:
    """The sections for which ``wanted`` holds; empty when there are none."""
    return b"".join(section.text for section in split_patch(patch) if wanted(section))


def _behind_hunks(section: bytes) -> list[bytes]:
    """A section cut where, behind a hunk, another file begins without git's header: what applies patches goes by
    ``---`` and ``+++`` alone."""
    parts: list[bytes] = []
    start = place = removed = added = 0
    hunks = False
    lines = re.findall(rb"[^\n]*\n|[^\n]+", section)
    for number, line in enumerate(lines):
        if removed > 0 or added > 0:
            removed -= line[:1] != b"+" and line[:1] != b"\\"
            added -= line[:1] != b"-" and line[:1] != b"\\"
        elif hunk := _HUNK.match(line):
            hunks = True
            removed, added = (int(count) if count is not None else 1 for count in hunk.groups())
        elif hunks and line.startswith(b"--- ") and b"".join(lines[number + 1 : number + 2]).startswith(b"+++ "):
            parts.append(section[start:place])
            start, hunks = place, False
        place += len(line)
    return [*parts, section[start:]]


def _paths(section: bytes) -> tuple[str, ...]:
    # Only the lines before the first hunk are headers: what a hunk holds may look like one.
    head = re.split(rb"^(?:@@ |GIT binary patch)", section, maxsplit=1, flags=re.MULTILINE)[0]
    if not section.startswith(b"diff --git "):
        head = section
    found: dict[str, None] = {}
    first = _GIT_PATHS.match(head.split(b"\n", 1)[0])
    raw = [first["a"], first["b"]] if first else []
    raw += [match[1].split(b"\t")[0] for match in _OLD_NEW.finditer(head)]
    for name in raw:
        name = _unquoted(name.rstrip(b"\r"))
        if name not in (b"/dev/null", b"") and name[:2] in (b"a/", b"b/"):
            found[name[2:].decode("utf-8", "surrogateescape")] = None
        elif name not in (b"/dev/null", b""):
            found[name.decode("utf-8", "surrogateescape")] = None
    for match in _RENAMES.finditer(head):
        found[_unquoted(match[1].rstrip(b"\r")).decode("utf-8", "surrogateescape")] = None
    return tuple(found)


def _unquoted(name: bytes) -> bytes:
    if not (name.startswith(b'"') and name.endswith(b'"') and len(name) > 1):
        return name

    def plain(match: re.Match[bytes]) -> bytes:
        escape = match[1]
        return bytes([int(escape, 8) & 255]) if escape.isdigit() else _ESCAPES.get(escape, escape)

    return re.sub(rb"\\([0-7]{3}|.)", plain, name[1:-1])
