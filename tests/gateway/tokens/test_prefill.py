"""A request that ends in an assistant's text: the policy goes on with that text, and only what it adds is its own."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.gateway.tokens import IncrementalEncoder, PolicyTokenizer, Sampled, TemplateRefusedError
from nemo_gym.gateway.tokens.template import ChatTemplate
from tests.gateway.tokens.conversations import TEXT, TOOLS, call, exchanges, result, said, sampled_ids, user
from tests.gateway.tokens.policies import FAMILIES, policy
from tests.gateway.tokens.sessions import Session
from tests.properties import examples

NOW = datetime(2026, 3, 1, 12)
PREFILL = '{"name": "'


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_ends_with_the_prefill_and_nothing_behind_it(family: str) -> None:
    used = policy(family)
    prompt = used.decode(IncrementalEncoder(used).full([user("a"), said(PREFILL)], tools=None, now=NOW))
    assert prompt.endswith(PREFILL)
    assert prompt.removesuffix(PREFILL).rstrip() in used.decode(
        used.encode(used.render([user("a"), said("x")], now=NOW))
    )


@pytest.mark.parametrize("family", FAMILIES)
@examples(40)
@given(data=st.data())
def test_incremental_encoding_equals_full_encoding_when_the_request_ends_in_a_prefill(
    family: str, data: st.DataObject
) -> None:
    used, encoder = policy(family), IncrementalEncoder(policy(family))
    start, rounds = data.draw(exchanges(max_calls=1))
    tools = TOOLS if data.draw(st.booleans()) else None
    prefill = said("p" + data.draw(TEXT) + data.draw(st.sampled_from(["", " ", "<|im_end|>", "</s>"])))
    history, ids = start, encoder.full(start, tools=tools, now=NOW)
    for answer, follows in rounds:
        ids = ids + sampled_ids(used, history, answer, tools, NOW, follows)
        given = {"system": start[0]["role"] == "system", "tools": bool(tools), "last_id": ids[-1], "now": NOW}
        new = encoder.continuation(answer, [*follows, prefill], **given)
        assert isinstance(new, list), new
        history = [*history, answer, *follows]
        assert ids + new == encoder.full([*history, prefill], tools=tools, now=NOW)
        new = encoder.continuation(answer, follows, **given)
        assert isinstance(new, list), new
        ids += new


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spelling", ["joined", "apart"])
def test_prefilled_answer_stays_in_its_conversation_however_the_harness_sends_it_back(
    family: str, spelling: str
) -> None:
    session = Session(family)
    session.ask([user("a")], said("b"))
    history = [user("a"), said("b"), user("c")]
    turn = session.ask([*history, said(PREFILL)], said('shell"}'))
    assert turn.parent is not None
    back = [said(PREFILL + 'shell"}')] if spelling == "joined" else [said(PREFILL), said('shell"}')]
    session.ask([*history, *back, user("go on")], said("done"))
    (trajectory,) = session.check()
    assert len(trajectory.turns) == 3
    whole = session.policy.decode(trajectory.prompt_ids + trajectory.response_ids)
    assert '{"name":"shell"}' in whole.replace(" ", "")  # one tokenizer starts every piece with a space
    second = trajectory.turns[1]
    sampled = session.policy.decode(trajectory.response_ids[second.start : second.end])
    assert sampled.startswith('shell"}')
    assert trajectory.response_mask[second.start - 1] == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_answer_cut_off_for_its_length_goes_on_where_it_stopped(family: str) -> None:
    session = Session(family)
    prepared = session.forest.prepare([user("a")])
    ids = session.policy.encode("half an answ")
    first = session.forest.commit(prepared, Sampled(ids, [-1.0] * len(ids), "length"), said("half an answ"))
    resumed = session.forest.prepare([user("a"), said("half an answ")])
    assert (resumed.parent, len(resumed.context)) == (first, 0)
    assert resumed.prompt.ids().tolist() == [*prepared.prompt.ids(), *ids]
    rest = session.policy.encode("er")
    session.forest.commit(resumed, Sampled(rest, [-2.0] * len(rest)), said("er"))
    session.forest.prepare([user("a"), said("half an answer"), user("b")])
    (trajectory,) = session.trajectories()
    assert trajectory.response_ids.tolist() == [*ids, *rest]
    assert set(trajectory.response_mask) == {1}
    again = session.forest.prepare([user("a"), said("half an answer"), user("b")])
    assert again.parent is session.forest.turns[1]


def test_prefill_is_refused_when_the_template_does_not_show_it_as_it_is() -> None:
    used = policy("chatml_think")
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content if m.role == 'user' or not loop.last or"
        " m.content == 'answerprobe' or 'secondprobetext' in m.content else '...' }}<|im_end|>{% endfor %}"
    )
    hiding = PolicyTokenizer(used.tokenizer, ChatTemplate(source), [])
    with pytest.raises(TemplateRefusedError, match="end in an assistant's text"):
        IncrementalEncoder(hiding).full([user("a"), said(PREFILL)], tools=None, now=NOW)


@pytest.mark.parametrize("message", [said("x", call(1, {})), said("")], ids=["calls", "nothing"])
def test_assistant_message_with_calls_or_nothing_is_no_prefill(message: dict[str, Any]) -> None:
    session = Session()
    prepared = session.forest.prepare([user("a"), message])
    assert session.policy.decode(prepared.prompt.ids()).endswith("<|im_start|>assistant\n")


def test_prefill_behind_tool_results_continues_the_tool_loop() -> None:
    session = Session()
    answer = said("b", call(1, {}))
    session.ask([user("a")], answer, TOOLS)
    prepared = session.forest.prepare([user("a"), answer, result(1, "x"), said("So")], TOOLS)
    assert prepared.parent is session.forest.turns[0]
    shown = session.policy.decode(prepared.context)
    assert shown.endswith("So")
    assert shown.count("<|im_start|>assistant") == 1
