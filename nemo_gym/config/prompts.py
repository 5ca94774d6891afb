"""Prompt templates: a YAML file with ``user`` and optionally ``system``, filled in from a row's fields."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from nemo_gym.config.files import plugin_roots
from nemo_gym.contract.errors import ConfigError
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
    except (yaml.YAMLError, ValidationError, UnicodeDecodeError, RecursionError) as error:
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
