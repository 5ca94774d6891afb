"""Chat templates read messages as the sandbox of model repositories lets them."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_gym.gateway.tokens.template import ChatTemplate, TemplateRefusedError


def rendered(source: str, **message: Any) -> str:
    return ChatTemplate(source).render([message])


def test_key_is_read_by_attribute_and_by_item() -> None:
    assert rendered("{{ messages[0].role }} {{ messages[0]['role'] }}", role="user") == "user user"


def test_method_of_a_dictionary_wins_over_a_key_of_its_name_when_read_as_attribute() -> None:
    source = "{% for key, value in messages[0].items() %}{{ key }}={{ value }};{% endfor %}"
    assert rendered(source, items="mine", role="user") == "items=mine;role=user;"
    assert rendered("{{ messages[0]['items'] }}", items="mine") == "mine"


def test_missing_key_is_undefined() -> None:
    source = "{% if messages[0].tool_calls is defined %}calls{% else %}none{% endif %}"
    assert rendered(source, role="assistant") == "none"


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].__class__.__mro__ }}", "{{ messages[0].update({'a': 1}) }}", "{{ messages.append(1) }}"],
)
def test_template_that_leaves_the_sandbox_is_refused(source: str) -> None:
    with pytest.raises(TemplateRefusedError):
        rendered(source, role="user")


def test_key_that_looks_like_an_internal_is_only_data() -> None:
    assert rendered("{{ messages[0].__secret__ }}", __secret__="told") == "told"
