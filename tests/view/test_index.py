"""The index of result files: what it holds, how it follows a file, and what it makes of lines that are no rows."""

from __future__ import annotations

import base64
import io
import json
import os
import sqlite3
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from nemo_gym.contract.errors import ConfigError
from nemo_gym.view.index import ResultIndex, ViewError, open_result
from nemo_gym.view.queries import (
    Prices,
    TableQuery,
    compare,
    compared,
    find_row,
    histogram,
    mean_of_tasks,
    notes,
    reasons,
    sign_test,
    summary,
    table,
    tasks,
)
from nemo_gym.view.rollout import chain_of, rollout_view, text_at
from tests.view.results import append, failed, row, said, write


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return write(tmp_path / "out.jsonl", row(0), row(1), row(2, reward=1.0), row(3, findings=[{"kind": "odd"}]))


def names(index: ResultIndex, **words: str) -> list[str]:
    return [each["rollout_id"] for each in table(index, TableQuery.of(words))["rows"]]


def test_table_shows_rows_of_both_files_worst_first(output: Path) -> None:
    write(output.with_name("out_failures.jsonl"), failed(9))
    index = open_result(output)
    assert names(index) == ["run.9-0", "run.3-0", "run.0-0", "run.1-0", "run.2-0"]
    assert names(index, sort="task_id", descending="1")[0] == "run.9-0"
    assert names(index, limit="1", offset="2") == ["run.0-0"]
    assert output.with_name("out_index.sqlite").exists()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ({"q": "pears basket"}, 4),
        ({"q": "PEAR 2"}, 1),
        ({"q": "task-3"}, 1),
        ({"q": 'quo"te OR pears'}, 0),
        ({"task": "SK-1"}, 1),
        ({"reward": ">0"}, 3),
        ({"reward": "0"}, 1),
        ({"findings": "1"}, 1),
        ({"findings": "od"}, 1),
        ({"agent": "solver", "outcome": "completed"}, 4),
        ({"outcome": "max_turns"}, 0),
    ],
)
def test_filters(output: Path, words: dict[str, str], found: int) -> None:
    assert table(open_result(output), TableQuery.of(words))["total"] == found


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"agnet": "x"}, r"'agnet' is not a filter \(did you mean 'agent'\?\)"),
        ({"sort": "rewrd"}, r"sort=rewrd \(did you mean 'reward'\?\)"),
        ({"reward": "2"}, "reward=2: must be one of"),
        ({"limit": "-1"}, "limit=-1: not a number"),
    ],
)
def test_unknown_filters_are_named(words: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TableQuery.of(words)


def test_what_is_appended_is_read_then_and_nothing_twice(output: Path) -> None:
    index = open_result(output)
    assert index.update() is False
    append(output, row(4), row(5))
    assert index.update() is True
    assert summary(index)["rollouts"] == 6
    again = ResultIndex(output)
    assert again.update() is False
    assert summary(again)["rollouts"] == 6


def test_index_is_made_anew_when_the_file_is_another_one(output: Path) -> None:
    write(output.with_name("out_failures.jsonl"), failed(9))
    index = open_result(output)
    output.with_name("new").write_bytes(write(output.with_name("tmp"), row(7)).read_bytes())
    output.with_name("new").replace(output)
    index.update()
    assert sorted(names(index)) == ["run.7-0", "run.9-0"]
    assert names(index, q="basket 0") == []
    output.unlink()
    index.update()
    assert names(index) == ["run.9-0"]


def test_failed_attempts_of_a_rollout_count_once_and_not_beside_its_result(output: Path) -> None:
    of_nemo_gym = {"_ng_task_index": 0, "_ng_rollout_index": 0, "agent_ref": {"name": "a"}, "response": {}}
    lost = {**of_nemo_gym, "_ng_failure_class": "agent_run_error", "error": "500"}
    other = {**lost, "agent_ref": {"name": "b"}}
    ids = [{**lost, "_ng_task_index": 5, "_ng_rollout_id": name} for name in ("x", "y")]
    output.unlink()
    failures = output.with_name("out_failures.jsonl")
    write(failures, lost, lost, other, *ids, failed(0), failed(7), failed(7))
    index = open_result(output)
    assert names(index, reward="none", sort="rollout_id") == ["0-0", "0-0", "run.0-0", "run.7-0", "x", "y"]
    write(output, {**of_nemo_gym, "reward": 1.0}, row(0, reward=1.0))
    assert index.update() is True
    assert names(index, reward="none", sort="rollout_id") == ["0-0", "run.7-0", "x", "y"]
    append(failures, lost, failed(7, failure_reason="again"))
    assert index.update() is True
    assert names(index, reward="none", sort="rollout_id") == ["0-0", "run.7-0", "x", "y"]
    assert "again" in [each["reason"] for each in reasons(index)]
    assert summary(index)["rollouts"] == 6
    output.unlink()
    assert index.update() is True
    assert names(index, sort="rollout_id") == ["0-0", "0-0", "run.0-0", "run.7-0", "x", "y"]


def test_last_line_without_an_end_is_left_out_until_it_has_one(output: Path) -> None:
    with output.open("ab") as file:
        file.write(b'{"_ng_rollout_id": "run.8-0", "_ng_')
    index = open_result(output)
    assert summary(index)["rollouts"] == 4
    assert notes(index) == ["The last line has no end (35 bytes) and is left out until it has one."]
    with output.open("ab") as file:
        file.write(b'task_index": 8, "_ng_rollout_index": 0, "valid": true, "reward": 1}\n')
    index.update()
    assert "run.8-0" in names(index)
    assert notes(index) == []


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1), "b": 1} if depth else 1


HOSTILE: list[Any] = [
    b"\xff\xfe not json",
    b"[]",
    b"[" * 5000 + b"]" * 5000,
    b'{"a":' * 3000 + b"1" + b"}" * 3000,
    {"_ng_task_index": 2**70, "_ng_rollout_index": 0, "reward": 1},
    {"_ng_task_index": 10**400, "_ng_rollout_index": 0, "reward": 1},
    {"_ng_task_index": True, "_ng_rollout_index": 0, "reward": 1},
    {"input": "a dataset row", "_ng_task_index": 1, "_ng_rollout_index": 0},
]
ODD_ROWS: list[Any] = [
    row(20, response={"output": "x"}, timings=[1], findings="many", agent_ref="me", ng_trajectory={"a": 1}),
    row(21, task_id=["a"], outcome={"b": 1}, reward="high", ng_model_session=4, responses_create_params=7),
    row(22, task_id="\ud800 half a pair", response={"output": [{"content": [{"text": "\udfff"}]}]}),
    row(23, timings={"run_s": 1e308, "eval_s": 1e308}, evaluation_log="../../etc/passwd", turns="x"),
    row(24, response={"output": [said("long " * 2_500_000)]}),
    row(29, topology=nested(300), artifacts=[{"name": "a", "size": nested(300)}]),
    row(30, official={"tests_status": {"FAIL_TO_PASS": {"failure": 7}, "PASS_TO_PASS": {"failure": "all"}}}),
    row(27, agent_ref={"name": 5}, timings={"run_s": 2**70}, reward=10**400),
    row(28, timings={"run_s": 10**400}, response={"output": [], "usage": {"input_tokens": 10**400}}),
    b'{"_ng_task_index": 25, "_ng_rollout_index": 0, "reward": 1, "task_id": "\xff\xfe"}',
    b'{"_ng_task_index": 26, "_ng_rollout_index": 0, "reward": 1, "deep": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"_ng_task_index": 31, "_ng_rollout_index": 0, "reward": 1, "details": ' + b"[" * 1020 + b"]" * 1020 + b"}",
]


def test_lines_that_are_no_rows_are_told_in_a_sentence_and_the_rest_is_shown(tmp_path: Path) -> None:
    index = open_result(write(tmp_path / "out.jsonl", row(0), *HOSTILE, *ODD_ROWS, row(1)))
    assert summary(index)["rollouts"] == 2 + len(ODD_ROWS)
    (odd, foreign) = notes(index)
    assert odd.startswith(f"{len(HOSTILE)} lines of out.jsonl are not result rows (line 2: it is not JSON")
    assert foreign.startswith("3 rows lack 'valid' or '_ng_rollout_id'")
    for each in table(index, TableQuery())["rows"]:
        found = find_row(index, each["rollout_id"])
        shown = rollout_view(index, found)
        assert orjson.loads(orjson.dumps(shown))["raw_bytes"] == len(found.raw)
        assert shown["evaluation"] is None


def test_figures_survive_numbers_that_are_too_large_together(tmp_path: Path) -> None:
    usage = {"input_tokens": 4 * 10**18, "output_tokens": 10}
    timings = {"init_s": 1e308, "run_s": 1e308, "eval_s": 1.0}
    rows = [row(task, reward=1.7e308, response={"output": [], "usage": usage}, timings=timings) for task in range(4)]
    found = summary(open_result(write(tmp_path / "out.jsonl", *rows, row(9))))
    assert (found["tokens_out"], found["seconds"]) == (50, 4 * 1.0 + 3.5)
    assert found["tokens_in"] > 9 * 10**18
    assert (found["valid"], found["reward"]["value"]) == (5, pytest.approx(4e300 / 5)), "each has a verdict"


def test_file_that_is_no_result_file_is_said_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'.*a\.jsonl' is not a result file: line 1: it has no '_ng_task_index'"):
        open_result(write(tmp_path / "a.jsonl", {"question": "?"}))
    with pytest.raises(ConfigError, match="there is no result file"):
        open_result(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="is a directory; name its result file"):
        open_result(tmp_path)


def test_foreign_file_in_the_place_of_the_index_is_left_alone(output: Path) -> None:
    other = output.with_name("out_index.sqlite")
    other.write_bytes(b"my notes\n" * 100)
    index = open_result(output)
    assert summary(index)["rollouts"] == 4
    assert other.read_bytes() == b"my notes\n" * 100
    assert "kept for this process only" in notes(index)[0]
    index.close()


def test_index_of_another_version_is_made_anew(output: Path) -> None:
    open_result(output).close()
    with sqlite3.connect(output.with_name("out_index.sqlite")) as database:
        database.execute("PRAGMA user_version=99")
    database.close()
    assert summary(open_result(output))["rollouts"] == 4


def test_two_readers_of_one_file_index_each_row_once(tmp_path: Path) -> None:
    output = write(tmp_path / "out.jsonl", *(row(task) for task in range(500)))
    indexes = [ResultIndex(output) for _ in range(4)]
    threads = [threading.Thread(target=index.update) for index in indexes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert summary(indexes[0])["rollouts"] == 500


def test_index_keeps_no_open_files_of_threads_that_have_ended(output: Path) -> None:
    index = open_result(output)
    opened = 0
    for _ in range(20):
        thread = threading.Thread(target=summary, args=(index,))
        thread.start()
        thread.join()
        opened = max(
            opened, sum(os.path.realpath(each) == str(index.path) for each in Path("/proc/self/fd").iterdir())
        )
    assert opened <= 4


def test_rollout_is_found_by_id_by_sample_and_by_task(output: Path) -> None:
    append(output, row(2, 1))
    index = open_result(output)
    assert find_row(index, "run.2-1").columns["sample_index"] == 1
    assert find_row(index, "task-2#1").columns["rollout_id"] == "run.2-1"
    assert find_row(index, "task-0").columns["rollout_id"] == "run.0-0"
    with pytest.raises(ViewError, match="there is no rollout 'task-2#99999999999999999999'"):
        find_row(index, "task-2#99999999999999999999")
    with pytest.raises(ViewError, match=r"there is no rollout 'task-22' in out.jsonl \(did you mean 'task-2'\?\)"):
        find_row(index, "task-22")


def test_rollout_shows_turns_with_calls_beside_their_results(tmp_path: Path) -> None:
    output = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "a", "name": "bash", "arguments": '{"command": "ls"}'},
        {"type": "function_call", "call_id": "b", "name": "get", "arguments": '{"x": 1, "y": 2}'},
        {"type": "function_call_output", "call_id": "b", "output": "two"},
        {"type": "function_call_output", "call_id": "a", "output": "one"},
        said("done"),
    ]
    index = open_result(write(tmp_path / "out.jsonl", row(0, response={"output": output})))
    found = find_row(index, "run.0-0")
    first, second = rollout_view(index, found)["turns"]
    assert [item["kind"] for item in first["items"]] == ["reasoning", "call", "call"]
    assert first["items"][1]["arguments"]["text"] == "ls"
    assert [call["result"]["text"] for call in first["items"][1:]] == ["one", "two"]
    assert second["items"][0]["text"] == "done"
    assert text_at(found.row, second["items"][0]["where"]) == "done"
    with pytest.raises(ViewError, match="has nothing at '/response/nowhere'"):
        text_at(found.row, "/response/nowhere")
    with pytest.raises(ViewError, match="no chain 0"):
        chain_of(found.row, 0)


def test_arguments_that_a_model_nests_deeply_are_shown_as_it_wrote_them(tmp_path: Path) -> None:
    arguments = json.dumps(nested(400))
    output = [{"type": "function_call", "call_id": "a", "name": "bash", "arguments": arguments}, said("done")]
    index = open_result(write(tmp_path / "out.jsonl", row(0, response={"output": output})))
    (turn,) = rollout_view(index, find_row(index, "run.0-0"))["turns"]
    assert [item.get("arguments", item)["text"] for item in turn["items"]] == [arguments, "done"]


def test_lines_of_failing_tests_are_marked_in_a_log_of_many_lines(tmp_path: Path) -> None:
    failing = [f"tests/test_{number // 50}.py::test_number_{number}" for number in range(4000)]
    said_by_tests = ["a test_number_7 b\r", "x", "tests/test_3.py::test_number_150", "FAILED test_number_9", "7"]
    (tmp_path / "out_logs").mkdir()
    (tmp_path / "out_logs" / "a.log").write_text("\n".join([*said_by_tests, *["x"] * 30_000]))
    graded = {"evaluation_log": "out_logs/a.log", "official": {"tests_status": {"P_TO_PASS": {"failure": failing}}}}
    index = open_result(write(tmp_path / "out.jsonl", row(0, **graded)))
    began = time.monotonic()
    lines = rollout_view(index, find_row(index, "run.0-0"))["evaluation"]["lines"]
    assert time.monotonic() - began < 5
    marks = [line["mark"] for line in lines if line["text"]]
    assert marks[: len(said_by_tests)] == ["test", "", "test", "fail", ""]


def test_harvested_archive_shows_its_files(tmp_path: Path) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, data in (("home/sum.txt", b"16\n"), ("home/icon", b"\xff\xfe")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    data = base64.b64encode(archive.getvalue()).decode()
    whole = {"name": "sum", "kind": "files", "encoding": "base64", "data": data}
    damaged = {"name": "odd", "kind": "files", "encoding": "utf-8", "data": "x" * 512}
    index = open_result(write(tmp_path / "out.jsonl", row(0, artifacts=[whole, damaged, {"kind": "files"}])))
    found = find_row(index, "run.0-0")
    texts = [each["text"] for each in rollout_view(index, found)["artifacts"]]
    assert texts == ["home/sum.txt:\n16\n\nhome/icon:\n(2 bytes that are not text)", "x" * 512, ""]
    assert [text_at(found.row, f"/artifacts/{number}/data") for number in (0, 1)] == texts[:2]


def test_samples_of_a_task_stand_side_by_side(tmp_path: Path) -> None:
    rows = [row(task, sample, reward=float(sample < task)) for task in range(3) for sample in range(2)]
    shown = tasks(open_result(write(tmp_path / "out.jsonl", *rows)), TableQuery())
    assert [(each["task_id"], each["mean"]) for each in shown["rows"]] == [
        ("task-0", 0),
        ("task-1", 0.5),
        ("task-2", 1),
    ]
    assert [sample["reward"] for sample in shown["rows"][1]["samples"]] == [1, 0]


def test_reasons_that_differ_in_numbers_only_count_as_one(tmp_path: Path) -> None:
    rows = [row(task, reward=0.0, reward_reason=f"{task + 3} of 12 tests fail") for task in range(4)]
    (reason,) = reasons(open_result(write(tmp_path / "out.jsonl", *rows)))
    assert (reason["rollouts"], reason["reason"], len(reason["named"])) == (4, "3 of 12 tests fail", 3)


def test_cost_comes_from_the_price_table(tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("default: {input: 1.0, output: 10.0}\nother: {input: 100, output: 100}\n")
    index = open_result(write(tmp_path / "out.jsonl", row(0), row(1)))
    assert summary(index, Prices.read(prices))["cost"] == pytest.approx((200 * 1.0 + 20 * 10.0) / 1e6)
    prices.write_text("default: 3\n")
    with pytest.raises(ConfigError, match="is not of the form"):
        Prices.read(prices)


def test_two_runs_are_compared_by_task(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", *(row(task, reward=0.0) for task in range(6)), row(7))
    second = write(tmp_path / "b.jsonl", *(row(task, reward=float(task > 0)) for task in range(6)), row(8))
    found = compared(open_result(first), open_result(second))
    assert {name: found[name] for name in ("wins", "losses", "ties", "gained", "lost", "only_a", "only_b")} == {
        "wins": 5, "losses": 0, "ties": 1, "gained": 5, "lost": 0, "only_a": 1, "only_b": 1,
    }  # fmt: skip
    assert found["p_value"] == pytest.approx(2 / 32)
    assert found["rows"][0]["difference"] == 1


def test_tasks_of_one_name_are_told_apart_as_the_run_does(tmp_path: Path) -> None:
    def rewards(*of_tasks: float) -> list[dict[str, Any]]:
        return [row(index, task_id="same", reward=reward) for index, reward in enumerate(of_tasks)]

    first = open_result(write(tmp_path / "a.jsonl", *rewards(1.0, 0.0, 0.0)))
    figures = summary(first)
    assert (figures["tasks"], figures["solved"]) == (3, 1)
    assert set(figures["pass_rates"]) == {"pass@1", "pass@1/std_err"}
    assert figures["pass_rates"]["pass@1"] == pytest.approx(100 / 3)
    found = compared(first, open_result(write(tmp_path / "b.jsonl", *rewards(1.0, 1.0))))
    assert [found[name] for name in ("tasks", "wins", "ties", "gained", "only_a", "only_b")] == [2, 1, 1, 1, 1, 0]
    assert [(each["task_id"], each["a"], each["b"]) for each in found["rows"]] == [
        ("same", [0], [1]),
        ("same", [1], [1]),
    ]


def test_statistics() -> None:
    mean = mean_of_tasks([[0, 1], [1, 1], [0], []])
    assert mean is not None
    assert (mean.value, mean.tasks) == (0.5, 3)
    assert mean.std_err == pytest.approx(0.288675)
    assert mean_of_tasks([[]]) is None
    assert sign_test(0, 0) == 1.0
    assert sign_test(5, 5) == 1.0
    assert sign_test(10, 0) == pytest.approx(2 / 1024)
    assert 0 < sign_test(60_000, 40_000) < 1e-100 or sign_test(60_000, 40_000) == 0
    assert compare({"a": [1]}, {}).tasks == 0


def test_rewards_stand_on_a_scale_from_0_to_1(tmp_path: Path) -> None:
    index = open_result(write(tmp_path / "out.jsonl", row(1), row(3)))
    assert [held for _, _, held in histogram(index, "reward", 4)] == [0, 0, 0, 2]
    assert [held for _, _, held in histogram(index, "tokens_out", 4)] == [2, 0, 0, 0]


def test_turns_and_time_have_bounds(tmp_path: Path) -> None:
    slow = {"init_s": 1.0, "run_s": 60.0, "eval_s": 1.0}
    index = open_result(
        write(tmp_path / "out.jsonl", row(0, ng_agent_observations={"turns": 30}), row(1, timings=slow), row(2))
    )
    assert names(index, seconds=">10") == ["run.1-0"]
    assert names(index, seconds="<= 10") == ["run.0-0", "run.2-0"]
    assert (names(index, turns=">20"), names(index, turns="30"), names(index, turns="<30")) == (
        ["run.0-0"],
        ["run.0-0"],
        [],
    )
    with pytest.raises(ConfigError, match=r"turns=many: must be a number, or a bound such as >20"):
        TableQuery.of({"turns": "many"})


def test_lines_that_came_after_the_reading_are_not_called_torn(output: Path) -> None:
    index = open_result(output)
    append(output, row(7))
    assert (index.torn_bytes, notes(index)) == (0, [])
    with output.open("ab") as file:
        file.write(b'{"half')
    assert index.torn_bytes == 6
