"""The keys of an RL sampler, besides those of its run."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from nemo_gym.config.pipeline import KeysConfig


class SamplingConfig(KeysConfig):
    """How groups are sampled, filtered and kept fresh. All defaults are defined here."""

    WHAT: ClassVar[str] = "sampling keys"

    samples_per_group: int = Field(8, ge=2)
    """Rollouts of each row."""
    look_ahead: bool = True
    """Submit groups before the queue runs dry, so that no worker waits. ``False``: one group whenever no rollout waits
    for a worker, as ProRL publishes it."""
    batches_ahead: int | None = Field(None, ge=0)
    """How many batches' worth of effective groups may be ready or in progress beyond the requested batch; by default
    ``max_weights_lag``, and 1 without it."""
    max_weights_lag: int | None = Field(None, ge=0)
    """How many weights versions a sample may lie behind when it is handed out; ``None`` sets no bound."""
    when_stale: Literal["drop", "rerun"] = "drop"
    """What happens to samples that are older: they are left out, or sampled again with the current weights."""
    stale_unit: Literal["group", "sample"] = "group"
    """``group``: one sample that is too old makes its whole group stale; ``sample``: only itself."""
    max_reruns: int = Field(1, ge=0)
    """How often a group's samples are run again because they are too old; then they are dropped."""
    epochs: int | None = Field(None, ge=1)
    """Passes over the data; ``None`` continues as long as batches are requested."""
    max_groups_per_batch: int | None = Field(None, ge=1)
    """Groups that may end for one batch before `next_batch` gives up; ``None`` never does. A policy that solves
    everything, or nothing, yields no effective group however long it runs."""

    @model_validator(mode="after")
    def _ahead_is_within_the_bound(self) -> Self:
        if None not in (self.batches_ahead, self.max_weights_lag) and self.ahead > (self.max_weights_lag or 0):
            raise ValueError(
                f"batches_ahead={self.batches_ahead} prepares samples that max_weights_lag={self.max_weights_lag}"
                " rejects as too old; lower the former or raise the latter"
            )
        return self

    @property
    def ahead(self) -> int:
        """Batches that may be prepared beyond the requested one."""
        if self.batches_ahead is not None:
            return self.batches_ahead
        return 1 if self.max_weights_lag is None else self.max_weights_lag
