"""The client's retries: bounded, and never a POST that may have been delivered."""

from __future__ import annotations

import asyncio
import gzip
import socket
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest
from pydantic import BaseModel

from nemo_gym.contract.errors import ConfigError, ServerError
from nemo_gym.http import client as client_module
from nemo_gym.http import client as exchange_module
from nemo_gym.http import openai_client as model_client_module
from nemo_gym.http import peers as peers_module
from nemo_gym.http.client import close_global_aiohttp_client, expect_json, get_global_aiohttp_client
from nemo_gym.http.openai_client import MAX_TRIES, NeMoGymAsyncOpenAI
from nemo_gym.http.peers import PeerError, Peers
from nemo_gym.server_utils import (
    ServerClient,
    ServerUnreachableError,
    apply_rollout_prefix,
    get_response_json,
    raise_for_status,
    request,
)

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


@asynccontextmanager
async def peer(hang_ups: int, port: int = 0) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server that reads a request and hangs up so many times before it answers."""
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        if len(seen) > hang_ups:
            writer.write(ANSWER)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    async with server:
        yield server.sockets[0].getsockname()[1], seen


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "FIRST_BACKOFF_S", 0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_post_is_sent_once_when_its_connection_breaks() -> None:
    async with peer(hang_ups=1) as (port, seen):
        with pytest.raises(ServerUnreachableError) as caught:
            await request("POST", f"http://127.0.0.1:{port}/verify", json={})
    assert len(seen) == 1 and caught.value.details["started"] == "unknown"


@pytest.mark.parametrize(("said", "tries"), [(b"X-Should-Retry: false\r\n", 1), (b"", MAX_TRIES)])
async def test_model_client_ends_its_tries_when_the_gateway_says_so(
    said: bytes, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_client_module, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(f"{__name__}.ANSWER", b"HTTP/1.1 502 Bad\r\n" + said + b"Content-Length: 2\r\n\r\n{}")
    async with peer(hang_ups=0) as (port, seen):
        client = NeMoGymAsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k")
        with pytest.raises(aiohttp.ClientResponseError):
            await client.create_chat_completion(messages=[])
    assert len(seen) == tries


@pytest.mark.parametrize(("method", "idempotent"), [("GET", None), ("POST", True), ("DELETE", None)])
async def test_request_is_sent_again_when_it_may_be(method: str, idempotent: bool | None) -> None:
    async with peer(hang_ups=2) as (port, seen):
        reply = await request(method, f"http://127.0.0.1:{port}/x", idempotent=idempotent)
        assert await get_response_json(reply) == {}
    assert len(seen) == 3


async def test_post_is_delivered_when_the_server_comes_up_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "FIRST_BACKOFF_S", 0.1)
    port = free_port()
    sending = asyncio.create_task(request("POST", f"http://127.0.0.1:{port}/seed_session", json={"a": 1}))
    await asyncio.sleep(0.15)
    async with peer(hang_ups=0, port=port) as (_, seen):
        assert (await sending).status == 200
    assert len(seen) == 1


async def test_retries_end_with_an_error_that_names_the_address() -> None:
    port = free_port()
    with pytest.raises(ServerUnreachableError, match=rf"127\.0\.0\.1:{port}/x") as caught:
        await request("POST", f"http://127.0.0.1:{port}/x?token=secret", json={})
    assert caught.value.details["started"] == "no" and caught.value.retryable
    assert "secret" not in str(caught.value)
    assert isinstance(caught.value, ServerError | ConnectionError)


async def test_error_status_carries_the_peers_body(counter: object) -> None:
    reply = await counter.client().post("counter", "/verify", json={"response": {}})  # type: ignore[attr-defined]
    with pytest.raises(aiohttp.ClientResponseError) as caught:
        await raise_for_status(reply)
    assert caught.value.status == 422 and b"_ng_session" in caught.value.response_content  # type: ignore[attr-defined]


async def test_credential_stays_with_its_server_when_that_answers_with_a_redirection() -> None:
    async with peer(hang_ups=0) as (elsewhere, heard), AsyncExitStack() as stack:

        async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            to = f"http://127.0.0.1:{elsewhere}/taken"
            head = f"HTTP/1.1 307 Moved\r\nLocation: {to}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
            writer.write(head.encode())
            await writer.drain()
            writer.close()

        server = await stack.enter_async_context(await asyncio.start_server(redirect, "127.0.0.1", 0))
        block = {"host": "127.0.0.1", "port": server.sockets[0].getsockname()[1]}
        client = ServerClient(global_config_dict={"math": {"resources_servers": {"math": block}}})
        client.use_credentials({"math": "for math alone"})
        with pytest.raises(aiohttp.ClientResponseError, match="307"):
            await raise_for_status(await client.post("math", "/verify", json={}))
        with pytest.raises(ServerError) as caught:
            await expect_json(await client.post("math", "/verify", json={}), "math")
        with pytest.raises(PeerError, match="307"):
            await Peers(client).post("math", "/verify", {})
    assert caught.value.details["peer_status"] == 307
    assert heard == []


def peers_of(port: int) -> Peers:
    block = {"host": "127.0.0.1", "port": port}
    return Peers(ServerClient(global_config_dict={"math": {"resources_servers": {"math": block}}}))


def answer_of(body: bytes, *headers: str) -> bytes:
    head = "".join(f"{header}\r\n" for header in (*headers, f"Content-Length: {len(body)}"))
    return f"HTTP/1.1 200 OK\r\n{head}\r\n".encode() + body


async def test_peers_hear_every_cookie_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    cookies = "Set-Cookie: a=1; expires=Thu, 01 Jan 2099 00:00:00 GMT", "set-cookie: b=x=y; path=/"
    monkeypatch.setattr(f"{__name__}.ANSWER", answer_of(b"{}", *cookies))
    async with peer(hang_ups=0) as (port, _):
        assert (await peers_of(port).post("math", "/seed_session", {})).cookies == {"a": "1", "b": "x=y"}


@pytest.mark.parametrize(
    ("coding", "body", "error"),
    [
        ("gzip", gzip.compress(b'{"a":1}'), None),
        ("deflate", zlib.compress(b'{"a":1}'), None),
        ("gzip", gzip.compress(bytes(10_000_000)), "is larger than 1000000 bytes"),
        ("gzip", gzip.compress(b'{"a":1}')[:-9], "the compressed body is truncated"),
        ("gzip", 2 * gzip.compress(b'{"a":1}'), "extra bytes after the compressed body"),
        ("gzip", b"no gzip", "compressed body cannot be decompressed"),
        ("br", b"x", "content-encoding 'br', which was not requested"),
    ],
    ids=["gzip", "deflate", "too large", "cut off", "two in one", "no gzip", "br"],
)
async def test_compressed_answer_is_read_within_the_bound_or_refused(
    coding: str, body: bytes, error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.ANSWER", answer_of(body, f"Content-Encoding: {coding}"))
    monkeypatch.setattr(peers_module, "MAX_REPLY_BYTES", 1_000_000)
    async with peer(hang_ups=0) as (port, _):
        asked = peers_of(port).post("math", "/verify", {})
        if error is None:
            assert (await asked).json() == {"a": 1}
        else:
            with pytest.raises(PeerError, match=error):
                await asked


async def test_header_with_a_line_break_is_never_sent() -> None:
    async with peer(hang_ups=0) as (port, seen):
        with pytest.raises(ConfigError, match="'X-NeMo-Gym-Control-Token': a line break"):
            await peers_of(port).post("math", "/verify", {}, control_token="t\r\nX-Forged: 1")
    assert seen == []


async def test_peers_repeat_what_is_idempotent_alone() -> None:
    async with peer(hang_ups=1) as (port, seen):
        with pytest.raises(PeerError, match="the connection broke"):
            await peers_of(port).post("math", "/act", {})
        assert len(seen) == 1
    async with peer(hang_ups=1) as (port, seen):
        await peers_of(port).post("math", "/verify", {}, idempotent=True)
        assert len(seen) == 2


@pytest.mark.parametrize("with_aiohttp", [False, True])
async def test_answer_after_a_day_of_work_is_read(with_aiohttp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        monkeypatch.setattr(loop, "time", lambda: time.monotonic() + 86400)
        await asyncio.sleep(0.1)  # all timers that are due by now have run
        writer.write(ANSWER)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        peers = peers_of(server.sockets[0].getsockname()[1])
        if with_aiohttp:
            assert await get_response_json(await peers._client.post("math", "/act", json={})) == {}
        else:
            assert (await peers.post("math", "/act", {})).json() == {}


def test_unknown_server_is_named_with_the_nearest_one() -> None:
    client = ServerClient(
        global_config_dict={"policy_model": {"responses_api_models": {"m": {"host": "h", "port": 1}}}}
    )
    with pytest.raises(ConfigError, match=r"policy_modl.*policy_model"):
        client.base_url("policy_modl")


def test_model_is_sent_without_its_unset_fields() -> None:
    class Body(BaseModel):
        a: int = 1
        b: int | None = None

    assert client_module.encode_json(Body(a=2)) == b'{"a":2}'
    assert client_module.encode_json({"rows": [Body(b=3)], "keys": {1: 2}}) == b'{"rows":[{"b":3}],"keys":{"1":2}}'


def test_rollout_prefix_is_part_of_a_base_url() -> None:
    assert apply_rollout_prefix("http://h:1/", "r-1") == "http://h:1/ng-rollout/r-1"
    assert apply_rollout_prefix("http://h:1", None) == "http://h:1"


async def test_poll_says_whether_a_server_answers(counter: object) -> None:
    client = counter.client()  # type: ignore[attr-defined]
    assert await asyncio.to_thread(client.poll_for_status, "counter") == "success"
    gone = ServerClient(
        global_config_dict={"x": {"resources_servers": {"x": {"host": "127.0.0.1", "port": free_port()}}}}
    )
    assert await asyncio.to_thread(gone.poll_for_status, "x") == "connection_error"


def test_session_is_closed_with_its_loop(recwarn: pytest.WarningsRecorder) -> None:
    async def use() -> aiohttp.ClientSession:
        assert get_global_aiohttp_client() is get_global_aiohttp_client()
        return get_global_aiohttp_client()

    assert asyncio.run(use()).closed
    assert not recwarn.list


async def test_session_that_was_closed_is_opened_anew() -> None:
    before = get_global_aiohttp_client()
    await close_global_aiohttp_client()
    assert before.closed
    assert not get_global_aiohttp_client().closed
