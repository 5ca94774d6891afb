"""The raw output of a harness, bounded: its beginning and its end, with the hole in the middle counted."""

from __future__ import annotations


class BoundedLog:
    """Keeps at most ``max_bytes``: three quarters from the beginning, the rest from the end."""

    def __init__(self, max_bytes: int) -> None:
        self._head_room = max_bytes * 3 // 4
        self._tail_room = max_bytes - self._head_room
        self._head = bytearray()
        self._tail = bytearray()
        self.size = 0
        """Bytes that were written in all."""

    def write(self, data: bytes) -> None:
        self.size += len(data)
        if room := self._head_room - len(self._head):
            self._head += data[:room]
            data = data[room:]
        if data and self._tail_room:
            self._tail += data[-self._tail_room :]
            # Cut rarely: each cut moves what is kept.
            if len(self._tail) > 4 * self._tail_room:
                del self._tail[: -self._tail_room]

    def text(self) -> str:
        """What was kept, as text."""
        tail = bytes(self._tail[-self._tail_room :]) if self._tail_room else b""
        left_out = self.size - len(self._head) - len(tail)
        hole = f"\n[{left_out} bytes left out]\n".encode() if left_out else b""
        return (bytes(self._head) + hole + tail).decode("utf-8", "replace")
