"""Blocks made from other blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_gym.config.compose import compose
from nemo_gym.contract.errors import ConfigError

from .conftest import write


def values(root: Path, text: str, *words: str) -> dict[str, object]:
    write(root / "main.yaml", text)
    return compose(["+config_paths=[main.yaml]", *words], roots=[root]).values


def test_inherit_from_merges_and_moves_the_source(root: Path) -> None:
    got = values(root, "base: {a: 1, b: {c: 2, d: 3}}\n_new: {_inherit_from: base, b: {c: 9}}\n")
    assert got["_new"] == {"a": 1, "b": {"c": 9, "d": 3}}
    assert "base" not in got


def test_copy_merges_and_keeps_the_source(root: Path) -> None:
    got = values(root, "_base: {a: 1}\n_new: {_copy: _base, b: 2}\n")
    assert got["_new"] == {"a": 1, "b": 2}
    assert got["_base"] == {"a": 1}


def test_value_forms_move_and_copy(root: Path) -> None:
    got = values(root, "base: {a: {b: 1}}\n_x: '${copy:base.a}'\n_y: '${inherit_from:base}'\n")
    assert got["_x"] == {"b": 1}
    assert got["_y"] == {"a": {"b": 1}}
    assert "base" not in got


def test_two_heirs_of_one_source_both_inherit(root: Path) -> None:
    got = values(root, "base: {a: 1}\n_x: '${inherit_from:base}'\n_y: {_inherit_from: base, b: 2}\n")
    assert got["_x"] == {"a": 1}
    assert got["_y"] == {"a": 1, "b": 2}


def test_inheritance_chains(root: Path) -> None:
    got = values(root, "a: {x: 1}\nb: {_inherit_from: a, y: 2}\n_c: {_inherit_from: b, z: 3}\n")
    assert got["_c"] == {"x": 1, "y": 2, "z": 3}
    assert "a" not in got and "b" not in got


def test_delete_key_removes_what_was_inherited(root: Path) -> None:
    got = values(root, "_base: {a: 1, b: 2, c: 3}\n_new: {_copy: _base, _delete_key: 'a,b'}\n")
    assert got["_new"] == {"c": 3}


def test_unset_value_in_a_deleted_block_is_not_reported(root: Path) -> None:
    assert values(root, "_x: {_delete_key: old, old: {a: '???'}, b: 1}\n")["_x"] == {"b": 1}


def test_directive_on_the_command_line_works(root: Path) -> None:
    got = values(root, "_base: {a: 1, b: 2}\n", "++_new=${copy:_base}", "++_base._delete_key=a")
    assert got["_new"] == {"a": 1, "b": 2} or got["_new"] == {"b": 2}
    assert got["_base"] == {"b": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "base: {a: 1}\nx: {_inherit_from: bse}\n",
            r"main\.yaml: x\._inherit_from: there is no 'bse' \(did you mean 'base'",
        ),
        ("x: {_copy: x}\n", "break the circle"),
        ("a: {_copy: b}\nb: {_copy: a}\n", "break the circle"),
        ("a: 5\nx: {_copy: a}\n", "is not a block of keys"),
        ("x: {_copy: [a]}\n", "must be the dotted path of a block"),
    ],
)
def test_wrong_directive_is_an_error_that_names_the_place(root: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        values(root, text)
