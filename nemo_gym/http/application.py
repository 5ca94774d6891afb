"""The application of a server: FastAPI's, with a way past its layers for the few routes that every call takes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Shortcut = Callable[[Scope, Receive, Send], Awaitable[None] | None]
"""Answers a request by itself, as all layers together would have; nothing for a request that shall go through them."""


class Application(FastAPI):
    """A layer costs every request that goes through it, also one that it has nothing to do with."""

    _shortcut: Shortcut | None = None
    _layers = 0

    def answer_the_rest_with(self, app: ASGIApp) -> None:
        """Pass requests that no route answers on to ``app``, behind this application's layers."""
        self.router.default = _Inner(app, self.router.default)

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


class _Inner:
    """An application that a plugin built, inside of this suite's.

    Its framework answers an exception with a 500 of its own and raises it on. That answer is kept back: the layers
    around word the exception as they word all others.
    """

    _PASSED = "nemo_gym.inner"

    def __init__(self, app: ASGIApp, not_found: ASGIApp) -> None:
        self._app = app
        self._not_found = not_found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get(self._PASSED):  # it has this application inside of it, and no route there answers either
            await self._not_found(scope, receive, send)
            return
        failed: list[Message] = []

        async def kept_when_failed(message: Message) -> None:
            if failed or (message["type"] == "http.response.start" and message["status"] == 500):
                failed.append(message)
            else:
                await send(message)

        await self._app({**scope, self._PASSED: True}, receive, kept_when_failed)
        for message in failed:
            await send(message)
