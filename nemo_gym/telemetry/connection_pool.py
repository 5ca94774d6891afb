"""The destination of this process's requests, for plugins that measure their own connections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

EXTERNAL = "external"
"""The destination of requests that name no server."""

_SERVER_NAME: ContextVar[str] = ContextVar("nemo_gym_destination", default=EXTERNAL)


@contextmanager
def destination(name: str) -> Iterator[None]:
    """Label requests made inside the block with the destination ``name``."""
    token = _SERVER_NAME.set(name)
    try:
        yield
    finally:
        _SERVER_NAME.reset(token)
