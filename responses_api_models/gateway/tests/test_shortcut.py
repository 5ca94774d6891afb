"""The short way to an answer and the long one say the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from starlette.requests import Request

from nemo_gym.contract.errors import CredentialError
from nemo_gym.gateway.dialects import PATHS
from nemo_gym.gateway.dialects.chat import ChatAdapter
from nemo_gym.gateway.routes import InferenceShortcut
from nemo_gym.gateway.sessions import GatewaySession
from nemo_gym.server_utils import request
from responses_api_models.gateway.app import Gateway
from responses_api_models.gateway.tests.conftest import GatewayStack, Opened

CHAT = "/v1/chat/completions"
LONG_WAY = {"Cookie": "unknown=1"}
"""A layer looks at cookies."""


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of all calls that were answered by the shortcut."""
    found: list[str] = []
    answer = InferenceShortcut._serve

    async def noted(self: Any, dialect: Any, live: Any, headers: Any, length: int, scope: Any, *channels: Any) -> None:
        found.append(scope["path"])
        await answer(self, dialect, live, headers, length, scope, *channels)

    monkeypatch.setattr(InferenceShortcut, "_serve", noted)
    return found


async def sent(opened: Opened, path: str, body: Any, method: str = "POST", **headers: str) -> tuple[int, Any, str]:
    root = opened.facts["base_url"].split("/sessions/")[0]
    token = {"Authorization": f"Bearer {opened.facts['inference_token']}"}
    data = orjson.dumps(body) if isinstance(body, dict | list) else body
    reply = await request(method, root + path, data=data, headers={**token, **headers})
    return reply.status, await reply.json(content_type=None), reply.headers["content-type"]


async def test_calls_of_sessions_are_answered_by_the_shortcut_on_both_paths(
    gateway: GatewayStack, answered: list[str]
) -> None:
    opened = await gateway.open()
    paths = [CHAT, f"/sessions/{opened.facts['session_id']}{CHAT}"]
    for path in paths:
        status, reply, _ = await sent(opened, path, {"messages": opened.messages, "model": "any"})
        assert (status, reply["object"]) == (200, "chat.completion")
    key = {"Authorization": "", "x-api-key": opened.facts["inference_token"]}
    message = {"messages": opened.messages, "model": "any", "max_tokens": 10}
    status, reply, _ = await sent(opened, "/v1/messages", message, **key)
    assert (status, reply["type"]) == (200, "message")
    assert answered == [*paths, "/v1/messages"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"\xff",
        b"[]",
        b"7",
        b"",
        b"{}",
        {"messages": 7, "input": 7},
        {"messages": [{"role": "bee"}], "input": [7]},
    ],
    ids=repr,
)
async def test_bodies_are_refused_in_the_same_words_by_the_shortcut(
    gateway: GatewayStack, answered: list[str], path: str, body: Any
) -> None:
    opened = await gateway.open()
    short = await sent(opened, path, body)
    assert answered == [path]
    assert short == await sent(opened, path, body, **LONG_WAY)
    assert len(answered) == 1
    assert short[0] in (400, 422)


async def test_what_opens_nothing_is_refused_in_the_layers(gateway: GatewayStack, answered: list[str]) -> None:
    opened, other = await gateway.open(), await gateway.open(rollout_id="another")
    body = {"messages": opened.messages}
    forged = {"Authorization": "Bearer ngi1_forged"}
    elsewhere = f"/sessions/{other.facts['session_id']}{CHAT}"
    assert (await sent(opened, CHAT, body, **forged))[0] == 401
    assert (await sent(opened, elsewhere, body))[0] == 401
    assert (await sent(opened, CHAT, body, Authorization=""))[0] == 401
    assert (await sent(opened, CHAT, body, method="PUT"))[0] == 405
    assert (await sent(opened, "/v1/chat/nothing", body))[0] == 404
    assert (await opened.control("abort")).status == 200
    assert (await sent(opened, CHAT, body))[0] == 409
    assert answered == []


async def test_a_body_beyond_the_bound_is_refused_however_it_comes(gateway: GatewayStack, answered: list[str]) -> None:
    await gateway.restart(max_body_bytes=2000)
    opened = await gateway.open()
    body = {"messages": [{"role": "user", "content": "long " * 500}]}

    async def in_chunks() -> AsyncIterator[bytes]:
        yield orjson.dumps(body)

    for data in (body, in_chunks()):
        status, reply, _ = await sent(opened, CHAT, data)
        assert status == 413
        assert "max_body_bytes" in reply["error"]["message"]
    assert answered == []
    status, _, _ = await sent(opened, CHAT, {"messages": opened.messages})
    assert status == 200


async def test_an_error_that_nobody_expected_tells_its_type_only(
    gateway: GatewayStack, answered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("secret")

    monkeypatch.setattr(ChatAdapter, "lower", broken)
    opened = await gateway.open()
    short = await sent(opened, CHAT, {"messages": opened.messages})
    assert answered == [CHAT]
    assert short == await sent(opened, CHAT, {"messages": opened.messages}, **LONG_WAY)
    assert short[0] == 500
    assert "KeyError" in short[1]["error"]["message"] and "secret" not in str(short)


async def test_a_caller_that_leaves_within_its_body_is_no_error(gateway: GatewayStack, answered: list[str]) -> None:
    opened = await gateway.open()
    host, _, port = opened.facts["base_url"].split("/")[2].partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    token = opened.facts["inference_token"]
    writer.write(f"POST {CHAT} HTTP/1.1\r\nAuthorization: Bearer {token}\r\nContent-Length: 99\r\n\r\n{{".encode())
    await writer.drain()
    async with asyncio.timeout(20):
        while not answered:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.01)
    writer.close()
    await writer.wait_closed()
    assert (await opened.state())["in_flight"] == 0
    assert (await opened.chat())["object"] == "chat.completion"


async def test_no_call_passes_by_a_check_that_a_plugin_has_of_its_own(
    gateway: GatewayStack, answered: list[str]
) -> None:
    class Strict(Gateway):
        def _authorize(self, request: Request) -> GatewaySession | None:
            raise CredentialError("not today")

    await gateway.restart(Strict)
    opened = await gateway.open()
    assert (await sent(opened, CHAT, {"messages": opened.messages}))[0] == 401
    assert answered == []
