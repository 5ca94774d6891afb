"""Valid request bodies, and ways to make them invalid."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import orjson
from hypothesis import strategies as st

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}

CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "text", "text": "Really."}]},
        {"role": "user", "content": [{"type": "text", "text": "Look."}, {"type": "text", "text": "Well?"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": '{"command": "ls"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
    ],
    "tools": [{"type": "function", "function": {"name": "shell", "description": "Run.", "parameters": SCHEMA}}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "temperature": 0.7,
    "top_p": 0.9,
    "n": 1,
    "seed": 3,
    "stop": ["\n\n"],
    "max_completion_tokens": 20,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logprobs": True,
    "top_logprobs": 0,
    "response_format": {"type": "text"},
    "stream": True,
    "stream_options": {"include_usage": True},
    "user": "u",
    "metadata": {"a": "b"},
    "reasoning_effort": "low",
    "logit_bias": {},
    "store": False,
}
RESPONSES: dict[str, Any] = {
    "model": "m",
    "instructions": "Be brief.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Really."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Look."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}], "content": None},
        {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": '{"command": "ls"}', "id": "fc_1"},
        {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ok"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Done.", "annotations": []}],
        },
        {"role": "user", "content": "And now?"},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Run.", "parameters": SCHEMA, "strict": False},
        {"type": "custom", "name": "patch", "description": "Patch.", "format": {"type": "text"}},
        {"type": "namespace", "name": "mcp", "description": "x", "tools": []},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "temperature": 0.7,
    "top_p": 0.9,
    "max_output_tokens": 20,
    "store": False,
    "stream": True,
    "prompt_cache_key": "k",
    "metadata": {"a": "b"},
    "truncation": "disabled",
}
MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 20,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "shell", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a.py"}]},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
                {"type": "text", "text": "Well?", "cache_control": {"type": "ephemeral", "ttl": "5m"}},
            ],
        },
    ],
    "tools": [{"name": "shell", "description": "Run.", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "temperature": 1.0,
    "top_k": 5,
    "top_p": 0.9,
    "stop_sequences": ["\n\n"],
    "stream": True,
    "metadata": {"user_id": "u"},
    "service_tier": "auto",
}
ROLLOUT = {"rollout_id": "r", "task_id": "t", "group_id": "g", "attempt": 1, "run_id": "fuzz", "sample_index": 0}
OPEN: dict[str, Any] = {
    "rollout": ROLLOUT,
    "sampling": {"temperature": 0.5, "seed": 1, "max_output_tokens": 9, "stop": ["x"], "top_k": 3},
    "ttl_s": 60,
    "reward_source": "runner",
}
REWARD: dict[str, Any] = {"reward": 0.5, "reward_info": {"reward": 0.5, "passed": [1, 2]}}
ENGINE: dict[str, Any] = {"type": "vllm", "base_url": "http://127.0.0.1:9", "name": "x", "weight": 1.0}

_BIG = 10**400
_MAX_PLACES_DEPTH = 8
junk = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            False,
            0,
            -1,
            1.5,
            2**63,
            2**64,
            -(2**63) - 1,
            _BIG,
            1e308,
            -1e308,
            5e-324,
            "",
            " ",
            "\0",
            "\u2028",
        ]
    ),
    st.sampled_from(
        [[], {}, [[]], [{}], [None], {"": {}}, {"type": None}, {"type": {}}, "null", "data:,", "data:;base64,"]
    ),
    st.sampled_from(
        ["https://127.0.0.1:1/x.png", "file:///etc/passwd", "data:image/png;base64,!!!!", "\ud800", "𝕏" * 50]
    ),
    st.sampled_from(
        ["auto", "none", "required", "json_schema", "json_object", "image_url", "input_image", "tool_result"]
    ),
    st.integers(),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=30),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.sampled_from(["type", "text", "role", "content", "name", "id", "x"]), inner, max_size=3
            ),
        ),
        max_leaves=8,
    ),
    st.integers(1, 600).map(lambda depth: _deep(depth, {})),
    st.integers(1, 600).map(lambda depth: _deep(depth, [])),
    st.integers(1000, 5000).map(lambda size: "x" * size),
)


def _deep(depth: int, inner: Any) -> Any:
    for _ in range(depth):
        inner = {"a": inner} if isinstance(inner, dict) else [inner]
    return inner


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every member and element, down to a maximum depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        if len(at) < _MAX_PLACES_DEPTH:
            yield from places(inner, (*at, key))


@st.composite
def mutated(draw: st.DrawFn, valid: dict[str, Any]) -> dict[str, Any]:
    """``valid`` with one to four changes: values replaced, removed, copied elsewhere, wrapped, doubled or added."""
    body = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 4))):
        locations = [*places(body)]
        if not locations:
            break
        *path, last = draw(st.sampled_from(locations))
        parent: Any = body
        for key in path:
            parent = parent[key]
        change = draw(st.sampled_from(["replace", "replace", "replace", "remove", "swap", "wrap", "double", "add"]))
        if change == "replace":
            parent[last] = copy.deepcopy(draw(junk))
        elif change == "remove":
            del parent[last]
        elif change == "wrap":
            parent[last] = [parent[last]] if draw(st.booleans()) else {"type": parent[last]}
        elif change == "swap":
            *other_path, other = draw(st.sampled_from(locations))
            value: Any = body
            for key in (*other_path, other):
                value = value[key]
            parent[last] = copy.deepcopy(value)
        elif change == "double" and isinstance(parent, list):
            parent.insert(last, copy.deepcopy(parent[last]))
        elif isinstance(parent, dict):
            parent[
                draw(st.sampled_from(["type", "x", "previous_response_id", "functions", "n", "prompt", "audio"]))
            ] = copy.deepcopy(draw(junk))
    return body


def encoded(body: Any) -> bytes:
    """Encode as JSON, including what strict JSON forbids: NaN, lone surrogates, numbers of any size."""
    return json.dumps(body).encode()


@st.composite
def damaged(draw: st.DrawFn, valid: dict[str, Any]) -> bytes:
    """The JSON of ``valid`` with one to three damaged places."""
    data = bytearray(orjson.dumps(valid))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        change = draw(st.sampled_from(["cut", "insert", "flip", "prefix", "suffix", "deep"]))
        if change == "cut":
            del data[at:]
        elif change == "insert":
            data[at:at] = draw(
                st.sampled_from(
                    [b"\xff", b"\x00", b"NaN", b"Infinity", b"-", b"1e999", b'"\\ud800"', b"\xed\xa0\x80", b"{", b"]"]
                )
            )
        elif change == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif change == "prefix":
            data[:0] = draw(st.sampled_from([b"\xef\xbb\xbf", b"\xff\xfe", b"\x1f\x8b\x08", b" \n\t", b"]}"]))
        elif change == "suffix":
            data += draw(st.sampled_from([b"{}", b"\x00", b",", b"\xc3"]))
        elif change == "deep":
            data[at:at] = b"[" * draw(st.integers(1, 50_000))
    return bytes(data)
