"""What a family's own template writes of a message, its parser reads back as that message."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.gateway.parsing import ParsedAnswer, answer_parser
from tests.gateway.parsing.policies import FAMILIES, policy, rendered
from tests.properties import examples

TOOL = {
    "type": "function",
    "function": {
        "name": "edit.file-2",
        "description": "Edits.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "count": {"type": "integer"},
                "ratio": {"type": "number"},
                "force": {"type": "boolean"},
                "items": {"type": "array"},
                "nested": {"type": "object"},
                "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            },
        },
    },
}
FRAGMENTS = st.sampled_from(
    [
        *("\n", "  ", "{", "}", "[", "]", '"', "\\", "é", "日本", "😀", "<", ">", "`", "```json", "null", "true", "1"),
        *("</tool_call", "<tool_call", "</think", "<function", "</param", "<|tool", "name", '{"name": "x"', "<｜tool"),
    ]
)
TEXT = st.lists(FRAGMENTS | st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=8), max_size=8)
MARKERS = ("think>", "THINK]", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "|>", "｜>")
"""No text of a message can hold what a template writes around one. Hypothesis draws constants of this project, too."""
PLAIN = TEXT.map("".join).filter(
    # A whole object with a name is how some families write a call.
    lambda text: (
        not any(marker in text for marker in MARKERS)
        and not (text.strip().startswith('{"name"') and text.rstrip().endswith("}"))
    )
)
WORDS = PLAIN.map(str.strip).filter(bool)
TAGS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<function=f>",
            "</function>",
            "</parameter> x",
            "<parameter=a>",
            "</invoke>",
        ),
        *("</arg_value>.", "<think>", "[TOOL_CALLS]", "<|tool_call_end|>", "</parameter></tag>", "<arg_key>"),
    ]
)
VALUES = st.lists(FRAGMENTS | TAGS | st.text(st.characters(codec="utf-8"), max_size=8), max_size=6).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": VALUES,
        "count": st.integers(),
        "ratio": st.floats(allow_nan=False, allow_infinity=False),
        "force": st.booleans(),
        "items": st.lists(JSON, max_size=3),
        "nested": st.dictionaries(st.text(max_size=5), JSON, max_size=3),
        "maybe": st.none() | st.integers(),
    },
)


@st.composite
def messages(draw: st.DrawFn, name: str) -> dict[str, Any]:
    family = FAMILIES[name]
    calls = draw(st.lists(ARGUMENTS, max_size=3 if family.several_calls else 1))
    message: dict[str, Any] = {"content": draw(WORDS | (st.just("") if calls else WORDS))}
    if calls and not family.says_before_calls:
        message["content"] = ""
    if family.shows_reasoning and draw(st.booleans()):
        message["reasoning_content"] = draw(WORDS)
    if calls:
        message["tool_calls"] = [
            {
                "id": f"functions.{TOOL['function']['name']}:{number}",
                "type": "function",
                "function": {"name": TOOL["function"]["name"], "arguments": json.dumps(arguments)},
            }
            for number, arguments in enumerate(calls)
        ]
    return message


def assert_same(parsed: ParsedAnswer, message: dict[str, Any], where: str) -> None:
    calls = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    assert (parsed.content or "") == message["content"], where
    assert (parsed.reasoning or "") == message.get("reasoning_content", ""), where
    assert [call.name for call in parsed.calls] == [TOOL["function"]["name"]] * len(calls), where
    assert [json.loads(call.arguments) for call in parsed.calls] == calls, where
    for call in parsed.calls:
        call.arguments.encode()


@pytest.mark.parametrize("name", FAMILIES)
def test_auto_finds_the_formats_that_the_template_writes(name: str) -> None:
    assert answer_parser(policy(name)).name == f"{FAMILIES[name].calls}+{FAMILIES[name].reasoning}"


@pytest.mark.parametrize("name", FAMILIES)
@examples(150)
@given(data=st.data())
def test_message_reads_back_as_itself_when_its_template_wrote_it(name: str, data: st.DataObject) -> None:
    message = data.draw(messages(name))
    prompt, answer = rendered(name, message, [TOOL])
    assert_same(answer_parser(policy(name)).parse(answer, prompt_tail=prompt[-256:], tools=[TOOL]), message, answer)


@pytest.mark.parametrize("name", FAMILIES)
@examples(100)
@given(data=st.data())
def test_text_without_markup_stays_letter_for_letter(name: str, data: st.DataObject) -> None:
    text = data.draw(PLAIN)
    parsed = answer_parser(policy(name)).parse(text, prompt_tail="question", tools=[TOOL])
    assert parsed == ParsedAnswer(text)
