"""NeMo Gym's names for prompt templates, which write the input of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from nemo_gym._util.files import write_whole
from nemo_gym.config.run import PromptConfig, apply_prompt_to_row, fill_prompt, read_prompt, resolve_path
from nemo_gym.contract.errors import RowError
from nemo_gym.contract.verdict import PARAMS_KEY
from nemo_gym.rollouts.rows import read_row, worded

__all__ = [
    "PromptConfig",
    "apply_prompt_to_row",
    "fill_prompt",
    "load_prompt_config",
    "materialize_prompts",
    "resolve_path",
    "validate_prompt_compatibility",
]

load_prompt_config = lru_cache(maxsize=64)(read_prompt)
"""`read_prompt`, once for each path: judges call it with each verdict."""


def validate_prompt_compatibility(rows: Sequence[Mapping[str, Any]], prompt_config: PromptConfig) -> None:
    """Raise `RowError` if rows already have an input, because a prompt file would replace it."""
    filled = [index for index, row in enumerate(rows) if (row.get(PARAMS_KEY) or {}).get("input")]
    if filled:
        raise RowError(
            f"rows {filled} already have {PARAMS_KEY}.input; leave out prompt_config, or remove their inputs",
            rows=filled,
        )


def materialize_prompts(input_jsonl: str | Path, prompt_config: str, output_jsonl: str | Path) -> int:
    """Write rows with their inputs filled in, each labelled with the prompt file. Return the number of rows.

    The output may be the input: it is written once every row has its prompt. Raises `RowError` naming the line of a
    row that cannot be used, and `OSError`."""
    prompt = read_prompt(prompt_config)
    source, target = Path(input_jsonl), Path(output_jsonl)
    label = {"prompt_config_used": str(resolve_path(prompt_config))}
    rows = [
        {**worded(read_row(line, source, number), prompt, source, number), **label}
        for number, line in enumerate(source.read_bytes().split(b"\n"), 1)
        if line.strip()
    ]
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))
    return len(rows)
