"""What ends a run early, seen from outside of the box: its limit of turns, and a model that only fails.

A turn is an answer of the model to anything in the box: the agent itself, its sub-agents, and what it asks beside its
work (titles, summaries). They are counted at the model's door, which forwards no more than the limit, so that neither
a sub-agent nor a command of the policy gets another. Where the provider does not count, the turns that the events show
are the limit's; those are the main conversation's alone, and only as true as the process that prints them.
"""

from __future__ import annotations

import asyncio

from nemo_gym.agent.harness.base import Judgement
from nemo_gym.agent.harness.events import EventReader
from nemo_gym.agent.topology.world import World
from nemo_gym.contract.session import MODEL_DOOR, AgentOutcome

POLL_S = 0.2


async def until_over(
    world: World, reader: EventReader, *, max_turns: int | None, max_model_failures: int | None
) -> Judgement:
    """Wait until a limit is passed, and say which; without limits it waits for ever."""
    while True:
        over = _over(world, reader, max_turns, max_model_failures)
        if over is not None:
            return over
        await asyncio.sleep(POLL_S)


def _over(
    world: World, reader: EventReader, max_turns: int | None, max_model_failures: int | None
) -> Judgement | None:
    door = world.door_statistics(MODEL_DOOR)
    turns = 0 if door is not None else reader.transcript.turns
    if (door is not None and door.over_limit) or (max_turns is not None and turns > max_turns):
        return AgentOutcome.MAX_TURNS, f"stopped after the {max_turns} turns it was given"
    if door is not None and max_model_failures is not None and door.failures_since_answer >= max_model_failures:
        return AgentOutcome.MODEL_UNREACHABLE, f"stopped after {door.failures_since_answer} failures in a row"
    return None
