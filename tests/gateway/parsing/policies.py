"""Policies of every family whose answers are parsed here: a template each, on the token tests' tokenizers."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_gym.gateway.tokens.policy import PolicyTokenizer
from nemo_gym.gateway.tokens.template import shape
from tests.gateway.tokens import policies as token_policies

FOLDER = Path(__file__).parent / "families"


@dataclass(frozen=True)
class Family:
    calls: str
    """The format that `auto` must find."""
    reasoning: str
    tokenizer: str
    """Family of the token tests whose tokenizer has this template's special tokens; ``""`` for the whole family."""
    says_before_calls: bool = True
    several_calls: bool = True
    shows_reasoning: bool = True
    typed: bool = False
    """Whether arguments are bare text that the tool's schema types."""


FAMILIES = {
    "chatml_think": Family("hermes", "think", ""),
    "hermes_open_think": Family("hermes", "think", "chatml_think"),
    "qwen3_coder": Family("qwen3_coder", "think", "chatml_think", typed=True),
    "minimax_m2": Family("minimax_m2", "think", "chatml_think", typed=True),
    "glm45": Family("glm45", "think", "header_stop", typed=True),
    "deepseek_v3": Family("deepseek", "none", "bar_tokens", shows_reasoning=False),
    "deepseek_v31": Family("deepseek", "think", "bar_tokens"),
    "bar_tokens": Family("deepseek", "none", "", shows_reasoning=False),
    "kimi_k2": Family("kimi_k2", "none", "chatml_think", shows_reasoning=False),
    "mistral_args": Family("mistral", "bracket_think", "inst_strict"),
    "inst_strict": Family("mistral", "none", "", says_before_calls=False, shows_reasoning=False),
    "llama_headers": Family(
        "llama_json", "none", "", says_before_calls=False, several_calls=False, shows_reasoning=False
    ),
}


@functools.cache
def policy(name: str) -> PolicyTokenizer:
    family = FAMILIES[name]
    if not family.tokenizer:
        return token_policies.policy(name)
    with tempfile.TemporaryDirectory() as folder:
        token_policies.write(Path(folder), family.tokenizer)
        return PolicyTokenizer.load(folder, chat_template=(FOLDER / f"{name}.jinja").read_text())


def rendered(
    name: str, message: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None = None
) -> tuple[str, str]:
    """``(prompt, answer)`` as the family's template writes them, the answer without the token that ends it."""
    used = policy(name)

    def render(*messages: Mapping[str, Any], add_generation_prompt: bool) -> str:
        # The template alone: a policy's own rendering would mark what the answer spells like control tokens.
        shaped = shape(messages, used.traits, leading=True)
        return used.template.render(shaped, tools=tools, add_generation_prompt=add_generation_prompt)

    question = {"role": "user", "content": "questionprobe"}
    whole = render(question, {"role": "assistant", **message}, add_generation_prompt=False)
    prompt = render(question, add_generation_prompt=True)
    assert whole.startswith(prompt)
    answer = whole[len(prompt) :]
    if used.turn_end is not None:
        answer = answer[: answer.rindex(used.turn_end)]
    return prompt, answer
