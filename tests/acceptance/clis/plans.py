"""What goes wrong in a trial: nothing, the same few things each time, or what a seed says."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_gym_testing.gateway.chance import faults_by_chance
from nemo_gym_testing.gateway.faults import Abort, CutOff, Fault, Garbage, Hang, Status
from tests.acceptance.clis.wire import Cut, Stall

IMPATIENCE_S = 4.0
"""How long a CLI among faults waits for an answer."""
STALL_S = 3 * IMPATIENCE_S


@dataclass(frozen=True)
class Plan:
    """Faults of one trial."""

    name: str = "calm"
    engine: Callable[[int], Fault | None] = lambda number: None
    """What happens to an engine's call, by its number from 1; the gateway tries again, or goes on with what broke
    off."""
    wire: Mapping[int, Cut | Stall] = field(default_factory=dict)
    """What happens to answers on their way to the CLI, by their number from 1. It asks again: the same answer must
    come."""
    kill_after: Sequence[int] = ()
    """Answers begun since its start after which a CLI that can be resumed is killed, for each start."""
    max_runs: int = 1
    timeout_s: float = 120.0
    """How long a CLI waits for an answer."""
    tokens_per_second: float | None = None
    gateway: Mapping[str, Any] = field(default_factory=dict)

    @property
    def calm(self) -> bool:
        return self.max_runs == 1


_SLOW_TO_GIVE_UP = {"ping_interval_s": 1.0, "engine": {"request_timeout_s": 2 * IMPATIENCE_S}}
"""A hanging engine is given up only when a CLI, were it not for pings, would have given up the gateway."""
_ENGINE: Mapping[int, Fault] = {
    1: Status(500),
    4: CutOff(5),
    7: Abort(9),
    9: Status(503, headers={"Retry-After": "0"}),
    12: Hang(),
    14: CutOff(0),
    16: Garbage(),
    18: Abort(0),
    21: CutOff(30),
}
CALM = Plan()
FAULTS = Plan(
    "faults",
    _ENGINE.get,
    {2: Cut(0), 5: Cut(700), 9: Stall(STALL_S, 300), 12: Cut(250), 15: Cut(1)},
    kill_after=[8],
    max_runs=4,
    timeout_s=IMPATIENCE_S,
    gateway=_SLOW_TO_GIVE_UP,
)


def by_chance(seed: int, what: str) -> Plan:
    """Faults that are the same for the same seed and ``what``: at any call, any byte, any time; with an engine so slow
    that callers leave while it samples."""
    draw = random.Random(f"{seed} {what}")
    chance = faults_by_chance(
        "status:500=0.06,status:503=0.04,cutoff=0.1,abort=0.1,garbage=0.03", draw.randrange(2**32)
    )
    answers = draw.sample(range(1, 40), 9)
    wire: dict[int, Cut | Stall] = {number: Cut(int(10 ** draw.uniform(0, 4))) for number in answers[:8]}
    wire[answers[8]] = Stall(STALL_S, draw.choice([0, 300, 2000]))
    return Plan(
        f"seed {seed}",
        lambda number: chance(),
        wire,
        kill_after=[draw.randrange(1, 9) for _ in range(2)],
        max_runs=6,
        timeout_s=IMPATIENCE_S,
        tokens_per_second=draw.choice([80, 200, 1000]),
        gateway={**_SLOW_TO_GIVE_UP, "first_event_grace_s": draw.choice([0.0, 0.1, 1.0])},
    )
