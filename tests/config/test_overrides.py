"""The command line's words."""

from __future__ import annotations

import string
from contextlib import nullcontext
from pathlib import Path

import pytest

from nemo_gym.config.compose import compose
from nemo_gym.config.overrides import given_values, word_of
from nemo_gym.contract.errors import ConfigError

from .conftest import write

GROUPS = ("agent=solver", "environment=mathy", "model=echo")


def solver(root: Path, *words: str) -> dict[str, object]:
    return compose([*GROUPS, *words], roots=[root]).servers["solver"].values


def test_nested_key_is_changed_when_it_exists(root: Path) -> None:
    changed = solver(root, "solver.responses_api_agents.solver.entrypoint=other.py")
    assert changed["entrypoint"] == "other.py"


def test_key_of_a_server_block_may_be_set_without_plus(root: Path) -> None:
    assert solver(root, "solver.responses_api_agents.solver.max_steps=7")["max_steps"] == 7


def test_plus_adds_and_double_plus_forces(root: Path) -> None:
    changed = solver(root, "+_x=1", "++solver.responses_api_agents.solver.max_steps=9")
    assert changed["max_steps"] == 9


def test_tilde_removes(root: Path) -> None:
    composition = compose([*GROUPS, "~solver"], roots=[root])
    assert set(composition.servers) == {"policy_model", "mathy"}


def test_settings_within_a_servers_block_are_the_class_to_judge_however_deep(root: Path) -> None:
    assert solver(root, "solver.responses_api_agents.solver.max_steps.at_most=9")["max_steps"] == {"at_most": 9}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("num_repeat=2", r"unknown key 'num_repeat' \(did you mean 'num_repeats'\?\)"),
        ("enviroment=mathy", r"unknown key 'enviroment' \(did you mean 'environment'\?\)"),
        ("solvr.responses_api_agents.solver.max_steps=1", r"did you mean 'solver'\?"),
        ("solver.responses_api_agnts.solver.max_steps=1", r"did you mean 'responses_api_agents'\?"),
        ("~nothing", "there is no such key"),
        ("num_repeats=1,2", "sweeps are not supported"),
        ("num_repeats", "write key=value"),
        ("composition={agent: x}", "is set by the composition itself"),
    ],
)
def test_wrong_word_is_an_error_with_the_fix(root: Path, word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose([*GROUPS, word], roots=[root])


def test_unreadable_value_is_not_repeated_in_the_error(root: Path) -> None:
    with pytest.raises(ConfigError, match="policy_api_key: the value cannot be read") as error:
        compose(["policy_api_key=sk=very{secret"], roots=[root])
    assert "very" not in error.value.message


def test_quoted_value_may_hold_anything(root: Path) -> None:
    composition = compose(["policy_api_key='a b,c={d}'"], roots=[root])
    assert composition.values["policy_api_key"] == "a b,c={d}"


@pytest.mark.parametrize(
    ("word", "expected"), [("1e-3", 0.001), ("true", True), ("null", None), ("[1,{a: b}]", [1, {"a": "b"}]), ("", "")]
)
def test_values_have_yaml_types(root: Path, word: str, expected: object) -> None:
    assert compose([f"+_x={word}"], roots=[root]).values["_x"] == expected


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("_x=résultats/日本.jsonl", "résultats/日本.jsonl"),
        ("_x=ö 1é", "ö 1é"),
        ("_x='ö, (x)'", "ö, (x)"),
        ("_x=Uqé9z", "Uqé9z"),
        ("_x=[ö/a.yaml,{ü: ä}]", ["ö/a.yaml", {"ü": "ä"}]),
    ],
)
def test_characters_outside_of_ascii_need_no_quotes(root: Path, word: str, expected: object) -> None:
    assert compose([f"+{word}"], roots=[root]).values["_x"] == expected


def test_error_names_the_characters_that_need_quotes(root: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read") as error:
        compose(["+_x=a#b"], roots=[root])
    named = error.value.message.partition("one of ")[2].partition(" in quotes")[0]
    for character in string.punctuation:
        with nullcontext() if character not in named else pytest.raises(ConfigError):
            assert compose([f"+_x=a{character}b"], roots=[root]).values["_x"] == f"a{character}b"
        assert compose([word_of("+_x", f"a{character}b")], roots=[root]).values["_x"] == f"a{character}b"


def test_list_element_is_changed_by_position(root: Path) -> None:
    write(root / "main.yaml", "_x: [{a: 1}, {a: 2}]\n")
    composition = compose(["+config_paths=[main.yaml]", "_x.1.a=5"], roots=[root])
    assert composition.values["_x"] == [{"a": 1}, {"a": 5}]
    with pytest.raises(ConfigError, match="'2' is not an index of a list of 2"):
        compose(["+config_paths=[main.yaml]", "++_x.2.a=5"], roots=[root])


def test_nemo_gym_spellings_of_run_keys_are_known(root: Path) -> None:
    words = ["+input_jsonl_fpath=a.jsonl", "+output_jsonl_fpath=b.jsonl", "+num_samples_in_parallel=3"]
    assert compose([*GROUPS, *words], roots=[root]).run_values() == {
        "input_jsonl_fpath": "a.jsonl",
        "output_jsonl_fpath": "b.jsonl",
        "num_samples_in_parallel": 3,
    }


def test_the_names_of_models_are_text() -> None:
    for name in ("4.10", "true", "1e5", "007", "1_000"):
        assert given_values([f"policy_model_name={name}", f"other={name}"])["policy_model_name"] == name
    assert given_values(["policy_model_name=null"]) == {"policy_model_name": None}


@pytest.mark.parametrize(
    "value",
    [
        *(1, 2.5, True, None, "a", "it's", "a\\'b", "c:\\x\\", "", "1", "null", "two\nlines", "a=b,c{}[]", "${x}"),
        *("é'Uq", [1, "x", {"a b": "c d", "e": [None]}], {"k:": {"nested": "it's"}}),
    ],
)
def test_word_of_a_value_says_that_value(value: object) -> None:
    (said,) = given_values([word_of("key", value)]).values()
    assert (said, type(said)) == (value, type(value))
