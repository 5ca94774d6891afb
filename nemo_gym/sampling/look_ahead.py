"""Decides when to submit another group.

**Workers stay busy** as long as some rollout waits for a worker. By Little's law the pipeline holds
``RUN workers × (time of a whole rollout / time of its RUN stage)`` rollouts, with both times as observed. Another
group is submitted while fewer rollouts than that, plus one group, are unfinished.

**No group is submitted that will probably not be used.** With the effective rate of the latest groups, the open groups
are expected to yield ``rate × groups``. Once the ready groups and that number, less one standard deviation, fill the
requested batch and `SamplingConfig.ahead` further ones, no other group is submitted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nemo_gym.config.pipeline import SamplingConfig

OBSERVED = 256
"""How many of the latest groups, and of the latest rollouts, the estimates use."""


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
        """Learn from the ``timings`` of a result row; ignore rows without them."""
        timings = row.get("timings") or {}
        init_s, run_s, eval_s = (timings.get(f"{stage}_s") or 0.0 for stage in ("init", "run", "eval"))
        if run_s:
            self._stage_s.append((init_s + run_s + eval_s, run_s))

    def wants_another(self, *, unfinished: int, running: int, under_way: int, ready: int, wanted: int) -> bool:
        """Return whether to submit another group. ``unfinished`` and ``running`` count rollouts, the latter in RUN;
        ``under_way`` and ``ready`` count groups; ``wanted`` is the size of the requested batch and those ahead."""
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
        """The share of effective groups among the latest, with one group of each kind added as a prior."""
        return (sum(self._outcomes) + 1) / (len(self._outcomes) + 2)

    @property
    def slots(self) -> float:
        """The number of rollouts in the pipeline when every RUN worker is busy; at most the number of all workers."""
        whole_s = sum(whole for whole, _ in self._stage_s)
        run_s = sum(run for _, run in self._stage_s)
        per_run_worker = whole_s / run_s if run_s else 1.0
        return min(self._workers[1] * per_run_worker, sum(self._workers))
