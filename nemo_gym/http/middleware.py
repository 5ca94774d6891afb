"""The layers that every request passes: metrics and span, rollout, credential, session cookie, bounds on the body; and
a fast path to this suite's own routes. What the layers record about a request is defined in `nemo_gym.http.requests`.

A session opened for an attempt names that attempt, and is refused once the attempt is fenced or closed. Requests that
a layer answers early (a wrong credential, a body too large) are counted like any other. A secured server follows a
request's ``traceparent`` only if the request carries a credential.
"""

from __future__ import annotations

import contextlib
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


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


class BodyTooLargeError(NemoGymError):
    """A request body is larger than the server accepts."""

    code = "body_too_large"
    status = 413


_OF_CONTAINERS = 4


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The bounds on one request's body, each with the server's configuration key that sets it."""

    max_bytes: int
    bytes_key: str = "max_body_bytes"
    max_values: int | None = None
    """JSON values; a list or an object counts as `_OF_CONTAINERS`."""
    values_key: str = ""

    def refuse_bytes(self) -> NemoGymError:
        return BodyTooLargeError(
            f"the body is larger than {self.max_bytes} bytes; raise the server's '{self.bytes_key}' to allow more",
            limit_bytes=self.max_bytes,
        )

    def refuse_values(self) -> NemoGymError:
        return TooManyValuesError(
            f"the body holds more than {self.max_values} JSON values (a list or an object counts as {_OF_CONTAINERS});"
            f" raise the server's '{self.values_key}' to allow more",
            limit=self.max_values,
        )


class UnknownErrorMiddleware:
    """Answers any other error with a problem that names only its type: the message may quote private fields, and the
    caller may be an agent. The traceback goes to this server's log.

    The error is not raised further. Otherwise the web server would close a connection that the client believes alive,
    and the client's next request on it, perhaps one that must not be repeated, would be lost.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, send_watched)
        except (Exception, SystemExit) as error:
            if started or scope["type"] != "http":
                raise
            # The boundary of plugin code, which may raise anything. A `SystemExit` would end the server.
            await unexpected(scope, error)(scope, receive, send)


class BodyLimitMiddleware:
    """Answers with `BodyTooLargeError` or `TooManyValuesError` if a route reads more of a body than its sender may
    send, whether or not the length was announced. The web server discards the rest, so the connection stays usable.

    Values are counted before any code parses the body.

    Args:
        limits: for requests of all other senders.
        agent_limits: for requests of agent servers.
    """

    def __init__(self, app: ASGIApp, limits: BodyLimits, agent_limits: BodyLimits) -> None:
        self.app = app
        self._limits, self._agent_limits = limits, agent_limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limits = self._agent_limits if sent_by_agent(scope) else self._limits
        content_length = _header(scope, b"content-length") or "0"
        received_bytes = 0
        counter = ValueCounter(_OF_CONTAINERS) if limits.max_values is not None else None
        error: NemoGymError | None = None
        replaced = False

        async def receive_bounded() -> Message:
            nonlocal received_bytes, error
            if error is None and not (content_length.isdecimal() and int(content_length) > limits.max_bytes):
                message = await receive()
                body = message.get("body", b"")
                received_bytes += len(body)
                if counter is not None and limits.max_values is not None and body:
                    counter.feed(body)
                    if counter.found > limits.max_values:
                        error = limits.refuse_values()
                        raise error
                if received_bytes <= limits.max_bytes:
                    return message
            error = error or limits.refuse_bytes()
            raise error

        async def send_or_replace(message: Message) -> None:
            # A framework turns any error raised while it reads the body into a 400.
            nonlocal replaced
            if error is not None and message["type"] == "http.response.start" and message["status"] != error.status:
                replaced = True
                await send_problem(scope, receive, send, error)
            elif not replaced:
                await send(message)

        await self.app(scope, receive_bounded, send_or_replace)


MAX_AGE_S = 14 * 24 * 3600
_ATTRIBUTES = f"path=/; Max-Age={MAX_AGE_S}; httponly; samesite=lax"
SessionGuard = Callable[[str, Mapping[str, Any]], Awaitable[None]]
"""Gets the path and the session; raises a `NemoGymError` if the session may no longer be used."""


class SessionMiddleware:
    """Gives every HTTP request a `LazySession`, and its reply the session's cookie if the session is in use."""

    def __init__(self, app: ASGIApp, cookie_name: str, codec: CookieCodec, guard: SessionGuard | None = None) -> None:
        self.app = app
        self._name = cookie_name
        self._needle = cookie_name.encode("latin-1", "replace") + b"="
        self._codec = codec
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or isinstance(scope.get("session"), LazySession):
            # A session already exists when this application runs inside another one.
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
            # Repeat an unchanged cookie too: callers keep only the cookies of the last reply.
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
"""Requests that are short and alike in every rollout, or not part of one. Tracing these too would double its cost."""
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
    """Counts and times every request by its route, and puts a span around requests of traced attempts.

    The innermost layer knows the route and records it in the scope's `Seen`.
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
        if telemetry.is_on() and _is_traced(scope["path"]) and (span := self._begin_span(scope)) is not None:
            telemetry.enter(span.context)  # never reset: each request runs in a task of its own

        async def send_watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        start = time.perf_counter()
        IN_FLIGHT.count += 1
        try:
            await self.app(scope, receive, send_watched)
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

    def _begin_span(self, scope: Scope) -> telemetry.Span | None:
        if not self._follows_anybody and _header(scope, _CREDENTIAL_HEADER) is None:
            return None
        if (parent := telemetry.extract(_header(scope, _TRACEPARENT))) is None:
            return None
        return telemetry.begin("", parent, SpanKind.SERVER, rollout_id=_header(scope, _ROLLOUT_HEADER))


def _is_traced(path: str) -> bool:
    return path not in _UNTRACED and not path.startswith("/sessions/")


OPEN_ROUTES = frozenset({"/", "/health", "/ready"})
"""Served to anybody: they show whether the server is up and ready."""

TOKEN_CAPTURE = "nemo_gym.token_capture"
_REPLICAS_HEADER = REPLICAS_HEADER.lower().encode()
_PREFIX = f"/{ROLLOUT_PATH_PREFIX}/"


class RolloutMiddleware:
    """Sets the current rollout from the path's prefix ``/ng-rollout/<id>/``, which it removes, or from the rollout
    header; and sets the replicas that the caller chose."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        rollout_id = _header(scope, _ROLLOUT_HEADER)
        path: str = scope["path"]
        if path.startswith(_PREFIX):
            rollout_id, _, inner = path[len(_PREFIX) :].partition("/")
            capture = inner.startswith(f"{TOKEN_CAPTURE_PATH_SEGMENT}/")
            inner = "/" + inner.removeprefix(f"{TOKEN_CAPTURE_PATH_SEGMENT}/")
            # Handlers get the path parameter that NeMo Gym's prefixed routes provide.
            prefix = {"rollout_id": rollout_id}
            scope = {**scope, "path": inner, "raw_path": inner.encode(), "path_params": prefix, TOKEN_CAPTURE: capture}
        with contextlib.ExitStack() as stack:
            if (replicas := _header(scope, _REPLICAS_HEADER)) is not None:
                stack.enter_context(replica_context(decode_replicas(replicas)))
            if rollout_id is not None and ROLLOUT_ID_PATTERN.match(rollout_id):
                stack.enter_context(rollout_context(rollout_id))
            await self.app(scope, receive, send)


class CredentialMiddleware:
    """Refuses every request without a genuine credential for this server.

    ``authenticates_itself`` returns true for requests whose route checks another kind of token (inference routes);
    they pass without a credential. An error it raises becomes the response. Without ``credentials`` the server is
    unsecured: a plugin built by hand, in its own tests.
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
        credential = _header(scope, _CREDENTIAL_HEADER)
        try:
            if credential is None and self._checks_callers(scope):
                caller = None
            else:
                caller = self._credentials.check(credential)
        except NemoGymError as error:
            await send_problem(scope, receive, send, error)
            return
        if caller is not None:
            scope[CALLER] = caller
        await self.app(scope, receive, send)

    def _checks_callers(self, scope: Scope) -> bool:
        """Whether the route checks the sender itself: those of ``authenticates_itself``, and the metrics."""
        if self._authenticates_itself is not None and self._authenticates_itself(scope):
            return True
        return bool(scope["path"] == METRICS_PATH)


def _is_open(scope: Scope) -> bool:
    return scope["path"] in OPEN_ROUTES and scope["method"] in ("GET", "HEAD")


Endpoint = Callable[[Request], Awaitable[Response]]


class DirectRoutesMiddleware:
    """The innermost layer: it answers plain routes itself and passes all other requests on.

    The framework would run exception and exit-stack layers and match each route in turn. A route that is a plain
    function of the request needs none of that.

    The first route of a path wins, as in the framework, so a path whose first route is not plain is passed on.
    """

    def __init__(self, app: ASGIApp, application: FastAPI) -> None:
        self.app = app
        self._application = application
        self._route_count = -1
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

        async def send_watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        request = Request(scope, receive, send)
        try:
            response = await endpoint(request)
            await response(scope, receive, send_watched)
        except ClientDisconnect:
            return  # the client left before it sent the whole body
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
        if len(routes) != self._route_count:  # plugins may add routes until the first request
            self._index_routes()
        endpoint = self._exact.get((scope["method"], scope["path"]))
        if endpoint is None and scope["path"].startswith("/sessions/"):
            for route in self._patterns:
                match, child_scope = route.matches(scope)
                if match is Match.FULL:
                    scope.update(child_scope)
                    note_route(scope, route.path)
                    return route.endpoint
        if endpoint is not None:
            note_route(scope, scope["path"])
        return endpoint

    def _index_routes(self) -> None:
        routes = self._application.router.routes
        self._route_count = len(routes)
        self._exact, self._patterns = {}, []
        claimed: set[tuple[str, str]] = set()
        for route in routes:
            for method in getattr(route, "methods", None) or ():
                key = (method, getattr(route, "path", ""))
                # `type is`: the framework's own routes are subclasses and parse their arguments.
                if key not in claimed and type(route) is Route:
                    if route.param_convertors:
                        if route not in self._patterns:
                            self._patterns.append(route)
                    else:
                        self._exact[key] = route.endpoint
                claimed.add(key)


# -- The application inside all layers --------------------------------------------------------------------------------

Shortcut = Callable[[Scope, Receive, Send], Awaitable[None] | None]
"""Answers a request exactly as all layers together would; returns ``None`` for a request that must pass the layers."""


class Application(FastAPI):
    """An application whose requests can take a shortcut past the layers: each layer costs time for every request."""

    _shortcut: Shortcut | None = None
    _layers = 0

    def answer_the_rest_with(self, app: ASGIApp) -> None:
        """Pass requests that match no route on to ``app``, behind this application's layers."""
        self.router.default = _Inner(app, self.router.default)

    def take_shortcut(self, shortcut: Shortcut) -> None:
        """Offer requests to ``shortcut`` first from now on. Adding a layer later disables it, so that no request skips
        that layer."""
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
    """An application that a plugin built, inside this suite's.

    Its framework answers an exception with its own 500 and then raises it again. The 500 is held back, so that the
    layers around answer the exception as they answer any other; it is sent only if nothing was raised.
    """

    _PASSED = "nemo_gym.inner"

    def __init__(self, app: ASGIApp, not_found: ASGIApp) -> None:
        self._app = app
        self._not_found = not_found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get(self._PASSED):  # the inner application contains this one, and none of its routes matched either
            await self._not_found(scope, receive, send)
            return
        withheld: list[Message] = []

        async def withhold_failure(message: Message) -> None:
            if withheld or (message["type"] == "http.response.start" and message["status"] == 500):
                withheld.append(message)
            else:
                await send(message)

        await self._app({**scope, self._PASSED: True}, receive, withhold_failure)
        for message in withheld:
            await send(message)
