"""Helpers that routes share: request bodies, request ids, responses."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym._util.suggest import validation_problems
from nemo_gym.broker.config import BrokerConfig
from nemo_gym.contract.errors import InvalidBodyError, NemoGymError
from nemo_gym.http.requests import TooManyValuesError, check_values
from nemo_gym.sandbox.wire import EVENT_STREAM, JSON, OCTET_STREAM, PROBLEM_JSON, REQUEST_ID_HEADER
from nemo_gym.sandbox.wire.problems import BrokerError, problem_of

# -- Models --------------------------------------------------------------------------------------------------------


def reply(body: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body.model_dump_json(), status, headers, JSON)


# -- Bodies --------------------------------------------------------------------------------------------------------

M = TypeVar("M", bound=BaseModel)

PROBLEM = {
    "description": "An error, as an RFC 9457 problem",
    "content": {PROBLEM_JSON: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}
RESPONSES: dict[int | str, dict[str, Any]] = {"4XX": PROBLEM, "5XX": PROBLEM}
"""The error responses that every route documents, in addition to its own responses."""


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """Describe a required JSON body, for ``openapi_extra``."""
    content = {JSON: {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


def raw_body(media_type: str) -> dict[str, Any]:
    """Describe a required binary body, for ``openapi_extra``."""
    content = {media_type: {"schema": {"type": "string", "format": "binary"}}}
    return {"requestBody": {"required": True, "content": content}}


def stream_reply(*media_types: str) -> dict[int | str, dict[str, Any]]:
    """Describe a streamed response of one of these media types, for ``responses``."""
    content: dict[str, Any] = {
        # An event stream gets no schema: some OpenAPI tools would apply it to the body, others to each event.
        media_type: {} if media_type == EVENT_STREAM else {"schema": {"type": "string", "format": "binary"}}
        for media_type in media_types
    }
    return {200: {"description": "A stream", "content": content}, **RESPONSES}


async def parse(request: Request, model: type[M], config: BrokerConfig, max_bytes: int | None = None) -> M:
    """Parse the body as a model. Raises `InvalidBodyError` naming each wrong field, and `BrokerError` for a wrong size
    or media type. ``max_bytes``: a limit below the configured ``max_body_bytes``."""
    require_media_type(request, JSON)
    limit = config.max_body_bytes if max_bytes is None else min(max_bytes, config.max_body_bytes)
    data = await read(request, limit)
    try:
        await check_values(data, config.max_body_values)
    except TooManyValuesError as error:
        raise BrokerError("body_too_many_values", error.message, limit=config.max_body_values) from None
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        problems = validation_problems(error, model.model_fields, whole="the body")
        raise InvalidBodyError(problems, started="no") from None


async def read(request: Request, max_bytes: int) -> bytes:
    """Return the whole body. Raises `BrokerError` ``body_too_large``."""
    return b"".join([chunk async for chunk in bounded(request, max_bytes)])


async def bounded(request: Request, max_bytes: int, code: str = "body_too_large") -> AsyncIterator[bytes]:
    """Yield the body in chunks. Raises `BrokerError` ``code`` beyond ``max_bytes``."""
    too_large = BrokerError(code, f"the body is larger than this broker's {max_bytes} bytes", limit_bytes=max_bytes)
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > max_bytes:
        raise too_large
    received = 0
    async for chunk in request.stream():
        received += len(chunk)
        if received > max_bytes:
            raise too_large
        if chunk:
            yield chunk


def require_media_type(request: Request, wanted: str) -> None:
    """Raise `BrokerError` ``unsupported_media_type`` unless the body's ``Content-Type`` is ``wanted``. A missing type
    counts as ``application/octet-stream``."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != wanted and not (wanted == OCTET_STREAM and not media_type):
        raise BrokerError(
            "unsupported_media_type", f"the body must be {wanted}, not {media_type[:80] or 'without a type'}"
        )


def digest(body: BaseModel) -> bytes:
    """Return a digest that is the same for equal request bodies."""
    # Not with orjson, which refuses integers beyond 64 bits, and a provider's options may contain some.
    return hashlib.sha256(json.dumps(body.model_dump(mode="json"), sort_keys=True).encode()).digest()


# -- Request ids ---------------------------------------------------------------------------------------------------

_HEADER = REQUEST_ID_HEADER.lower().encode()
_KEY = "nemo_gym.request_id"
_PLAIN = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_FINAL = {"sandbox_create": 424, "sandbox_create_verification": 424, "sandbox_lost": 410}
"""Error code → status if the error is not retryable. The status is 4xx, because it is not the broker's fault."""
_FRAMEWORK_CODES = {404: "route_not_found", 405: "method_not_allowed"}


class RequestIdMiddleware:
    """Gives each request an id, and adds it to the response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        client_id = next((value.decode("latin-1") for name, value in scope["headers"] if name == _HEADER), "")
        request_id = client_id if _PLAIN.fullmatch(client_id) else uuid.uuid4().hex
        scope[_KEY] = request_id

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), (_HEADER, request_id.encode())]}
            await send(message)

        await self.app(scope, receive, named)


def request_id_of(request: Request) -> str:
    return str(request.scope[_KEY])


def problem_reply(scope: Scope, error: NemoGymError) -> Response:
    """Return the problem response for a request that ended with an error."""
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
