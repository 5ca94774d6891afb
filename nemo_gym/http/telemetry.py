"""What every server shows of itself: its requests as metrics and spans, and who may read the metrics.

Requests that a layer answers early (a wrong credential, a body too large) are counted like any other. A request's
``traceparent`` is followed only where it comes with a credential of the stack.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Iterable, Mapping
from typing import Any

import structlog
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.config.launch import ServerLaunch
from nemo_gym.config.observability import ObservabilityConfig
from nemo_gym.contract.credentials import CREDENTIAL_HEADER, Caller, Role
from nemo_gym.contract.errors import CredentialError
from nemo_gym.http import tracing
from nemo_gym.http.correlation import ROLLOUT_ID_HEADER
from nemo_gym.http.metrics import METRICS_PATH, Counter, Histogram, Reading, add_source
from nemo_gym.http.tracing import SpanKind

log = structlog.get_logger(__name__)

REQUESTS = Counter("nemo_gym_http_requests", "Requests that were answered", ("method", "route", "status"))
REQUEST_SECONDS = Histogram("nemo_gym_http_request_seconds", "From a request to its last byte", ("route",))

SEEN = "nemo_gym.seen"
UNKNOWN_ROUTE = "other"
"""Of paths that no route has, and of an application that a plugin built itself."""
_UNTRACED = frozenset({"/", "/health", "/ready", "/heartbeat", "/sessions", "/close", METRICS_PATH})
"""Short and the same for every rollout, or no part of one; with all requests as spans, traces cost twice as much."""
_TITLES = {"/seed_session": "seed", "/harvest": "harvest", "/verify": "verify"}
_CREDENTIAL = CREDENTIAL_HEADER.lower().encode()
_ROLLOUT = ROLLOUT_ID_HEADER.lower().encode()
_TRACEPARENT = tracing.TRACEPARENT.encode()
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_ROLES = (Role.PIPELINE, Role.ENVIRONMENT, Role.MODEL, Role.OPERATOR)
"""Who may read a server's metrics: agents have no business with others' rollouts."""


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
        if tracing.is_on() and _is_traced(scope["path"]) and (span := self._begun(scope)) is not None:
            tracing.enter(span.context)  # for good: each request is a task of its own

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
                tracing.end(span, f"status {status}" if status >= 500 else None)

    def _begun(self, scope: Scope) -> tracing.Span | None:
        given = rollout_id = None
        follows = self._follows_anybody
        for name, value in scope["headers"]:
            if name == _TRACEPARENT:
                given = value
            elif name == _CREDENTIAL:
                follows = True
            elif name == _ROLLOUT:
                rollout_id = value.decode("latin-1")
        if given is None or not follows or (parent := tracing.extract(given.decode("latin-1"))) is None:
            return None
        return tracing.begin("", parent, SpanKind.SERVER, rollout_id=rollout_id)


def _is_traced(path: str) -> bool:
    return path not in _UNTRACED and not path.startswith("/sessions/")


class Seen:
    """What is learned of a request while it is answered."""

    __slots__ = ("attributes", "route", "title")

    def __init__(self) -> None:
        self.route = UNKNOWN_ROUTE
        self.title: str | None = None
        """Of its span, where that is more than a request."""
        self.attributes: Mapping[str, Any] = {}


def note_route(scope: Scope, route: str | None) -> None:
    """By which of its routes a server answers; what nobody notes counts as `UNKNOWN_ROUTE`."""
    seen = scope.get(SEEN)
    if seen is not None and route is not None:
        seen.route = route


def describe_request(scope: Scope, title: str, attributes: Mapping[str, Any]) -> None:
    """Have the span of the request be called ``title``, with these attributes."""
    seen = scope.get(SEEN)
    if isinstance(seen, Seen) and tracing.is_on():
        seen.title, seen.attributes = title, attributes


def require_scraper(request: Request, caller: Caller | None, token: str | None, *, secured: bool) -> None:
    """Raise `CredentialError` or `RoleError` unless the sender may read metrics: by the run's token as bearer, or by a
    credential of any role but ``agent``."""
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if token is not None and hmac.compare_digest(given.encode(), token.encode()):
        return
    if caller is not None:
        caller.require(*_ROLES, route=METRICS_PATH)
    elif secured:
        raise CredentialError(
            f"{METRICS_PATH} needs the run's metrics token as bearer (run_dir/metrics.token), or the header"
            f" {CREDENTIAL_HEADER}"
        )


def start_traces(config: ObservabilityConfig, *, server: str, run_id: str, **resource: str) -> None:
    """Send the spans of this process from now on, where the configuration says so."""
    if config.traces is None:
        return
    from importlib.metadata import version

    from nemo_gym.http.otlp import SpanExporter

    described = {
        "service.name": server,
        "service.namespace": "nemo_gym",
        "service.version": version("nemo-gym-suite"),
        "run_id": run_id,
        **resource,
    }
    tracing.install(SpanExporter(config.traces, described), config.traces.sample)


def start_server_telemetry(launch: ServerLaunch) -> None:
    """Of a server process, before it serves."""
    start_traces(ObservabilityConfig.of(launch.config), server=launch.instance, run_id=launch.run_id)
