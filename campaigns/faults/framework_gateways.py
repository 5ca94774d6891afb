"""A thousand sessions of the agent framework over four gateways, one of which is killed.

    python -m campaigns.faults.framework_gateways --json

Bars: every prompt ends with a terminal state, all sessions of the killed gateway are run again as new attempts, and
the counts of active sessions, sampled after each opening, differ by at most 1 before the kill and among the three
gateways after it. Measured beside them: what a session costs with the framework, against the same calls in a bare
loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from nemo_gym.contract.credentials import Role, StackKeys
from nemo_gym.contract.session import RolloutIdentity
from nemo_gym.framework import OpenAICompatibleAgentFramework, SessionHandle
from nemo_gym.framework.gateways import GatewayPool
from nemo_gym.framework.launch import GatewaysConfig, OwnGateways
from nemo_gym.framework.samples import TrajectoryRow
from nemo_gym.http.client import ServerClient, close_global_aiohttp_client
from nemo_gym_testing.gateway import FakeVllmEngine
from nemo_gym_testing.gateway.tiny.policies import make_policy

TURNS = 2
AT_ONCE = 128
PROMPT = [{"role": "user", "content": "hello"}]


class Runner:
    """Two model calls, and a reward."""

    def __init__(self) -> None:
        self._http: aiohttp.ClientSession | None = None
        self.started = 0

    async def __call__(self, *, session: SessionHandle, raw_prompt: Any, sample_index: int, **_: Any) -> None:
        self.started += 1
        self._http = self._http or aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        await calls(self._http, session)

    async def aclose(self) -> None:
        if self._http is not None:
            await self._http.close()


async def calls(http: aiohttp.ClientSession, session: SessionHandle) -> None:
    messages: list[Any] = [*PROMPT]
    for _ in range(TURNS):
        body = {"model": "any", "messages": messages, "max_tokens": 16}
        async with http.post(f"{session.base_url}/chat/completions", json=body) as reply:
            if reply.status != 200:
                raise ConnectionError(f"{reply.status}: {await reply.text()}")
            message = (await reply.json())["choices"][0]["message"]
        messages = [*messages, message, {"role": "user", "content": "go on"}]
    async with http.post(session.complete_url, json={"reward_info": {"reward": 1.0}}) as reply:
        reply.raise_for_status()


class CountingSink:
    def __init__(self) -> None:
        self.keys: list[str] = []
        self.states: dict[str, str] = {}

    async def put(self, partition: str, rows: Sequence[TrajectoryRow]) -> None:
        self.keys += [row.key for row in rows]

    async def tag(self, partition: str, uid: str, tag: Mapping[str, Any]) -> None:
        self.states[uid] = tag["status"]


def client_of(stacks: Sequence[OwnGateways]) -> ServerClient:
    """One client for the servers of several stacks."""
    config: dict[str, Any] = {}
    credentials: dict[str, str] = {}
    for stack in stacks:
        config |= stack.entry.config
        keys = StackKeys.from_hex(stack.entry.root_key)
        credentials |= keys.outgoing(Role.PIPELINE, "pipeline", stack.config.names)
    client = ServerClient(global_config_dict=config)
    client.use_credentials(credentials)
    return client


def trainer_config(n: int, cap: int = 0) -> dict[str, Any]:
    runner = {"runner_fqn": "campaigns.faults.framework_gateways.Runner", "max_concurrent_sessions": cap}
    block = {"agent_runners": {"calls": runner}}
    return {"actor_rollout_ref": {"rollout": {"n": n, "custom": {"agent_framework": block}}}}


def batch(prompts: int) -> dict[str, Any]:
    return {"uid": [f"u{n}" for n in range(prompts)], "raw_prompt": [PROMPT] * prompts, "global_steps": 1}


async def bare(pool: GatewayPool, sessions: int) -> float:
    """Return the seconds per session for opening, the same calls and finalizing, in one loop without the framework."""
    waiting = iter(range(sessions))
    began = time.perf_counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def worker() -> None:
            for number in waiting:
                rollout = RolloutIdentity(rollout_id=f"b{number}", task_id="t", group_id="g")
                opened = await pool.open(rollout, {})
                await calls(http, opened.handle)
                await pool.finalize(opened)

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    return (time.perf_counter() - began) / sessions


async def run(sessions: int, folder: Path) -> dict[str, Any]:
    per_prompt = 8
    policy = make_policy(folder / "policy", "chatml_think")
    async with FakeVllmEngine() as engine:
        engines = [{"type": "vllm", "base_url": engine.url}]
        # Each gateway has its own supervisor, which is killed with it: a supervisor that survived would restart the
        # gateway within a second, and sessions would see no more than a pause.
        stacks = [
            await asyncio.to_thread(
                OwnGateways,
                GatewaysConfig(1, engines, str(policy), max_context_tokens=4096, name=f"gateway{number}"),
                run_dir=folder / f"run{number}",
            )
            for number in range(4)
        ]
        try:
            spread: list[dict[str, int]] = []
            pool = GatewayPool(
                client_of(stacks),
                [name for stack in stacks for name in stack.config.names],
                observe=lambda counts: spread.append(dict(counts)),
            )
            sink = CountingSink()
            framework = OpenAICompatibleAgentFramework.from_config(
                config=trainer_config(per_prompt), gateways=pool, sink=sink
            )
            capped = OpenAICompatibleAgentFramework.from_config(
                config=trainer_config(per_prompt, AT_ONCE), gateways=pool, sink=sink
            )
            # In turn, so that other load on the machine affects both.
            costs = []
            for _ in range(3):
                once = await bare(pool, sessions // 4)
                began = time.perf_counter()
                await capped.run_batch(batch(sessions // 4 // per_prompt))
                costs.append((once, (time.perf_counter() - began) / (sessions // 4)))
            spread.clear()
            sink.keys.clear()
            sink.states.clear()
            prompts = sessions // per_prompt
            engine.gate.clear()
            running = asyncio.create_task(framework.run_batch(batch(prompts)))
            # All sessions are open and wait for the engine; none ends while the counts are read.
            while len(spread) < sessions:  # noqa: ASYNC110 - the pool has no event for it
                await asyncio.sleep(0.01)
            before = list(spread)
            victim = stacks[1].entry
            open_there = pool.gateways[1].active
            for pid in (victim.pid, victim.servers[0].pid):
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            while len(spread) < sessions + open_there:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
            engine.gate.set()
            summary = await running
            after = [counts for counts in spread[len(before) :] if len(counts) == 3]
            await pool.aclose()
            for each in (framework, capped):
                runner: Any = each._runners["calls"]
                await runner.aclose()
            await close_global_aiohttp_client()
        finally:
            for stack in stacks:
                await asyncio.to_thread(stack.stop)
    distinct = {key.rsplit("_", 1)[0] for key in sink.keys}
    bare_ms, framework_ms = (min(cost[i] for cost in costs) * 1000 for i in (0, 1))
    return {
        "sessions": sessions,
        "prompts_finished": sum(state == "finished" for state in sink.states.values()),
        "prompts": prompts,
        "sessions_with_trajectories": len(distinct),
        "failed_sessions": summary.failed_sessions,
        "reasons": summary.reasons[:3],
        "open_at_the_killed_gateway": open_there,
        "widest_before": max(max(c.values()) - min(c.values()) for c in before),
        "widest_among_three_after": max((max(c.values()) - min(c.values()) for c in after), default=None),
        "openings_after": len(after),
        "bare_ms_per_session": round(bare_ms, 2),
        "framework_ms_per_session": round(framework_ms, 2),
        "overhead_ms_per_session": round(framework_ms - bare_ms, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    with tempfile.TemporaryDirectory(prefix="ng-framework-") as folder:
        result = asyncio.run(run(arguments.sessions, Path(folder)))
    bars = {
        "every_prompt_finished": result["prompts_finished"] == result["prompts"],
        "no_session_lost": result["sessions_with_trajectories"] == result["sessions"],
        "even_before": result["widest_before"] <= 1,
        "even_among_three_after": result["openings_after"] > 0 and result["widest_among_three_after"] <= 1,
    }
    result["bars"] = bars
    print(json.dumps(result, indent=None if arguments.json else 2))
    sys.exit(0 if all(bars.values()) else 1)


if __name__ == "__main__":
    main()
