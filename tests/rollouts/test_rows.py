"""Dataset rows, as they are read before any task runs."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import orjson
import pytest

from nemo_gym.config.run import RolloutRunConfig
from nemo_gym.contract.errors import ConfigError, RowError
from nemo_gym.rollouts.rows import MaterializedInputs, materialize, numbered_lines

GOOD = b'{"responses_create_params": {"input": "?"}, "answer": 1}\n'


def read(directory: Path, data: bytes | None = None, **keys: Any) -> list[dict[str, Any]]:
    """The rows that a run over ``data`` has."""
    config = {"input": directory / "in.jsonl", "output": directory / "out.jsonl", **keys}
    if data is not None:
        (directory / "in.jsonl").write_bytes(data)
    inputs: MaterializedInputs = materialize(RolloutRunConfig.parse(config), ["solver", "other"])
    assert inputs.lines is not None
    inputs.lines.seek(0)
    rows = [orjson.loads(line) for line in inputs.lines]
    inputs.close()
    return rows


def with_answer(answer: bytes) -> bytes:
    return GOOD.replace(b"1}", answer + b"}")


def refused(directory: Path, line: bytes) -> str:
    """The reason for which a line is refused; with skip_bad_rows, it alone is left out."""
    data = GOOD + line + GOOD
    with pytest.raises(RowError) as caught:
        read(directory, data, agent_name="solver")
    assert caught.value.details["lines"] == [2]
    assert len(read(directory, data, agent_name="solver", skip_bad_rows=True)) == 2
    return str(caught.value).split("\n  ")[1].removeprefix(str(directory / "in.jsonl"))


@pytest.mark.parametrize(
    ("answer", "path"),
    [
        (b"18446744073709551616", "answer"),
        (b"-9223372036854775809", "answer"),
        (b'{"cases": [1, {"expected": 123456789012345678901234567890}]}', r"answer.cases[1].expected"),
        (b"9" * 5000 + b".0e-4999, " + b'"more": 100000000000000000000', "more"),
    ],
    ids=["too large", "too small", "deep", "beside a long float"],
)
def test_integer_that_would_be_rounded_is_refused_by_its_path(tmp_path: Path, answer: bytes, path: str) -> None:
    why = refused(tmp_path, with_answer(answer))
    assert why == f":2: '{path}' is an integer of over 64 bits, which would be rounded; write it as text"


@pytest.mark.parametrize("answer", ["18446744073709551615", "-9223372036854775808", '"12345678901234567890123"'])
def test_long_numbers_that_stay_as_they_are_are_used(tmp_path: Path, answer: str) -> None:
    (row,) = read(tmp_path, with_answer(answer.encode() + b', "pi": 3.14159265358979323846'), agent_name="solver")
    assert row["answer"] == orjson.loads(answer)


@pytest.mark.parametrize(("levels", "said"), [(260, "too deeply"), (1000, "too deeply"), (1100, "depth limit")])
def test_row_that_is_nested_too_deeply_is_a_bad_row(tmp_path: Path, levels: int, said: str) -> None:
    assert said in refused(tmp_path, with_answer(b"[" * levels + b"]" * levels))


@pytest.mark.parametrize("named", ['"other"', '{"name": "other"}'])
def test_row_names_its_agent_by_an_object_or_by_text(tmp_path: Path, named: str) -> None:
    (row,) = read(tmp_path, with_answer(b'1, "agent_ref": ' + named.encode()))
    assert row["agent_ref"]["name"] == "other"


def test_agent_that_the_run_names_runs_rows_that_name_another(tmp_path: Path) -> None:
    named = [with_answer(b'1, "agent_ref": {"name": "%s"}' % name) for name in (b"other", b"solver", b"elsewhere")]
    (tmp_path / "in.jsonl").write_bytes(b"".join((GOOD, *named)))
    keys = {"input": tmp_path / "in.jsonl", "output": tmp_path / "out.jsonl", "agent_name": "solver"}
    inputs = materialize(RolloutRunConfig.parse(keys), ["solver", "other"], keep=False)
    assert (inputs.agents, inputs.replaced_agents) == (("solver",), ("elsewhere", "other"))


def test_error_of_a_row_whose_agent_does_not_run_says_how_it_can_be_run(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(with_answer(b'1, "agent_ref": {"name": "elsewhere"}'))
    keys = {"input": tmp_path / "in.jsonl", "output": tmp_path / "out.jsonl"}
    with pytest.raises(RowError, match="'elsewhere'; running: solver; agent_name= names one for all rows"):
        materialize(RolloutRunConfig.of_stack(keys, {"agent": "solver"}), ["solver"], keep=False)


def test_a_setting_that_is_null_is_left_out(tmp_path: Path) -> None:
    keys = {"input": tmp_path / "in.jsonl", "output": tmp_path / "out.jsonl"}
    none = {"num_repeats": None, "concurrency": None, "limit": None, "agent_name": None}
    assert RolloutRunConfig.of_stack({**keys, **none}, {"agent": "solver"}) == RolloutRunConfig.of_stack(
        keys, {"agent": "solver"}
    )


def test_agent_that_the_composition_chose_runs_rows_that_name_none(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(GOOD + with_answer(b'1, "agent_ref": {"name": "other"}'))
    keys = {"input": tmp_path / "in.jsonl", "output": tmp_path / "out.jsonl"}
    inputs = materialize(RolloutRunConfig.of_stack(keys, {"agent": "solver"}), ["solver", "other"], keep=False)
    assert inputs.agents == ("solver", "other")


@pytest.mark.parametrize("named", ["7", '["other"]', '{"name": 7}', "false"])
def test_agent_of_another_type_is_refused(tmp_path: Path, named: str) -> None:
    why = refused(tmp_path, with_answer(b'1, "agent_ref": ' + named.encode()))
    assert why == ":2: 'agent_ref' must be an agent's name or an object with a 'name'"


def test_row_that_is_not_utf8_is_refused_with_the_fix(tmp_path: Path) -> None:
    why = refused(tmp_path, with_answer('"é"'.encode("latin-1")))
    assert why == ":2:56: not UTF-8 (byte 0xe9); convert the file, for example with iconv -f LATIN1 -t UTF-8"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (gzip.compress(GOOD), r"is compressed \(gzip\): unpack it with gunzip"),
        (GOOD.decode().encode("utf-16"), "UTF-16: convert it"),
        (GOOD.decode().encode("utf-16-le"), "UTF-16: convert it"),
    ],
    ids=["gzip", "UTF-16", "UTF-16 without a mark"],
)
def test_file_that_is_no_text_in_utf8_is_refused_with_the_fix(tmp_path: Path, data: bytes, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, data, agent_name="solver")


def test_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    rows = read(tmp_path, b"\xef\xbb\xbf" + GOOD, agent_name="solver")
    assert [row["answer"] for row in rows] == [1]
    assert list(numbered_lines(tmp_path / "in.jsonl", {1})) == [(1, GOOD)], "as its environment is asked about it"
    with pytest.raises(ConfigError, match="is one JSON array"):
        read(tmp_path, b"\xef\xbb\xbf[" + GOOD + b"]", agent_name="solver")


@pytest.mark.parametrize("path", ["/dev/null", "pipe"])
def test_input_that_is_no_regular_file_is_named_so(tmp_path: Path, path: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is not a regular file"):
        read(tmp_path, input=tmp_path / path)


def test_a_row_that_has_an_input_is_not_worded_anew(tmp_path: Path) -> None:
    (tmp_path / "prompt.yaml").write_text("user: 'What is {a}?'\n")
    keys = {"agent_name": "solver", "prompt_config": str(tmp_path / "prompt.yaml")}
    data = b'{"a": 1}\n' + GOOD
    with pytest.raises(RowError, match=r"in.jsonl:2: already has 'responses_create_params.input'"):
        read(tmp_path, data, **keys)
    (row,) = read(tmp_path, data, skip_bad_rows=True, **keys)
    assert row["responses_create_params"] == {"input": [{"role": "user", "content": "What is 1?"}]}


def test_a_template_that_was_changed_words_the_next_run(tmp_path: Path) -> None:
    keys = {"agent_name": "solver", "prompt_config": str(tmp_path / "prompt.yaml")}
    for question in ("What is {a}?", "Compute {a}."):
        (tmp_path / "prompt.yaml").write_text(f"user: '{question}'\n")
        (row,) = read(tmp_path, b'{"a": 1}\n', **keys)
        assert row["responses_create_params"]["input"][0]["content"] == question.format(a=1)


def test_a_template_may_have_the_escapes_of_json(tmp_path: Path) -> None:
    keys = {"agent_name": "solver", "prompt_config": str(tmp_path / "prompt.yaml")}
    (tmp_path / "prompt.yaml").write_text(json.dumps({"user": "\N{GRINNING FACE} {a}"}))
    (row,) = read(tmp_path, b'{"a": 1}\n', **keys)
    assert row["responses_create_params"]["input"][0]["content"] == "\N{GRINNING FACE} 1"
    (tmp_path / "prompt.yaml").write_text(json.dumps({"user": "\ud83d {a}"}))
    with pytest.raises(ConfigError, match=r"(?s)prompt.yaml' must be YAML with 'user'.*surrogate"):
        read(tmp_path, b'{"a": 1}\n', **keys)


def test_a_wrong_template_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "prompt.yaml").write_text("user: 3\n")
    with pytest.raises(
        ConfigError, match=r"prompt.yaml' must be YAML with 'user'[^\n]*: user: Input should be a \S+ string$"
    ):
        read(tmp_path, b'{"a": 1}\n', agent_name="solver", prompt_config=str(tmp_path / "prompt.yaml"))
