"""Answers held to a JSON schema by the engine, as harnesses ask for with ``response_format``.

The engine masks the tokens that the schema does not allow, so such an answer is sampled from another distribution than
the policy's own, and from its first token on, reasoning included. Whoever trains on it has to want that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nemo_gym.contract.errors import InvalidBodyError


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
