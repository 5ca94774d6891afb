"""Errors on the wire: RFC 9457 problem bodies, which say what is wrong and never what is private.

A server may word the errors of some of its routes otherwise (`shape_errors`).
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
"""Answers an error in another form than a problem; ``None`` leaves it a problem."""


class InternalError(NemoGymError):
    """An error that nobody expected."""

    code = "internal"


def shape_errors(app: FastAPI, shape: ErrorShape) -> None:
    """Have every error that leaves ``app`` worded by ``shape``, the framework's own and unexpected ones included."""
    app.state.nemo_gym_error_shape = shape


def problem_response(error: NemoGymError, scope: Scope | None = None) -> Response:
    """The answer to the request ``scope`` that ended with ``error``."""
    app = scope.get("app") if scope is not None else None
    shape: ErrorShape | None = getattr(app.state, "nemo_gym_error_shape", None) if app is not None else None
    if scope is not None and shape is not None and (shaped := shape(scope, error)) is not None:
        return shaped
    body = error.as_problem()
    headers = {}
    if (retry_after := error.details.get("retry_after_s")) is not None:
        headers["Retry-After"] = str(math.ceil(retry_after))  # whole seconds, says RFC 9110
    return Response(orjson.dumps(body, default=str), error.status, headers, PROBLEM_TYPE)


async def send_problem(scope: Scope, receive: Receive, send: Send, error: NemoGymError) -> None:
    await problem_response(error, scope)(scope, receive, send)


def install_problem_handlers(app: FastAPI) -> None:
    """Answer this suite's errors as problems."""

    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, NemoGymError)
        return refused(request, error)

    async def framework(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return await refused_by_framework(request, error)

    async def left(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)  # nobody's fault here, and nobody hears it

    app.add_exception_handler(NemoGymError, known)
    app.add_exception_handler(HTTPException, framework)
    app.add_exception_handler(ClientDisconnect, left)


def refused(request: Request, error: NemoGymError) -> Response:
    """The answer to a request that ended with one of this suite's errors; logged."""
    said = log.warning if error.status >= 500 else log.info
    said("request refused", route=request.scope["path"], code=error.code, status=error.status, error=error.message)
    return problem_response(error, request.scope)


async def refused_by_framework(request: Request, error: HTTPException) -> Response:
    """The answer to a request that ended with an error of the framework: no such route, another method; or with one
    that a plugin raised by hand."""
    shape: ErrorShape | None = getattr(request.scope["app"].state, "nemo_gym_error_shape", None)
    if shape is not None:
        said = error.detail if isinstance(error.detail, str) else orjson.dumps(error.detail, default=str).decode()
        shaped = shape(request.scope, http_error(error.status_code, f"{said} ({request.scope['path']})"))
        if shaped is not None:
            shaped.headers.update(error.headers or {})
            return shaped
    return await http_exception_handler(request, error)


def http_error(status: int, message: str) -> NemoGymError:
    """An error of which nothing but its status is known."""
    return _error_class(status)(message)


@functools.lru_cache(maxsize=64)
def _error_class(http_status: int) -> type[NemoGymError]:
    return type("HttpError", (NemoGymError,), {"status": http_status, "code": f"http_{http_status}"})


def unexpected(scope: Scope, error: Exception) -> Response:
    """The answer to a request that ended with an error which nobody expected, while it is being handled: its traceback
    is logged."""
    log.exception("route failed", route=scope["path"])
    said = f"{type(error).__name__} in {scope['path']}; the server's log has the traceback"
    return problem_response(InternalError(said), scope)
