"""Sampling parameters of one call, and answers held to a JSON schema.

Answers held to a JSON schema by the engine, as harnesses ask for with ``response_format``.

The engine masks the tokens that the schema does not allow, so such an answer is sampled from another distribution than
the policy's own, and from its first token on, reasoning included. Whoever trains on it has to want that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_gym.contract.errors import InvalidBodyError
from nemo_gym.gateway.engines.types import Sampling


def schema_of(response_format: Mapping[str, Any] | None) -> str | None:
    """The schema that ``response_format`` asks for, as JSON text; nothing for plain text.

    Takes the shapes of Chat Completions (``{"type": "json_schema", "json_schema": {"schema": …}}``) and of Responses
    (``{"type": "json_schema", "schema": …}``). Raises `InvalidBodyError` (details: param) for any other.
    """
    if response_format is None or response_format.get("type") == "text":
        return None
    kind = response_format.get("type")
    if kind == "json_object":
        return '{"type":"object"}'
    if kind != "json_schema":
        raise InvalidBodyError(
            f"response_format.type: '{kind}' is not possible; use 'text', 'json_object' or 'json_schema'",
            param="response_format",
        )
    holder = response_format.get("json_schema", response_format)
    schema = holder.get("schema") if isinstance(holder, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidBodyError(
            "response_format: 'json_schema' needs a 'schema' that is an object", param="response_format"
        )
    return json.dumps(schema, separators=(",", ":"))


def vllm_fields(schema: str | None) -> dict[str, Any]:
    """What vLLM takes, beside a completion's other parameters or among ``sampling_params``."""
    return {} if schema is None else {"structured_outputs": {"json": json.loads(schema)}}


def sglang_fields(schema: str | None) -> dict[str, Any]:
    """What SGLang takes among ``sampling_params``."""
    return {} if schema is None else {"json_schema": schema}


# Sampling parameters of one call: what the harness asked for, under what its session pins.

_NUMBERS = {
    "temperature": (float, 0.0, None),
    "top_p": (float, 0.0, 1.0),
    "top_k": (int, -1, None),
    "min_p": (float, 0.0, 1.0),
    "presence_penalty": (float, -2.0, 2.0),
    "frequency_penalty": (float, -2.0, 2.0),
    "repetition_penalty": (float, 0.0, None),
    "seed": (int, None, None),
}
_MAX_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def pinned_sampling(
    asked: Mapping[str, Any], pinned: Mapping[str, Any], *, room_tokens: int, stop_token_ids: Sequence[int] = ()
) -> Sampling:
    """The parameters to sample with. ``pinned`` wins over ``asked`` (a body of any dialect) key by key, except that
    the smaller token budget wins: a harness may ask for a shorter answer. ``room_tokens`` is what is left of the
    context; ``stop_token_ids`` end an answer beside those that are pinned. Raises `InvalidBodyError` for a value that
    cannot be meant."""
    values: dict[str, Any] = {}
    for name, (kind, low, high) in _NUMBERS.items():
        value = pinned.get(name)
        if value is None:
            value = asked.get(name)
        if value is not None:
            values[name] = _number(name, value, kind, low, high)
    budgets = [room_tokens]
    for source in (asked, pinned):
        for name in _MAX_TOKENS:
            if source.get(name) is not None:
                budgets.append(int(_number(name, source[name], int, 1, None)))
    stop = pinned.get("stop") or asked.get("stop") or asked.get("stop_sequences") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not _are(str, stop):
        raise InvalidBodyError("'stop' must be a string or a list of strings", param="stop")
    stop_ids = pinned.get("stop_token_ids") or []
    if not _are(int, stop_ids):
        raise InvalidBodyError("'stop_token_ids' must be a list of token ids", param="stop_token_ids")
    return Sampling(
        max_tokens=min(budgets),
        stop=tuple(stop),
        stop_token_ids=(*stop_ids, *(token for token in stop_token_ids if token not in stop_ids)),
        ignore_eos=bool(pinned.get("ignore_eos", False)),
        **values,
    )


def asked_otherwise(asked: Mapping[str, Any], pinned: Mapping[str, Any]) -> dict[str, Any]:
    """What a harness asked for and did not get, because its session pins another value."""
    if not pinned:
        return {}
    found = {
        name: asked[name]
        for name in _NUMBERS
        if pinned.get(name) is not None and asked.get(name) is not None and asked[name] != pinned[name]
    }
    stop, wanted = pinned.get("stop"), asked.get("stop") or asked.get("stop_sequences")
    if stop and wanted and _listed(stop) != _listed(wanted):
        found["stop"] = _listed(wanted)
    bounds = [pinned[name] for name in _MAX_TOKENS if pinned.get(name) is not None]
    budgets = [asked[name] for name in _MAX_TOKENS if asked.get(name) is not None]
    if bounds and budgets and min(budgets) > min(bounds):
        found["max_output_tokens"] = min(budgets)
    return found


def _listed(values: Any) -> list[Any]:
    return [values] if isinstance(values, str) else [*values]


def _are(kind: type, values: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(v, kind) and not isinstance(v, bool) for v in values)


def _number(name: str, value: Any, kind: type, low: float | None, high: float | None) -> int | float:
    wrong = isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)
    if wrong or (kind is int and int(value) != value):
        said = repr(value)[:100]
        raise InvalidBodyError(f"'{name}' must be {'a whole number' if kind is int else 'a number'}, not {said}")
    if (low is not None and value < low) or (high is not None and value > high):
        raise InvalidBodyError(
            f"'{name}' is {value}; it must be at least {low}" + (f", at most {high}" if high else "")
        )
    number: int | float = kind(value)
    return number
