"""Scripts: what follows on which conversation, and what is wrong with a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_gym.contract.errors import ConfigError
from responses_api_models.scripted_model.script import Script, ScriptError

EXAMPLE = Path(__file__).parent.parent / "data" / "example_script.yaml"


def script(*tasks: dict[str, Any]) -> Script:
    return Script.model_validate({"tasks": tasks})


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def turn(observed: str = "ok") -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": "…"}, {"role": "tool", "tool_call_id": "c", "content": observed}]


def test_turn_is_the_number_of_answers_so_far() -> None:
    told = script({"name": "t", "turns": [{"text": "one"}, {"text": "two"}, {"text": "three"}]})
    said = [told.answer([user("x"), *turn() * done]).text for done in range(3)]
    assert said == ["one", "two", "three"]


def test_first_task_whose_patterns_are_found_answers() -> None:
    told = script(
        {"name": "system", "when": {"user": "sum", "system": "terse"}, "turns": [{"text": "4"}]},
        {"name": "user", "when": {"user": "sum.*numbers"}, "turns": [{"text": "four"}]},
    )
    assert told.answer([{"role": "system", "content": "be terse"}, user("sum")]).task == "system"
    assert told.answer([user([{"type": "text", "text": "the sum\nof numbers"}])]).task == "user"  # type: ignore[arg-type]


def test_branch_follows_on_what_was_observed_in_its_own_turn() -> None:
    told = Script.load(EXAMPLE)
    asked = [user("weather in Oslo")]
    assert told.answer(asked).tool_calls[0].arguments == {"city": "Oslo"}
    assert told.answer([*asked, *turn("-3 degrees")]).text == "It is cold in Oslo."
    assert told.answer([*asked, *turn("city not found")]).text == "I could not find out."


def test_branches_can_loop() -> None:
    told = script(
        {
            "name": "poll",
            "turns": [
                {"id": "look", "text": "looking", "then": [{"observed": "busy", "goto": "look"}]},
                {"text": "free"},
            ],
        }
    )
    assert told.answer([user("x"), *turn("busy") * 5]).text == "looking"
    assert told.answer([user("x"), *turn("busy") * 5, *turn("idle")]).text == "free"


def test_recorded_messages_are_replayed() -> None:
    call = {"id": "c9", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    told = script(
        {
            "name": "recorded",
            "messages": [
                user("x"),
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c9", "content": "a b"},
                {"role": "assistant", "content": "Two files."},
            ],
        }
    )
    assert told.answer([user("x")]).tool_calls[0].arguments == '{"command": "ls"}'
    assert told.answer([user("x"), *turn()]).text == "Two files."


def test_unknown_conversation_is_quoted_with_the_known_tasks() -> None:
    with pytest.raises(ScriptError, match=r"'something else'.*weather, sum"):
        Script.load(EXAMPLE).answer([user("something else")])


def test_question_after_the_last_turn_is_an_error_unless_it_repeats() -> None:
    ended = {"name": "t", "turns": [{"text": "one"}]}
    with pytest.raises(ScriptError, match="ended after 1 turns"):
        script(ended).answer([user("x"), *turn()])
    assert script({**ended, "repeat_last": True}).answer([user("x"), *turn() * 9]).text == "one"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tasks: []", "tasks"),
        ("tasks: [{name: t, turns: [{}]}]", "'text' or 'tool_calls'"),
        ("tasks: [{name: t, turns: [{text: a, then: [{goto: nowhere}]}]}]", "nowhere"),
        ("tasks: [{name: t, when: {user: '('}, turns: [{text: a}]}]", "regular expression"),
        ("tasks: [{name: t, turns: [{text: a, fault: {status: 500, disconnect: true}}]}]", "exactly one"),
        ("tasks: [{name: t, turns: [{txt: a}]}]", "txt"),
        ("tasks: [", "no YAML"),
    ],
)
def test_wrong_file_is_named_with_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "script.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Script.load(path)
    assert said in str(caught.value) and str(path) in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml"):
        Script.load(tmp_path / "gone.yaml")


def test_documented_format_is_read() -> None:
    readme = (EXAMPLE.parent.parent / "README.md").read_text()
    block = (
        readme.split("```yaml\n")[1]
        .split("```")[0]
        .replace("content: …", "content: x")
        .replace(", tool_calls: […]", "")
    )
    told = Script.model_validate(yaml.safe_load(block))
    assert told.answer([{"role": "system", "content": "a software engineer"}, user("addition of maths")], 1).task
