"""CLIs that hang, loop, flood, fork, die or lie, and models that fail: a typed outcome in time, and nothing left."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from campaigns.faults.leftovers import foreign_sockets, open_sockets
from nemo_gym.contract.session import ActResponse, AgentOutcome, McpServer, SandboxClause, SandboxSpecModel, Topology
from nemo_gym.sandbox.base import BoxLabel
from nemo_gym.sandbox.providers.local import LocalProvider
from tests.harness.conftest import Weather
from tests.harness.stage import IMAGE, MCP_TOKEN, RUN, act, descriptor, nap, patience_s
from tests.servers.stack import Stack

WORLD = descriptor(Topology.AGENT_IN_ENV)


def patch(answer: ActResponse) -> str:
    return answer.artifacts[0].content().decode()


async def gone(local: LocalProvider, *words: str) -> bool:
    """No box, and no process of this machine with these words in its command line."""
    running = await asyncio.to_thread(subprocess.check_output, ["ps", "-eo", "args"], text=True)
    return await local.list({BoxLabel.RUN: RUN}) == [] and not any(word in running for word in words)


async def until_gone(local: LocalProvider, words: str, *, expected: bool) -> None:
    deadline = time.monotonic() + 60
    while await gone(local, words) is not expected:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_hanging_agent_is_stopped_at_its_deadline_and_its_work_kept(stack: Stack, local: LocalProvider) -> None:
    answer = await act(stack, "hang", WORLD, wall_clock_s=await patience_s(act(stack, "fix the greeting", WORLD)))
    assert answer.outcome is AgentOutcome.TIMED_OUT
    assert "+kept" in patch(answer)
    assert answer.observations["turns"] == 1
    assert await gone(local, nap(273))


async def test_agent_that_is_stopped_is_ended_at_its_deadline_and_its_work_kept(
    stack: Stack, local: LocalProvider
) -> None:
    patience = await patience_s(act(stack, "fix the greeting", WORLD))
    answer = await act(stack, "stop the agent", WORLD, wall_clock_s=patience)
    assert answer.outcome is AgentOutcome.TIMED_OUT
    assert "+kept" in patch(answer)
    assert await gone(local, nap(274))


async def test_daemon_that_holds_the_output_open_does_not_hold_the_run_up(stack: Stack, local: LocalProvider) -> None:
    answer = await act(stack, "hold the output", WORLD, wall_clock_s=200)
    assert answer.outcome is AgentOutcome.COMPLETED, answer.outcome_detail
    assert "+kept" in patch(answer)
    assert await gone(local, nap(275))


async def test_flood_among_the_events_is_a_gap_and_harmless(stack: Stack) -> None:
    answer = await act(stack, "garbage among the events", WORLD)
    assert answer.outcome is AgentOutcome.COMPLETED, answer.outcome_detail
    assert answer.observations["event_log"]["bytes"] > 30_000_000
    assert "line_too_long" in json.dumps(answer.observations["records"])
    assert "+kept" in patch(answer)


async def test_doors_are_closed_when_the_attempt_ends(stack: Stack, weather: Weather) -> None:
    before = open_sockets()

    def doors() -> set[str]:
        return {*foreign_sockets()} - {*before}

    acting = asyncio.create_task(act(stack, "hang", descriptor(Topology.AGENT_IN_ENV, mcp=weather.url)))
    await until(lambda: len(doors()) >= 2)  # the agent server is in this process
    acting.cancel()
    await until(lambda: not doors())


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_attempt_whose_caller_leaves_is_stopped_with_its_box(stack: Stack, local: LocalProvider) -> None:
    acting = asyncio.create_task(act(stack, "hang", WORLD))
    await until_gone(local, nap(273), expected=False)
    acting.cancel()
    await until_gone(local, nap(273), expected=True)


async def test_looping_agent_ends_at_its_turn_limit(stack: Stack) -> None:
    answer = await act(stack, "never stop", WORLD, max_turns=5)
    assert (answer.outcome, answer.observations["turns"]) == (AgentOutcome.MAX_TURNS, 5)


async def test_flood_on_stderr_is_bounded_and_harmless(stack: Stack) -> None:
    answer = await act(stack, "flood", WORLD)
    assert answer.outcome is AgentOutcome.COMPLETED, answer.outcome_detail
    assert answer.observations["stderr"]["bytes"] == 30_000_000
    assert len(answer.observations["stderr"]["text"]) < 20_000
    assert "+kept" in patch(answer)


async def test_daemons_neither_hold_the_run_up_nor_outlive_the_box(stack: Stack, local: LocalProvider) -> None:
    answer = await act(stack, "fork daemons", WORLD, wall_clock_s=60)
    assert answer.outcome is AgentOutcome.COMPLETED, answer.outcome_detail
    assert "+kept" in patch(answer)
    assert await gone(local, nap(271), nap(272))


async def test_agent_killed_from_within_is_crashed_and_its_work_kept(stack: Stack) -> None:
    with capture_logs() as logs:
        answer = await act(stack, "kill the agent", WORLD)
    assert answer.outcome is AgentOutcome.CRASHED
    assert "signal 9" in (answer.outcome_detail or "")
    assert answer.within_reach
    assert "+kept" in patch(answer)
    assert "the act left nothing to grade" not in [entry["event"] for entry in logs], "it is graded"


async def test_agent_that_the_box_kills_for_its_memory_is_crashed(stack: Stack, local: LocalProvider) -> None:
    clause = SandboxClause(
        spec=SandboxSpecModel.model_validate({"image": IMAGE, "workdir": "/repo", "resources": {"memory_mib": 64}})
    )
    answer = await act(stack, "eat memory", WORLD.model_copy(update={"sandbox": clause}), wall_clock_s=60)
    assert answer.outcome is AgentOutcome.CRASHED
    assert "out of memory" in (answer.outcome_detail or "")
    assert "+kept" in patch(answer)
    assert await gone(local, "tail -n 7771 /dev/zero")


@pytest.mark.parametrize(
    ("words", "status"), [("rate limit", "429"), ("server error", "500"), ("disconnect", "")]
)  # fmt: skip
async def test_model_that_keeps_failing_is_unreachable(stack: Stack, words: str, status: str) -> None:
    answer = await act(stack, words, WORLD, wall_clock_s=60)
    assert answer.outcome is AgentOutcome.MODEL_UNREACHABLE, answer.outcome_detail
    assert status in (answer.outcome_detail or "")
    assert answer.observations["turns"] == 1
    assert not answer.within_reach


async def test_one_failure_of_the_model_is_no_outcome(stack: Stack) -> None:
    assert (await act(stack, "one hiccup", WORLD)).outcome is AgentOutcome.COMPLETED


async def test_model_that_never_answers_is_unreachable_at_the_deadline(stack: Stack) -> None:
    answer = await act(
        stack, "silent model", WORLD, wall_clock_s=await patience_s(act(stack, "fix the greeting", WORLD))
    )
    assert answer.outcome is AgentOutcome.MODEL_UNREACHABLE


async def test_wrong_mcp_token_is_mcp_failed(stack: Stack, weather: Weather) -> None:
    wrong = McpServer(name="weather", url=f"{weather.url}/mcp", headers={"Authorization": MCP_TOKEN + "x"})
    answer = await act(stack, "write the answer", WORLD.model_copy(update={"mcp": (wrong,)}))
    assert answer.outcome is AgentOutcome.MCP_FAILED
    assert "401" in (answer.outcome_detail or "")
    assert weather.seen == []
