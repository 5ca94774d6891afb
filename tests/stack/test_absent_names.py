"""A plugin that imports what this core lacks."""

from __future__ import annotations

import importlib
import re

import pytest

from nemo_gym.stack.child import absent_name


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("from nemo_gym.judge import JudgeErr", "'JudgeErr' of 'nemo_gym[a-z.]*judge', .*did you mean 'JudgeError'"),
        ("from nemo_gym.judg import JudgeError", "'nemo_gym.judg', which does not exist here .did you mean 'judge'"),
        ("import nemo_gym.sandbox.provider", "modules of 'nemo_gym.sandbox': .*providers"),
    ],
)
def test_what_is_absent_is_named_with_what_exists(statement: str, told: str) -> None:
    with pytest.raises(ImportError) as raised:
        exec(statement, {})
    said = absent_name(raised.value)
    assert said is not None
    assert re.search(told, said), said


def test_another_package_that_is_absent_is_not_ours_to_explain() -> None:
    with pytest.raises(ImportError) as raised:
        importlib.import_module("no_such_package_anywhere")
    assert absent_name(raised.value) is None
