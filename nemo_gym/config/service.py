"""What the rollout service needs to know: the keys of a composition's ``serve`` block."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from nemo_gym.config.pipeline import PipelineConfig

POSTGRES_SCHEMES = ("postgresql://", "postgres://")


class ServiceConfig(PipelineConfig):
    """One service: where it listens, where its jobs are kept, and the keys of its pipeline."""

    WHAT: ClassVar[str] = "serve"

    host: str = "127.0.0.1"
    port: int = Field(8210, ge=0, le=65535)
    """0 takes a free one."""
    store: str | None = None
    """A file for SQLite, ``jobs.sqlite`` in the run's directory by default; or ``postgresql://user@host/database``,
    which several services may share."""
    pipeline: str = Field("main", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)
    """Names this service among those that share a store; its successor of the same name takes over its jobs."""
    tokens: Path | None = None
    """A YAML file with the tokens of each role: ``submit``, ``read``, ``operate``. Without it those of
    ``NEMO_GYM_SERVICE_SUBMIT_TOKEN``, ``…_READ_TOKEN`` and ``…_OPERATE_TOKEN``, and without these new ones."""
    datasets: dict[str, Path] = Field(default_factory=dict)
    """Files whose rows jobs may name instead of bringing them."""
    capacities: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Rollouts at once of each replica of a server instance; the others have no bound."""
    watch_s: float = Field(5.0, gt=0)
    """How often servers are asked whether they are there."""
    silent_s: float = Field(30.0, gt=0)
    """A server that is silent for so long gives its jobs to others."""
    check_s: float = Field(60.0, gt=0)
    """How long an agent and its servers may take to say that they are ready, when the first of its jobs comes."""
    max_lost_attempts: int | None = Field(10, ge=1)
    """Attempts of a job whose server went away; counted apart from those that failed."""
    stop_after_same_failure: int = Field(0, ge=0)
    """A service goes on whatever fails."""
    max_jobs_per_request: int = Field(10_000, ge=1)
    max_body_mib: int = Field(256, ge=1)

    @property
    def is_postgres(self) -> bool:
        return self.store is not None and self.store.startswith(POSTGRES_SCHEMES)

    @model_validator(mode="after")
    def _store_can_be_told(self) -> Self:
        if self.store is not None and "://" in self.store and not self.is_postgres:
            raise ValueError(f"store '{self.store.split('://')[0]}://…' is neither a file nor postgresql://…")
        if self.silent_s < self.watch_s:
            raise ValueError(f"silent_s={self.silent_s:g} must be at least watch_s={self.watch_s:g}")
        return self
