"""Reading server-sent events from chunks that are cut anywhere."""

from __future__ import annotations

from collections.abc import Iterator

DONE = b"[DONE]"


class EventReader:
    """Collects ``data`` fields into events. Comments and other fields are skipped; all three line ends are known."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        """Of a line, in pieces: one that comes in thousands of chunks is joined once."""
        self._rest_bytes = 0
        self._data: list[bytes] = []

    @property
    def held_bytes(self) -> int:
        """Of the event that is not complete yet."""
        return self._rest_bytes + sum(map(len, self._data))

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The data of every event that ``chunk`` completes."""
        self._rest.append(chunk)
        self._rest_bytes += len(chunk)
        if b"\n" not in chunk and b"\r" not in chunk and not self._rest[0].endswith(b"\r"):
            return
        text = b"".join(self._rest)
        if b"\r" in text:
            # A lone CR at the end may be half of a CRLF: it waits for the next chunk.
            held = b"\r" if text.endswith(b"\r") else b""
            text = text.removesuffix(held).replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held
        *lines, rest = text.split(b"\n")
        self._rest, self._rest_bytes = [rest], len(rest)
        for line in lines:
            if line.startswith(b"data:"):
                value = line[5:]
                self._data.append(value.removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []
