"""The keys of the rollout service: a composition's ``serve`` block."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from nemo_gym.config.pipeline import PipelineConfig
from nemo_gym.contract.credentials import require_loopback
from nemo_gym.contract.errors import reject_unknown_keys

POSTGRES_SCHEMES = ("postgresql://", "postgres://")


class ServiceConfig(PipelineConfig):
    """One service: where it listens, where its jobs are kept, and the keys of its pipeline."""

    WHAT: ClassVar[str] = "serve"

    host: str = "127.0.0.1"
    port: int = Field(8210, ge=0, le=65535)
    """0 chooses a free port."""
    plain_http: bool = False
    """Whether the service may listen where other machines reach it, although its callers' tokens are not encrypted."""
    store: str | None = None
    """A file for SQLite, ``jobs.sqlite`` in the run's directory by default; or ``postgresql://user@host/database``,
    which several services may share."""
    pipeline: str = Field("main", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)
    """The service's name among those that share a store; a later service of the same name takes over its jobs."""
    tokens: Path | None = None
    """A YAML file with the tokens of each role: ``submit``, ``read``, ``operate``. Without it, the tokens come from
    ``NEMO_GYM_SERVICE_SUBMIT_TOKEN``, ``…_READ_TOKEN`` and ``…_OPERATE_TOKEN``; without these, new ones are made."""
    datasets: dict[str, Path] = Field(default_factory=dict)
    """Files whose rows jobs may refer to instead of carrying them."""
    capacities: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Concurrent rollouts of each replica, by server instance; instances that are not listed have no limit."""
    watch_s: float = Field(5.0, gt=0)
    """Interval at which the service checks that its servers respond."""
    silent_s: float = Field(30.0, gt=0)
    """When a server has been silent for this long, its jobs go to other servers."""
    check_s: float = Field(60.0, gt=0)
    """How long an agent and its servers may take to report that they are ready, when the agent's first job arrives."""
    max_lost_attempts: int | None = Field(10, ge=1)
    """Attempts of a job whose server went away; counted separately from failed attempts."""
    stop_after_same_failure: int = Field(0, ge=0)
    """0: a service never stops because of failures."""
    max_jobs_per_request: int = Field(10_000, ge=1)
    max_body_mib: int = Field(256, ge=1)
    max_body_values: int = Field(10_000_000, ge=1)
    """JSON values in one request, because a short value takes 20 times its length in memory; a list or an object
    counts as 4."""

    def check_caps(self, agents: Collection[str], environments: Collection[str]) -> None:
        super().check_caps(agents, environments)
        reject_unknown_keys(self.capacities, [*agents, *environments], where="serve.capacities")

    @property
    def is_postgres(self) -> bool:
        return self.store is not None and self.store.startswith(POSTGRES_SCHEMES)

    @model_validator(mode="after")
    def _check_host(self) -> Self:
        consequence = (
            "its tokens would cross the network in plain HTTP: listen on 127.0.0.1 with a TLS proxy in front, or"
            " accept it with serve.plain_http=true for a network in which nobody else listens"
        )
        require_loopback(self.host, consequence, unless=self.plain_http, key="serve.host")
        return self

    @model_validator(mode="after")
    def _check_store_datasets_and_intervals(self) -> Self:
        if self.store is not None and "://" in self.store and not self.is_postgres:
            raise ValueError(f"store '{self.store.split('://')[0]}://…' is neither a file nor postgresql://…")
        for name, path in self.datasets.items():
            if not path.is_file():
                raise ValueError(
                    f"serve.datasets.{name}: '{path}' is not a file; name a JSONL file with one row per line"
                )
        if self.silent_s < self.watch_s:
            raise ValueError(f"silent_s={self.silent_s:g} must be at least watch_s={self.watch_s:g}")
        return self
