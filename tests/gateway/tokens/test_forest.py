from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.contract.errors import InvalidBodyError, ModelError
from nemo_gym.gateway.tokens import History, Sampled, SplitReason, TokenForest, trajectories_of
from nemo_gym.gateway.tokens import history as history_module
from nemo_gym.gateway.tokens.trajectories import record_of, restore
from tests.gateway.tokens.conversations import TOOLS, call, result, said, user
from tests.gateway.tokens.policies import FAMILIES
from tests.gateway.tokens.sessions import NOW, Session
from tests.properties import examples

SYSTEM = {"role": "system", "content": "be brief"}


def conversation(session: Session, turns: int, spell: Any = lambda answer: answer) -> list[dict[str, Any]]:
    """A tool loop of ``turns`` answers whose history the harness spells as ``spell`` does."""
    messages: list[dict[str, Any]] = [SYSTEM, user("do it")]
    for number in range(turns):
        answer = said(f"  step {number}\n\n  next \n", call(number, '{"path":"a", "n":1.0}'))
        session.ask(messages, answer, TOOLS)
        messages = [*messages, spell(copy.deepcopy(answer)), result(number, f"out {number}")]
    return messages


@pytest.mark.parametrize("family", FAMILIES)
def test_conversation_is_one_trajectory_of_exactly_what_was_sampled(family: str) -> None:
    session = Session(family)
    conversation(session, 12)
    (trajectory,) = session.check()
    assert len(trajectory.turns) == 12
    assert trajectory.split_reason == "initial"
    assert trajectory.sampled_count == sum(len(one.ids) for one in session.log)
    assert trajectory.weights_versions == ("0", "1", "2")


def strip_text(answer: dict[str, Any]) -> dict[str, Any]:
    return {**answer, "content": answer["content"].strip()}


def spell_arguments(answer: dict[str, Any]) -> dict[str, Any]:
    for each in answer["tool_calls"]:
        arguments = json.loads(each["function"]["arguments"])
        each["function"]["arguments"] = json.dumps({"n": 1, "path": arguments["path"]})
    return answer


def rename_nothing_but_nulls(answer: dict[str, Any]) -> dict[str, Any]:
    return {**answer, "refusal": None, "annotations": [], "function_call": None}


@pytest.mark.parametrize("spell", [strip_text, spell_arguments, rename_nothing_but_nulls])
@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_turns_stay_one_trajectory_when_the_harness_spells_history_anew(family: str, spell: Any) -> None:
    session = Session(family)
    conversation(session, 20, spell)
    (trajectory,) = session.check()
    assert len(trajectory.turns) == 20


def test_no_sampled_token_is_lost_when_a_harness_starts_to_strip_after_the_third_turn() -> None:
    session = Session()
    messages = conversation(session, 3)
    session.ask(messages, said(" padded "), TOOLS)
    stripped = [strip_text(one) if one["role"] == "assistant" else one for one in messages]
    session.ask([*stripped, said("padded"), user("more")], said("done"), TOOLS)
    (trajectory,) = session.check()
    assert len(trajectory.turns) == 5


def test_results_follow_their_calls_when_the_harness_renames_ids_and_reorders_results() -> None:
    session = Session("inst_strict")
    start = [user("go")]
    session.ask(start, said("", call(1, {"path": "a"}), call(2, {"path": "b"})), TOOLS)
    renamed = said("", call(71, {"path": "a"}), call(72, {"path": "b"}))
    results = [result(72, "second"), result(71, "first")]
    session.ask([*start, renamed, *results], said("ok"), TOOLS)
    shown = session.policy.decode(session.log[-1].prompt)
    engine_ids = session.encoder.full([*start, said("", call(1, {}), call(2, {})), result(2, "second")], tools=TOOLS)
    linked = shown.split("[TOOL_RESULTS]")[1].split("[/TOOL_RESULTS]")[0]
    assert linked in session.policy.decode(engine_ids)
    back = [result(81, "first"), result(82, "second")]
    again = said("", call(81, {"path": "a"}), call(82, {"path": "b"}))
    session.ask([*start, again, *back, said("ok"), user("thanks")], said("bye"), TOOLS)
    (trajectory,) = session.check()
    assert len(trajectory.turns) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_system_message_amid_the_conversation_keeps_one_trajectory(family: str) -> None:
    session = Session(family)
    messages = [SYSTEM, user("a")]
    session.ask(messages, said("b"))
    messages = [*messages, said("b"), {"role": "system", "content": "mind the gap"}, user("c")]
    session.ask(messages, said("d"))
    assert "mind the gap" in session.policy.decode(session.log[-1].prompt)
    session.ask([*messages, said("d"), user("e")], said("f"))
    assert len(session.check()) == 1


def test_answer_sent_back_as_several_messages_keeps_one_trajectory() -> None:
    session = Session()
    session.ask([user("a")], said("text", call(1, {}), call(2, {})))
    parts = [said("text"), said("", call(1, {})), said("", call(2, {}))]
    session.ask([user("a"), *parts, result(1, "x"), result(2, "y")], said("b"))
    assert len(session.check()) == 1


def test_sub_agent_is_a_sibling_and_the_main_conversation_goes_on() -> None:
    session = Session()
    main = [SYSTEM, user("a")]
    session.ask(main, said("b"), TOOLS)
    session.ask([{"role": "system", "content": "you search"}, user("find")], said("found"))
    session.ask([*main, said("b"), user("c")], said("d"), TOOLS)
    side, whole = session.check()
    assert (side.split_reason, whole.split_reason) == ("sub_agent", "initial")
    assert len(whole.turns) == 2


def test_sub_agent_under_the_same_instructions_is_told_from_compaction_by_its_tools() -> None:
    session = Session()
    conversation(session, 3)
    fewer = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    session.ask([SYSTEM, user("count the lines")], said("two"), fewer)
    assert [one.split_reason for one in session.check()] == ["initial", "sub_agent"]


def test_conversation_resumed_under_other_instructions_is_edited_history() -> None:
    session = Session()
    _, *messages = conversation(session, 3)
    session.ask([{"role": "system", "content": "other files are there now"}, *messages], said("going on"), TOOLS)
    assert [one.split_reason for one in session.check()] == ["initial", "edited_history"]


def test_compaction_behind_a_call_for_its_summary_is_compaction() -> None:
    session = Session()
    messages = conversation(session, 4)
    session.ask([SYSTEM, messages[1], user("sum up")], said("a summary"), TOOLS)
    kept = [SYSTEM, user("a summary"), said("thanks"), user("the files"), said("seen")]
    session.ask([*kept, user("go on")], said("going on"), TOOLS)
    assert [one.split_reason for one in session.check()] == ["initial", "compaction", "compaction"]


def test_compaction_is_a_sibling_with_its_reason() -> None:
    session = Session()
    messages = conversation(session, 4)
    session.ask([SYSTEM, user("summary of what happened")], said("going on"), TOOLS)
    assert [one.split_reason for one in session.check()] == ["initial", "compaction"]
    session.ask([*messages], said("the old conversation can go on"), TOOLS)
    assert [len(one.turns) for one in session.check()] == [1, 5]


def test_changed_tools_are_a_sibling_with_its_reason() -> None:
    session = Session()
    messages = conversation(session, 2)
    other = copy.deepcopy(TOOLS)
    other[0]["function"]["description"] = "runs anything"
    session.ask(messages, said("x"), other)
    assert [one.split_reason for one in session.check()] == ["initial", "tools_changed"]


def test_reordered_tools_are_the_same_tools() -> None:
    session = Session()
    second = {"type": "function", "function": {"parameters": {"type": "object", "properties": {}}, "name": "zed"}}
    session.ask([user("a")], said("b"), [*TOOLS, second])
    spelled = {"cache_control": {"type": "ephemeral"}, "type": "function"}
    spelled["function"] = {"name": "zed", "strict": None, "parameters": {"properties": {}, "type": "object"}}
    session.ask([user("a"), said("b"), user("c")], said("d"), [spelled, *TOOLS])
    assert len(session.check()) == 1


def test_edited_answer_is_a_sibling_behind_the_shared_turns() -> None:
    session = Session()
    messages = conversation(session, 4)
    edited = copy.deepcopy(messages)
    edited[4]["content"] = "I never said that"
    turn = session.ask(edited, said("x"), TOOLS)
    assert turn.reason is SplitReason.EDITED_HISTORY
    assert turn.parent is session.forest.turns[0]
    assert [one.split_reason for one in session.check()] == ["initial", "edited_history"]


def test_edited_question_is_edited_history() -> None:
    session = Session()
    messages = conversation(session, 2)
    session.ask([messages[0], user("do something else"), *messages[2:]], said("x"), TOOLS)
    assert [one.split_reason for one in session.check()] == ["initial", "edited_history"]


def test_answer_sampled_again_keeps_every_token_of_both() -> None:
    session = Session()
    messages = conversation(session, 5)
    before = session.ask(messages, said("first try"), TOOLS)
    again = session.ask(messages, said("second try"), TOOLS)
    assert again.reason is SplitReason.RESAMPLE
    assert again.parent is before.parent
    session.ask([*messages, said("second try"), user("good")], said("bye"), TOOLS)
    abandoned, main = session.check()
    assert abandoned.split_reason == "resample"
    assert [len(abandoned.turns), len(main.turns)] == [1, 7]
    session.ask([*messages, said("first try"), user("after all")], said("ok"), TOOLS)
    assert [len(one.turns) for one in session.check()] == [2, 7]


def test_first_answer_sampled_again_is_a_sibling() -> None:
    session = Session()
    session.ask([user("a")], said("b"))
    session.ask([user("a")], said("c"))
    assert [one.split_reason for one in session.check()] == ["initial", "resample"]


def test_calls_at_the_same_time_branch_and_keep_each_their_tokens() -> None:
    session = Session()
    start = [user("a")]
    session.ask(start, said("b"))
    asked = [[*start, said("b"), user(text)] for text in ("left", "right")]
    prepared = [session.forest.prepare(messages) for messages in asked]
    for one, text in reversed([*zip(prepared, ("l", "r"), strict=True)]):
        sampled = session.sample(said(text))
        session.log.append(type(session.log[0])(one.prompt.ids(), list(sampled.ids), list(sampled.logprobs or ())))
        session.forest.commit(one, sampled, said(text))
    session.ask([*asked[0], said("l"), user("on")], said("z"))
    right, left = session.check()
    assert (right.split_reason, len(right.turns), len(left.turns)) == ("branch", 1, 3)


@pytest.mark.parametrize(
    "sampled",
    [
        Sampled([5, 6], [-1.0]),
        Sampled([10**7], [-1.0]),
        Sampled([10**12], [-1.0]),
        Sampled([-1], [-1.0]),
        Sampled([5], [float("nan")]),
        Sampled([5], [float("-inf")]),
        Sampled([5.5], [-1.0]),  # type: ignore[list-item]
        Sampled([5], [None]),  # type: ignore[list-item]
    ],
)
def test_answer_that_does_not_fit_changes_nothing(sampled: Sampled) -> None:
    session = Session()
    messages = conversation(session, 2)
    prepared = session.forest.prepare(messages, TOOLS)
    with pytest.raises(ModelError):
        session.forest.commit(prepared, sampled, said("x"))
    session.ask(messages, said("fine"), TOOLS)
    (trajectory,) = session.check()
    assert len(trajectory.turns) == 3


def test_failed_call_changes_nothing() -> None:
    session = Session()
    messages = conversation(session, 2)
    session.forest.prepare([SYSTEM, user("never answered")])
    session.forest.prepare(messages, TOOLS)
    assert session.ask(messages, said("fine"), TOOLS).reason is None


def test_request_without_messages_is_refused() -> None:
    with pytest.raises(InvalidBodyError, match="messages"):
        Session().forest.prepare([])


REMINDER = "<system-reminder>todo: two</system-reminder>"


@pytest.mark.parametrize(
    ("committed", "later", "kept"),
    [
        ("a" + REMINDER, "a", True),
        ("a" + REMINDER, "a\n<system-reminder> todo:  two </system-reminder>", True),
        ("a", "a" + REMINDER, False),
        ("a" + REMINDER, "a<system-reminder>todo: three</system-reminder>", False),
        ("a" + REMINDER, "b" + REMINDER, False),
    ],
)
def test_reminder_in_history_splits_only_when_the_policy_has_not_seen_it(
    committed: str, later: str, kept: bool
) -> None:
    session = Session()
    session.ask([SYSTEM, user(committed)], said("x"))
    session.ask([SYSTEM, user(later), said("x"), user("y")], said("z"))
    assert (len(session.check()) == 1) == kept


def test_message_of_reminders_alone_may_leave_history_or_move_on() -> None:
    session = Session()
    session.ask([SYSTEM, user("a"), user(REMINDER)], said("x"))
    session.ask([SYSTEM, user("a"), said("x"), user("y"), user(REMINDER)], said("z"))
    assert session.policy.decode(session.log[-1].prompt).count("todo: two") == 2
    assert len(session.check()) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_answer_cut_off_by_its_limit_is_closed_and_continued(family: str) -> None:
    session = Session(family)
    prepared = session.forest.prepare([user("a")])
    ids = session.policy.encode("half an answ")
    turn = session.forest.commit(prepared, Sampled(ids, [-1.0] * len(ids), "length"), said("half an answ"))
    resumed = session.forest.prepare([user("a"), said("half an answ"), user("Resume directly.")])
    assert resumed.parent is turn
    assert resumed.prompt.ids()[: turn.end].tolist() == [*prepared.prompt.ids(), *ids]
    shown = session.policy.decode(resumed.context)
    assert shown.startswith(session.policy.turn_end or "<|user|>")
    assert "Resume directly." in shown


def test_answer_without_tokens_is_a_turn_without_tokens() -> None:
    session = Session()
    prepared = session.forest.prepare([user("a")])
    session.forest.commit(prepared, Sampled([], [], "stop"), said(""))
    resumed = session.forest.prepare([user("a"), said(""), user("b")])
    assert session.policy.decode(resumed.context).startswith("<|im_end|>\n<|im_start|>user\nb")
    (trajectory,) = session.trajectories()
    assert (trajectory.sampled_count, len(trajectory.response_ids)) == (0, 0)


def test_answer_continued_by_the_harness_stays_in_its_conversation() -> None:
    session = Session()
    session.ask([user("a")], said("half"))
    session.ask([user("a"), said("half")], said("and half"))
    session.ask([user("a"), said("half and half"), user("more")], said("done"))
    (trajectory,) = session.check()
    assert len(trajectory.turns) == 3


def test_template_that_moves_its_tools_starts_a_sibling_for_each_turn_with_the_reason() -> None:
    session = Session("moving_tools")
    session.ask([user("a")], said("b"), TOOLS)
    messages = [user("a"), said("b"), user("c")]
    session.ask(messages, said("d"), TOOLS)
    _, second = session.check()
    assert second.split_reason == "template"
    assert "moves the tools" in str(second.split_detail)
    assert second.prompt_ids.tolist() == session.encoder.full(messages, tools=TOOLS, now=NOW)


def test_template_that_is_not_proven_is_continued_where_its_own_tokens_are_the_sampled_ones() -> None:
    session = Session("numbered")
    messages = [user("a")]
    for text in ("b", "c", "d"):
        session.ask(messages, said(text))
        messages = [*messages, said(text), user("next")]
    (trajectory,) = session.check()
    assert "assistant 6" in session.policy.decode(trajectory.prompt_ids + trajectory.response_ids)


@pytest.mark.parametrize(
    ("history", "reasons"),
    [(History.VERBATIM, ["initial"]), (History.TEMPLATE, ["initial", "reasoning_dropped"])],
)
def test_dropped_reasoning_stays_or_splits_as_configured(history: History, reasons: list[str]) -> None:
    session = Session(history=history)
    answer = {**said("b", call(1, {})), "reasoning_content": "hm"}
    session.ask([user("a")], answer, raw="<think>\nhm\n</think>\n\nb")
    tool_loop = [user("a"), said("b", call(1, {})), result(1, "x")]
    session.ask(tool_loop, said("c"))
    session.ask([*tool_loop, said("c"), user("d")], said("e"))
    assert [one.split_reason for one in session.check()] == reasons
    assert ("hm" in session.policy.decode(session.log[-1].prompt)) == (history is History.VERBATIM)


def test_work_of_a_turn_does_not_grow_with_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session()
    read, encoded = [0], [0]
    entry_at, encode = history_module.entry_at, session.policy.encode

    def counting_entry(*given: Any) -> Any:
        read[0] += 1
        return entry_at(*given)

    def counting_encode(text: str) -> list[int]:
        encoded[0] += len(text)
        return encode(text)

    monkeypatch.setattr(history_module, "entry_at", counting_entry)
    monkeypatch.setattr(session.policy, "encode", counting_encode)
    messages = [SYSTEM, user("go")]
    work = []
    for number in range(120):
        read[0] = encoded[0] = 0
        session.forest.prepare(json.loads(json.dumps(messages)), TOOLS)
        work.append((read[0], encoded[0]))
        answer = said("step", call(100 + number, {}))
        session.ask(messages, answer, TOOLS)
        messages = [*messages, answer, result(100 + number, "out")]
    assert work[10] == work[119]
    assert work[119][0] == 2  # the answer as it came back, and the result of its call


def test_journal_restores_the_forest_and_the_session_goes_on() -> None:
    session = Session()
    messages = conversation(session, 3)
    session.ask(messages, said("one"), TOOLS)
    session.ask(messages, said("two"), TOOLS)
    records = json.loads(json.dumps([record_of(turn) for turn in session.forest.turns]))
    restored = TokenForest(session.encoder, session.policy, History.VERBATIM, NOW)
    restore(restored, records)
    assert trajectories_of(restored.turns, "s1", reward=1.0) == session.trajectories()
    session.forest = restored
    session.ask([*messages, said("two"), user("go on")], said("done"), TOOLS)
    assert [len(one.turns) for one in session.check()] == [1, 5]


@pytest.mark.parametrize("family", FAMILIES)
@examples(40)
@given(data=st.data())
def test_every_sampled_token_is_exported_once_whatever_a_harness_does(family: str, data: st.DataObject) -> None:
    session = Session(family)
    conversations: list[list[dict[str, Any]]] = [[SYSTEM, user("start")]]
    for step in range(data.draw(st.integers(1, 10))):
        messages = data.draw(st.sampled_from(conversations))
        what = data.draw(
            st.sampled_from(["go on", "go on", "fail", "edit", "compact", "sub-agent", "strip", "rewind"])
        )
        if what == "fail":
            session.forest.prepare(messages, TOOLS)
            continue
        if what == "edit":
            messages = [*messages]
            at = data.draw(st.integers(0, len(messages) - 1))
            messages[at] = {**messages[at], "content": f"edited {step}"}
        elif what == "compact":
            messages = [SYSTEM, user(f"summary {step}")]
        elif what == "sub-agent":
            messages = [{"role": "system", "content": f"other {step}"}, user("task")]
        elif what == "strip":
            messages = [strip_text(one) if one["role"] == "assistant" else one for one in messages]
        elif what == "rewind":
            ends = [at for at, one in enumerate(messages) if one["role"] == "user"]
            messages = messages[: data.draw(st.sampled_from(ends)) + 1]
        calls = [call(step, {"n": step})] if data.draw(st.booleans()) else []
        answer = said(data.draw(st.sampled_from([f" said {step} ", "same"])), *calls)
        session.ask(messages, answer, TOOLS)
        follows = [result(step, "out")] if calls else [user(f"then {data.draw(st.integers(0, 1))}")]
        conversations.append([*messages, answer, *follows])
    session.check()
