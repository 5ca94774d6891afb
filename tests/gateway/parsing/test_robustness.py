"""Whatever a policy samples: nothing raises, nothing is lost, and no text costs more than its length."""

from __future__ import annotations

import json
import re
import re._constants as sre
import re._parser as sre_parser
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.gateway.parsing import ParsedCall, answer_parser, formats
from nemo_gym.gateway.parsing import formats as mistral
from nemo_gym.gateway.parsing.formats import CALL_FORMATS, FramedJson, TaggedCalls, Tool
from tests.gateway.parsing.policies import policy
from tests.gateway.parsing.test_formats import WRITTEN
from tests.properties import examples

PIECES = sorted(
    {
        piece
        for written in WRITTEN.values()
        for text in written
        for piece in re.findall(r"<[^<>]*>|\[[A-Z_]+\]|[{}\[\]\":,]|\w+|\s+", text)
    }
    | {"<think>", "</think>", "\\", "\\u12", '"a": ', '{"name": "a", "arguments": ', "```json\n", "</", "\ud800"}
)
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=40).map("".join)


@pytest.mark.parametrize("name", CALL_FORMATS)
@examples(300)
@given(
    text=st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=40).map("".join), tail=st.text(max_size=9)
)
def test_arbitrary_text_never_raises_and_calls_hold_json(name: str, text: str, tail: str) -> None:
    parsed = answer_parser(policy("chatml_think"), tool_parser=name).parse(text, prompt_tail=tail, tools=None)
    for call in parsed.calls:
        assert call.name
        assert formats.is_object(call.arguments)
    if not parsed.calls and parsed.reasoning is None and "think>" not in text + tail:
        assert parsed.content == text


@pytest.mark.parametrize("name", CALL_FORMATS)
@examples(200)
@given(text=TEXTS)
def test_segments_hold_every_letter_when_there_is_no_call(name: str, text: str) -> None:
    segments = CALL_FORMATS[name].split(text, None)
    if not any(isinstance(segment, ParsedCall) for segment in segments):
        assert "".join(str(segment) for segment in segments) == text


@examples(500)
@given(text=st.text(alphabet='{}[]":,\\u0123eE+-.tfn \n', max_size=12) | st.text(max_size=5))
def test_json_ends_where_the_standard_library_says(text: str) -> None:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    decoder = json.JSONDecoder(parse_constant=refuse)
    try:
        value, end = decoder.raw_decode(text)
    except ValueError:
        value = end = None
    mine = formats.value_end(text, 0) if text[:1] not in (" ", "\n", "\t", "\r") else None
    if mine != end:  # a number cut short by what follows is no number here: 01 is not 0, and 1.x is not 1
        assert mine is None
        assert isinstance(value, int | float | bool | None)


HOSTILE = {
    "hermes": ['<tool_call>{"', '<tool_call>{"a":["', '<tool_call>{"name":"f","arguments":{"a":[', "<tool_call>{}  "],
    "qwen3_coder": [
        "<function=",
        "<function=f>",
        "<function=f><parameter=a>",
        "<parameter=a><function=f><parameter=b></parameter>",
        "<function=f><parameter=a></parameter>",
        "<function=f><parameter=a></function>",
        "<function=f>\n<parameter=a>\n<parameter=b>\n",
        "</parameter>   ",
    ],
    "glm45": [
        "<tool_call>f",
        "<tool_call>f<arg_key>k</arg_key><arg_value>",
        "<arg_key>k</arg_key><arg_value></arg_value>",
    ],
    "minimax_m2": ['<invoke name="f">', '<parameter name="a"><invoke name="f"><parameter name="b"></parameter>'],
    "deepseek": [
        "<｜tool▁call▁begin｜>",
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a":"',
        "<｜tool▁call▁begin｜>f```json {}  ",
    ],
    "kimi_k2": ["<|tool_call_begin|>f<|tool_call_argument_begin|>[", "<|tool_call_begin|>" + "f" * 300],
    "mistral": ['[TOOL_CALLS][{"name":"f"},', '[TOOL_CALLS]f[ARGS]{"a":"', "[TOOL_CALLS]["],
    "llama_json": ['<|python_tag|>{"name":"', '{"name":"f"};', "[" * 40],
}
LETTERS = 100_000
TOOLS = [{"function": {"name": "f", "parameters": {"properties": {"a": {}, "b": {}}}}}]


@pytest.mark.parametrize(("name", "unit"), [(name, unit) for name, units in HOSTILE.items() for unit in units])
def test_work_grows_with_the_text_when_it_is_hostile(name: str, unit: str) -> None:
    tail = {"qwen3_coder": "JUNK", "minimax_m2": "JUNK"}.get(name, "")
    head = {"qwen3_coder": "<function=f>", "minimax_m2": '<invoke name="f">'}.get(name, "")
    once, twice = (
        _lines_run(name, head + unit * (size // len(unit)) + tail, TOOLS) for size in (LETTERS, 2 * LETTERS)
    )
    assert twice <= 2.5 * once + 1000


@pytest.mark.parametrize(
    ("shape", "name"), [("many tools", "f{}"), ("many parameters", "f0"), ("many tools", "none of them {}")]
)
def test_work_grows_with_the_calls_and_the_tools_and_not_with_both_together(shape: str, name: str) -> None:
    def lines(size: int) -> int:
        properties = {f"k{at}": {"type": "string"} for at in range(size if shape == "many parameters" else 1)}
        tools = [
            {"type": "function", "function": {"name": f"f{at}", "parameters": {"properties": properties}}}
            for at in range(size if shape == "many tools" else 1)
        ]
        text = "".join(f"<function={name.format(at)}>\n</function>\n" for at in range(size))
        return _lines_run("qwen3_coder", text, tools)

    assert lines(800) <= 2.5 * lines(400)


def _lines_run(name: str, text: str, tools: Sequence[Tool] | None = None) -> int:
    """How many lines of Python this parse runs; what regular expressions do beneath them is bounded below."""
    lines = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    parse = CALL_FORMATS[name].split
    before = sys.gettrace()
    sys.settrace(count)
    try:
        parse(text, tools)
    finally:
        sys.settrace(before)
    return lines


def _patterns() -> Iterator[re.Pattern[str]]:
    for parser in CALL_FORMATS.values():
        if isinstance(parser, FramedJson):
            yield from (parser._opening, parser._closing)
        if isinstance(parser, TaggedCalls):
            yield parser._tags
    for module in (formats, mistral):
        yield from (value for value in vars(module).values() if isinstance(value, re.Pattern))


@pytest.mark.parametrize("pattern", [pytest.param(found, id=found.pattern[:60]) for found in _patterns()])
def test_pattern_cannot_run_back_when_it_fails(pattern: re.Pattern[str]) -> None:
    """Repetitions are possessive, bounded, or of parts that begin with a letter of their own, so that there is one way
    to divide a text into them: a search costs at most a constant per letter."""

    def walk(parsed: Any) -> None:
        for operation, argument in parsed:
            if operation in (sre.MAX_REPEAT, sre.MIN_REPEAT):
                begins_with_its_letter = argument[2][0][0] is sre.LITERAL
                assert argument[1] != sre.MAXREPEAT or begins_with_its_letter, f"unbounded in {pattern.pattern}"
            for part in argument if isinstance(argument, tuple | list) else (argument,):
                if isinstance(part, sre_parser.SubPattern):
                    walk(part)
                elif isinstance(part, list):
                    for branch in part:
                        if isinstance(branch, sre_parser.SubPattern):
                            walk(branch)

    walk(sre_parser.parse(pattern.pattern))


def test_nesting_is_no_limit() -> None:
    depth = 100_000
    arguments = '{"a": ' + "[" * depth + "]" * depth + "}"
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    parsed = answer_parser(policy("chatml_think")).parse(text, prompt_tail="", tools=None)
    assert parsed.calls == (ParsedCall("f", arguments),)
