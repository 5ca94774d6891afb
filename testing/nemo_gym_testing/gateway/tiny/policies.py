"""Complete policies on disk, as a model repository holds them: tokenizer, chat template, stop tokens and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from nemo_gym._util.suggest import nearest
from nemo_gym.contract.errors import ConfigError
from nemo_gym.gateway.tokens import PolicyTokenizer
from nemo_gym_testing.gateway.tiny.model import TinyModel
from nemo_gym_testing.gateway.tiny.vocabulary import tokenizer

_FOLDER = Path(__file__).with_name("families")


@dataclass(frozen=True, slots=True)
class Family:
    """A conversation format that real policies use. ``special``: its special tokens."""

    special: tuple[str, ...]
    bos: str
    eos: str


def _bars(*names: str) -> tuple[str, ...]:
    return tuple(f"<｜{name}｜>" for name in names)


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
_LLAMA = tuple(
    f"<|{name}|>"
    for name in ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id", "eom_id", "python_tag")
)
_INST = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]")
_BARS = _bars(
    *("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant"),
    *("tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end"),
    *("tool▁call▁begin", "tool▁call▁end"),
)
_HEADERS = ("[gMASK]", "<sop>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")

FAMILIES: Mapping[str, Family] = {
    "chatml_think": Family(_CHATML, "<|endoftext|>", "<|im_end|>"),
    "llama_headers": Family(_LLAMA, "<|begin_of_text|>", "<|end_of_text|>"),
    "inst_strict": Family((*_INST, "[/AVAILABLE_TOOLS]"), "<s>", "</s>"),
    "bar_tokens": Family(_BARS, _BARS[0], _BARS[1]),
    "header_stop": Family((*_HEADERS, "<tool_call>", "</tool_call>"), "<sop>", "<|endoftext|>"),
}
"""All support tools. ``chatml_think`` reasons; ``llama_headers`` makes one call at a time; ``header_stop`` ends an
answer with the header of the message it expects next."""


def chat_template(family: str) -> str:
    """Return the Jinja text of a family's chat template."""
    return (_FOLDER / f"{_checked_family(family)}.jinja").read_text(encoding="utf-8")


def make_policy(directory: str | Path, family: str, seed: int = 0) -> Path:
    """Write a complete policy into ``directory``, for the gateway and for a `TinyEngine` alike. The same family and
    seed give the same files; the seed is that of the weights. Takes about 50 ms.

    Raises `ConfigError` for an unknown family.
    """
    definition = FAMILIES[_checked_family(family)]
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer(definition.special).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(chat_template(family), encoding="utf-8")
    _write(
        folder / "tokenizer_config.json", {"bos_token": definition.bos, "eos_token": definition.eos, "family": family}
    )
    policy = PolicyTokenizer.load(folder)
    ends = sorted(policy.stop_ids)
    _write(folder / "generation_config.json", {"eos_token_id": ends, "temperature": 1.0})
    TinyModel.random(policy.vocabulary_size, ends, seed).save(folder)
    return folder


def _checked_family(family: str) -> str:
    if family not in FAMILIES:
        raise ConfigError(f"family: '{family}' is unknown{nearest(family, FAMILIES)}; there are {[*FAMILIES]}")
    return family


def _write(file: Path, data: Mapping[str, Any]) -> None:
    file.write_bytes(orjson.dumps(data, option=orjson.OPT_INDENT_2))
