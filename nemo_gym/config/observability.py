"""The composition's ``observability`` block: where traces go, and where a run's own metrics are served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from nemo_gym._util.suggest import validation_problems
from nemo_gym.config.keys import OBSERVABILITY
from nemo_gym.contract.errors import ConfigError

TRACES_PATH = "/v1/traces"


class TracesConfig(BaseModel):
    """Spans of rollouts, sent to an OpenTelemetry collector."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint: str
    """The endpoint for OTLP over HTTP: ``http://127.0.0.1:4318``. A URL with a path is used unchanged."""
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    protocol: Literal["http/protobuf", "http/json"] = "http/protobuf"
    sample: float = Field(1.0, gt=0, le=1)
    """Share of attempts that are traced; all servers trace the same attempts."""
    queue_spans: int = Field(20_000, ge=1)
    """Spans that a process keeps for a collector that is slow or gone; any more are dropped and counted."""
    interval_s: float = Field(2.0, gt=0)
    """How often finished spans are sent."""
    timeout_s: float = Field(10.0, gt=0)
    """Time limit of one request to the collector."""

    @field_validator("endpoint")
    @classmethod
    def _is_a_url(cls, endpoint: str) -> str:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be a URL such as http://127.0.0.1:4318")
        return endpoint

    @property
    def url(self) -> str:
        """Where spans are posted."""
        has_path = urlsplit(self.endpoint).path not in ("", "/")
        return self.endpoint if has_path else self.endpoint.rstrip("/") + TRACES_PATH


class ObservabilityConfig(BaseModel):
    """What a run exposes for monitoring while it runs. Servers answer ``/metrics`` without this block, too."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    traces: TracesConfig | None = None
    metrics_port: int | None = Field(None, ge=0, le=65535)
    """Where the pipeline of ``ng_run`` and ``ng_collect_rollouts`` serves ``/metrics``, on loopback; 0 takes a free
    port. A rollout service serves ``/metrics`` among its own routes."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """The block of a configuration, or its defaults; raises `ConfigError` naming each wrong key."""
        try:
            return cls.model_validate(values.get(OBSERVABILITY) or {})
        except ValidationError as error:
            problems = validation_problems(error, cls.model_fields, where=OBSERVABILITY)
            raise ConfigError(problems, key=OBSERVABILITY) from None
