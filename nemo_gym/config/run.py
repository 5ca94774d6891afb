"""The keys of one rollout run, from the command line, from a run block in YAML, or from the Python API, and the prompt
template that one of them names: a YAML file with ``user`` and optionally ``system``, filled in from a row's fields."""

from __future__ import annotations

from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml
from pydantic import BaseModel, Field, PrivateAttr, ValidationError, field_validator, model_validator

from nemo_gym._util.suggest import validation_problems
from nemo_gym.config.files import find_file, plugin_roots
from nemo_gym.config.pipeline import PipelineConfig, named
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.verdict import PARAMS_KEY

_COMPRESSED = (
    (b"\x1f\x8b", "gzip", "gunzip"),
    (b"BZh", "bzip2", "bunzip2"),
    (b"\xfd7zX", "xz", "unxz"),
    (b"\x28\xb5\x2f\xfd", "zstd", "unzstd"),
)
"""How compressed files begin, their names, and the programs that unpack them."""


class PromptConfig(BaseModel):
    """Templates in ``str.format`` syntax: ``{field}`` is a row's field, doubled braces are literal."""

    user: str
    system: str | None = None

    @field_validator("user", "system")
    @classmethod
    def _escaped_pair_is_one_character(cls, text: str | None) -> str | None:
        """JSON, which YAML may be, escapes a character such as an emoji as two surrogates, and YAML keeps both."""
        return None if text is None else text.encode("utf-16", "surrogatepass").decode("utf-16")


def read_prompt(path: str) -> PromptConfig:
    """Read a prompt file, searched for in ``NEMO_GYM_EXTRA_ROOTS``, the working directory and the installation.
    Raises `ConfigError`."""
    file = resolve_path(path)
    try:
        return PromptConfig.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"prompt file '{path}' cannot be read: {error.strerror}", key="prompt_config") from error
    except (yaml.YAMLError, ValidationError, UnicodeDecodeError, RecursionError) as error:
        problem = validation_problems(error) if isinstance(error, ValidationError) else error
        raise ConfigError(
            f"prompt file '{file}' must be YAML with 'user' and optionally 'system': {problem}", key="prompt_config"
        ) from error


def resolve_path(path: str | Path) -> Path:
    """Return the path below the first root in which a relative path exists, or else below the first root."""
    given = Path(path)
    if given.is_absolute():
        return given
    roots = plugin_roots()
    return next((root / given for root in roots if (root / given).exists()), roots[0] / given)


def fill_prompt(prompt_config: PromptConfig, row: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the messages of a row. Raises ``KeyError`` naming a field that the row lacks, and `ConfigError` naming a
    template that cannot be filled in."""
    messages = []
    for role, template in (("system", prompt_config.system), ("user", prompt_config.user)):
        if template is None:
            continue
        try:
            messages.append({"role": role, "content": template.format_map(row)})
        except KeyError as error:
            raise KeyError(f"the prompt uses {error}, but the row has only the fields {sorted(row)}") from None
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the prompt's '{role}' cannot be filled in: {error}; a brace that is text is written twice",
                key="prompt_config",
            ) from error
    return messages


def apply_prompt_to_row(row: Mapping[str, Any], prompt_config: PromptConfig) -> dict[str, Any]:
    """Return a copy of the row with an input made from the prompt; its other parameters are kept."""
    params = row.get(PARAMS_KEY)
    kept = dict(params) if isinstance(params, Mapping) else {}
    return {**row, PARAMS_KEY: {**kept, "input": fill_prompt(prompt_config, row)}}


class RolloutRunConfig(PipelineConfig):
    """One run: its rows, its files, and the keys of its pipeline."""

    WHAT: ClassVar[str] = "run keys"

    input: Path = named("input", "input_jsonl_fpath", default=...)
    """Dataset: one JSON object per line. A relative path is looked for here, then below ``NEMO_GYM_EXTRA_ROOTS`` and
    the installation."""
    output: Path = named("output", "output_jsonl_fpath", default=...)
    """Result file; the other files of the run are beside it and share its stem."""
    prompt_config: str | None = None
    """A prompt template (YAML: ``user`` and optionally ``system``) that writes the input of every row. Rows must not
    have one."""
    num_repeats: int = named("num_repeats", default=1, ge=1)
    """Samples per task."""
    limit: int | None = Field(None, ge=1)
    """Only the first so many tasks of the input."""
    shard: str | None = Field(None, pattern=r"^[1-9]\d*/[1-9]\d*$")
    """``2/3``: every third of these tasks, from the second on, for one of three pipelines that share an input. Tasks
    keep the numbers they have in the whole input, so results can be put together."""
    skip_bad_rows: bool = False
    """Leave rows that cannot be read or have no prompt out of the run and name them; otherwise nothing runs until they
    are mended."""

    resume: bool = named("resume", "resume_from_cache", default=True)
    """Continue the run that ``output`` holds: keep finished rollouts, start unfinished ones as new attempts.
    ``false`` refuses an ``output`` that holds a run."""
    retry_failed: bool = False
    """Give rollouts of the continued run that ended without a verdict a new budget of attempts."""
    overwrite: bool = False
    """Discard what is at ``output``: a run, finished or not, or a file of other origin."""

    disable_aggregation: bool = False
    """Leave out the aggregate metrics file."""

    run_id: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)
    """Chosen at random when left out; a resumed run keeps its own."""
    run_dir: Path | None = None
    """Where the stack keeps its state; the pipeline itself writes beside ``output``."""
    store: Path | None = None
    """The run's database; ``<output stem>_store.sqlite`` by default. Must be on a local file system."""

    _is_agent_composed: bool = PrivateAttr(default=False)

    @classmethod
    def of_stack(cls, given: Mapping[str, Any], chosen: Mapping[str, str]) -> Self:
        """Parse ``given``, in which ``null`` leaves a key out. If it names no agent, the one that the composition
        chose runs the rows that name none."""
        given = {key: value for key, value in given.items() if value is not None}
        if "agent" not in chosen or {"agent", "agent_name"} & set(given):
            return cls.parse(given)
        config = cls.parse({**given, "agent_name": chosen["agent"]})
        config._is_agent_composed = True
        return config

    @property
    def agent_of_all(self) -> str | None:
        """The agent that the user named for this run."""
        return None if self._is_agent_composed else self.agent_name

    @property
    def prompt(self) -> PromptConfig | None:
        """The template of ``prompt_config``. Raises `ConfigError` if it cannot be read."""
        return None if self.prompt_config is None else read_prompt(self.prompt_config)

    @field_validator("store")
    @classmethod
    def _store_is_a_file(cls, store: Path | None) -> Path | None:
        if store is not None and store.parts[0] in ("postgresql:", "postgres:"):
            raise ValueError("a run keeps its jobs in a file beside its output; ng_serve_rollouts shares a PostgreSQL")
        return store

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
        if self.overwrite and self.resume and "resume" in self.model_fields_set:
            raise ValueError("choose one of resume=true (continue) and overwrite=true (discard)")
        return self

    def check_input(self) -> None:
        """Raise `ConfigError` if the input is no file of text; a cheap check before anything is started."""
        if not self.input.is_file():
            what = "is not a regular file" if self.input.exists() else "does not exist"
            what = "is a directory" if self.input.is_dir() else what
            raise ConfigError(
                f"input '{self.input}' {what}; 'input' names a JSONL file with one row per line", key="input"
            )
        try:
            with self.input.open("rb") as file:
                head = file.read(4)
        except OSError as error:
            raise ConfigError(f"input '{self.input}' cannot be read: {error.strerror}", key="input") from error
        for magic, name, unpack in _COMPRESSED:
            if head.startswith(magic):
                raise ConfigError(
                    f"input '{self.input}' is compressed ({name}): unpack it with {unpack} and name the result",
                    key="input",
                )
        if head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) or b"\0" in head:
            raise ConfigError(
                f"input '{self.input}' is not UTF-8 but, it seems, UTF-16: convert it, for example with"
                f" iconv -f UTF-16 -t UTF-8 '{self.input}' > rows.jsonl",
                key="input",
            )

    @property
    def shard_of(self) -> tuple[int, int]:
        """``(remainder, count)``: this run has the tasks whose position modulo ``count`` is ``remainder``."""
        if self.shard is None:
            return 0, 1
        number, count = self.shard.split("/")
        return int(number) - 1, int(count)


RUN_KEYS = RolloutRunConfig.spellings()
"""Every spelling of every run key. ``agent`` is among them; a command that composes groups takes it out first."""
