"""Every request has an id, its sender's or one of ours, which is in its answer, its problem and the log."""

from __future__ import annotations

import re
import uuid

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.contract.errors import NemoGymError
from nemo_gym.sandbox.wire.problems import BrokerError, problem_of
from nemo_gym.sandbox.wire.routes import PROBLEM_JSON, REQUEST_ID_HEADER

_HEADER = REQUEST_ID_HEADER.lower().encode()
_KEY = "nemo_gym.request_id"
_PLAIN = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_FINAL = {"sandbox_create": 424, "sandbox_create_verification": 424, "sandbox_lost": 410}
"""Of errors that no second try mends, and that are therefore none of the broker's own."""
_FRAMEWORK_CODES = {404: "route_not_found", 405: "method_not_allowed"}


class RequestIdMiddleware:
    """Names each request, and its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == _HEADER), "")
        request_id = given if _PLAIN.fullmatch(given) else uuid.uuid4().hex
        scope[_KEY] = request_id

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), (_HEADER, request_id.encode())]}
            await send(message)

        await self.app(scope, receive, named)


def request_id_of(request: Request) -> str:
    return str(request.scope[_KEY])


def problem_reply(scope: Scope, error: NemoGymError) -> Response:
    """The answer to a request that ended with an error."""
    if error.code.startswith("http_") and (code := _FRAMEWORK_CODES.get(error.status)) is not None:
        error = BrokerError(code, error.message)
    problem = problem_of(error, request_id=str(scope.get(_KEY, "")))
    if not problem.retryable and (status := _FINAL.get(problem.code)) is not None:
        problem = problem.model_copy(update={"status": status})
    headers = {}
    retry_after_s = getattr(error, "retry_after_s", None) or error.details.get("retry_after_s")
    if retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(retry_after_s)))
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(problem.model_dump_json(), problem.status, headers, PROBLEM_JSON)
