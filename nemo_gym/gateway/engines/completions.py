"""Chat completions of an endpoint, read only as far as somebody must: what it told about tokens stays as it came."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from nemo_gym.gateway.engines.openai import SampledText, sampled_text
from nemo_gym.gateway.relayed import JsonText


class _Logprobs(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw()


class _Choice(msgspec.Struct):
    message: dict[str, Any]
    finish_reason: Any = None
    logprobs: _Logprobs | None = None
    token_ids: msgspec.Raw = msgspec.Raw()


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: Any = None


_COMPLETIONS = msgspec.json.Decoder(_Completion)


@dataclass(frozen=True, slots=True)
class Completion:
    """The one choice of a chat completion."""

    message: Mapping[str, Any]
    finish_reason: str | None
    usage: Mapping[str, Any] | None
    entries: JsonText
    """``logprobs.content``, a view of the whole body; false where the endpoint offers none."""
    token_ids: JsonText
    """As many as ``entries``, where the endpoint tells them."""


def completion_in(body: bytes | bytearray) -> Completion:
    """Raises `ValueError` for what is no completion."""
    try:
        found = _COMPLETIONS.decode(body)
        if not found.choices:
            raise ValueError("'choices' is empty")
        choice = found.choices[0]
        for call in choice.message.get("tool_calls") or ():
            if not isinstance(call["function"]["name"], str):
                raise TypeError("a tool call has no name")
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    logprobs = choice.logprobs or _Logprobs()
    return Completion(
        choice.message,
        choice.finish_reason if isinstance(choice.finish_reason, str) else None,
        found.usage if isinstance(found.usage, dict) else None,
        JsonText(memoryview(logprobs.content)),
        JsonText(memoryview(choice.token_ids)),
    )


def tokens_in(entries: JsonText, token_ids: JsonText | None) -> SampledText | None:
    """What `Completion.entries` and its ids say. Raises `ValueError` where they are not what the dialect makes of
    them."""
    choice = {
        "logprobs": {"content": entries.value()},
        "token_ids": token_ids.value() if token_ids else None,
    }
    try:
        return sampled_text(choice)
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
