"""Images: placeholders in the prompt, their sources in the same order beside it, and in the trajectory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from nemo_gym.gateway.tokens import IncrementalEncoder, PolicyTokenizer, Sampled, TemplateRefusedError
from nemo_gym.gateway.tokens.forest import UnprovenError
from nemo_gym.gateway.tokens.template import ChatTemplate
from nemo_gym.gateway.tokens.trajectories import read_npz, record_of, restore, write_npz
from tests.gateway.tokens.conversations import TOOLS, call, result, said, user
from tests.gateway.tokens.policies import policy
from tests.gateway.tokens.sessions import NOW, Session

PLACEHOLDER = "<|image|>"


def image(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}}


def shows(text: str, *names: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}, *map(image, names)]


def sources(*names: str) -> tuple[str, ...]:
    return tuple(f"data:image/png;base64,{name}" for name in names)


def asked_for_two() -> tuple[list[dict[str, Any]], dict[str, Any], list[dict[str, Any]]]:
    """A request, its answer with two calls, and their results, each with images."""
    start = [{"role": "user", "content": shows("look", "AA")}]
    answer = said("b", call(1, {}), call(2, {}))
    results = [{**result(1, ""), "content": shows("x", "BB")}, {**result(2, ""), "content": shows("y", "CC", "DD")}]
    return start, answer, results


def test_every_placeholder_has_its_image_in_order() -> None:
    session = Session()
    start, answer, results = asked_for_two()
    session.ask(start, answer, TOOLS)
    prepared = session.forest.prepare([*start, answer, *results], TOOLS)
    assert prepared.images() == sources("AA", "BB", "CC", "DD")
    assert session.policy.decode(prepared.prompt.ids()).count(PLACEHOLDER) == 4
    assert prepared.prompt.ids().tolist()[-len(prepared.context) :] == prepared.context.tolist()


def test_order_of_images_is_that_of_the_kept_tokens_when_a_harness_reorders_results() -> None:
    session = Session()
    start, answer, results = asked_for_two()
    session.ask(start, answer, TOOLS)
    session.ask([*start, answer, *results], said("c"), TOOLS)
    again = session.forest.prepare([*start, answer, *results[::-1], said("c"), user("d")], TOOLS)
    assert again.parent is session.forest.turns[1]
    assert again.images() == sources("AA", "BB", "CC", "DD")


def test_images_survive_the_journal() -> None:
    session = Session()
    start, answer, results = asked_for_two()
    session.ask(start, answer, TOOLS)
    session.ask([*start, answer, *results], said("c"), TOOLS)
    records = orjson.loads(orjson.dumps([record_of(turn) for turn in session.forest.turns]))
    other = Session()
    restore(other.forest, records)
    prepared = other.forest.prepare([*start, answer, *results, said("c"), user("d")], TOOLS)
    assert prepared.images() == sources("AA", "BB", "CC", "DD")


def test_images_are_in_the_exported_trajectory_with_the_message_that_brought_them(tmp_path: Path) -> None:
    session = Session()
    start, answer, results = asked_for_two()
    session.ask(start, answer, TOOLS)
    session.ask([*start, answer, *results], said("c"), TOOLS)
    (trajectory,) = session.trajectories()
    assert [item["message"] for item in trajectory.multimodal] == [0, 2, 3, 3]
    write_npz(tmp_path / "t.npz", [trajectory])
    assert read_npz(tmp_path / "t.npz") == [trajectory]
    with np.load(tmp_path / "t.npz", allow_pickle=False) as file:
        (metadata,) = orjson.loads(file["metadata"].tobytes())
    assert [item["source"] for item in metadata["multimodal"]] == [*sources("AA", "BB", "CC", "DD")]


def test_image_is_another_conversation_than_another_image() -> None:
    session = Session()
    session.ask([{"role": "user", "content": shows("look", "AA")}], said("b"))
    other = session.forest.prepare([{"role": "user", "content": shows("look", "BB")}, said("b"), user("c")])
    assert (other.parent, other.images()) == (None, sources("BB"))


@pytest.mark.parametrize("family", ["llama_headers", "inst_strict", "header_stop"])
@pytest.mark.parametrize("role", ["user", "tool"])
def test_image_is_refused_where_the_template_does_not_show_it(family: str, role: str) -> None:
    encoder = IncrementalEncoder(policy(family))
    called = [user("x"), said("", call(1, {})), {**result(1, ""), "content": shows("y", "AA")}]
    messages = called if role == "tool" else [{"role": "user", "content": shows("y", "AA")}]
    with pytest.raises(TemplateRefusedError, match=f"a {role} message holds an image"):
        encoder.full(messages, tools=None, now=NOW)


def test_continuation_is_unproven_when_the_template_counts_images() -> None:
    source = (
        "{% set seen = namespace(images=0) %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{% if part.type == 'image' %}{% set seen.images = seen.images + 1 %}Picture {{ seen.images }}: <|image|>"
        "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    used = policy("chatml_think")
    counting = PolicyTokenizer(used.tokenizer, ChatTemplate(source), [])
    assert "user" in counting.traits.images
    encoder = IncrementalEncoder(counting)
    given: dict[str, Any] = {"system": False, "tools": False, "last_id": None, "now": NOW}
    with pytest.raises(UnprovenError):
        encoder.continuation(said("b"), [{"role": "user", "content": shows("look", "AA")}], **given)
    assert isinstance(encoder.continuation(said("b"), [user("look")], **given), list)


def test_sampled_tokens_stay_where_they_are_when_images_come_between_them() -> None:
    session = Session()
    start, answer, results = asked_for_two()
    session.ask(start, answer, TOOLS)
    session.ask([*start, answer, *results], said("c"), TOOLS)
    prepared = session.forest.prepare([*start, answer, *results, said("c"), user("d")], TOOLS)
    session.forest.commit(prepared, Sampled([7], [-9.0]), said("e"))
    (trajectory,) = session.trajectories()
    assert [turn.end - turn.start for turn in trajectory.turns][-1] == 1
    assert len(trajectory.multimodal) == 4
