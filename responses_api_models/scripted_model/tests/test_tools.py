"""One script, spelled as different harnesses take it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from nemo_gym.contract.errors import ConfigError
from responses_api_models.scripted_model.app import ScriptedModel
from responses_api_models.scripted_model.script import HarnessTools, Script

SCRIPT = {
    "tasks": [
        {
            "name": "t",
            "when": {"user": "(?P<city>Oslo)"},
            "turns": [
                {"tool_calls": [{"shell": "echo '$HOME' $city"}]},
                {"tool_calls": [{"tool": "get_weather", "arguments": {"city": "$city"}}]},
                {"tool_calls": [{"name": "Own", "arguments": {"a": 1}}]},
                {"text": "Cold.", "ends": True},
            ],
        }
    ]
}
TOOLS: dict[str, Any] = {
    "shell": {"name": "run", "arguments": {"cmd": "$command", "background": False}},
    "environment": {"name": "mcp__${server}__${tool}", "arguments": {"reason": "why not"}},
}


def said(tools: dict[str, Any], turn: int, words: str = "Oslo") -> tuple[str, list[tuple[str, Any]]]:
    script = Script.model_validate(SCRIPT).spelled(HarnessTools.model_validate(tools), "weather")
    answer = script.answer([{"role": "user", "content": words}, *[{"role": "assistant", "content": "…"}] * turn])
    return answer.text, [(call.name, call.arguments) for call in answer.tool_calls]


def test_command_stands_where_the_harness_wants_it() -> None:
    assert said(TOOLS, 0) == ("", [("run", {"cmd": "echo '$HOME' Oslo", "background": False})])


def test_tool_of_the_environment_has_the_harness_s_name() -> None:
    assert said(TOOLS, 1) == ("", [("mcp__weather__get_weather", {"city": "Oslo", "reason": "why not"})])
    assert said(TOOLS, 2) == ("", [("Own", {"a": 1})])


def test_last_words_come_with_a_call_only_where_the_harness_wants_one() -> None:
    assert said(TOOLS, 3) == ("Cold.", [])
    assert said({**TOOLS, "end": {"name": "submit"}}, 3) == ("Cold.", [("submit", {})])


def test_conversation_beside_the_work_is_answered_by_the_harness_s_own_task() -> None:
    title = {"name": "title", "when": {"user": "^Title"}, "turns": [{"text": "A title"}]}
    assert said({**TOOLS, "tasks": [title]}, 0, "Title for: Oslo") == ("A title", [])
    assert said({**TOOLS, "tasks": [title]}, 3)[0] == "Cold."


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({"shell": TOOLS["shell"]}, "'tool: get_weather', and the harness's tools have no 'environment'"),
        ({"environment": TOOLS["environment"]}, "'shell: echo .*the harness's tools have no 'shell'"),
    ],
)
def test_script_is_refused_when_the_harness_lacks_a_tool(tools: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"task 't': .*{message}"):
        said(tools, 0)


@pytest.mark.parametrize(
    "turn",
    [
        {"tool_calls": [{"shell": "ls", "name": "bash"}]},
        {"tool_calls": [{"arguments": {}}]},
        {"tool_calls": [{"shell": "ls", "arguments": {"a": 1}}]},
        {"tool_calls": [{"shell": "ls"}], "ends": True},
        {"ends": True},
    ],
)
def test_turn_that_says_two_things_or_none_is_refused(turn: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"exactly one of|takes no arguments|no 'tool_calls'|needs 'text'"):
        Script.model_validate({"tasks": [{"name": "t", "turns": [turn]}]})


def model(directory: Path, **block: Any) -> ScriptedModel:
    import json

    path = directory / "script.json"
    path.write_text(json.dumps(SCRIPT))
    values = {"responses_api_models": {"m": {"entrypoint": "app.py", "host": "127.0.0.1", "port": 1, **block}}}
    config = ScriptedModel.config_from("m", {"m": values})
    return ScriptedModel.model_construct(config=cast(Any, config), server_client=cast(Any, None))


def test_model_does_not_start_when_nobody_says_how_the_harness_spells_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set 'tools' to the agent's data/scripted_tools\.yaml"):
        _ = model(tmp_path, script=str(tmp_path / "script.json")).script
    with pytest.raises(ConfigError, match=r"nobody\.yaml', which maps them .* cannot be read: No such file"):
        _ = model(tmp_path, script=str(tmp_path / "script.json"), tools=str(tmp_path / "nobody.yaml")).script


ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("path", sorted(ROOT.glob("responses_api_agents/*/data/scripted_tools.yaml")), ids=str)
def test_shipped_spellings_are_read(path: Path) -> None:
    HarnessTools.load(path)
