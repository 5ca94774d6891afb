"""The gateway before a real ``transformers serve`` (CPU, float32, a tiny random policy): text in, text out."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import pytest_asyncio

from nemo_gym.gateway.engines import EngineConnections, EngineEndpoint, OpenAIEngine
from nemo_gym.gateway.tokens import PolicyTokenizer
from nemo_gym.server_utils import close_global_aiohttp_client
from nemo_gym_testing.gateway.real import make_real_policy, transformers_server
from responses_api_models.gateway.tests.conftest import GatewayStack, Teller
from tests.engines.conftest import spelled
from tests.servers.stack import running_stack

pytestmark = pytest.mark.full
ROOT = Path(__file__).resolve().parents[2]
QUESTION = [{"role": "user", "content": "Name three colours, one per line."}]


@dataclass(frozen=True)
class RealServe:
    url: str
    policy: Path
    log: Path

    def asked(self) -> int:
        """Chat completions that came so far, refused ones included."""
        return self.log.read_text().count("POST /v1/chat/completions")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealServe]:
    folder = tmp_path_factory.mktemp("transformers")
    policy = make_real_policy(folder / "policy")
    async with transformers_server(policy, folder / "serve.log") as url:
        yield RealServe(f"{url}/v1", policy, folder / "serve.log")


def engine_block(served: RealServe, model: str | None = None) -> dict[str, Any]:
    """As `model=gateway` has it (`configs/model/gateway.yaml`)."""
    return {"type": "openai", "base_url": served.url, "model": model or str(served.policy)}


@pytest.fixture
async def gateway(served: RealServe, tmp_path: Path) -> AsyncIterator[GatewayStack]:
    with running_stack() as stack:
        gateway = GatewayStack(stack, served, Teller(), tmp_path)  # type: ignore[arg-type]
        await gateway.start(engines=[engine_block(served)], policy=None)
        yield gateway
        await close_global_aiohttp_client()
        await asyncio.to_thread(stack.close)


async def test_plain_and_streamed_answers_are_the_engines(served: RealServe, gateway: GatewayStack) -> None:
    asked = {"messages": QUESTION, "temperature": 0, "max_completion_tokens": 24}
    async with (
        aiohttp.ClientSession() as http,
        http.post(
            f"{served.url}/chat/completions",
            json={"model": str(served.policy), "messages": QUESTION, "temperature": 0, "max_tokens": 24},
        ) as reply,
    ):
        its_own = await reply.json()
    session = await gateway.open()
    plain = await session.chat(**asked)
    streamed = await session.post(
        "/chat/completions", {**asked, "model": "any", "stream": True, "stream_options": {"include_usage": True}}
    )
    text, last = spelled(await streamed.read())
    said = its_own["choices"][0]["message"]["content"]
    assert said and plain["choices"][0]["message"]["content"] == text == said
    assert plain["choices"][0]["finish_reason"] == "length"
    # The engine knows only the older name of the budget.
    assert plain["usage"]["completion_tokens"] == last["usage"]["completion_tokens"] == 24
    policy = PolicyTokenizer.load(served.policy)
    assert plain["usage"]["prompt_tokens"] == len(policy.encode(policy.render(QUESTION, add_generation_prompt=True)))
    summary = await session.finalize(reward=1.0)
    assert [row["messages"][-1]["content"] for row in summary["trajectories"]] == [said, said]
    assert all(row["prompt_ids"] == row["response_ids"] == [] for row in summary["trajectories"])


async def test_engine_that_cannot_list_its_models_is_in_service(served: RealServe) -> None:
    async with aiohttp.ClientSession() as http, http.get(f"{served.url}/models") as reply:
        assert reply.status == 500
    connections = EngineConnections()
    await OpenAIEngine(EngineEndpoint("e0", served.url, model=str(served.policy)), connections).probe()
    await connections.aclose()


@pytest.mark.parametrize(
    ("model", "body", "said"),
    [(None, {"top_k": 5}, "Unexpected fields in the request"), ("tinny", {}, "Server is pinned to")],
)
async def test_refused_request_is_the_requests_fault_and_is_asked_once(
    served: RealServe, gateway: GatewayStack, model: str | None, body: dict[str, Any], said: str
) -> None:
    await gateway.restart(engines=[engine_block(served, model)], policy=None)
    before = served.asked()
    session = await gateway.open()
    reply = await session.post("/chat/completions", {"messages": QUESTION, "model": "any", "max_tokens": 4, **body})
    assert reply.status == 400 and said in await reply.text()
    assert served.asked() == before + 1
    status = await (await gateway.stack.client().get("gateway", "/engines")).json()
    assert [engine["state"] for engine in status["engines"]] == ["up"]


async def test_run_of_answers_that_are_longer_than_the_probes_patience(served: RealServe, tmp_path: Path) -> None:
    """Calls go one by one and are silent for seconds; each probe meanwhile finds that models cannot be listed."""
    output = tmp_path / "rollouts.jsonl"
    routing = "++policy_model.responses_api_models.gateway.routing"
    run = await asyncio.create_subprocess_exec(
        *(Path(sys.executable).with_name("ng_run"), "agent=simple_agent", "environment=math", "model=gateway"),
        *(f"policy_base_url={served.url}", f"policy_model_name={served.policy}", "max_output_tokens=200"),
        *("input=resources_servers/math/data/example.jsonl", f"output={output}"),
        *(f"{routing}.probe_interval_s=0.2", f"{routing}.failures_to_down=2"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    told, _ = await run.communicate()
    assert run.returncode == 0, told.decode()
    rows = [orjson.loads(line) for line in output.read_bytes().splitlines()]
    assert len(rows) == 6
    for row in rows:
        assert row["valid"] and row["_ng_attempt_index"] == 0
        (trajectory,) = row["ng_trajectory"]
        assert trajectory["prompt_ids"] == trajectory["response_ids"] == []
        assert trajectory["messages"][-1]["content"]
