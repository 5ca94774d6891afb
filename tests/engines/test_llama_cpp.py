"""The gateway before a real llama.cpp (CPU, float32, a tiny random policy): text in, text out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from nemo_gym.server_utils import close_global_aiohttp_client
from nemo_gym_testing.gateway.real import llama_server, make_real_policy, write_gguf
from responses_api_models.gateway.tests.conftest import GatewayStack, Teller
from tests.engines.conftest import count_of, spelled
from tests.engines.recordings import ask, recorded, strange
from tests.servers.stack import running_stack

pytestmark = pytest.mark.full
CONTEXT, LONG = 65_536, 60_000
QUESTION = [{"role": "user", "content": "Name three colours, one per line."}]


@dataclass(frozen=True)
class RealLlama:
    url: str


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def llama(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealLlama]:
    folder = tmp_path_factory.mktemp("llama")
    file = write_gguf(make_real_policy(folder / "policy", architecture="gemma3"), folder / "policy.gguf")
    async with llama_server(file, folder / "llama.log", context=CONTEXT) as url:
        yield RealLlama(url)


@pytest.fixture
async def gateway(llama: RealLlama, tmp_path: Path) -> AsyncIterator[GatewayStack]:
    with running_stack() as stack:
        gateway = GatewayStack(stack, llama, Teller(), tmp_path)  # type: ignore[arg-type]
        await gateway.start(engines=[{"type": "openai", "base_url": f"{llama.url}/v1", "model": "tiny"}], policy=None)
        yield gateway
        await close_global_aiohttp_client()
        await asyncio.to_thread(stack.close)


async def test_plain_and_streamed_answers_are_the_engines(llama: RealLlama, gateway: GatewayStack) -> None:
    asked: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "max_completion_tokens": 24}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{llama.url}/v1/chat/completions", json={"model": "tiny", **asked}) as reply,
    ):
        said = (await reply.json())["choices"][0]["message"]["content"]
    session = await gateway.open()
    plain = await session.chat(**asked)
    streamed = await session.post(
        "/chat/completions", {**asked, "model": "any", "stream": True, "stream_options": {"include_usage": True}}
    )
    text, last = spelled(await streamed.read())
    assert said and plain["choices"][0]["message"]["content"] == text == said
    assert plain["choices"][0]["finish_reason"] == "length"
    assert plain["usage"]["completion_tokens"] == last["usage"]["completion_tokens"] == 24


async def test_engine_answers_as_it_was_recorded(llama: RealLlama) -> None:
    found = await ask("llama-cpp", llama.url)
    known = recorded("llama-cpp")
    assert [one for name in known for one in strange(known[name], found[name], name)] == []


async def test_conversation_that_does_not_fit_is_the_requests_fault(llama: RealLlama, gateway: GatewayStack) -> None:
    session = await gateway.open()
    long = [{"role": "user", "content": "one two three " * (CONTEXT // 2)}]
    reply = await session.post("/chat/completions", {"messages": long, "model": "any"})
    assert reply.status == 400 and (await reply.json())["error"]["code"] == "context_length_exceeded"
    status = await (await gateway.stack.client().get("gateway", "/engines")).json()
    assert [engine["state"] for engine in status["engines"]] == ["up"]


async def test_call_that_is_given_up_frees_its_place_in_the_engine(llama: RealLlama, gateway: GatewayStack) -> None:
    session = await gateway.open()
    asked = {"messages": QUESTION, "model": "any", "max_tokens": LONG, "ignore_eos": True}
    call = asyncio.create_task(session.post("/chat/completions", asked))
    async with asyncio.timeout(60):
        while not await count_of(llama.url, "llamacpp:requests_processing"):
            assert not call.done(), await call
            await asyncio.sleep(0.05)
        call.cancel()
        # It looks for callers that left after a second in which nobody else got an answer, its metrics included.
        await asyncio.sleep(2.0)
        while await count_of(llama.url, "llamacpp:requests_processing"):  # noqa: ASYNC110 - only its metrics tell
            await asyncio.sleep(2.0)
    assert await count_of(llama.url, "llamacpp:tokens_predicted_total") < LONG
