from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.gateway.tokens import Sampled
from nemo_gym.gateway.tokens.history import Prefix
from nemo_gym.gateway.tokens.turns import Prompt
from tests.gateway.tokens.conversations import said, user
from tests.gateway.tokens.sessions import Session


def test_prompt_without_copies_equals_its_array_in_every_form() -> None:
    session = Session()
    messages = [user("a")]
    for text in ("b", "", "d"):
        prepared = session.forest.prepare(messages)
        ids = prepared.prompt.ids().tolist()
        prompt = prepared.prompt
        assert orjson.loads(prepared.prompt.json()) == list(prompt) == [prompt[at] for at in range(len(prompt))] == ids
        assert b" " not in prepared.prompt.json()
        assert [prompt.tail(count).tolist() for count in (1, 5, 10_000)] == [ids[-1:], ids[-5:], ids]
        assert prompt[2:-1].tolist() == ids[2:-1]
        sampled = session.policy.encode(text)
        told = orjson.dumps(sampled) if text == "d" else None
        turn = session.forest.commit(prepared, Sampled(sampled, [-1.0] * len(sampled), ids_json=told), said(text))
        assert (orjson.loads(turn.prompt_json()), orjson.loads(turn.sampled_json())) == (ids, sampled)
        messages = [*messages, said(text), user("next")]


def test_one_token_of_a_prompt_is_read_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session()
    session.ask([user("a")], said("b"))
    prompt = session.forest.prepare([user("a"), said("b"), user("c")]).prompt
    ids = prompt.ids().tolist()
    monkeypatch.setattr(Prompt, "ids", None)
    assert [prompt[at] for at in range(-len(ids), len(ids))] == ids * 2
    for beyond in (len(ids), -len(ids) - 1):
        with pytest.raises(IndexError):
            prompt[beyond]


def test_prompt_stays_as_it_is_when_other_turns_are_committed() -> None:
    session = Session()
    first = session.ask([user("a")], said("b"))
    branches = [session.forest.prepare([user("a"), said("b"), user(text)]) for text in ("c", "longer than that")]
    before = [prepared.prompt.json() for prepared in branches]
    for prepared in branches:
        turn = session.forest.commit(prepared, Sampled([7], [-1.0]), said("x"))
        assert turn.text[: turn.text_end].decode() == ",".join(map(str, turn.tokens[: turn.end]))
        assert turn.sampled_json() == b"[7]" and orjson.loads(turn.prompt_json()) == [*turn.tokens[: turn.end - 1]]
    assert [prepared.prompt.json() for prepared in branches] == before
    assert Prompt(first, branches[0].context).ids() == branches[0].prompt.ids()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6), st.lists(st.integers(0, 2), max_size=4)), max_size=12))
def test_prefixes_read_as_lists_that_were_copied(steps: list[tuple[int, int, list[int]]]) -> None:
    made: list[tuple[Prefix[int], list[int]]] = [(Prefix(), [])]
    for which, kept, new in steps:
        shared, plain = made[which % len(made)]
        kept = min(kept, len(plain))
        made.append((shared.grown(kept, new), plain[:kept] + new))
    for shared, plain in made:
        assert shared == plain
        assert shared[1:-1] == plain[1:-1]
        assert [shared[at] for at in range(-len(plain), len(plain))] == plain * 2
        for _, other in made:
            equal = [a == b for a, b in zip(plain, other, strict=False)]
            assert shared.common(other) == (equal.index(False) if False in equal else len(equal))
