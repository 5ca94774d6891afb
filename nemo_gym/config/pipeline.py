"""The keys of the pipeline that drives rollouts, for runs, services and samplers alike, and those that a service and a
sampler add."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from nemo_gym._util.suggest import MISSPELT, nearest, validation_problems
from nemo_gym.contract.credentials import require_loopback
from nemo_gym.contract.errors import ConfigError, reject_unknown_keys
from nemo_gym.contract.session import ChosenLimits, Limits
from nemo_gym.contract.verdict import MAX_EVALUATION_LOG_CHARS, SAMPLING_KEYS

POSTGRES_SCHEMES = ("postgresql://", "postgres://")


def named(*names: str, default: Any = None, **constraints: Any) -> Any:
    """A field that is also known by NeMo Gym's spellings."""
    return Field(default, validation_alias=AliasChoices(*names), **constraints)


class KeysConfig(BaseModel):
    """Keys that a user gives, under any of their spellings."""

    WHAT: ClassVar[str]
    """What error messages call these keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    @classmethod
    def spellings(cls) -> frozenset[str]:
        """Every spelling of every key."""
        keys: set[str] = set()
        for name, field in cls.model_fields.items():
            keys.add(name)
            if isinstance(field.validation_alias, AliasChoices):
                keys.update(str(choice) for choice in field.validation_alias.choices)
        return frozenset(keys)

    @classmethod
    def parse(cls, given: Mapping[str, Any], *, within: Collection[str] = (), where: str = "") -> Self:
        """Parse ``given``. Raises `ConfigError` that names each wrong key and the nearest right one; those ``within``
        the block ``where`` by their path."""
        reject_unknown_keys(given, cls.spellings(), where=cls.WHAT)
        try:
            return cls.model_validate(dict(given))
        except ValidationError as error:
            errors = error.errors()
            for problem in errors:
                if problem["loc"] and problem["loc"][0] in within:
                    problem["loc"] = (where, *problem["loc"])
            key = ".".join(map(str, errors[0]["loc"])) or None
            raise ConfigError("; ".join(map(_problem_text, errors)), key=key) from None


class PipelineConfig(KeysConfig):
    """The pipeline's workers, deadlines, budgets and bounds. All defaults are defined here. These keys take precedence
    over an agent's own configuration.

    Timeouts are in seconds and count a stage's execution, never its time in a queue.
    """

    WHAT: ClassVar[str] = "pipeline keys"

    agent_name: str | None = named("agent_name", "agent")
    """The agent server instance of all rows; in a service, of those without ``agent_ref``. May be left out when the
    stack has one agent."""

    concurrency: int = named("concurrency", "num_samples_in_parallel", default=16, ge=1)
    """Rollouts in the RUN stage at once, and the default worker count of the other stages."""
    init_workers: int | None = Field(None, ge=1)
    run_workers: int | None = Field(None, ge=1)
    eval_workers: int | None = Field(None, ge=1)
    ready_buffer: int | None = Field(None, ge=1)
    """Prepared rollouts that may wait between INIT and RUN; a quarter of the RUN workers by default."""

    init_timeout_s: float = Field(900.0, gt=0)
    run_timeout_s: float = Field(7200.0, gt=0)
    eval_timeout_s: float = Field(3600.0, gt=0)
    close_timeout_s: float = Field(30.0, gt=0)
    """Time limit of every clean-up, also after a cancel."""
    model_connect_timeout_s: float | None = Field(None, gt=0)
    model_idle_timeout_s: float | None = Field(None, gt=0)
    model_request_timeout_s: float | None = Field(None, gt=0)
    """Limits of every model call of this run, in place of the model server's: see `nemo_gym.contract.session`."""
    max_attempts: int = Field(3, ge=1)
    """Attempts per rollout when the infrastructure fails; a failed EVAL is repeated as often, on the same artifact."""
    max_lost_attempts: int | None = Field(None, ge=1)
    """The same for attempts whose agent or environment server went away; ``max_attempts`` by default."""
    stop_after_same_failure: int = Field(20, ge=0)
    """Attempts in a row that fail the same way before the run stops with that reason; 0 never stops it."""
    retry_delay_s: float = Field(0.5, ge=0)
    """Wait before the second attempt; doubles with each further one, up to 30 s."""
    wall_clock_s: float | None = Field(None, gt=0)
    """Time limit of one attempt's agent, which then ends as ``timed_out`` and is graded. This key and the next four
    take precedence over the limits of environments and agents; ``None`` leaves those in force."""
    max_turns: int | None = Field(None, ge=1)
    max_output_bytes: int | None = Field(None, ge=1)
    memory_mib: int | None = Field(None, ge=1)
    """Memory of one attempt's box; ``cpu`` is the number of its cores."""
    cpu: float | None = Field(None, gt=0)
    lease_s: float = Field(60.0, gt=0)
    """How long a job stays with a silent worker before it returns to the queue."""
    agent_caps: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Concurrent rollouts by agent instance; instances that are not listed have no limit of their own."""
    environment_caps: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """The same by environment instance."""

    responses_create_params: dict[str, Any] = Field(default_factory=dict)
    """Overrides of every row's request parameters (model settings only)."""
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    max_output_tokens: int | None = Field(None, ge=1)
    """Token limit of one model response. A harness may ask for less."""
    stop: str | list[str] | None = None
    """Strings that end a model response."""
    seed: int | None = None
    """Sampling seed; each sample gets ``seed + sample index``. With ``None`` the engine chooses."""
    num_repeats_add_seed: bool = False
    """NeMo Gym's spelling of ``seed=0``."""

    validation: Literal["gold", "nothing"] | None = None
    """Validate environments: agents with ``row_access: validation`` get the solution, and results record this."""
    evaluation_log_chars: int = Field(MAX_EVALUATION_LOG_CHARS, ge=0, le=MAX_EVALUATION_LOG_CHARS)
    """Characters at the end of each evaluation's log that are kept, as a file beside ``output``; 0 keeps none."""

    @field_validator("stop", mode="before")
    @classmethod
    def _is_text_or_texts(cls, stop: Any) -> Any:
        texts = stop if isinstance(stop, list | tuple) else [stop]
        if stop is not None and not all(isinstance(text, str) for text in texts):
            raise ValueError("must be a text or a list of texts; numbers need quotes")
        return stop

    @field_validator("responses_create_params")
    @classmethod
    def _are_parameters_of_a_response(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Check known parameters, and refuse names that resemble them; others are for an agent that knows them."""
        if not given:
            return given
        from nemo_gym.openai_types.responses import NeMoGymResponseCreateParamsNonStreaming as Parameters

        known = Parameters.model_fields
        own = [key for key in given if key in cls.model_fields and key not in known]
        if own:
            raise ValueError(f"'{own[0]}' is no parameter of a response; the run key {own[0]}= sets it")
        checked = {key: value for key, value in given.items() if key in known or nearest(key, known, cutoff=MISSPELT)}
        try:
            Parameters.model_validate({"input": "", **checked})
        except ValidationError as error:
            raise ValueError(validation_problems(error, known)) from None
        return given

    @model_validator(mode="after")
    def _attempts_end_before_their_stage(self) -> Self:
        if self.wall_clock_s is not None and self.wall_clock_s >= self.run_timeout_s:
            raise ValueError(
                f"wall_clock_s={self.wall_clock_s:g} must be less than run_timeout_s={self.run_timeout_s:g}, where a"
                " rollout ends without a verdict; raise run_timeout_s"
            )
        return self

    def check_caps(self, agents: Collection[str], environments: Collection[str]) -> None:
        """Raise `ConfigError` if a cap is for an instance that does not exist."""
        reject_unknown_keys(self.agent_caps, agents, where="agent_caps")
        reject_unknown_keys(self.environment_caps, environments, where="environment_caps")

    @property
    def agent_of_all(self) -> str | None:
        """The agent of every row, also of one with another ``agent_ref``; with ``None``, rows may name theirs."""
        return None

    @property
    def overrides(self) -> dict[str, Any]:
        """Request parameters that win over the row's."""
        chosen = {"temperature": self.temperature, "top_p": self.top_p, "max_output_tokens": self.max_output_tokens}
        return {**self.responses_create_params, **{key: value for key, value in chosen.items() if value is not None}}

    @property
    def sampling(self) -> dict[str, Any]:
        """Parameters that hold for every model call of this run's rollouts, whatever their harness asks for."""
        return {name: value for name in SAMPLING_KEYS if (value := getattr(self, name)) is not None}

    @property
    def sampling_beside_rows(self) -> dict[str, Any]:
        """The sampling parameters that materialized rows do not hold."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return {"top_k": self.top_k, "stop": stop, "seed": self.base_seed}

    @property
    def limits(self) -> Limits:
        """The attempt's limits that this run sets."""
        return Limits(**{name: getattr(self, name) for name in Limits.model_fields})

    @property
    def model_limits(self) -> ChosenLimits:
        """The limits that this run sets for its model calls."""
        return ChosenLimits(
            connect_timeout_s=self.model_connect_timeout_s,
            idle_timeout_s=self.model_idle_timeout_s,
            request_timeout_s=self.model_request_timeout_s,
        )

    @property
    def base_seed(self) -> int | None:
        return 0 if self.seed is None and self.num_repeats_add_seed else self.seed

    @property
    def workers(self) -> tuple[int, int, int]:
        """Worker counts of INIT, RUN and EVAL."""
        return (
            self.init_workers or self.concurrency,
            self.run_workers or self.concurrency,
            self.eval_workers or self.concurrency,
        )


def _problem_text(problem: Any) -> str:
    """Describe one problem, by the key as a user types it; a message about several keys already names them."""
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return str(message)
    key = ".".join(map(str, problem["loc"]))
    return f"{key} is required" if problem["type"] == "missing" else f"{key}: {message} (got {problem.get('input')!r})"


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
