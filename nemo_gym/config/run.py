"""What one rollout run needs to know: keys of the command line, of a run block in YAML, or of the Python API."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from nemo_gym.config.roots import find_file, plugin_roots
from nemo_gym.contract.errors import ConfigError, reject_unknown_keys
from nemo_gym.contract.model_limits import ChosenLimits
from nemo_gym.contract.session import Limits
from nemo_gym.contract.verdict import MAX_EVALUATION_LOG_CHARS


def _named(*names: str, default: Any = None, **constraints: Any) -> Any:
    """A field that is also known by NeMo Gym's spellings."""
    return Field(default, validation_alias=AliasChoices(*names), **constraints)


class RolloutRunConfig(BaseModel):
    """One run. Every key has one default, and it is here. Run keys win over an agent's own configuration.

    Timeouts count a stage's execution, never its time in a queue, in seconds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    input: Path = _named("input", "input_jsonl_fpath", default=...)
    """Dataset: one JSON object per line. A relative path is looked for here, then below ``NEMO_GYM_EXTRA_ROOTS`` and
    the installation."""
    output: Path = _named("output", "output_jsonl_fpath", default=...)
    """Result file; the other files of the run stand beside it and share its stem."""
    agent_name: str | None = _named("agent_name", "agent")
    """Agent server instance for rows without ``agent_ref``; may be left out when the stack has one agent."""

    num_repeats: int = _named("num_repeats", default=1, ge=1)
    """Samples per task."""
    limit: int | None = Field(None, ge=1)
    """Only the first so many tasks of the input."""
    shard: str | None = Field(None, pattern=r"^[1-9]\d*/[1-9]\d*$")
    """``2/3``: every third of these tasks, from the second on, for one of three pipelines that share an input. Tasks
    keep the numbers they have in the whole input, so results can be put together."""
    skip_bad_rows: bool = False
    """Leave rows that cannot be read or have no prompt out of the run and name them; otherwise nothing runs until they
    are mended."""

    concurrency: int = _named("concurrency", "num_samples_in_parallel", default=16, ge=1)
    """Rollouts in the RUN stage at once, and the default worker count of the other stages."""
    init_workers: int | None = Field(None, ge=1)
    run_workers: int | None = Field(None, ge=1)
    eval_workers: int | None = Field(None, ge=1)
    ready_buffer: int | None = Field(None, ge=1)
    """Rollouts that may stand prepared between INIT and RUN; a quarter of the RUN workers by default."""

    init_timeout_s: float = Field(900.0, gt=0)
    run_timeout_s: float = Field(7200.0, gt=0)
    eval_timeout_s: float = Field(3600.0, gt=0)
    close_timeout_s: float = Field(30.0, gt=0)
    """Bound of every clean-up, also after a cancel."""
    model_connect_timeout_s: float | None = Field(None, gt=0)
    model_idle_timeout_s: float | None = Field(None, gt=0)
    model_request_timeout_s: float | None = Field(None, gt=0)
    """Limits of every model call of this run, in place of the model server's: see `nemo_gym.contract.model_limits`."""
    max_attempts: int = Field(3, ge=1)
    """Attempts per rollout when the infrastructure fails; EVAL alone is tried as often on the same artifact."""
    stop_after_same_failure: int = Field(20, ge=0)
    """Attempts in a row that fail the same way before the run stops with that reason; 0 never stops it."""
    retry_delay_s: float = Field(0.5, ge=0)
    """Wait before the second attempt; doubles with each further one, up to 30 s."""
    wall_clock_s: float | None = Field(None, gt=0)
    """Of one attempt's agent, which then ends as ``timed_out`` and is graded. This and the next four win over what
    environments and agents say; ``None`` leaves it to them."""
    max_turns: int | None = Field(None, ge=1)
    max_output_bytes: int | None = Field(None, ge=1)
    memory_mib: int | None = Field(None, ge=1)
    """Of one attempt's box, and ``cpu`` its cores."""
    cpu: float | None = Field(None, gt=0)
    lease_s: float = Field(60.0, gt=0)
    """How long a job stays with a silent worker before it returns to the queue."""

    resume: bool = _named("resume", "resume_from_cache", default=True)
    """Continue the run that ``output`` holds; what is finished is kept, what was under way starts as a new attempt.
    ``false`` refuses an ``output`` that holds a run."""
    retry_failed: bool = False
    """Give rollouts of that run that ended without a verdict a new budget."""
    overwrite: bool = False
    """Discard what stands at ``output``: a run, finished or not, or a file of other origin."""

    responses_create_params: dict[str, Any] = Field(default_factory=dict)
    """Overrides of every row's request parameters (model settings only)."""
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    max_output_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    """Sampling seed; each sample gets ``seed + sample index``. ``None`` leaves the engine its own."""
    num_repeats_add_seed: bool = False
    """NeMo Gym's spelling of ``seed=0``."""

    validation: Literal["gold", "nothing"] | None = None
    """Validate environments: agents with ``row_access: validation`` get the solution, and results say so."""
    evaluation_log_chars: int = Field(MAX_EVALUATION_LOG_CHARS, ge=0, le=MAX_EVALUATION_LOG_CHARS)
    """Of the end of each evaluation's log, kept as a file beside ``output``; 0 keeps none."""
    disable_aggregation: bool = False
    """Leave out the aggregate metrics file."""

    run_id: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)
    """Chosen at random when left out; a resumed run keeps its own."""
    run_dir: Path | None = None
    """Where the stack keeps its state; the pipeline itself writes beside ``output``."""
    store: Path | None = None
    """The run's database; ``<output stem>_store.sqlite`` by default. Must be on a local file system."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Self:
        """The configuration of ``given``; raises `ConfigError` naming each wrong key, with the nearest right one."""
        reject_unknown_keys(given, RUN_KEYS, where="run keys")
        try:
            return cls.model_validate(dict(given))
        except ValidationError as error:
            found = error.errors()
            key = ".".join(map(str, found[0]["loc"])) or None
            raise ConfigError("; ".join(map(_plain, found)), key=key) from None

    @field_validator("input")
    @classmethod
    def _input_is_found_like_a_plugin(cls, path: Path) -> Path:
        """A relative path that does not exist here is looked for where plugins are, as NeMo Gym does."""
        if path.is_absolute() or path.exists():
            return path
        return find_file(path, plugin_roots()) or path

    @model_validator(mode="after")
    def _output_is_a_jsonl_file(self) -> Self:
        if self.output.suffix != ".jsonl":
            raise ValueError(f"output '{self.output}' must end in .jsonl; the run's other files are named after it")
        if self.retry_failed and (self.overwrite or not self.resume):
            other = "overwrite=true discards it" if self.overwrite else "resume=false refuses it"
            raise ValueError(f"retry_failed=true continues the run at 'output', and {other}; leave one of them out")
        if self.shard is not None and self.shard_of[0] >= self.shard_of[1]:
            raise ValueError(f"shard={self.shard}: the first number is at most the second (shard=1/2 and shard=2/2)")
        if self.wall_clock_s is not None and self.wall_clock_s >= self.run_timeout_s:
            raise ValueError(
                f"wall_clock_s={self.wall_clock_s:g} must be less than run_timeout_s={self.run_timeout_s:g}, where a"
                " rollout ends without a verdict; raise run_timeout_s"
            )
        if self.overwrite and self.resume and "resume" in self.model_fields_set:
            raise ValueError("choose one of resume=true (continue) and overwrite=true (discard)")
        return self

    def check_input(self) -> None:
        """Raise `ConfigError` when there is no input file; a look, before anything is started for it."""
        if not self.input.is_file():
            what = "is a directory" if self.input.is_dir() else "does not exist"
            raise ConfigError(
                f"input '{self.input}' {what}; 'input' names a JSONL file with one row per line", key="input"
            )

    @property
    def shard_of(self) -> tuple[int, int]:
        """Which tasks are this run's: those whose position, divided by the second number, leaves the first."""
        if self.shard is None:
            return 0, 1
        number, count = self.shard.split("/")
        return int(number) - 1, int(count)

    @property
    def overrides(self) -> dict[str, Any]:
        """Request parameters that win over the row's."""
        chosen = {"temperature": self.temperature, "top_p": self.top_p, "max_output_tokens": self.max_output_tokens}
        return {**self.responses_create_params, **{key: value for key, value in chosen.items() if value is not None}}

    @property
    def limits(self) -> Limits:
        """The attempt's limits that this run sets."""
        return Limits(**{name: getattr(self, name) for name in Limits.model_fields})

    @property
    def model_limits(self) -> ChosenLimits:
        """What this run chose for its model calls."""
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


def _plain(problem: Any) -> str:
    """One problem, by the key as a user types it; what is wrong with several together names them itself."""
    said = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return str(said)
    key = ".".join(map(str, problem["loc"]))
    return f"{key} is required" if problem["type"] == "missing" else f"{key}: {said} (got {problem.get('input')!r})"


def _run_keys() -> frozenset[str]:
    keys: set[str] = set()
    for name, field in RolloutRunConfig.model_fields.items():
        keys.add(name)
        if isinstance(field.validation_alias, AliasChoices):
            keys.update(str(choice) for choice in field.validation_alias.choices)
    return frozenset(keys)


RUN_KEYS = _run_keys()
"""Every spelling of every run key. ``agent`` is among them; a command that composes groups takes it out first."""
