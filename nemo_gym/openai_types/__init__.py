"""OpenAI's wire types as this suite reads them: iterables are lists, and items may carry the token ids and log
probabilities that an engine attaches to what it sampled.

`nemo_gym.openai_utils` exports everything here under the names that NeMo Gym plugins import. This file does not import
``openai``, which is slow: commands that read result rows need the names of the token fields.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypeAlias

from pydantic import BaseModel
from typing_extensions import TypedDict

__all__ = [
    "RoutedExperts",
    "TokenIDLogProbMixin",
    "TokenIDLogProbTypedDictMixin",
]

RoutedExperts: TypeAlias = str | list[list[list[int]]]
"""Expert indices per token, shape ``[tokens, layers, top_k]``, or a trainer's opaque string; never read here."""

REQUIRED_TOKEN_FIELDS = frozenset({"prompt_token_ids", "generation_token_ids", "generation_log_probs"})
TOKEN_FIELDS = REQUIRED_TOKEN_FIELDS | {"routed_experts"}


class TokenIDLogProbMixin(BaseModel):
    """Token fields of an item; the lengths are ``[prompt]``, ``[generated]`` and ``[generated]``."""

    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    routed_experts: RoutedExperts | None = None


class TokenIDLogProbTypedDictMixin(TypedDict):
    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    routed_experts: NotRequired[RoutedExperts]


def check_tokens(value: Any) -> Any:
    """Raise ``ValueError`` unless the required token fields are all present or no token field is; a validator."""
    present = TOKEN_FIELDS.intersection(value) if isinstance(value, dict) else None
    if present and (missing := REQUIRED_TOKEN_FIELDS - present):
        raise ValueError(f"token fields come together; missing {', '.join(sorted(missing))}")
    return value
