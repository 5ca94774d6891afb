"""The application of a server: FastAPI's, with a way past its layers for the few routes that every call takes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

Shortcut = Callable[[Scope, Receive, Send], Awaitable[None] | None]
"""Answers a request by itself, as all layers together would have; nothing for a request that shall go through them."""


class Application(FastAPI):
    """A layer costs every request that goes through it, also one that it has nothing to do with."""

    _shortcut: Shortcut | None = None
    _layers = 0

    def take_shortcut(self, shortcut: Shortcut) -> None:
        """Ask ``shortcut`` first from now on. What is added to the layers after this is not passed by: then there is
        no shortcut any more."""
        self._shortcut = shortcut
        self._layers = len(self.user_middleware)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._shortcut is not None and len(self.user_middleware) == self._layers:
            answering = self._shortcut(scope, receive, send)
            if answering is not None:
                scope["app"] = self
                await answering
                return
        await super().__call__(scope, receive, send)
