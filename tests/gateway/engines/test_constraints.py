"""Answers held to a schema: what harnesses ask for, and what each wire sends."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from nemo_gym.contract.errors import InvalidBodyError
from nemo_gym.gateway.engines import EngineConnections
from nemo_gym.gateway.engines import calls as resuming
from nemo_gym.gateway.engines.types import schema_of
from tests.gateway.engines.test_token_engines import STREAMING, WIRES, engine_on, request

SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
TEXT = '{"type":"object","properties":{"title":{"type":"string"}},"required":["title"]}'


def sent(wire: str, body: dict[str, Any]) -> Any:
    held = body if wire == "vllm-completions" else body["sampling_params"]
    return held.get("json_schema") if wire.startswith("sglang") else held.get("structured_outputs")


@pytest.mark.parametrize("wire", WIRES)
async def test_engine_is_sent_the_schema_when_an_answer_is_held_to_one(wire: str, http: EngineConnections) -> None:
    async with engine_on(wire, http) as (fake, engine):
        await engine.generate(request(json_schema=TEXT))
        await engine.generate(request())
        if wire in STREAMING:
            async with contextlib.aclosing(engine.stream(request(json_schema=TEXT))) as items:
                _ = [item async for item in items]
    expected = TEXT if wire.startswith("sglang") else {"json": SCHEMA}
    found = [sent(wire, call.body) for call in fake.calls]
    assert found == [expected, None, expected][: len(found)]
    assert len(found) == (3 if wire in STREAMING else 2)


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, '{"type":"object"}'),
        ({"type": "json_schema", "json_schema": {"name": "t", "strict": True, "schema": SCHEMA}}, TEXT),
        ({"type": "json_schema", "name": "t", "schema": SCHEMA}, TEXT),
    ],
)
def test_schema_is_read_from_every_dialects_shape(response_format: dict[str, Any] | None, schema: str | None) -> None:
    assert schema_of(response_format) == schema


@pytest.mark.parametrize(
    "response_format", [{"type": "grammar"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": []}, {}]
)
def test_format_is_refused_with_its_name_when_it_cannot_be_served(response_format: dict[str, Any]) -> None:
    with pytest.raises(InvalidBodyError, match="response_format") as raised:
        schema_of(response_format)
    assert raised.value.details["param"] == "response_format"


def test_answer_held_to_a_schema_never_goes_on_elsewhere() -> None:
    """The other engine would begin the schema anew amid the answer."""
    assert resuming._resumable(request().sampling)
    assert not resuming._resumable(request(json_schema=TEXT).sampling)
