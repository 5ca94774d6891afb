"""Which value wins, and where it is said to come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_gym.config.compose import compose
from nemo_gym.contract.errors import ConfigError

from .conftest import write

X = "x: {x}\nuse: {{a: '${{x}}'}}\n"


def value(root: Path, *words: str, key: str = "x") -> object:
    return compose(words, roots=[root]).values[key]


def test_including_file_wins_over_its_includes(root: Path) -> None:
    write(root / "base.yaml", "x: base\ny: base\nuse: ['${x}', '${y}']\n")
    write(
        root / "main.yaml",
        "config_paths: [base.yaml]\nx: main\nz: '${use}'\nu: '${z}'\nuu: ['${u}', '${uu2}']\nuu2: 1\n",
    )
    with pytest.raises(ConfigError, match="unknown key 'uu'"):
        compose(["+config_paths=[main.yaml]"], roots=[root])
    write(root / "main.yaml", "config_paths: [base.yaml]\nx: main\n_keep: '${use}'\n")
    assert value(root, "+config_paths=[main.yaml]") == "main"
    assert value(root, "+config_paths=[main.yaml]", key="y") == "base"


def test_later_sibling_wins_over_earlier_one(root: Path) -> None:
    for name in ("first", "second"):
        write(root / f"{name}.yaml", f"_x: {name}\n")
    assert value(root, "+config_paths=[first.yaml,second.yaml]", key="_x") == "second"
    assert value(root, "+config_paths=[second.yaml,first.yaml]", key="_x") == "first"


def test_shared_include_does_not_undo_an_earlier_sibling(root: Path) -> None:
    write(root / "base.yaml", "_x: base\n")
    write(root / "first.yaml", "config_paths: [base.yaml]\n_x: first\n")
    write(root / "second.yaml", "config_paths: [base.yaml]\n_y: second\n")
    assert value(root, "+config_paths=[first.yaml,second.yaml]", key="_x") == "first"


def test_env_yaml_wins_over_files_and_command_line_over_both(root: Path) -> None:
    write(root / "main.yaml", "_x: file\n")
    write(root / "env.yaml", "_x: env\n")
    assert value(root, "+config_paths=[main.yaml]", key="_x") == "env"
    assert value(root, "+config_paths=[main.yaml]", "_x=word", key="_x") == "word"


def test_env_yaml_may_hold_variables_that_nothing_uses(root: Path) -> None:
    write(root / "env.yaml", "judge_api_key: abc\n")
    assert value(root, key="judge_api_key") == "abc"


def test_env_yaml_may_name_files(root: Path) -> None:
    write(root / "main.yaml", "_x: file\n")
    write(root / "other.yaml", "_y: other\n")
    write(root / "env.yaml", "config_paths: [main.yaml]\n")
    assert value(root, key="_x") == "file"
    assert value(root, "+config_paths=[other.yaml]", key="_x") == "file"


def test_included_path_may_name_an_environment_variable(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", str(root / "deep"))
    write(root / "deep/main.yaml", "_x: deep\n")
    assert value(root, "+config_paths=['${oc.env:WHERE}/main.yaml']", key="_x") == "deep"


def test_include_is_found_beside_the_file_that_includes_it(root: Path) -> None:
    write(root / "deep/base.yaml", "_x: base\n")
    write(root / "deep/main.yaml", "config_paths: [base.yaml]\n")
    assert value(root, "+config_paths=[deep/main.yaml]", key="_x") == "base"


def test_circular_include_is_one_error_that_shows_the_circle(root: Path) -> None:
    write(root / "a.yaml", "config_paths: [b.yaml]\n")
    write(root / "b.yaml", "config_paths: [a.yaml]\n")
    with pytest.raises(ConfigError, match=r"circle: .*a\.yaml → .*b\.yaml → .*a\.yaml"):
        compose(["+config_paths=[a.yaml]"], roots=[root])


def test_missing_file_is_an_error_with_the_nearest_name(root: Path) -> None:
    write(root / "deep/training.yaml", "_x: 1\n")
    with pytest.raises(ConfigError, match=r"no file 'deep/trainning\.yaml' \(did you mean 'training\.yaml'\?\)"):
        compose(["+config_paths=[deep/trainning.yaml]"], roots=[root])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2\n", r"broken\.yaml, line 2"),
        ("a: 1\na: 2\n", r"broken\.yaml, line 2.*duplicate key a"),
        ("- a\n- b\n", "must hold a mapping of keys to values"),
        ("policy_api_key sk-secret\n", r"broken\.yaml: the file must hold a mapping of keys ((?!secret).)*$"),
        ("policy_api_key:sk-secret\n", r"broken\.yaml: the file must hold a mapping of keys ((?!secret).)*$"),
        ("1: a\n", "write it in quotes"),
        ("config_paths: {a: b}\n", "must be a list of file paths"),
        ("a: &x\n  b: *x\n", r"broken\.yaml: is nested too deeply, or one of its anchors holds itself"),
        (f"a: {'[' * 3000}{']' * 3000}\n", r"broken\.yaml: is nested too deeply"),
    ],
)
def test_unusable_file_is_an_error_that_names_it(root: Path, text: str, message: str) -> None:
    write(root / "broken.yaml", text)
    with pytest.raises(ConfigError, match=message):
        compose(["+config_paths=[broken.yaml]"], roots=[root])


def test_folder_in_place_of_env_yaml_is_an_error(root: Path) -> None:
    (root / "env.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"env\.yaml cannot be read.*directory"):
        compose([], roots=[root])


def test_variable_that_is_not_set_is_reported_once_however_many_keys_lead_to_it(root: Path) -> None:
    write(root / "env.yaml", "policy_api_key: ${oc.env:NO_SUCH_VARIABLE}\n_x: {y: '${policy_api_key}'}\n")
    with pytest.raises(ConfigError) as error:
        compose([], roots=[root])
    assert error.value.message.count(";") == 0
    assert "policy_api_key" in error.value.message
    assert "uses the environment variable NO_SUCH_VARIABLE, which is not set" in error.value.message


@pytest.mark.parametrize("word", ["solver=5", "+config_paths=[wrong.yaml]"])
def test_value_in_place_of_a_servers_block_is_an_error(root: Path, word: str) -> None:
    write(root / "wrong.yaml", "solver: 5\n")
    where = r"wrong\.yaml" if "wrong" in word else "the command line"
    with pytest.raises(ConfigError, match=rf"{where}: 'solver' is a server \(.*solver\.yaml\).* must be a mapping"):
        compose(["agent=solver", "environment=mathy", "model=echo", word], roots=[root])


@pytest.mark.parametrize("word", ["solver=${copy:other}", "+config_paths=[replaced.yaml]"])
def test_directive_in_place_of_a_servers_block_puts_another_block_there(root: Path, word: str) -> None:
    write(root / "env.yaml", "other: {responses_api_agents: {other_agent: {entrypoint: app.py}}}\n")
    write(root / "replaced.yaml", "solver: ${copy:other}\n")
    composed = compose(["agent=solver", "environment=mathy", "model=echo", word], roots=[root])
    assert composed.servers["solver"].implementation == "other_agent"


def test_null_in_place_of_a_servers_block_removes_the_server(root: Path) -> None:
    write(root / "env.yaml", "solver:\n")
    assert "solver" not in compose(["agent=solver", "environment=mathy", "model=echo"], roots=[root]).servers


def test_empty_file_is_no_error(root: Path) -> None:
    write(root / "empty.yaml", "")
    assert compose(["+config_paths=[empty.yaml]"], roots=[root]).servers == {}


def test_lists_are_replaced_whole(root: Path) -> None:
    write(root / "first.yaml", "_x: [1, 2, 3]\n")
    write(root / "second.yaml", "_x: [4]\n")
    assert value(root, "+config_paths=[first.yaml,second.yaml]", key="_x") == [4]
