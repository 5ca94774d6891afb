"""What every request passes: its metrics and span, bounds on its body, its session cookie, its rollout, its sender's
credential; and a short way to the routes of this suite, which every rollout takes. What the layers learn about a
request stands in `nemo_gym.http.requests`.

A session that was opened for an attempt names it, and every request with it is refused once that attempt is fenced or
closed. Requests that a layer answers early (a wrong credential, a body too large) are counted like any other. A
request's ``traceparent`` is followed only where it comes with a credential of the stack.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.contract.credentials import CREDENTIAL_HEADER, ServerCredentials
from nemo_gym.contract.errors import NemoGymError
from nemo_gym.http import telemetry
from nemo_gym.http.problems import refused, refused_by_framework, send_problem, unexpected
from nemo_gym.http.requests import (
    CALLER,
    SEEN,
    UNKNOWN_ROUTE,
    CookieCodec,
    LazySession,
    Seen,
    TooManyValuesError,
    ValueCounter,
    note_route,
    sent_by_agent,
)
from nemo_gym.http.telemetry import (
    METRICS_PATH,
    REPLICAS_HEADER,
    ROLLOUT_ID_HEADER,
    ROLLOUT_ID_PATTERN,
    ROLLOUT_PATH_PREFIX,
    TOKEN_CAPTURE_PATH_SEGMENT,
    Counter,
    Histogram,
    Reading,
    SpanKind,
    add_source,
    decode_replicas,
    replica_context,
    rollout_context,
)

_CREDENTIAL_HEADER = CREDENTIAL_HEADER.lower().encode()
_ROLLOUT_HEADER = ROLLOUT_ID_HEADER.lower().encode()


class BodyTooLargeError(NemoGymError):
    """A request body beyond the server's bound."""

    code = "body_too_large"
    status = 413


_OF_CONTAINERS = 4


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What one request's body may have. Each names the key of the server that sets it."""

    max_bytes: int
    bytes_key: str = "max_body_bytes"
    max_values: int | None = None
    """JSON values, a list or an object being worth `_OF_CONTAINERS` of them."""
    values_key: str = ""

    def refuse_bytes(self) -> NemoGymError:
        return BodyTooLargeError(
            f"the body is larger than {self.max_bytes} bytes; raise the server's '{self.bytes_key}' if it may be",
            limit_bytes=self.max_bytes,
        )

    def refuse_values(self) -> NemoGymError:
        return TooManyValuesError(
            f"the body holds more than {self.max_values} JSON values (a list or an object is worth {_OF_CONTAINERS});"
            f" raise the server's '{self.values_key}' if it may",
            limit=self.max_values,
        )


class UnknownErrorMiddleware:
    """Answers any other error with a problem that names its type only: the message may quote private fields, and the
    caller may be an agent. The traceback goes to this server's log.

    The error ends here. Raised on, it would make the web server close a connection that its client believes alive, and
    the next request on it, perhaps one that must not be repeated, would be lost.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            # The boundary of plugin code.
            await unexpected(scope, error)(scope, receive, send)


class BodyLimitMiddleware:
    """Answers with `BodyTooLargeError` or `TooManyValuesError` where a route reads more of a body than its sender may
    send, whether its length was announced or not. What was not read is thrown away by the web server, so the
    connection stays usable.

    Values are counted before anything is parsed, whoever parses it.

    Args:
        limits: of anybody's requests.
        agent_limits: of requests that agent servers send.
    """

    def __init__(self, app: ASGIApp, limits: BodyLimits, agent_limits: BodyLimits) -> None:
        self.app = app
        self._limits, self._agent_limits = limits, agent_limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limits = self._agent_limits if sent_by_agent(scope) else self._limits
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        taken = 0
        counter = ValueCounter(_OF_CONTAINERS) if limits.max_values is not None else None
        error: NemoGymError | None = None
        replaced = False

        async def bounded() -> Message:
            nonlocal taken, error
            if error is None and not (announced.isdigit() and int(announced) > limits.max_bytes):
                message = await receive()
                body = message.get("body", b"")
                taken += len(body)
                if counter is not None and limits.max_values is not None and body:
                    counter.feed(body)
                    if counter.found > limits.max_values:
                        error = limits.refuse_values()
                        raise error
                if taken <= limits.max_bytes:
                    return message
            error = error or limits.refuse_bytes()
            raise error

        async def worded(message: Message) -> None:
            # A framework that was reading the body says 400 to whatever is raised meanwhile.
            nonlocal replaced
            if error is not None and message["type"] == "http.response.start" and message["status"] != error.status:
                replaced = True
                await send_problem(scope, receive, send, error)
            elif not replaced:
                await send(message)

        await self.app(scope, bounded, worded)


MAX_AGE_S = 14 * 24 * 3600
_ATTRIBUTES = f"path=/; Max-Age={MAX_AGE_S}; httponly; samesite=lax"
SessionGuard = Callable[[str, Mapping[str, Any]], Awaitable[None]]
"""Gets the path and the session; raises a `NemoGymError` for one that may not be used any more."""


class SessionMiddleware:
    """Gives every HTTP request a `LazySession`, and its reply the cookie of a session that is used."""

    def __init__(self, app: ASGIApp, cookie_name: str, codec: CookieCodec, guard: SessionGuard | None = None) -> None:
        self.app = app
        self._name = cookie_name
        self._needle = cookie_name.encode("latin-1", "replace") + b"="
        self._codec = codec
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or isinstance(scope.get("session"), LazySession):
            # The second case: an application within one that has sessions already.
            await self.app(scope, receive, send)
            return
        cookie = self._cookie(scope)
        session = LazySession(self._codec, cookie)
        scope["session"] = session
        if cookie is not None and self._guard is not None:
            try:
                await self._guard(scope["path"], session)
            except NemoGymError as error:
                await send_problem(scope, receive, send, error)
                return

        async def send_with_cookie(message: Message) -> None:
            # Also when nothing changed: callers keep the cookies of the last reply only.
            if message["type"] == "http.response.start" and (session.changed or cookie is not None):
                value = self._codec.encode(session) if session.changed else cookie
                header = f"{self._name}={value}; {_ATTRIBUTES}".encode("latin-1")
                message["headers"] = [*message.get("headers", ()), (b"set-cookie", header)]
            await send(message)

        await self.app(scope, receive, send_with_cookie)

    def _cookie(self, scope: Scope) -> str | None:
        for name, value in scope["headers"]:
            if name == b"cookie" and self._needle in value:
                for part in value.split(b";"):
                    part = part.strip()
                    if part.startswith(self._needle):
                        text: str = part[len(self._needle) :].decode("latin-1")
                        return text.strip('"')
        return None


REQUESTS = Counter("nemo_gym_http_requests", "Requests that were answered", ("method", "route", "status"))
REQUEST_SECONDS = Histogram("nemo_gym_http_request_seconds", "From a request to its last byte", ("route",))

_UNTRACED = frozenset({"/", "/health", "/ready", "/heartbeat", "/sessions", "/close", METRICS_PATH})
"""Short and the same for every rollout, or no part of one; with all requests as spans, traces cost twice as much."""
_TITLES = {"/seed_session": "seed", "/harvest": "harvest", "/verify": "verify"}
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_TRACEPARENT = telemetry.TRACEPARENT.encode()


class _InFlight:
    """Requests that this process is answering."""

    def __init__(self) -> None:
        self.count = 0
        add_source(self, self.readings)

    def readings(self) -> Iterable[Reading]:
        yield Reading("nemo_gym_http_requests_in_flight", "Requests that are being answered", [({}, self.count)])


IN_FLIGHT = _InFlight()


class ObserveMiddleware:
    """Counts and times every request by its route, and puts a span around those of traced attempts.

    The innermost layer, which knows the route, notes it in the scope's `Seen`.
    """

    def __init__(self, app: ASGIApp, *, follows_anybody: bool) -> None:
        self.app = app
        self._follows_anybody = follows_anybody

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or SEEN in scope:
            await self.app(scope, receive, send)
            return
        seen = scope[SEEN] = Seen()
        status = 500
        span = None
        if telemetry.is_on() and _is_traced(scope["path"]) and (span := self._begun(scope)) is not None:
            telemetry.enter(span.context)  # for good: each request is a task of its own

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        start = time.perf_counter()
        IN_FLIGHT.count += 1
        try:
            await self.app(scope, receive, watched)
        finally:
            IN_FLIGHT.count -= 1
            route, method = seen.route, scope["method"]
            REQUESTS.add(method if method in _METHODS else UNKNOWN_ROUTE, route, str(status))
            REQUEST_SECONDS.observe(time.perf_counter() - start, route)
            if span is not None and status not in (401, 403, 404):
                span.name = seen.title or _TITLES.get(route) or f"{method} {route}"
                span.attributes |= {
                    "http.request.method": method,
                    "http.route": route,
                    "http.response.status_code": status,
                    **seen.attributes,
                }
                telemetry.end(span, f"status {status}" if status >= 500 else None)

    def _begun(self, scope: Scope) -> telemetry.Span | None:
        given = rollout_id = None
        follows = self._follows_anybody
        for name, value in scope["headers"]:
            if name == _TRACEPARENT:
                given = value
            elif name == _CREDENTIAL_HEADER:
                follows = True
            elif name == _ROLLOUT_HEADER:
                rollout_id = value.decode("latin-1")
        if given is None or not follows or (parent := telemetry.extract(given.decode("latin-1"))) is None:
            return None
        return telemetry.begin("", parent, SpanKind.SERVER, rollout_id=rollout_id)


def _is_traced(path: str) -> bool:
    return path not in _UNTRACED and not path.startswith("/sessions/")


OPEN_ROUTES = frozenset({"/", "/health", "/ready"})
"""Served to anybody: they say that a server lives, and nothing else."""

TOKEN_CAPTURE = "nemo_gym.token_capture"
_REPLICAS_HEADER = REPLICAS_HEADER.lower().encode()
_PREFIX = f"/{ROLLOUT_PATH_PREFIX}/"


class RolloutMiddleware:
    """Takes ``/ng-rollout/<id>/`` off the path, or the rollout header, and makes it the current rollout; and goes on
    with the replicas that its caller chose."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        replicas = next((value for name, value in scope["headers"] if name == _REPLICAS_HEADER), None)
        if replicas is not None:
            with replica_context(decode_replicas(replicas.decode("latin-1"))):
                await self._with_rollout(scope, receive, send)
        else:
            await self._with_rollout(scope, receive, send)

    async def _with_rollout(self, scope: Scope, receive: Receive, send: Send) -> None:
        rollout_id: str | None = None
        path: str = scope["path"]
        if path.startswith(_PREFIX):
            rollout_id, _, rest = path[len(_PREFIX) :].partition("/")
            capture = rest.startswith(f"{TOKEN_CAPTURE_PATH_SEGMENT}/")
            rest = "/" + rest.removeprefix(f"{TOKEN_CAPTURE_PATH_SEGMENT}/")
            # As NeMo Gym's prefixed routes show it to a handler.
            prefix = {"rollout_id": rollout_id}
            scope = {**scope, "path": rest, "raw_path": rest.encode(), "path_params": prefix, TOKEN_CAPTURE: capture}
        else:
            for name, value in scope["headers"]:
                if name == _ROLLOUT_HEADER:
                    rollout_id = value.decode("latin-1")
                    break
        if rollout_id is None or not ROLLOUT_ID_PATTERN.match(rollout_id):
            await self.app(scope, receive, send)
            return
        with rollout_context(rollout_id):
            await self.app(scope, receive, send)


class CredentialMiddleware:
    """Refuses every request without a genuine credential for this server.

    ``authenticates_itself`` lets requests on without one whose route checks another kind of token (inference routes);
    what it raises is answered. Without ``credentials`` the server is unsecured: a plugin built by hand, in its own
    tests.
    """

    def __init__(
        self,
        app: ASGIApp,
        credentials: ServerCredentials | None,
        authenticates_itself: Callable[[Scope], bool] | None = None,
    ) -> None:
        self.app = app
        self._credentials = credentials
        self._authenticates_itself = authenticates_itself

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._credentials is None or scope["type"] != "http" or _is_open(scope):
            await self.app(scope, receive, send)
            return
        credential: str | None = None
        for name, value in scope["headers"]:
            if name == _CREDENTIAL_HEADER:
                credential = value.decode("latin-1")
                break
        try:
            if credential is None and self._checks_callers(scope):
                checked = None
            else:
                checked = self._credentials.check(credential)
        except NemoGymError as error:
            await send_problem(scope, receive, send, error)
            return
        if checked is not None:
            scope[CALLER] = checked
        await self.app(scope, receive, send)

    def _checks_callers(self, scope: Scope) -> bool:
        """Whether the route checks the sender itself: one of `authenticates_itself`, and the metrics."""
        if self._authenticates_itself is not None and self._authenticates_itself(scope):
            return True
        return bool(scope["path"] == METRICS_PATH)


def _is_open(scope: Scope) -> bool:
    return scope["path"] in OPEN_ROUTES and scope["method"] in ("GET", "HEAD")


Endpoint = Callable[[Request], Awaitable[Response]]


class DirectRoutesMiddleware:
    """Innermost of an application's layers: answers plain routes itself and passes the rest on.

    The framework's own way goes through exception and exit-stack layers and asks each route in turn. A route that is a
    plain function of a request needs none of that.

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
            try:
                await self.app(scope, receive, send)
            finally:
                note_route(scope, getattr(scope.get("route"), "path", None))
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
                    note_route(scope, route.path)
                    return route.endpoint
        if endpoint is not None:
            note_route(scope, scope["path"])
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


# -- The application inside all layers --------------------------------------------------------------------------------

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
