"""What a harness reads when an inference route refuses: its own dialect, whoever in the server said no."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from starlette.responses import Response

from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, InferenceCall, SimpleResponsesAPIModel
from nemo_gym.contract.credentials import CREDENTIAL_HEADER, Role
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.errors import dialect_error, dialect_of, inference_path
from nemo_gym.gateway.engines import EngineRateLimitedError
from tests.servers.stack import Stack, rollout

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
LIMIT = 4096


class BrokenModel(SimpleResponsesAPIModel):
    """Fails as no one expects."""

    config: BaseResponsesAPIModelConfig

    async def infer(self, call: InferenceCall) -> Response:
        if call.body.get("leaves"):
            sys.exit("CANARY of a row")
        raise RuntimeError("CANARY of a row")


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[aiohttp.ClientSession]:
    stack.add("model", BrokenModel, Role.MODEL, max_body_bytes=LIMIT)
    async with aiohttp.ClientSession(stack.url("model")) as session:
        yield session


async def token(stack: Stack) -> str:
    reply = await stack.client().post("model", "/sessions", json={"rollout": rollout().model_dump()})
    return str((await reply.json())["inference_token"])


def check(path: str, body: Any) -> str:
    """The error's type, once it has the form of the path's dialect."""
    error = body["error"]
    if path.startswith(MESSAGES):
        assert set(body) == {"type", "error"} and body["type"] == "error"
        assert set(error) == {"type", "message"}
    else:
        assert set(body) == {"error"}
        assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and isinstance(error["message"], str)
    return str(error["type"])


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    "body",
    [b"[]", b"7", b"null", b"nonsense", b'{"a":', b'{"a":NaN}', b'{"a":"\xff"}', b'{"a":"\\ud800"}', b"[" * 99_999],
    ids=lambda body: body[:12].decode("latin-1"),
)
async def test_body_that_is_no_json_object_is_refused_in_the_dialect(
    stack: Stack, http: aiohttp.ClientSession, path: str, body: bytes
) -> None:
    headers = {"Authorization": f"Bearer {await token(stack)}"}
    async with http.post(path, data=body[:LIMIT], headers=headers) as reply:
        assert (reply.status, check(path, await reply.json())) == (400, "invalid_request_error")


@pytest.mark.parametrize(("path", "kind"), [(CHAT, "invalid_request_error"), (MESSAGES, "request_too_large")])
async def test_body_beyond_the_bound_is_refused_and_the_connection_stays_usable(
    stack: Stack, http: aiohttp.ClientSession, path: str, kind: str
) -> None:
    headers = {"Authorization": f"Bearer {await token(stack)}"}

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b" " * 1024
            await asyncio.sleep(0)

    for data in (b" " * (LIMIT + 1), chunks()):
        async with http.post(path, data=data, headers=headers) as reply:
            assert (reply.status, check(path, await reply.json())) == (413, kind)
    async with http.get("/health") as reply:
        assert reply.status == 200


@pytest.mark.parametrize(("path", "kind"), [(CHAT, "invalid_request_error"), (MESSAGES, "authentication_error")])
async def test_wrong_tokens_are_refused_in_the_dialect(
    stack: Stack, http: aiohttp.ClientSession, path: str, kind: str
) -> None:
    given: list[dict[str, str]] = [
        {},
        {"Authorization": "Bearer ngi1_unknown"},
        {"x-api-key": "sk-else"},
        {CREDENTIAL_HEADER: "ngc1.pipeline.x.model.forged"},
    ]
    for headers in given:
        async with http.post(path, json={}, headers=headers) as reply:
            assert (reply.status, check(path, await reply.json())) == (401, kind)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_token_of_an_ended_session_is_refused_in_the_dialect_and_not_worth_a_retry(
    stack: Stack, http: aiohttp.ClientSession, path: str
) -> None:
    old = await token(stack)
    await token(stack)
    async with http.post(path, json={}, headers={"x-api-key": old}) as reply:
        check(path, await reply.json())
        assert (reply.status, reply.headers["x-should-retry"]) == (409, "false")


async def test_wrong_method_and_unknown_route_are_refused_in_the_dialect(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    for path, headers, kind in (
        (CHAT, {}, "invalid_request_error"),
        (MESSAGES, {}, "invalid_request_error"),
    ):
        async with http.put(path, json={}, headers=headers) as reply:
            assert (reply.status, check(path, await reply.json()), reply.headers["Allow"]) == (405, kind, "POST")
    version, known = {"anthropic-version": "2023-06-01"}, {"x-api-key": await token(stack)}
    for headers, status, kinds in (
        ({}, 401, ("invalid_request_error", "authentication_error")),
        ({"x-api-key": "ngi1_guess"}, 401, ("invalid_request_error", "authentication_error")),
        (known, 404, ("invalid_request_error", "not_found_error")),
    ):
        async with http.post("/v1/embeddings", json={}, headers=headers) as reply:
            assert (reply.status, check(CHAT, await reply.json())) == (status, kinds[0])
        async with http.post("/v1/messages/batches", json={}, headers={**version, **headers}) as reply:
            assert (reply.status, check(MESSAGES, await reply.json())) == (status, kinds[1])


@pytest.mark.parametrize(("path", "kind"), [(RESPONSES, "server_error"), (MESSAGES, "api_error")])
async def test_unexpected_error_is_said_in_the_dialect_and_quotes_nothing(
    stack: Stack, http: aiohttp.ClientSession, path: str, kind: str
) -> None:
    headers = {"x-api-key": await token(stack)}
    for body in ({}, {"leaves": True}):
        async with http.post(path, json=body, headers=headers) as reply:
            assert (reply.status, check(path, await reply.json())) == (500, kind)
            assert "CANARY" not in await reply.text()


@pytest.mark.parametrize("encodings", [["zstd"], ["identity, zstd"], ["identity", "zstd"]])
async def test_encoded_body_is_refused_by_name(
    encodings: list[str], stack: Stack, http: aiohttp.ClientSession
) -> None:
    headers = [("x-api-key", await token(stack)), *(("Content-Encoding", encoding) for encoding in encodings)]
    async with http.post(CHAT, data=b"\x28\xb5\x2f\xfd", headers=headers) as reply:
        assert reply.status == 415 and "zstd" in (await reply.json())["error"]["message"]


async def test_routes_that_are_no_inference_keep_problems(stack: Stack, http: aiohttp.ClientSession) -> None:
    async with http.post("/sessions", json={}) as reply:
        assert (reply.status, (await reply.json(content_type=None))["code"]) == (401, "credential")
    reply = await stack.client().post("model", "/sessions", json={"rollout": 1})
    assert (reply.status, (await reply.json(content_type=None))["code"]) == (422, "body")


def test_dialect_is_known_from_the_path_with_and_without_a_session() -> None:
    assert inference_path("/sessions/abc/v1/messages") == "/v1/messages"
    assert inference_path("/sessions/abc/token/ngi1_x/v1/responses") == "/v1/responses"
    assert dialect_of("/sessions/abc/v1/responses") is Dialect.RESPONSES
    assert dialect_of("/v1/messages/count_tokens") is Dialect.MESSAGES
    assert dialect_of("/v1/models") is Dialect.CHAT
    assert dialect_of("/v1/models/m", [b"anthropic-version"]) is Dialect.MESSAGES
    assert dialect_of("/sessions/abc/finalize") is dialect_of("/engines") is dialect_of("/v1") is None


@pytest.mark.parametrize(("asked_s", "header"), [(None, "1"), (0.0, "1"), (0.2, "1"), (6.5, "7"), (30, "30")])
@pytest.mark.parametrize("dialect", [*Dialect])
def test_rate_limit_always_says_in_whole_seconds_when_to_come_back(
    dialect: Dialect, asked_s: float | None, header: str
) -> None:
    """Without that, or with nothing to wait, Codex ends the run."""
    reply = dialect_error(dialect, EngineRateLimitedError("busy", retry_after_s=asked_s))
    assert (reply.status_code, reply.headers["retry-after"]) == (429, header)
