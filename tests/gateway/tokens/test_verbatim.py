"""Continuations that are put together without rendering say what rendering would."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_gym.gateway.tokens.incremental import IncrementalEncoder
from nemo_gym.gateway.tokens.template import ChatTemplate
from nemo_gym.gateway.tokens.verbatim import Pieces, VerbatimTemplate
from tests.gateway.tokens.conversations import call, result, said, user
from tests.gateway.tokens.policies import FAMILIES, policy

END = "<end>"


def pieces_of(source: str, *new: dict[str, Any], history: list[dict[str, Any]] | None = None) -> Pieces | None:
    template = ChatTemplate(source)
    before = history or [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    return VerbatimTemplate(template).pieces(before, new, tools=None, start=lambda text: text.rfind(END))


def looped(body: str, before: str = "") -> str:
    """A template that shows users' messages with ``body``."""
    return (
        f"{before}{{% for m in messages %}}{{% if m.role == 'assistant' %}}{{{{ m.content }}}}{END}"
        f"{{% elif m.role == 'tool' or loop.last %}}{body}{{% endif %}}{{% endfor %}}"
    )


SHOWN = (
    "{{ m.content }}",
    "{{ '<u>' + m.content + '</u>' }}",
    "{{ '<u>' ~ m.content ~ 1 }}",
    "{% if m.content %}{{ m['content'] }}{% endif %}",
    "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}",
    "{% set t %}<{{ m.content }}>{% endset %}{{ t }}",
    "{% macro show(c) %}[{{ c }}]{% endmacro %}{{ show(m.content) }}",
    "{{ m.content | default('nothing') }}{{ m.content }}",
)
INSPECTED = (
    "{{ m.content | trim }}",
    "{{ m.content.strip() }}",
    "{{ m.content[1:] }}",
    "{{ m.content | length }}",
    "{{ m.content | upper }}",
    "{{ m.content | tojson }}",
    "{{ m.content | replace('a', 'b') }}",
    "{{ '%s' | format(m.content) }}",
    "{{ '%s' % m.content }}",
    "{{ '{}'.format(m.content) }}",
    "{{ ['x', m.content] | join(',') }}",
    "{{ ', '.join(['x', m.content]) }}",
    "{{ 'abc'.replace('b', m.content) }}",
    "{{ m.content * 2 }}",
    "{{ m }}",
    "{{ [m.content] }}",
    "{{ m | tojson }}",
    "{% if 'x' in m.content %}x{% endif %}{{ m.content }}",
    "{% if m.content in 'abc' %}x{% endif %}{{ m.content }}",
    "{% if m.content in ['abc'] %}x{% endif %}{{ m.content }}",
    "{% if m.content == 'abc' %}x{% endif %}{{ m.content }}",
    "{% if 'abc' != m.content %}x{% endif %}{{ m.content }}",
    "{% if m.content < 'b' %}x{% endif %}{{ m.content }}",
    "{{ {'a': 1}[m.content] }}{{ m.content }}",
    "{% for c in m.content %}{{ c }}{% endfor %}",
    "{% if ('<' + m.content).startswith('<a') %}x{% endif %}{{ m.content }}",
    "{% if ('<' ~ m.content).endswith('a') %}x{% endif %}{{ m.content }}",
    "{% set t %}<{{ m.content }}>{% endset %}{{ t[0] }}{{ m.content }}",
    "{% macro show(c) %}[{{ c }}]{% endmacro %}{{ show(m.content) | trim }}",
    "{{ m.content }}{{ strftime_now('%H') }}",
    "{% if strftime_now('%H') == '12' %}x{% endif %}{{ m.content }}",
)


@pytest.mark.parametrize("body", SHOWN)
def test_text_is_put_in_its_place_when_the_template_only_shows_it(body: str) -> None:
    found = pieces_of(looped(body), user("other"))
    assert found is not None
    for text in ("x", " a\n", "'\"<>&\\", "<tool_response>", "é\u2028"):
        rendered = ChatTemplate(looped(body)).render([user("q"), said("a"), user(text)])
        assert found.filled([user(text)]) == rendered[rendered.rfind(END) :]


@pytest.mark.parametrize("body", INSPECTED)
def test_continuation_is_rendered_when_the_template_does_more_with_a_text_than_to_show_it(body: str) -> None:
    assert pieces_of(looped(body), user("other")) is None


def test_continuation_is_rendered_when_a_text_is_empty() -> None:
    found = pieces_of(looped("{% if m.content %}<{{ m.content }}>{% endif %}"), user("x"))
    assert found is not None
    assert found.filled([user("")]) is None


def test_continuation_is_rendered_when_it_depends_on_the_names_of_earlier_calls() -> None:
    asked = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    history = [user("q"), {"role": "assistant", "content": "a", "tool_calls": [asked]}]
    answer = {"role": "tool", "tool_call_id": "1", "content": "r"}
    shown = "{{ messages[1].tool_calls[0].function.name }}: {{ m.content }}"
    assert pieces_of(looped(shown), answer, history=history) is None
    compared = "{% if m.tool_call_id == messages[1].tool_calls[0].id %}{{ m.content }}{% endif %}"
    assert pieces_of(looped(compared), answer, history=history) is None
    assert pieces_of(looped("{{ m.tool_call_id }}: {{ m.content }}"), answer, history=history) is not None


def test_continuations_without_rendering_are_found_in_most_families() -> None:
    """Otherwise the comparison below compares nothing."""
    found = set()
    for family in FAMILIES:
        encoder = IncrementalEncoder(policy(family))
        encoder.continuation(said("a", call(1, {"a": 1})), [result(1, "r")], system=True, tools=True, last_id=None)
        found |= {family for pieces in encoder._pieces.values() if pieces is not None}
    assert found >= {"chatml_think", "bar_tokens", "header_stop"}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=80, deadline=None)
@given(
    text=st.text(min_size=1) | st.sampled_from(["<|im_end|>x", "</s>", "<|user|>", "\n", " <tool_response>", "\ufdd0"])
)
def test_continuation_without_rendering_equals_the_rendered_one(family: str, text: str) -> None:
    encoder, rendering = encoders(family)
    cases = ((said("a"), [user(text)]), (said("a", call(1, {"a": 1})), [result(1, text)]))
    for last, new in cases:
        given: dict[str, Any] = {"system": True, "tools": True, "last_id": None}
        assert encoder.continuation(last, new, **given) == rendering.continuation(last, new, **given)


def encoders(family: str) -> tuple[IncrementalEncoder, IncrementalEncoder]:
    if family not in _ENCODERS:

        class Rendering(IncrementalEncoder):
            def _filled(self, *_: Any) -> None:
                return None

        _ENCODERS[family] = IncrementalEncoder(policy(family)), Rendering(policy(family))
    return _ENCODERS[family]


_ENCODERS: dict[str, tuple[IncrementalEncoder, IncrementalEncoder]] = {}
