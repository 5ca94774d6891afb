"""Each format's rules, on answers written out."""

from __future__ import annotations

import json

import pytest

from nemo_gym.gateway.parsing import ParsedAnswer, ParsedCall, answer_parser
from nemo_gym.gateway.parsing.formats import CALL_FORMATS, typed_json
from tests.gateway.parsing.policies import policy

POLICY = "chatml_think"


def parse(text: str, *, tool_parser: str = "hermes", tail: str = "", parse_calls: bool = True) -> ParsedAnswer:
    parser = answer_parser(policy(POLICY), tool_parser=tool_parser)
    return parser.parse(text, prompt_tail=tail, tools=None, parse_calls=parse_calls)


def call(name: str, arguments: str) -> ParsedCall:
    return ParsedCall(name, arguments)


A, B = call("a", '{"x":  1}'), call("b", "{}")
WRITTEN = {
    "hermes": (
        '<tool_call>\n{"name": "a", "arguments": {"x":  1}}\n</tool_call>',
        '<tool_call>{"arguments": {}, "name": "b"}</tool_call>',
    ),
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n"
        '{"x":  1}\n```<｜tool▁call▁end｜>',
        "<｜tool▁call▁begin｜>b<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.a:0<|tool_call_argument_begin|>"
        '{"x":  1}<|tool_call_end|>',
        "<|tool_call_begin|>functions.b:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "a", "arguments": {"x":  1}, "id": "abcdefghi"}]',
        "[TOOL_CALLS]b[CALL_ID]abcdefghi[ARGS]{}",
    ),
    "llama_json": (
        '<|python_tag|>{"name": "a", "parameters": {"x":  1}}',
        '<|python_tag|>{"type": "function", "name": "b", "parameters": {}}',
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=a>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
        "<function=b>\n</function>",
    ),
    "glm45": (
        "<tool_call>a\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "<tool_call>b</tool_call>",
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="a">\n<parameter name="x">1</parameter>\n</invoke>',
        '<invoke name="b">\n</invoke>\n</minimax:tool_call>',
    ),
}
TYPED = {"qwen3_coder", "glm45", "minimax_m2"}
X_IS_A_NUMBER = [{"function": {"name": "a", "parameters": {"properties": {"x": {"type": "integer"}}}}}]


def test_every_format_is_written_out_here() -> None:
    assert WRITTEN.keys() == CALL_FORMATS.keys()


@pytest.mark.parametrize("name", WRITTEN)
def test_text_around_calls_stays_when_there_are_several(name: str) -> None:
    first, second = WRITTEN[name]
    parser = answer_parser(policy(POLICY), tool_parser=name)
    parsed = parser.parse(f"One. \n\n{first}\n Two.\n{second}\nThree.", prompt_tail="", tools=X_IS_A_NUMBER)
    expected = call("a", '{"x": 1}') if name in TYPED else A
    assert parsed == ParsedAnswer("One.\nTwo.\nThree.", None, (expected, B))


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_stay_text_when_they_are_not_wanted(name: str) -> None:
    text = f"{WRITTEN[name][0]} and so on "
    assert parse(text, tool_parser=name, parse_calls=False) == ParsedAnswer(text)


@pytest.mark.parametrize("name", WRITTEN)
def test_every_cut_of_an_answer_loses_no_letter_that_is_no_markup(name: str) -> None:
    first, second = WRITTEN[name]
    text = f"One.\n{first}\n{second}"
    for end in range(len(text)):
        parsed = parse(text[:end], tool_parser=name)
        assert len(parsed.calls) <= 2
        if not parsed.calls:
            assert parsed.content == text[:end]
        else:
            assert parsed.calls[0].name == "a"
            assert (parsed.content or "").startswith("One.")


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "a", "arguments": {"x": 1}</tool_call>',
        "<tool_call>{'name': 'a', 'arguments': {}}</tool_call>",
        '<tool_call>{"name": "a", "arguments": {"x": 01}}</tool_call>',
        '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "a", "arguments": {"x": "two\nlines"}}</tool_call>',
        '<tool_call>{"name": "a", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "a", "arguments": "not json"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a", "arguments": "{\\"x\\": \\"\\ud800\\"}"}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>[{"name": "a"}]</tool_call>',
        '<tool_call>{"name": "a", "arguments": {}} and more</tool_call>',
    ],
)
def test_frame_stays_content_when_it_holds_no_call(text: str) -> None:
    assert parse(text) == ParsedAnswer(text)


def test_sound_call_is_found_behind_a_broken_one() -> None:
    text = '<tool_call>{"name": </tool_call>\n<tool_call>{"name": "b"}</tool_call>'
    assert parse(text) == ParsedAnswer('<tool_call>{"name": </tool_call>', None, (B,))


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"n": 123456789012345678901234567890, "f": 1.10, "e": "\\u00e9"}', None),
        ('{"b":2,"a":1,"a":3}', None),
        ('{"t": "</tool_call>"}', None),
        ('{"half": "\\ud83d"}', None),
        ('"{\\"x\\": [1]}"', '{"x": [1]}'),
        ("null", "{}"),
    ],
)
def test_arguments_are_letter_for_letter_as_sampled_when_they_are_an_object(arguments: str, read: str | None) -> None:
    text = f'<tool_call>{{"name": "a", "arguments": {arguments}}}</tool_call>'
    assert parse(text).calls == (call("a", read or arguments),)


def test_answer_that_is_json_stays_content_when_it_has_keys_of_its_own() -> None:
    text = '{"name": "Ada", "parameters": {}, "born": 1815}'
    assert parse(text, tool_parser="llama_json") == ParsedAnswer(text)


def test_answer_that_is_a_json_name_is_a_call_only_of_an_offered_tool() -> None:
    tools = [{"type": "function", "function": {"name": "finish"}}, {"type": "function", "function": {"name": "f"}}]
    split = CALL_FORMATS["llama_json"].split
    assert split('{"name":"Bob"}', tools) == ['{"name":"Bob"}']
    assert split('{"name":"finish"}', tools) == ["", call("finish", "{}"), ""]
    assert split('{"name":"Bob","parameters":{}}', tools) == ["", call("Bob", "{}"), ""]


def test_llama_calls_follow_each_other_when_semicolons_part_them() -> None:
    text = '{"name": "a", "parameters": {"x":  1}}; {"name": "b", "parameters": {}}'
    assert parse(text, tool_parser="llama_json") == ParsedAnswer(None, None, (A, B))


@pytest.mark.parametrize(
    ("text", "tail", "expected"),
    [
        ("<think>\nhm\n</think>\n\nyes", "", ParsedAnswer("yes", "hm")),
        ("hm\n</think>\n\nyes ", "<|im_start|>assistant\n<think>\n", ParsedAnswer("yes ", "hm")),
        ("hm, still", "<think>\n", ParsedAnswer(None, "hm, still")),
        ("<think>hm", "", ParsedAnswer(None, "hm")),
        ("<think>\n\n</think>\n\nyes", "", ParsedAnswer("yes")),
        ("hm</think>yes", "", ParsedAnswer("yes", "hm")),
        ("so </think> is a tag", "<think>\n\n</think>\n\n", ParsedAnswer("so </think> is a tag")),
        ("write <think>x</think>", "", ParsedAnswer("write <think>x</think>")),
        ("yes", "he wrote <think> there", ParsedAnswer("yes")),
        ("", "<think>", ParsedAnswer(None)),
        ("", "", ParsedAnswer("")),
        (
            '<think>I may <tool_call>{"name": "b"}</tool_call></think>\n<tool_call>{"name": "b"}</tool_call>',
            "",
            ParsedAnswer(None, 'I may <tool_call>{"name": "b"}</tool_call>', (B,)),
        ),
    ],
)
def test_reasoning_is_told_from_content(text: str, tail: str, expected: ParsedAnswer) -> None:
    assert parse(text, tail=tail) == expected


@pytest.mark.parametrize(
    ("name", "opening", "closing"),
    [
        ("kimi_k2", "<|tool_call_begin|>functions.b:0<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ("deepseek", "<｜tool▁call▁begin｜>b<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>b\n```json", "\n```<｜tool▁call▁end｜>"),
    ],
)
def test_call_without_any_arguments_is_a_call_once_it_is_closed(name: str, opening: str, closing: str) -> None:
    for space in ("", "\n"):
        assert parse(opening + space + closing, tool_parser=name) == ParsedAnswer(None, None, (B,))
        assert parse(opening + space, tool_parser=name) == ParsedAnswer(opening + space)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize(("opening", "tail"), [("<think>\n", ""), ("", "<|im_start|>assistant\n<think>\n")])
def test_call_at_the_end_of_unclosed_reasoning_is_a_call(name: str, opening: str, tail: str) -> None:
    first, second = WRITTEN[name]
    a = ParsedCall("a", '{"x": "1"}') if name in UNCLOSED else A
    text = f"{opening}I list them.\n{first}"
    assert parse(text, tool_parser=name, tail=tail) == ParsedAnswer(None, "I list them.", (a,))
    assert parse(f"{text}\n{second}", tool_parser=name, tail=tail) == ParsedAnswer(None, "I list them.", (a, B))
    assert parse(text, tool_parser=name, tail=tail, parse_calls=False).calls == ()
    assert parse(f"{text}\n</think>\n\n", tool_parser=name, tail=tail) == ParsedAnswer(None, "I list them.", (a,))


def test_call_that_unclosed_reasoning_goes_on_after_is_none() -> None:
    text = '<think>Perhaps <tool_call>{"name": "b"}</tool_call>, or'
    assert parse(text) == ParsedAnswer(None, text.removeprefix("<think>"))


@pytest.mark.parametrize("said", ["", "Now the template: "])
@pytest.mark.parametrize(
    ("tool_parser", "text"),
    [
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": "</think>"}}</tool_call>'),
        ("qwen3_coder", "<tool_call>\n<function=a>\n<parameter=x>\n</think>\n</parameter>\n</function>\n</tool_call>"),
        ("glm45", "<tool_call>a\n<arg_key>x</arg_key>\n<arg_value></think></arg_value>\n</tool_call>"),
    ],
)
def test_tag_in_an_argument_ends_no_reasoning(tool_parser: str, text: str, said: str) -> None:
    parsed = parse(said + text, tool_parser=tool_parser)
    assert ((parsed.content or "").strip(), parsed.reasoning) == (said.strip(), None)
    assert [json.loads(each.arguments) for each in parsed.calls] == [{"x": "</think>"}]


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("1", None, '"1"'),
        ("1", {"type": "string"}, '"1"'),
        ("1", {"type": "integer"}, "1"),
        ("1e2", {"type": "number"}, "1e2"),
        (" 12345678901234567890123 ", {"type": "integer"}, "12345678901234567890123"),
        ("True", {"type": "boolean"}, "true"),
        ("true", {"type": ["string", "boolean"]}, '"true"'),
        ("None", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "null"),
        ('["a",  1]', {"anyOf": [{"type": "string"}, {"type": "array"}]}, '["a",  1]'),
        ('["a', {"type": "array"}, '"[\\"a"'),
        ("two", {"type": "integer"}, '"two"'),
        ('{"a": 1}', {}, '{"a": 1}'),
        ("3", {"enum": [1, 2, 3]}, "3"),
        ("3", {"enum": ["1", "3"]}, '"3"'),
        ("3", {"const": 3}, "3"),
        ("", {"type": "string"}, '""'),
        ("", {"type": "integer"}, '""'),
        ("1", {"type": [{"type": "string"}, "integer"]}, "1"),
        ("1", {"type": [{"type": "string"}]}, "1"),
        ("1", {"enum": 5}, "1"),
        ("1", {"anyOf": 5, "oneOf": {"type": "string"}, "allOf": None}, "1"),
    ],
)
def test_bare_value_has_the_type_that_the_schema_allows(text: str, schema: dict[str, object], expected: str) -> None:
    assert typed_json(text, schema) == expected


def test_value_is_typed_through_references_of_the_tools_schema() -> None:
    parameters = {
        "properties": {"x": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}, "y": {"$ref": "#/$defs/N"}},
        "$defs": {"N": {"$ref": "#/$defs/M"}, "M": {"type": "integer"}},
    }
    parser = answer_parser(policy(POLICY), tool_parser="qwen3_coder")
    text = "<function=a><parameter=x>1</parameter><parameter=y>2</parameter></function>"
    tools = [{"function": {"name": "a", "parameters": parameters}}]
    assert parser.parse(text, prompt_tail="", tools=tools).calls == (call("a", '{"x": 1, "y": 2}'),)


def test_last_parameter_counts_when_its_name_is_written_twice() -> None:
    text = "<function=a><parameter=x>1</parameter><parameter=y>2</parameter><parameter=x>3</parameter></function>"
    assert parse(text, tool_parser="qwen3_coder").calls == (call("a", '{"x": "3", "y": "2"}'),)


def test_value_keeps_tags_of_its_own_when_a_policy_edits_a_parser() -> None:
    value = "<parameter=x>\n</parameter> and\n</function>\n<tool_call>"
    text = f"<tool_call>\n<function=a>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert json.loads(parse(text, tool_parser="qwen3_coder").calls[0].arguments) == {"x": value}


UNCLOSED = {
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n<parameter=a>\nls\n</function>\n</tool_call>",
        "<tool_call>\n<function=g>\n<parameter=a>\npwd\n</parameter>\n</function>\n</tool_call>",
        "<function=f>\n<parameter=a>\nls\n<parameter=b>\n2\n</parameter>\n</function>",
    ),
    "glm45": (
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>ls\n</tool_call>",
        "<tool_call>g\n<arg_key>a</arg_key>\n<arg_value>pwd</arg_value>\n</tool_call>",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>ls\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">ls</invoke>\n</minimax:tool_call>',
        '<invoke name="g">\n<parameter name="a">pwd</parameter>\n</invoke>\n</minimax:tool_call>',
        '<invoke name="f">\n<parameter name="a">ls\n<parameter name="b">2</parameter>\n</invoke>',
    ),
}
PROPERTIES = {"a": {"type": "string"}, "b": {"type": "integer"}}
F_AND_G = [{"function": {"name": name, "parameters": {"properties": PROPERTIES}}} for name in ("f", "g")]


@pytest.mark.parametrize("name", UNCLOSED)
def test_value_ends_with_its_call_when_the_policy_left_out_the_end(name: str) -> None:
    first, second, _ = UNCLOSED[name]
    f, g = call("f", '{"a": "ls"}'), call("g", '{"a": "pwd"}')
    split = CALL_FORMATS[name].split
    for text, calls in ((first, [f]), (f"{first}\n{second}", [f, g]), (f"{first}\n{first}\n{second}", [f, f, g])):
        segments = split(text, F_AND_G)
        assert [each for each in segments if isinstance(each, ParsedCall)] == calls
        assert not "".join(each for each in segments if isinstance(each, str)).strip()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nls\n</parameter>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nls\n</tool_call>"),
        (
            "minimax_m2",
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">ls</parameter>\n</minimax:tool_call>',
        ),
    ],
)
def test_call_ends_with_its_frame_when_the_policy_left_out_the_end(name: str, text: str) -> None:
    split = CALL_FORMATS[name].split
    f = call("f", '{"a": "ls"}')
    assert split(text, F_AND_G) == ["", f, ""]
    assert split(f"{text}\n{text}", F_AND_G) == ["", f, "\n", f, ""]


def test_frame_of_seed_oss_belongs_to_the_call() -> None:
    text = "<seed:tool_call>\n<function=f>\n<parameter=a>ls</parameter>\n</function>\n</seed:tool_call>"
    f = call("f", '{"a": "ls"}')
    assert CALL_FORMATS["qwen3_coder"].split(f"{text}\n{text}", F_AND_G) == ["", f, "\n", f, ""]


@pytest.mark.parametrize("name", UNCLOSED)
def test_value_ends_at_the_tools_next_parameter_when_the_policy_left_out_the_end(name: str) -> None:
    segments = CALL_FORMATS[name].split(UNCLOSED[name][2], F_AND_G)
    assert segments == ["", call("f", '{"a": "ls", "b": 2}'), ""]


@pytest.mark.parametrize(
    "value",
    [
        "assert split('<function=h></function><function=h></function>')",  # no tool offered is named so
        "one\n<parameter=c>\ntwo",  # no parameter of the tool is named so
        "one\n<parameter=a>\ntwo",  # it is the parameter itself
        "the line <parameter=b> in a text",
        "one\n<parameter=b>\ntwo\n</parameter>\n<parameter=b>\n3",  # the parameter follows
    ],
)
def test_value_keeps_tags_that_are_none_of_the_offered_tools(value: str) -> None:
    text = f"<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n<function=g>\n</function>"
    calls = [each for each in CALL_FORMATS["qwen3_coder"].split(text, F_AND_G) if isinstance(each, ParsedCall)]
    expected = {"a": value}
    if value.endswith("3"):
        expected = {"a": "one\n<parameter=b>\ntwo", "b": 3}
    assert [(each.name, json.loads(each.arguments)) for each in calls] == [("f", expected), ("g", {})]
