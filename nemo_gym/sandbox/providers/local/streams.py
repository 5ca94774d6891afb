"""Byte streams of asyncio through pipes whose other end a supervisor's child has."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

_CHUNK_BYTES = 256 * 1024


async def write_stream(descriptor: int, chunks: AsyncIterator[bytes]) -> None:
    """Write a stream into a pipe and close it. When nobody reads any more, the reader has said why."""
    loop = asyncio.get_running_loop()
    try:
        async for chunk in chunks:
            view = memoryview(chunk)
            while view:
                try:
                    view = view[os.write(descriptor, view) :]
                except BlockingIOError:
                    await _ready(loop.add_writer, loop.remove_writer, descriptor)
                except BrokenPipeError:
                    return
    finally:
        os.close(descriptor)


async def read_stream(descriptor: int) -> AsyncGenerator[bytes, None]:
    os.set_blocking(descriptor, False)
    loop = asyncio.get_running_loop()
    try:
        while True:
            try:
                chunk = os.read(descriptor, _CHUNK_BYTES)
            except BlockingIOError:
                await _ready(loop.add_reader, loop.remove_reader, descriptor)
                continue
            if not chunk:
                return
            yield chunk
    finally:
        os.close(descriptor)


async def _ready(add: Any, remove: Any, descriptor: int) -> None:
    ready = asyncio.get_running_loop().create_future()
    add(descriptor, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        remove(descriptor)
