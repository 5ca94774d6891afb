from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.contract.errors import ConfigError
from nemo_gym.gateway.tokens.policy import PolicyTokenizer
from nemo_gym.gateway.tokens.template import ChatTemplate, TemplateRefusedError
from tests.gateway.tokens.conversations import call, result, said, user
from tests.gateway.tokens.policies import FAMILIES, policy, write
from tests.properties import examples


def test_template_renders_json_without_html_escapes() -> None:
    template = ChatTemplate("{{ messages[0].content | tojson }}")
    assert template.render([user("<é & 漢>")]) == '"<é & 漢>"'


def test_template_has_loop_controls_generation_blocks_and_a_clock() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert ChatTemplate(source).render([user("a"), user("b")]) == "a"
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([], now=datetime(2031, 1, 1)) == "2031"


def test_template_cannot_reach_python_or_change_what_it_is_given() -> None:
    for source in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ ''.format.__globals__ }}"):
        try:
            shown = ChatTemplate(source).render([user("a")])
        except TemplateRefusedError:
            continue
        assert shown == ""


def test_template_with_a_syntax_error_is_a_config_error_with_its_line() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("fine\n{% if %}")


def test_policy_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        PolicyTokenizer.load(tmp_path)


def test_policy_without_a_template_says_what_to_set(tmp_path: Path) -> None:
    folder = write(tmp_path, "chatml_think")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="chat_template"):
        PolicyTokenizer.load(folder)


def test_policy_reads_a_template_from_the_tokenizer_config(tmp_path: Path) -> None:
    folder = write(tmp_path, "chatml_think")
    source = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": "broken"}, {"name": "tool_use", "template": source}]
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    assert PolicyTokenizer.load(folder).render([user("x")]) == policy("chatml_think").render([user("x")])


def test_policy_is_loaded_when_its_template_lists_the_parameters_of_tools(tmp_path: Path) -> None:
    listed = "{% for tool in tools or [] %}{% for name in tool.function.parameters.properties.keys() %}{{ name }}"
    folder = write(tmp_path, "chatml_think")
    own = (folder / "chat_template.jinja").read_text()
    loaded = PolicyTokenizer.load(folder, chat_template=f"{listed}{{% endfor %}}{{% endfor %}}{own}")
    assert loaded.stops.keys() == policy("chatml_think").stops.keys()


def test_policy_rejects_a_stop_token_it_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="<nope>"):
        PolicyTokenizer.load(write(tmp_path, "chatml_think"), stop_tokens=["<nope>"])


@pytest.mark.parametrize(
    ("family", "trait", "value"),
    [
        ("chatml_think", "arguments", "object"),
        ("bar_tokens", "arguments", "string"),
        ("inst_strict", "call_ids", "alnum9"),
        ("inst_strict", "mid_system", "reminder"),
        ("inst_strict", "consecutive_users", False),
        ("inst_strict", "user_after_tool", False),
        ("moving_tools", "system", "user"),
        ("moving_tools", "tool_use", False),
        ("chatml_think", "tool_use", True),
    ],
)
def test_traits_are_found_by_trying(family: str, trait: str, value: object) -> None:
    assert getattr(policy(family).traits, trait) == value


def test_tool_results_are_refused_when_the_template_would_not_show_the_calls() -> None:
    with pytest.raises(TemplateRefusedError, match="made for tools"):
        policy("numbered").render([user("x"), said("", call(1, "{}")), result(1, "out")])


@pytest.mark.parametrize("depth", [100, 480, 600, 900])
def test_tools_are_refused_or_taken_however_deep_their_schemas_are(depth: int) -> None:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"a": schema}
    tools = [{"type": "function", "function": {"name": "shell", "parameters": schema}}]
    try:
        policy("chatml_think").render([user("x")], tools=tools)
    except TemplateRefusedError as error:
        assert depth > 100 and "nested too deeply" in str(error)


def test_call_ids_stay_linked_when_the_template_wants_nine_characters() -> None:
    shown = policy("inst_strict").render([user("x"), said("", call(1, "{}")), result(1, "out")])
    calls = json.loads(shown.split("[TOOL_CALLS]")[1].split("</s>")[0])
    assert json.loads(shown.split("[TOOL_RESULTS]")[1].split("[/")[0])["call_id"] == calls[0]["id"]


def test_lone_surrogate_in_arguments_is_encoded_as_a_replacement() -> None:
    used = policy("chatml_think")
    shown = used.decode(used.encode(used.render([user("x"), said("", call(1, '{"a": "\\ud800"}')), result(1, "out")])))
    assert '{"a": "?"}' in shown


def test_importing_the_token_code_loads_neither_tokenizers_nor_numpy() -> None:
    code = "import sys, nemo_gym.gateway.tokens; print({'tokenizers', 'jinja2', 'numpy'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


@pytest.mark.parametrize("written", ['{"id": 123456789012345678901234567890}', '{"a": "\\ud800"}'])
@pytest.mark.parametrize("family", ["chatml_think", "bar_tokens"])
def test_arguments_reach_the_template_as_written_when_few_json_readers_take_them(family: str, written: str) -> None:
    call = {"id": "abcdef123", "type": "function", "function": {"name": "f", "arguments": written}}
    shown = policy(family).render(
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    )
    value = json.loads(written)
    assert any(json.dumps(next(iter(value.values())), ensure_ascii=plain) in shown for plain in (True, False))


@pytest.mark.parametrize("family", FAMILIES)
@examples(80)
@given(text=st.text() | st.lists(st.sampled_from(["<|im_end|>", " the", "\n", "</s>", "fox é", "  "])).map("".join))
def test_ids_are_those_of_the_tokenizers_own_encoding(family: str, text: str) -> None:
    used = policy(family)
    written = text.encode("utf-8", "replace").decode()  # no tokenizer takes lone surrogates
    assert used.encode(text) == used.tokenizer.encode(written, add_special_tokens=False).ids
