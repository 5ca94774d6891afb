"""Errors on the wire: RFC 9457 problem bodies, which name the error and reveal no private data.

A server may give the errors of some of its routes another form (`shape_errors`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import orjson
import structlog
from fastapi import FastAPI
from fastapi.exception_handlers import http_exception_handler
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nemo_gym.contract.errors import NemoGymError
from nemo_gym.http.delivery import CLIENT_CLOSED_REQUEST

PROBLEM_TYPE = "application/problem+json"
log = structlog.get_logger(__name__)


ErrorShape = Callable[[Scope, NemoGymError], Response | None]
"""Returns an error's response in another form than a problem, or ``None`` to leave it a problem."""


class InternalError(NemoGymError):
    """An unexpected error."""

    code = "internal"


def shape_errors(app: FastAPI, shape: ErrorShape) -> None:
    """Format every error that leaves ``app`` with ``shape``, including the framework's own and unexpected ones."""
    app.state.nemo_gym_error_shape = shape


def problem_response(error: NemoGymError, scope: Scope | None = None) -> Response:
    """The response to the request ``scope`` that ended with ``error``."""
    app = scope.get("app") if scope is not None else None
    shape: ErrorShape | None = getattr(app.state, "nemo_gym_error_shape", None) if app is not None else None
    if scope is not None and shape is not None and (shaped := shape(scope, error)) is not None:
        return shaped
    body = error.as_problem()
    headers = {}
    if (retry_after := error.details.get("retry_after_s")) is not None:
        headers["Retry-After"] = str(math.ceil(retry_after))  # RFC 9110: whole seconds
    return Response(orjson.dumps(body, default=str), error.status, headers, PROBLEM_TYPE)


async def send_problem(scope: Scope, receive: Receive, send: Send, error: NemoGymError) -> None:
    await problem_response(error, scope)(scope, receive, send)


def install_problem_handlers(app: FastAPI) -> None:
    """Answer this suite's errors as problems."""

    async def handle_suite_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, NemoGymError)
        return refused(request, error)

    async def handle_framework_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return await refused_by_framework(request, error)

    async def handle_disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)  # not an error, and no client is left to receive it

    app.add_exception_handler(NemoGymError, handle_suite_error)
    app.add_exception_handler(HTTPException, handle_framework_error)
    app.add_exception_handler(ClientDisconnect, handle_disconnect)


def refused(request: Request, error: NemoGymError) -> Response:
    """Log one of this suite's errors, and return the response to its request."""
    log_refusal = log.warning if error.status >= 500 else log.info
    log_refusal(
        "request refused", route=request.scope["path"], code=error.code, status=error.status, error=error.message
    )
    return problem_response(error, request.scope)


async def refused_by_framework(request: Request, error: HTTPException) -> Response:
    """The response to a request that ended with an ``HTTPException``: the framework's (unknown route, wrong method) or
    one that a plugin raised."""
    shape: ErrorShape | None = getattr(request.scope["app"].state, "nemo_gym_error_shape", None)
    if shape is not None:
        detail = error.detail if isinstance(error.detail, str) else orjson.dumps(error.detail, default=str).decode()
        shaped = shape(request.scope, http_error(error.status_code, f"{detail} ({request.scope['path']})"))
        if shaped is not None:
            shaped.headers.update(error.headers or {})
            return shaped
    return await http_exception_handler(request, error)


def http_error(status: int, message: str) -> NemoGymError:
    """An error of which only the status is known."""
    return _error_class(status)(message)


@functools.lru_cache(maxsize=64)
def _error_class(http_status: int) -> type[NemoGymError]:
    return type("HttpError", (NemoGymError,), {"status": http_status, "code": f"http_{http_status}"})


def unexpected(scope: Scope, error: BaseException) -> Response:
    """Log an unexpected error with its traceback, and return the response to its request. Call it while ``error`` is
    being handled."""
    log.exception("route failed", route=scope["path"])
    message = f"{type(error).__name__} in {scope['path']}; the server's log has the traceback"
    return problem_response(InternalError(message), scope)
