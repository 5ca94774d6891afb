"""Prompt templates: a YAML file with ``user`` and optionally ``system``, filled in from a row's fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from nemo_gym.config.roots import plugin_roots
from nemo_gym.contract.errors import ConfigError, RowError
from nemo_gym.contract.verdict import PARAMS_KEY


class PromptConfig(BaseModel):
    """Templates in ``str.format`` syntax: ``{field}`` is a row's field, doubled braces are literal."""

    user: str
    system: str | None = None


@lru_cache(maxsize=64)
def load_prompt_config(path: str) -> PromptConfig:
    """Read a prompt file, searched for in ``NEMO_GYM_EXTRA_ROOTS``, the working directory and the installation.
    Raises `ConfigError`."""
    file = resolve_path(path)
    try:
        return PromptConfig.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"prompt file '{path}' cannot be read: {error.strerror}", key="prompt_config") from error
    except (yaml.YAMLError, ValidationError) as error:
        raise ConfigError(
            f"prompt file '{file}' must be YAML with 'user' and optionally 'system': {error}", key="prompt_config"
        ) from error


def resolve_path(path: str | Path) -> Path:
    """Return the path below the first root in which a relative path exists, or else below the first root."""
    given = Path(path)
    if given.is_absolute():
        return given
    roots = plugin_roots()
    return next((root / given for root in roots if (root / given).exists()), roots[0] / given)


def fill_prompt(prompt_config: PromptConfig, row: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the messages of a row. Raises ``KeyError`` naming a field that the row lacks."""
    templates = [("system", prompt_config.system), ("user", prompt_config.user)]
    try:
        return [
            {"role": role, "content": template.format_map(row)} for role, template in templates if template is not None
        ]
    except KeyError as error:
        raise KeyError(f"the prompt uses {error}, but the row has only the fields {sorted(row)}") from None


def validate_prompt_compatibility(rows: Sequence[Mapping[str, Any]], prompt_config: PromptConfig) -> None:
    """Raise `RowError` if rows already have an input, because a prompt file would replace it."""
    filled = [index for index, row in enumerate(rows) if (row.get(PARAMS_KEY) or {}).get("input")]
    if filled:
        raise RowError(
            f"rows {filled} already have {PARAMS_KEY}.input; leave out prompt_config, or remove their inputs",
            rows=filled,
        )


def apply_prompt_to_row(row: Mapping[str, Any], prompt_config: PromptConfig) -> dict[str, Any]:
    """Return a copy of the row with an input made from the prompt; its other parameters are kept."""
    params = row.get(PARAMS_KEY)
    kept = dict(params) if isinstance(params, Mapping) else {}
    return {**row, PARAMS_KEY: {**kept, "input": fill_prompt(prompt_config, row)}}


def materialize_prompts(input_jsonl: str | Path, prompt_config: str, output_jsonl: str | Path) -> int:
    """Write rows with their inputs filled in, each labelled with the prompt file. Return the number of rows."""
    import orjson

    prompt = load_prompt_config(prompt_config)
    rows = [orjson.loads(line) for line in Path(input_jsonl).read_bytes().splitlines() if line.strip()]
    validate_prompt_compatibility(rows, prompt)
    label = {"prompt_config_used": str(resolve_path(prompt_config))}
    target = Path(output_jsonl)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as stream:
        for row in rows:
            stream.write(orjson.dumps({**apply_prompt_to_row(row, prompt), **label}) + b"\n")
    return len(rows)
