"""Request bodies, read within bounds and judged by their model; and how the description of the API speaks of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from nemo_gym._util.suggest import validation_problems
from nemo_gym.contract.errors import InvalidBodyError
from nemo_gym.sandbox.wire.problems import BrokerError
from nemo_gym.sandbox.wire.routes import JSON, OCTET_STREAM, PROBLEM_JSON

M = TypeVar("M", bound=BaseModel)

PROBLEM = {
    "description": "An error, as an RFC 9457 problem",
    "content": {PROBLEM_JSON: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}
RESPONSES: dict[int | str, dict[str, Any]] = {"4XX": PROBLEM, "5XX": PROBLEM}
"""Of every route, beside its own."""


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """For ``openapi_extra``: a required JSON body."""
    content = {JSON: {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


def raw_body(media_type: str) -> dict[str, Any]:
    """For ``openapi_extra``: a required body of bytes."""
    content = {media_type: {"schema": {"type": "string", "format": "binary"}}}
    return {"requestBody": {"required": True, "content": content}}


def stream_reply(*media_types: str) -> dict[int | str, dict[str, Any]]:
    """For ``responses``: bytes of one of these kinds."""
    content = {media_type: {"schema": {"type": "string", "format": "binary"}} for media_type in media_types}
    return {200: {"description": "A stream", "content": content}, **RESPONSES}


async def parse(request: Request, model: type[M], max_bytes: int) -> M:
    """The body as a model. Raises `InvalidBodyError` naming each wrong field, `BrokerError` for its size or kind."""
    require_media_type(request, JSON)
    data = await read(request, max_bytes)
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise InvalidBodyError(validation_problems(error, model.model_fields), started="no") from None


async def read(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises `BrokerError` ``body_too_large``."""
    return b"".join([chunk async for chunk in bounded(request, max_bytes)])


async def bounded(request: Request, max_bytes: int, code: str = "body_too_large") -> AsyncIterator[bytes]:
    """The body as it comes. Raises `BrokerError` ``code`` beyond the bound."""
    refused = BrokerError(code, f"the body is larger than this broker's {max_bytes} bytes", limit_bytes=max_bytes)
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > max_bytes:
        raise refused
    taken = 0
    async for chunk in request.stream():
        taken += len(chunk)
        if taken > max_bytes:
            raise refused
        if chunk:
            yield chunk


def require_media_type(request: Request, wanted: str) -> None:
    """Raises `BrokerError` ``unsupported_media_type`` unless the body says that it is ``wanted``."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != wanted and not (wanted == OCTET_STREAM and not given):
        raise BrokerError("unsupported_media_type", f"the body must be {wanted}, not {given[:80] or 'without a type'}")


def digest(body: BaseModel) -> bytes:
    """What two requests have in common that ask for the same."""
    # Not with orjson, which refuses the integers beyond 64 bits that a provider's options may hold.
    return hashlib.sha256(json.dumps(body.model_dump(mode="json"), sort_keys=True).encode()).digest()


__all__ = [
    "RESPONSES",
    "ClientDisconnect",
    "bounded",
    "digest",
    "json_body",
    "parse",
    "raw_body",
    "read",
    "require_media_type",
    "stream_reply",
]
