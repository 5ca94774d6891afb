"""To whom a request of this process goes, for a plugin that measures its own connections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

EXTERNAL = "external"
"""Of requests that name no server."""

_SERVER_NAME: ContextVar[str] = ContextVar("nemo_gym_destination", default=EXTERNAL)


@contextmanager
def destination(name: str) -> Iterator[None]:
    """Requests inside go to ``name``."""
    token = _SERVER_NAME.set(name)
    try:
        yield
    finally:
        _SERVER_NAME.reset(token)
