"""The agent framework as configuration: ``actor_rollout_ref.rollout.custom.agent_framework`` of a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from nemo_gym._util.suggest import validation_problems
from nemo_gym.contract.errors import ConfigError, reject_unknown_keys

CONFIG_PATH = "actor_rollout_ref.rollout.custom.agent_framework"


class RunnerConfig(BaseModel):
    """One entry of ``agent_runners``: a runner by its import path, or an agent server of this suite by its name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    runner_fqn: str | None = None
    """A function, or a class whose instances are called, as ``package.module.name`` (or ``package.module:name``)."""
    agent_server: str | None = None
    """An agent server instance of a running stack. Its environment gives the reward."""
    stack_run_dir: Path | None = None
    """That stack's ``run_dir``; by default that of the only stack on this machine that has the server."""
    runner_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the class, or for each call of the function."""
    tool_config_path: str | None = None
    """verl's tool configuration; its tools reach the runner as ``tool_config``."""
    dispatch_mode: Literal["inline_async", "ray_task"] = "inline_async"
    """Where the runner runs: in the framework's event loop, or as a Ray task that imports the runner again."""
    max_concurrent_sessions: int = Field(0, ge=0)
    """The limit for this runner; 0 is unlimited."""
    trajectory_selection: Literal["all", "longest"] = "all"
    """Which of a session's trajectories are kept; ``longest`` keeps the one with the most sampled tokens."""
    ray_num_cpus: float = Field(0.0, ge=0)
    """CPUs that Ray reserves for one task. Runners mostly wait, so none by default."""

    @model_validator(mode="after")
    def _names_one_runner(self) -> Self:
        if (self.runner_fqn is None) == (self.agent_server is None):
            raise ValueError("runner_fqn is required (or agent_server, and not both)")
        if self.agent_server is not None and (self.dispatch_mode != "inline_async" or self.runner_kwargs):
            raise ValueError("agent_server takes neither dispatch_mode nor runner_kwargs: the server is a process")
        return self


class FrameworkConfig(BaseModel):
    """The framework's own keys, with their defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    agent_runners: dict[str, RunnerConfig]
    """The runners, by the ``agent_name`` of samples."""
    gateway_count: int = Field(1, ge=1)
    """How many gateways to start."""
    framework_class_fqn: str | None = None
    """The import path of another `AgentFramework`; by default `OpenAICompatibleAgentFramework`."""
    log_dir: Path | None = None
    """The folder for copies of each session's trajectories, for people; ``None`` writes none."""
    use_reward_loop_worker: bool = True
    """Whether a trainer's reward workers score sessions that posted no reward."""
    mask_unfinished_episode: bool = False
    """Whether a session whose runner posted ``finished: false`` is left out of the loss."""
    enable_last_assistant_rollback: bool = True
    """Accepted, and without effect: this suite's gateway keeps every sampled token."""
    max_session_attempts: int = Field(3, ge=1)
    """How often one session is tried if its gateway or another part of the infrastructure is lost."""
    session_ttl_s: float = Field(6 * 3600.0, gt=0)
    """How long a session may last before its gateway aborts it."""
    gateway_patience_s: float = Field(60.0, gt=0)
    """How long a new session waits when no gateway answers."""

    @field_validator("mask_unfinished_episode", "use_reward_loop_worker", mode="before")
    @classmethod
    def _is_bool(cls, value: Any) -> Any:
        if not isinstance(value, bool):
            raise ValueError(f"must be a bool, not {value!r}")  # noqa: TRY004 - pydantic reports ValueErrors
        return value

    @field_validator("agent_runners")
    @classmethod
    def _has_a_runner(cls, value: dict[str, RunnerConfig]) -> dict[str, RunnerConfig]:
        if not value:
            raise ValueError("is required: at least one runner by name")
        return value

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> Self:
        """Parse a configuration block. Raises `ConfigError` naming each wrong key below `CONFIG_PATH`."""
        block = dict(given or {})
        if lonely := {"runner_fqn", "runner_kwargs", "dispatch_mode", "agent_server"} & block.keys():
            raise ConfigError(
                f"{CONFIG_PATH}: {', '.join(sorted(lonely))} belong to a runner: put them below agent_runners.<name>",
                key="agent_runners",
            )
        if "max_concurrent_sessions" in block:
            raise ConfigError(
                f"{CONFIG_PATH}.max_concurrent_sessions: there is no cap of all runners together; set it per runner,"
                " below agent_runners.<name>",
                key="max_concurrent_sessions",
            )
        if not block.get("agent_runners"):
            raise ConfigError(f"{CONFIG_PATH}.agent_runners is required: at least one runner by name")
        reject_unknown_keys(block, cls.model_fields, where=CONFIG_PATH)
        try:
            return cls.model_validate(block)
        except ValidationError as error:
            problems = validation_problems(error, cls.model_fields, where=CONFIG_PATH)
            raise ConfigError(problems, key=str(error.errors()[0]["loc"][-1])) from None


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """The part of ``actor_rollout_ref.rollout`` that the framework uses: sessions per prompt, and sampling."""

    n: int
    val_n: int
    sampling: Mapping[str, Any]
    val_sampling: Mapping[str, Any]

    @classmethod
    def of(cls, rollout: Any) -> Self:
        """Read the trainer's configuration, a mapping or an OmegaConf node."""

        def sampling(node: Any) -> dict[str, Any]:
            given = {name: _get(node, name) for name in ("temperature", "top_p", "top_k")}
            return {name: value for name, value in given.items() if value is not None}

        val, limit = _get(rollout, "val_kwargs") or {}, _get(rollout, "response_length")
        bound = {} if limit is None else {"max_output_tokens": int(limit)}
        n, val_n = _get(rollout, "n"), _get(val, "n")
        for key, value in (("n", n), ("val_kwargs.n", val_n)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"actor_rollout_ref.rollout.{key} must be a positive number, got {value!r}", key=key)
        return cls(
            n=n or 1,
            val_n=val_n or 1,
            sampling={**sampling(rollout), **bound},
            val_sampling={**sampling(rollout), **sampling(val), **bound},
        )

    def sessions(self, partition: str) -> int:
        return self.val_n if partition == "val" else self.n

    def sampling_of(self, partition: str, *, greedy: bool) -> dict[str, Any]:
        """Return the sampling parameters of every model call of a session; they override the harness's."""
        if partition == "val":
            return dict(self.val_sampling)
        return {**self.sampling, "temperature": 0.0, "top_p": 1.0, "top_k": -1} if greedy else dict(self.sampling)


def framework_block(config: Any) -> tuple[FrameworkConfig, RolloutConfig]:
    """Return the framework's part of a trainer's whole configuration, a mapping or an OmegaConf node."""
    rollout = _get(_get(config, "actor_rollout_ref"), "rollout")
    if rollout is None:
        raise ConfigError("actor_rollout_ref.rollout is missing: the framework reads its configuration there")
    block = _get(_get(rollout, "custom"), "agent_framework")
    return FrameworkConfig.parse(plain(block)), RolloutConfig.of(rollout)


def plain(node: Any) -> Any:
    """Convert an OmegaConf node to plain data; return any other value unchanged."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _get(node: Any, name: str) -> Any:
    if node is None:
        return None
    return node.get(name) if hasattr(node, "get") else getattr(node, name, None)
