from __future__ import annotations

import dataclasses
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.gateway.tokens import History, Sampled, TokenForest, Turn
from nemo_gym.gateway.tokens.forest import IncrementalEncoder, UnprovenError
from nemo_gym.gateway.tokens.policy import PolicyTokenizer
from nemo_gym.gateway.tokens.template import TemplateRefusedError
from nemo_gym.gateway.tokens.trajectories import record_of, restore
from nemo_gym_testing.gateway.tiny.policies import chat_template
from tests.gateway.tokens.conversations import TOOLS, call, exchanges, result, said, sampled_ids, user
from tests.gateway.tokens.policies import FAMILIES, policy, write
from tests.properties import examples

NOW = datetime(2026, 3, 1, 12)


def continuation(family: str, last: dict[str, Any], new: list[dict[str, Any]], **given: Any) -> Any:
    settings = {"system": False, "tools": False, "last_id": None, "now": NOW, **given}
    return IncrementalEncoder(policy(family)).continuation(last, new, **settings)


@pytest.mark.parametrize("family", FAMILIES)
@examples(60)
@given(data=st.data())
def test_incremental_encoding_equals_full_encoding(family: str, data: st.DataObject) -> None:
    used = policy(family)
    encoder = IncrementalEncoder(used)
    start, rounds = data.draw(exchanges(max_calls=1 if family == "llama_headers" else 3))
    tools = TOOLS if data.draw(st.booleans()) else None
    history = start
    ids = encoder.full(history, tools=tools, now=NOW)
    for answer, follows in rounds:
        ids = ids + sampled_ids(used, history, answer, tools, NOW, follows)
        new = encoder.continuation(
            answer, follows, system=start[0]["role"] == "system", tools=bool(tools), last_id=ids[-1], now=NOW
        )
        assert isinstance(new, list), new
        ids += new
        history = [*history, answer, *follows]
        assert ids == encoder.full(history, tools=tools, now=NOW)


def test_reasoning_stays_in_a_tool_loop_exactly_as_the_template_renders_it() -> None:
    used, encoder = policy("chatml_think"), IncrementalEncoder(policy("chatml_think"))
    history = [user("do it")]
    answer = {**said("now", call(1, {"a": 1})), "reasoning_content": "think first"}
    ids = encoder.full(history, tools=TOOLS, now=NOW)
    ids += sampled_ids(used, history, answer, TOOLS, NOW, [result(1, "done")])
    assert "think first" in used.decode(ids)
    new = encoder.continuation(answer, [result(1, "done")], system=False, tools=True, last_id=ids[-1], now=NOW)
    assert isinstance(new, list)
    assert ids + new == encoder.full([*history, answer, result(1, "done")], tools=TOOLS, now=NOW)


def test_new_messages_are_encoded_as_in_the_whole_when_the_template_drops_reasoning_before_them() -> None:
    used, encoder = policy("chatml_think"), IncrementalEncoder(policy("chatml_think"))
    answer = {**said("now"), "reasoning_content": "think first"}
    new = encoder.continuation(answer, [user("and then?")], system=False, tools=False, last_id=None, now=NOW)
    whole = encoder.full([user("do it"), answer, user("and then?")], tools=None, now=NOW)
    assert isinstance(new, list)
    assert whole[-len(new) :] == new
    assert "think first" not in used.decode(whole)


@pytest.mark.parametrize(
    ("family", "dropping"), [("chatml_think", {"user"}), ("llama_headers", set()), ("header_stop", set())]
)
def test_dropped_reasoning_is_found_by_role(family: str, dropping: set[str]) -> None:
    assert IncrementalEncoder(policy(family)).drops_reasoning == dropping


def test_dropped_reasoning_is_found_when_the_template_only_reads_it_beside_the_content(tmp_path: Path) -> None:
    inline = "{%- if '</think>' in content and not reasoning %}"
    template = chat_template("chatml_think")
    assert inline in template
    used = PolicyTokenizer.load(
        write(tmp_path, "chatml_think"), chat_template=template.replace(inline, "{%- if false %}")
    )
    assert IncrementalEncoder(used).drops_reasoning == {"user"}


@pytest.mark.parametrize(
    ("family", "tools", "says"),
    [
        ("moving_tools", True, "moves the tools"),
        ("numbered", False, "differently depending on earlier ones"),
        ("plain_text", False, "without a token that ends a turn"),
    ],
)
def test_continuation_is_unproven_when_the_template_does_not_append(family: str, tools: bool, says: str) -> None:
    with pytest.raises(UnprovenError, match=says):
        continuation(family, said("yes"), [user("next")], tools=tools)


CHATML = (
    "{{ '<|im_start|>' + message.role + '\\n' + message.content }}{% if message.tool_calls %}{{ message.tool_calls }}"
)
CHATML += "{% endif %}{{ '<|im_end|>\\n' }}"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
LAST_RESULT = (
    "{% if loop.last or message.role != 'tool' or messages[loop.index].role != 'tool' %}" + CHATML + "{% endif %}"
)
NUMBERED_RESULTS = (
    "{% set seen = namespace(results=0) %}{% for message in messages %}{% if message.role == 'tool' %}"
    "{% set seen.results = seen.results + 1 %}{{ seen.results }}{% endif %}" + CHATML + "{% endfor %}" + ASK
)
COUNTED = "{{ messages | length }} messages\n{% for message in messages %}" + CHATML + "{% endfor %}" + ASK


@pytest.mark.parametrize(
    ("template", "stops", "new", "says"),
    [
        (COUNTED, [], 1, "anew"),
        ("{% for message in messages %}" + LAST_RESULT + "{% endfor %}" + ASK, [], 2, "elsewhere or nowhere"),
        ("{% for message in messages %}{{ message.role + message.content + ' the' }}{% endfor %}", ["e"], 1, "joins"),
        (NUMBERED_RESULTS, [], 2, "differently depending on earlier ones"),
    ],
)
def test_continuation_is_unproven_when_it_would_differ_from_the_whole(
    tmp_path: Path, template: str, stops: list[str], new: int, says: str
) -> None:
    used = PolicyTokenizer.load(write(tmp_path, "chatml_think"), chat_template=template, stop_tokens=stops)
    calls = [call(1, "{}"), call(2, "{}")] if new == 2 else []
    follows = [result(1, "one"), result(2, "two")] if new == 2 else [user("next")]
    used.traits = dataclasses.replace(used.traits, tool_use=True)
    encoder = IncrementalEncoder(used)
    with pytest.raises(UnprovenError, match=says):
        encoder.continuation(said("yes", *calls), follows, system=False, tools=False, last_id=None, now=NOW)


def test_template_that_appends_without_tools_is_proven_when_there_are_none() -> None:
    assert isinstance(continuation("moving_tools", said("yes"), [user("next")], tools=False), list)


def test_turn_end_is_written_when_the_answer_was_cut_off() -> None:
    used = policy("chatml_think")
    cut = continuation("chatml_think", said("ye"), [user("go on")], last_id=used.encode("e")[0])
    assert used.decode(cut) == "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


def test_turn_end_is_not_doubled_when_the_policy_ended_with_another_stop_token() -> None:
    used = policy("llama_headers")
    assert used.stops.keys() == {"<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"}
    new = continuation("llama_headers", said("x"), [user("y")], last_id=used.stops["<|eom_id|>"])
    assert used.decode(new).startswith("<|start_header_id|>user")


def test_next_header_is_kept_when_the_policy_guessed_another_one() -> None:
    used = policy("header_stop")
    guessed = continuation("header_stop", said("x"), [user("y")], last_id=used.stops["<|user|>"])
    other = continuation("header_stop", said("x"), [user("y")], last_id=used.stops["<|observation|>"])
    assert used.decode(guessed) == "\ny<|assistant|>\n"
    assert used.decode(other) == "<|user|>\ny<|assistant|>\n"


def test_strict_template_gets_reminders_and_joined_messages_it_can_take() -> None:
    used = policy("inst_strict")
    new = continuation("inst_strict", said("x"), [{"role": "system", "content": "mind"}, user("y")])
    assert used.decode(new) == "</s>[INST]<system-reminder>\nmind\n</system-reminder>\n\ny[/INST]"


SWITCHED = {
    "system": [{"role": "system", "content": "Be terse. /quick\n"}, user("read")],
    "user": [user("read " * 50 + "/QUICK")],
    "neither": [{"role": "system", "content": "say /quick to a user"}, user("/quick reads")],
    "both": [{"role": "system", "content": "/quick"}, user("take your time /slow")],
}


@pytest.mark.parametrize("where", SWITCHED)
def test_every_later_prompt_obeys_the_switches_that_the_template_finds_in_earlier_texts(where: str) -> None:
    used = policy("switch_in_text")
    forest = TokenForest(IncrementalEncoder(used), used, History.VERBATIM, NOW)
    messages = SWITCHED[where]
    turns: list[Turn] = []
    follows = [[result(1, "a.txt /slow")], [user("and b /slow")], [user("then c")], [user("now d /quick")], []]
    for number, new in enumerate(follows):
        prepared = forest.prepare(messages, TOOLS)
        assert prepared.parent is (turns[-1] if turns else None), prepared.detail
        rendered = used.encode(used.render(messages, tools=TOOLS, now=NOW))
        assert prepared.context.tolist() == rendered[-len(prepared.context) :]
        answer = said("ok", *([call(1, {"path": "a"})] if not number else []))
        turns.append(forest.commit(prepared, Sampled([*used.encode("ok"), *used.stops.values()][:3]), answer))
        messages = [*messages, answer, *new]
        if number == 1:  # as after a restart
            records = [record_of(turn) for turn in turns]
            forest = TokenForest(IncrementalEncoder(used), used, History.VERBATIM, NOW)
            restore(forest, records)
            turns = list(forest.turns)


def test_continuation_is_unproven_when_a_new_switch_changes_earlier_answers(tmp_path: Path) -> None:
    quick = "{% set quick = '[quick]' if '/quick' in messages | map(attribute='content') | join else '' %}"
    shown = CHATML.replace("message.content", "message.content + (quick if message.role == 'assistant' else '')")
    template = (
        quick
        + "{% for message in messages %}"
        + shown
        + "{% endfor %}"
        + ASK
        + "{{ quick if add_generation_prompt else '' }}"
    )
    used = PolicyTokenizer.load(write(tmp_path, "chatml_think"), chat_template=template)
    encoder = IncrementalEncoder(used)
    given: dict[str, Any] = {"system": False, "tools": False, "last_id": None, "now": NOW}
    with pytest.raises(UnprovenError, match="anew"):
        encoder.continuation(said("yes"), [user("next /quick")], **given)
    assert encoder.continuation(said("yes"), [user("next")], **given)
    found = encoder.switch_messages([user("first /quick")])
    assert used.decode(encoder.continuation(said("yes"), [user("next")], **given, switch_messages=found)).endswith(
        "[quick]"
    )


@pytest.mark.parametrize(
    "text", ["Put it into <slow></slow>. /quick", "/quick", "</slow> /slow /quick", "/quick /slow"]
)
def test_word_that_a_template_takes_for_no_switch_is_none_in_a_continuation(text: str, tmp_path: Path) -> None:
    template = (
        "{% set ns = namespace(slow=false) %}{% for message in messages %}"
        "{% if message.role == 'user' %}{% set words = message.content.replace('</slow>', '') %}"
        "{% if '/slow' in words %}{% set ns.slow = true %}"
        "{% elif '/quick' in words %}{% set ns.slow = false %}{% endif %}"
        "{% endif %}" + CHATML + "{% endfor %}" + ASK + "{{ '[slow]' if add_generation_prompt and ns.slow else '' }}"
    )
    used = PolicyTokenizer.load(write(tmp_path, "chatml_think"), chat_template=template)
    encoder = IncrementalEncoder(used)
    first, answer, new = user(text), said("yes"), user("next")
    given: dict[str, Any] = {"system": False, "tools": False, "last_id": None, "now": NOW}
    continued = used.decode(
        encoder.continuation(answer, [new], **given, switch_messages=encoder.switch_messages([first]))
    )
    assert used.render([first, answer, new], tools=None, now=NOW).endswith(continued)


@pytest.mark.parametrize("family", FAMILIES)
def test_template_that_looks_for_nothing_in_texts_has_no_switches(family: str) -> None:
    assert not IncrementalEncoder(policy(family)).switches


def test_refusal_names_the_templates_own_words() -> None:
    with pytest.raises(TemplateRefusedError, match="only one call at a time"):
        IncrementalEncoder(policy("llama_headers")).full([user("x"), said("", call(1, {}), call(2, {}))], tools=None)
