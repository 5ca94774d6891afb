"""Parsers by name: what is unknown, what is missing, and what third parties bring."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.contract.errors import ConfigError
from nemo_gym.gateway.parsing import ParsedAnswer, ParsedCall, Segment, answer_parser
from nemo_gym.gateway.tokens.policy import PolicyTokenizer
from tests.gateway.parsing.policies import FOLDER, policy
from tests.gateway.tokens import policies as token_policies

HERE = "tests.gateway.parsing.test_registry"


class Shouting:
    """A third party's format: every word in capitals is a call."""

    def split(self, text: str, tools: Sequence[Any] | None) -> list[Segment]:
        if "raise" in text:
            raise RuntimeError("no more")
        return [ParsedCall(word, "{}") if word.isupper() else word for word in text.split()]


class Whole:
    def __init__(self, policy: PolicyTokenizer) -> None:
        self.policy = policy

    def parse(self, text: str, *, prompt_tail: str, tools: Sequence[Any] | None) -> ParsedAnswer:
        if "raise" in text:
            raise KeyError(text)
        return ParsedAnswer(text, prompt_tail, (ParsedCall("f", text),))


class Reversed:
    def split(self, text: str, prompt_tail: str) -> tuple[str | None, str | None]:
        content, _, reasoning = text.partition("|")
        return reasoning, content


def shouting(policy: PolicyTokenizer) -> Shouting:
    return Shouting()


def reversing(policy: PolicyTokenizer) -> Reversed:
    return Reversed()


def nothing(policy: PolicyTokenizer) -> None:
    return None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tool_parser": "hermess"}, "tool_parser: unknown parser 'hermess' (did you mean 'hermes'?); known are auto"),
        ({"reasoning_parser": "thinks"}, "reasoning_parser: unknown parser 'thinks' (did you mean 'think'?)"),
        ({"tool_parser": "vllm:hermes"}, "tool_parser: 'vllm:hermes' needs the package 'vllm'"),
        ({"tool_parser": "sglang:hermes"}, "tool_parser: 'sglang:hermes' needs the package 'sglang'"),
        ({"reasoning_parser": "vllm:qwen3"}, "reasoning_parser: 'vllm:qwen3' needs the package 'vllm'"),
        ({"reasoning_parser": "sglang:qwen3"}, "reasoning_parser: 'sglang:qwen3' needs the package 'sglang'"),
        ({"tool_parser": "no.such.module:f"}, "tool_parser: cannot import 'no.such.module:f'"),
        ({"tool_parser": f"{HERE}:absent"}, "tool_parser: cannot import"),
        ({"tool_parser": f"{HERE}:HERE"}, "is not callable"),
        ({"tool_parser": f"{HERE}:nothing"}, "has neither 'split' nor 'parse'"),
        ({"reasoning_parser": f"{HERE}:nothing"}, "has no method 'split'"),
        ({"tool_parser": "transformers:/no/such/place"}, "tool_parser: cannot read '/no/such/place'"),
        ({"tool_parser": "harmony", "reasoning_parser": "think"}, "parses whole answers, reasoning included"),
    ],
)
def test_parser_is_refused_with_the_way_out_when_it_cannot_be_had(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        answer_parser(policy("chatml_think"), **options)
    assert said in str(raised.value)


def test_response_template_is_asked_for_when_a_model_has_none(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no response_template"):
        answer_parser(policy("chatml_think"), tool_parser=f"transformers:{tmp_path}")


@pytest.mark.parametrize("family", ["header_stop", "numbered", "plain_text"])
def test_answers_stay_text_and_the_log_says_so_when_no_format_is_recognised(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        parser = answer_parser(token_policies.policy(family))
    assert parser.name == "text+none"
    assert len(caplog.records) == 1
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parser.parse(text, prompt_tail="", tools=[]) == ParsedAnswer(text)


def test_third_partys_format_of_calls_is_used_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    parser = answer_parser(policy("chatml_think"), tool_parser=f"{HERE}:shouting")
    assert parser.parse("<think>x</think>do RUN now", prompt_tail="", tools=None) == ParsedAnswer(
        "do\nnow", "x", (ParsedCall("RUN", "{}"),)
    )
    for _ in range(2):
        assert parser.parse("raise RUN", prompt_tail="", tools=None) == ParsedAnswer("raise RUN")
    assert len(caplog.records) == 1


def test_third_partys_parser_of_whole_answers_is_used_and_its_calls_are_checked() -> None:
    parser = answer_parser(policy("chatml_think"), tool_parser=f"{HERE}:Whole")
    assert parser.parse("{}", prompt_tail="t", tools=None) == ParsedAnswer("{}", "t", (ParsedCall("f", "{}"),))
    assert parser.parse("{}", prompt_tail="t", tools=None, parse_calls=False) == ParsedAnswer("{}")
    assert parser.parse("no json", prompt_tail="t", tools=None) == ParsedAnswer("no json")
    assert parser.parse("raise", prompt_tail="t", tools=None) == ParsedAnswer("raise")


def test_third_partys_format_of_reasoning_is_used() -> None:
    parser = answer_parser(policy("chatml_think"), reasoning_parser=f"{HERE}:reversing")
    assert parser.parse("yes|hm", prompt_tail="", tools=None) == ParsedAnswer("yes", "hm")


HARMONY = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x":  1}<|call|>'
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HARMONY, ParsedAnswer("I look.", "hm", (ParsedCall("f", '{"x":  1}'),))),
        (HARMONY.removesuffix("<|call|>"), ParsedAnswer("I look.", "hm", (ParsedCall("f", '{"x":  1}'),))),
        (
            " to=functions.f<|channel|>commentary json<|message|>{}",
            ParsedAnswer(None, None, (ParsedCall("f", "{}"),)),
        ),
        ("<|channel|>final<|message|>yes", ParsedAnswer("yes")),
        ("<|channel|>analysis<|message|>cut of", ParsedAnswer(None, "cut of")),
        ("plain", ParsedAnswer("plain")),
        ("stray<|channel|>final<|message|>yes<|end|>more", ParsedAnswer("stray\nyes\nmore")),
        (
            "<|channel|>commentary to=functions.f<|message|>{bad",
            ParsedAnswer("<|channel|>commentary to=functions.f<|message|>{bad"),
        ),
    ],
)
def test_harmony_channels_are_told_apart(text: str, expected: ParsedAnswer) -> None:
    parser = answer_parser(policy("chatml_think"), tool_parser="harmony")
    assert parser.parse(text, prompt_tail="<|start|>assistant", tools=None) == expected


def test_harmony_is_found_when_the_template_writes_it(tmp_path: Path) -> None:
    template = """
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.content %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|im_end|>' }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<|start|>assistant to=functions.' + call.function.name + '<|channel|>commentary json<|message|>' }}
            {{- call.function.arguments | tojson + '<|call|>' }}
        {%- endfor %}
    {%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""  # noqa: E501
    token_policies.write(tmp_path, "chatml_think")
    assert answer_parser(PolicyTokenizer.load(tmp_path, chat_template=template)).name == "harmony"


def test_formats_are_found_when_the_prompt_opens_reasoning_that_the_template_leaves_out_of_answers(
    tmp_path: Path,
) -> None:
    template = (FOLDER / "qwen3_coder.jinja").read_text()
    opening = template.replace("{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>assistant\\n<think>\\n' }}")
    assert opening != template
    token_policies.write(tmp_path, "chatml_think")
    assert answer_parser(PolicyTokenizer.load(tmp_path, chat_template=opening)).name == "qwen3_coder+think"


def test_importing_the_parsers_loads_no_engine_and_no_transformers() -> None:
    script = "import sys, nemo_gym.gateway.parsing; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", f"import json; {script}"], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert not loaded & {"vllm", "sglang", "transformers", "torch", "tokenizers", "jinja2"}
