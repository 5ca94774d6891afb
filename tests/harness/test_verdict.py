"""What a harness says of itself, against what the doors saw."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from nemo_gym.agent.harness.base import CliHarness, CliPackage, HarnessCommand, HarnessContext, HarnessEnded, Judgement
from nemo_gym.agent.harness.events import EventReader, TextReader
from nemo_gym.agent.harness.run import judge, within_reach
from nemo_gym.contract.session import AgentOutcome
from nemo_gym.contract.verdict import failure_of_outcome
from nemo_gym.sandbox.base import ExecOutcome
from nemo_gym.sandbox.door_statistics import DoorStatistics

COMPLETED, CRASHED, MAX_TURNS = AgentOutcome.COMPLETED, AgentOutcome.CRASHED, AgentOutcome.MAX_TURNS
UNREACHABLE, TIMED_OUT, MCP_FAILED = AgentOutcome.MODEL_UNREACHABLE, AgentOutcome.TIMED_OUT, AgentOutcome.MCP_FAILED
REFUSED_BY_MODEL, CONTEXT_EXCEEDED = AgentOutcome.MODEL_REFUSED, AgentOutcome.CONTEXT_EXCEEDED


class Says(CliHarness):
    """Ends as it is told to."""

    name = "says"
    package = CliPackage(name="says", version="1", command="says", runtime="script")
    said: Judgement = (COMPLETED, None)

    def command(self, context: HarnessContext) -> HarnessCommand:
        raise AssertionError("not run here")

    def reader(self) -> EventReader:
        return TextReader()

    def outcome(self, ended: HarnessEnded) -> Judgement:
        return self.said


def seen(**counts: object) -> DoorStatistics:
    return DoorStatistics(**counts)  # type: ignore[arg-type]


WELL = seen(requests=3, answered=3)
DOWN = seen(requests=5, answered=1, failed=4, failures_since_answer=4, last_error="500: boom")
LONG = seen(requests=3, answered=2, refused=1, last_error="400: maximum context length is 4096 tokens")
TOO_LONG_AT_ONCE = seen(requests=1, refused=1, last_error="400: maximum context length is 4096 tokens")
TOO_LARGE = seen(requests=3, answered=2, refused=1, last_error="413: the body is larger than 33554432 bytes")
TOO_LARGE_AT_ONCE = seen(requests=1, refused=1, last_error="413: the body is larger than 33554432 bytes")
NO_KEY = seen(requests=3, failed=3, failures_since_answer=3, last_error="502: engine 'e' refused its API key (401)")
NO_MODEL = seen(requests=1, failed=1, failures_since_answer=1, last_error="502: engine 'e' has no such model or route")


def ended(
    model: DoorStatistics | None,
    end: ExecOutcome = ExecOutcome.EXITED,
    mcp: Mapping[str, DoorStatistics] | None = None,
) -> HarnessEnded:
    return HarnessEnded(end, 0, None, "", TextReader(), model, mcp or {})


def judged(said: AgentOutcome, how: HarnessEnded) -> Judgement:
    harness = Says()
    harness.said = (said, None if said is COMPLETED else "its own words")
    return judge(harness, how)


@pytest.mark.parametrize(
    ("said", "model", "outcome", "words"),
    [
        (COMPLETED, WELL, COMPLETED, None),
        (COMPLETED, None, COMPLETED, None),
        (COMPLETED, seen(), CRASHED, "it never asked"),
        (COMPLETED, seen(requests=2, refused=2, last_error="400: no"), REFUSED_BY_MODEL, "2 of 2 requests .*400: no"),
        (CRASHED, seen(requests=2, refused=2, last_error="404: no such model"), REFUSED_BY_MODEL, "no such model"),
        (CRASHED, NO_KEY, REFUSED_BY_MODEL, "refused its API key"),
        (CRASHED, NO_MODEL, REFUSED_BY_MODEL, "no such model"),
        (CRASHED, seen(requests=1, failed=1, failures_since_answer=1, last_error="401: no"), REFUSED_BY_MODEL, "no"),
        (CRASHED, TOO_LONG_AT_ONCE, CONTEXT_EXCEEDED, "first request does not fit .*4096 tokens"),
        (COMPLETED, TOO_LONG_AT_ONCE, CONTEXT_EXCEEDED, "first request"),
        (MAX_TURNS, TOO_LONG_AT_ONCE, CONTEXT_EXCEEDED, "first request"),
        (COMPLETED, DOWN, UNREACHABLE, "the last 4 of 5 .*500: boom.*it completed"),
        (CRASHED, DOWN, UNREACHABLE, "500: boom.*it crashed: its own words"),
        (CRASHED, WELL, CRASHED, "its own words"),
        (CRASHED, TOO_LARGE_AT_ONCE, CONTEXT_EXCEEDED, "first request does not fit .*33554432 bytes"),
        (CRASHED, LONG, MAX_TURNS, "no longer fits"),
        (CRASHED, TOO_LARGE, MAX_TURNS, "no longer fits"),
        (COMPLETED, LONG, COMPLETED, None),
        (MAX_TURNS, DOWN, MAX_TURNS, "its own words"),
        (AgentOutcome.REFUSED, WELL, AgentOutcome.REFUSED, "its own words"),
    ],
)
def test_own_word_holds_unless_the_door_knows_better(
    said: AgentOutcome, model: DoorStatistics | None, outcome: AgentOutcome, words: str | None
) -> None:
    got, detail = judged(said, ended(model))
    assert got is outcome
    assert (detail is None) if words is None else re.search(words, detail or "")


@pytest.mark.parametrize(
    ("end", "model", "outcome"),
    [
        (ExecOutcome.TIMED_OUT, WELL, TIMED_OUT),
        (ExecOutcome.TIMED_OUT, DOWN, UNREACHABLE),
        (ExecOutcome.TIMED_OUT, seen(requests=1, open=1), UNREACHABLE),
        (ExecOutcome.TIMED_OUT, seen(requests=3, answered=1, failed=1, failures_since_answer=1), TIMED_OUT),
        (ExecOutcome.TIMED_OUT, seen(requests=2, refused=2, last_error="400: no"), REFUSED_BY_MODEL),
        (ExecOutcome.TIMED_OUT, seen(), CRASHED),
        (ExecOutcome.TIMED_OUT, None, TIMED_OUT),
        (ExecOutcome.OUT_OF_MEMORY, WELL, CRASHED),
    ],
)
def test_ending_that_was_forced_is_judged_for_every_harness(
    end: ExecOutcome, model: DoorStatistics | None, outcome: AgentOutcome
) -> None:
    assert judged(COMPLETED, ended(model, end))[0] is outcome


def test_mcp_server_that_failed_is_within_reach_unless_a_door_saw_it() -> None:
    refused = seen(requests=2, failed=2, failures_since_answer=2, statuses={401: 2})
    assert not within_reach(MCP_FAILED, ended(WELL, mcp={"weather": refused}))
    assert within_reach(MCP_FAILED, ended(WELL))
    assert failure_of_outcome(MCP_FAILED, None) is not None


def test_mcp_server_that_never_served_is_the_outcome() -> None:
    refused = seen(requests=2, failed=2, failures_since_answer=2, statuses={401: 2}, last_error="401: token")
    outcome, detail = judged(COMPLETED, ended(WELL, mcp={"weather": refused}))
    assert (outcome, "'weather' served none of 2 requests (401: token)" in (detail or "")) == (MCP_FAILED, True)
    probing = seen(requests=2, answered=1, refused=1, statuses={400: 1, 200: 1})
    assert judged(COMPLETED, ended(WELL, mcp={"weather": probing}))[0] is COMPLETED
    assert judged(COMPLETED, ended(DOWN, mcp={"weather": refused}))[0] is UNREACHABLE


def test_crash_is_within_the_policys_reach_once_the_model_has_answered() -> None:
    assert within_reach(CRASHED, ended(WELL))
    assert not within_reach(CRASHED, ended(seen(requests=1, refused=1)))
    assert not within_reach(UNREACHABLE, ended(DOWN))
    assert not within_reach(COMPLETED, ended(WELL))
