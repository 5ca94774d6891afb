from __future__ import annotations

import asyncio

from nemo_gym.http.protocol import JoinedWrites

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Written(asyncio.Transport):
    """Remembers each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


async def test_head_leaves_with_the_body_when_both_are_written_at_once() -> None:
    below = Written()
    joined = JoinedWrites(below, asyncio.get_running_loop())
    joined.write(HEAD)
    joined.write(b"ok")
    assert below.writes == [HEAD + b"ok"]
    await asyncio.sleep(0)
    assert below.writes == [HEAD + b"ok"]


async def test_head_leaves_alone_when_no_body_follows_at_once() -> None:
    below = Written()
    joined = JoinedWrites(below, asyncio.get_running_loop())
    joined.write(HEAD)
    await asyncio.sleep(0)
    assert below.writes == [HEAD]
    joined.write(b"ok")
    assert below.writes == [HEAD, b"ok"]


async def test_nothing_is_lost_when_the_connection_is_closed_behind_a_head() -> None:
    below = Written()
    joined = JoinedWrites(below, asyncio.get_running_loop())
    joined.write(HEAD)
    joined.close()
    assert below.writes == [HEAD]
    assert joined.is_closing()


async def test_two_heads_leave_in_order_when_one_has_no_body() -> None:
    below = Written()
    joined = JoinedWrites(below, asyncio.get_running_loop())
    joined.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    joined.write(HEAD)
    joined.write(b"ok")
    assert b"".join(below.writes) == b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"ok"
