"""Scripts as files: which rule answers, which step, and what is filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_gym.contract.errors import ConfigError
from nemo_gym_testing.gateway.tiny import FAMILIES, CallView, Script, load_script
from nemo_gym_testing.gateway.tiny.rendering import AnswerRenderer
from tests.gateway.testing.runs import TOOLS, policy, user

RULES = r"""
rules:
  - name: title
    no_tools: true
    when: "(?i)title"
    steps: [{say: A title}]
    limit: 1
  - name: summary
    when: "(?i)summarise .*(?P<subject>repository)"
    captures: {mark: 'out-(\d+)'}
    steps: [{say: "The $subject is at out-$mark, $$ and $HOME stay."}]
  - name: marked
    when: MARKED
    where: head
    step: 'out-(\d+)'
    steps: [{say: zero}, {say: one}, {say: two}]
    after: sample
  - name: work
    tools: [shell]
    steps:
      - {think: hm, say: I look., call: {name: shell, arguments: {command: "cat ${HOME} $(ls)"}}}
      - {text: "raw <tool_call>"}
"""


@pytest.fixture
def script(tmp_path: Path) -> Script:
    (tmp_path / "script.yaml").write_text(RULES)
    return load_script(tmp_path / "script.yaml")


def view(*messages: dict[str, Any], tools: Any = TOOLS, family: str = "chatml_think") -> CallView:
    used = policy(family)
    prompt = used.render(messages, tools=tools)
    return CallView(prompt, used.encode(prompt), 0, AnswerRenderer(used))


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def content(answer: Any) -> Any:
    return answer["content"]


def test_step_follows_the_answers_of_the_conversation_and_the_last_repeats(script: Script) -> None:
    first = script(view(user("go")))
    assert isinstance(first, dict)
    assert first == {
        "content": "I look.",
        "reasoning_content": "hm",
        "tool_calls": [{"name": "shell", "arguments": {"command": "cat ${HOME} $(ls)"}}],
    }
    assert script(view(user("go"), said("a"), user("on"))) == "raw <tool_call>"
    assert script(view(user("go"), said("a"), user("on"), said("b"), user("on"))) == "raw <tool_call>"


def test_rule_answers_as_often_as_its_limit_and_unfit_calls_are_sampled(script: Script) -> None:
    asked = view(user("Give a title"), tools=None)
    assert content(script(asked)) == "A title"
    assert script(asked) is None


def test_captures_fill_in_and_other_dollar_signs_stay(script: Script) -> None:
    answer = script(view(user("x"), said("a"), user("out-3 then out-14"), said("b"), user("summarise the repository")))
    assert content(answer) == "The repository is at out-14, $$ and $HOME stay."


def test_step_follows_marks_in_the_prompt_when_it_names_them(script: Script) -> None:
    def system(text: str) -> CallView:
        return view({"role": "system", "content": "MARKED"}, user(text))

    assert content(script(system("start"))) == "zero"
    assert content(script(system("out-0"))) == "one"
    assert content(script(system("out-0 out-1"))) == "two"
    assert script(system("out-2")) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_and_tools_are_read_from_prompts_of_every_family(family: str) -> None:
    call = {"id": "abcdef123", "type": "function", "function": {"name": "other", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "abcdef123", "content": "out"}
    history = [user("go")]
    for number in range(4):
        assert view(*history, family=family).answers == 2 * number
        assert view(*history, family=family).tools == ("shell",)
        history += [{**said(""), "tool_calls": [call]}, result]
        assert view(*history, family=family).answers == 2 * number + 1
        history += [said("done"), user("more")]
    assert view(*history, tools=None, family=family).tools == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rules: [{steps: []}]", "steps"),
        ("rules: [{steps: [{say: x}], whn: y}]", "whn"),
        ("rules: [{steps: [{say: x}], step: 'MARK'}]", "group"),
        ("rules: [{steps: [{say: x}], captures: {a: b}}]", "group"),
        ("rules: [{steps: [{say: x}], when: '('}]", "when"),
        ("rules: [", "script.yaml"),
    ],
)
def test_wrong_file_is_a_config_error_that_names_the_entry(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "script.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_script(file)
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        load_script(tmp_path / "missing.yaml")
