"""The typed outcome of a run: the harness's own word, checked against what the doors saw from outside the box.

A process in a box can say anything. That the model failed is only believed of what the policy cannot bring about: the
door's own failures to reach the model, 5xx and 429 answers, streams that broke off. A harness that says it succeeded
without ever getting an answer from the model did not.
"""

from __future__ import annotations

from nemo_gym.agent.harness.base import CliHarness, HarnessEnded, Judgement
from nemo_gym.contract.session import AgentOutcome, is_context_exceeded, outcome_of_refusal
from nemo_gym.sandbox.base import ExecOutcome
from nemo_gym.sandbox.door_statistics import DoorStatistics


def judge(harness: CliHarness, ended: HarnessEnded) -> Judgement:
    """The outcome of a run whose process has ended, and one sentence when it is not ``completed``."""
    model = ended.model_door
    if model is not None and model.over_limit:
        return AgentOutcome.MAX_TURNS, f"it asked the model for more than its {model.turns} answers"
    if ended.stopped is not None and ended.stopped[0] is AgentOutcome.MAX_TURNS:
        return ended.stopped
    said = ended.stopped or _said(harness, ended)
    if model is not None and model.refused and not model.answered and not model.failing:
        # The policy never had a word, so nothing of this is its doing.
        if is_context_exceeded(model.last_error or ""):
            return AgentOutcome.CONTEXT_EXCEEDED, f"the first request does not fit the model's context{_in(model)}"
        if said[0] in (AgentOutcome.COMPLETED, AgentOutcome.CRASHED):
            return AgentOutcome.MODEL_REFUSED, _of_the_model(model, said)
    if model is not None and _model_failed(said[0], model):
        return outcome_of_refusal(_last_status(model), model.last_error or ""), _of_the_model(model, said)
    for name, door in ended.mcp_doors.items():
        if _served_nothing(door):
            return AgentOutcome.MCP_FAILED, f"MCP server '{name}' served none of {door.requests} requests{_in(door)}"
    if model is None or model.failing:
        return said
    if said[0] is AgentOutcome.CRASHED and model.refused and is_context_exceeded(model.last_error or ""):
        return AgentOutcome.MAX_TURNS, "the conversation no longer fits the model's context"
    if said[0] is AgentOutcome.COMPLETED and not model.answered:
        never = "it never asked" if not model.requests else f"none of its {model.requests} requests was answered"
        return AgentOutcome.CRASHED, f"{harness.name} says it completed without the model: {never}{_in(model)}"
    return said


def within_reach(outcome: AgentOutcome, ended: HarnessEnded) -> bool:
    """Whether the policy could have caused it: it acts in the box of the process, once the model has answered. That
    the model does not answer is the doors' word, which it cannot change."""
    if outcome is AgentOutcome.MCP_FAILED and any(map(_served_nothing, ended.mcp_doors.values())):
        return False
    if outcome not in (AgentOutcome.CRASHED, AgentOutcome.MCP_FAILED):
        return False
    door = ended.model_door
    return bool(door.answered if door is not None else ended.reader.transcript.turns)


def _served_nothing(door: DoorStatistics) -> bool:
    return bool(door.failures) and not any(status < 400 for status in door.statuses)


def _model_failed(said: AgentOutcome, model: DoorStatistics) -> bool:
    if said is AgentOutcome.MAX_TURNS:
        return False
    if said is AgentOutcome.TIMED_OUT:
        # One failure and then a long generation is a run that was too slow.
        return model.failures_since_answer > 1 or bool(model.requests and not model.answered and not model.refused)
    return model.failing


def _said(harness: CliHarness, ended: HarnessEnded) -> Judgement:
    match ended.outcome:
        case ExecOutcome.TIMED_OUT:
            return AgentOutcome.TIMED_OUT, "stopped at the end of its wall-clock time"
        case ExecOutcome.OUT_OF_MEMORY:
            return AgentOutcome.CRASHED, "killed: the box ran out of memory"
        case ExecOutcome.EXITED | ExecOutcome.SIGNALED | ExecOutcome.LOST:
            return harness.outcome(ended)


def _last_status(model: DoorStatistics) -> int | None:
    """Of the error that the door saw last; ``None`` where there was no answer."""
    status = (model.last_error or "").partition(":")[0]
    return int(status) if status.isdecimal() else None


def _of_the_model(model: DoorStatistics, said: Judgement) -> str:
    unanswered = model.requests - model.answered
    which = f"the last {model.failures_since_answer}" if model.failing else str(unanswered)
    detail = f"{which} of {model.requests} requests to the model were not answered{_in(model)}"
    if said[0] is AgentOutcome.MODEL_UNREACHABLE:
        return f"{detail}; {said[1]}"
    return f"{detail}; by the harness it {said[0].replace('_', ' ')}" + (f": {said[1]}" if said[1] else "")


def _in(door: DoorStatistics) -> str:
    """The target's own words."""
    return f" ({door.last_error[:500]})" if door.last_error else ""
