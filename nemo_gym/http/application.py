"""The application of a server: FastAPI's, with a short way to the routes of this suite, which every rollout takes.

The framework's own way goes through exception and exit-stack layers and asks each route in turn. A route that is a
plain function of a request needs none of that: `DirectRoutesMiddleware` finds it by its path and calls it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.contract.errors import NemoGymError
from nemo_gym.http.problems import refused, refused_by_framework

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


Endpoint = Callable[[Request], Awaitable[Response]]


class DirectRoutesMiddleware:
    """Innermost of an application's layers: answers plain routes itself and passes the rest on.

    The first route of a path wins, as in the framework: a path whose first route is not a plain one is not touched.
    """

    def __init__(self, app: ASGIApp, application: FastAPI) -> None:
        self.app = app
        self._application = application
        self._known = -1
        self._exact: dict[tuple[str, str], Endpoint] = {}
        self._patterns: list[Route] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._find(scope) if scope["type"] == "http" else None
        if endpoint is None:
            await self.app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        request = Request(scope, receive, send)
        try:
            response = await endpoint(request)
            await response(scope, receive, watched)
        except ClientDisconnect:
            return  # gone before its whole body was here: nobody waits for an answer
        except NemoGymError as error:
            if started:
                raise
            await refused(request, error)(scope, receive, send)
        except HTTPException as error:
            if started:
                raise
            await (await refused_by_framework(request, error))(scope, receive, send)

    def _find(self, scope: Scope) -> Endpoint | None:
        routes = self._application.router.routes
        if len(routes) != self._known:  # plugins add theirs after the base's, until the first request at the latest
            self._learn()
        endpoint = self._exact.get((scope["method"], scope["path"]))
        if endpoint is None and scope["path"].startswith("/sessions/"):
            for route in self._patterns:
                match, found = route.matches(scope)
                if match is Match.FULL:
                    scope.update(found)
                    return route.endpoint
        return endpoint

    def _learn(self) -> None:
        routes = self._application.router.routes
        self._known = len(routes)
        self._exact, self._patterns = {}, []
        taken: set[tuple[str, str]] = set()
        for route in routes:
            for method in getattr(route, "methods", None) or ():
                key = (method, getattr(route, "path", ""))
                # `type is`: the framework's own routes are subclasses and parse their arguments.
                if key not in taken and type(route) is Route:
                    if route.param_convertors:
                        if route not in self._patterns:
                            self._patterns.append(route)
                    else:
                        self._exact[key] = route.endpoint
                taken.add(key)
