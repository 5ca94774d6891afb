"""When another group is worth submitting.

**Workers stay busy** as long as one rollout waits behind those that run. By Little's law the pipeline holds
``RUN workers × (time of a whole rollout / time of its RUN stage)`` rollouts, both times as observed; another group is
wanted whenever fewer than that and one group more are unfinished.

**Nothing is submitted that will hardly be used.** From the effective rate of the latest groups, those under way are
expected to yield ``rate × groups``. Once that, less one standard deviation, fills the batch that is asked for and
`SamplingConfig.ahead` more, no other group is wanted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nemo_gym.config.sampling import SamplingConfig

OBSERVED = 256
"""Latest groups, and latest rollouts, from which is learned."""


class LookAhead:
    """``workers`` are the pipeline's INIT, RUN and EVAL workers."""

    def __init__(self, config: SamplingConfig, workers: Sequence[int]) -> None:
        self._config = config
        self._workers = workers
        self._outcomes: deque[bool] = deque(maxlen=OBSERVED)
        self._stage_s: deque[tuple[float, float]] = deque(maxlen=OBSERVED)

    @property
    def outcomes(self) -> list[bool]:
        """Whether the latest groups were effective, oldest first."""
        return list(self._outcomes)

    def learn_outcomes(self, effective: Iterable[bool]) -> None:
        self._outcomes.extend(effective)

    def learn_times(self, row: Mapping[str, Any]) -> None:
        """From the ``timings`` of a result row; other rows teach nothing."""
        timings = row.get("timings") or {}
        init_s, run_s, eval_s = (timings.get(f"{stage}_s") or 0.0 for stage in ("init", "run", "eval"))
        if run_s:
            self._stage_s.append((init_s + run_s + eval_s, run_s))

    def wants_another(self, *, unfinished: int, running: int, under_way: int, ready: int, wanted: int) -> bool:
        """``unfinished`` rollouts, of which ``running`` are in RUN; groups ``under_way`` and ``ready``; ``wanted``:
        those of the batch that is asked for, and of the batches ahead of it."""
        if self._config.look_ahead:
            if unfinished >= self.slots + self._config.samples_per_group:
                return False
        elif unfinished > running:
            return False
        rate = self.effective_rate
        likely = rate * under_way - math.sqrt(under_way * rate * (1 - rate))
        return ready + likely < wanted

    @property
    def effective_rate(self) -> float:
        """Of the latest groups; one of each kind is assumed beforehand."""
        return (sum(self._outcomes) + 1) / (len(self._outcomes) + 2)

    @property
    def slots(self) -> float:
        """Rollouts in the pipeline when every RUN worker is busy; at most one for each worker of any stage."""
        whole_s = sum(whole for whole, _ in self._stage_s)
        run_s = sum(run for _, run in self._stage_s)
        per_run_worker = whole_s / run_s if run_s else 1.0
        return min(self._workers[1] * per_run_worker, sum(self._workers))
