"""``ng_reverify`` over the results of real runs."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_gym.cli.reverify import _settings
from nemo_gym.rollouts.results import RunFiles

from .stacks import GROUPS, SUM_APP, command, ng_run, no_traceback, write, write_root, write_rows


def collect(root: Path, *words: str) -> RunFiles:
    """Four rollouts of two tasks; the calculator is right about each."""
    rows = write_rows(root / "in.jsonl", 2)
    with ng_run(root, *GROUPS, f"input={rows}", "output=out/rollouts.jsonl", "num_repeats=2", *words) as stack:
        assert stack.wait_end() == 0, stack.stderr
    return RunFiles(root / "out" / "rollouts.jsonl")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunFiles]:
    root = write_root(tmp_path_factory.mktemp("root"))
    return root, collect(root, "sums.resources_servers.sums.bonus=0.5")


def copied(finished: tuple[Path, RunFiles], name: str) -> RunFiles:
    """The same results under another name, for tests that change them."""
    files = RunFiles(finished[1].output.with_name(f"{name}.jsonl"))
    for attribute in ("output", "materialized_inputs", "configuration"):
        getattr(files, attribute).write_bytes(getattr(finished[1], attribute).read_bytes())
    return files


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rewrite(files: RunFiles, **changes: Any) -> None:
    """Change the first result row."""
    first, *others = lines(files.output)
    files.output.write_text("".join(json.dumps(row) + "\n" for row in ({**first, **changes}, *others)))


def test_stored_rollouts_get_the_same_verdicts_from_the_runs_own_configuration(
    finished: tuple[Path, RunFiles],
) -> None:
    root, files = finished[0], copied(finished, "rollouts, é (1)")
    done = command(root, "reverify", str(files.output))
    assert done.returncode == 0, done.stdout + done.stderr
    compared = lines(files.reverified)
    assert {line["status"] for line in compared} == {"same"} and len(compared) == 4
    assert {line["new"]["reward"] for line in compared} == {1.5}
    assert {line["_ng_rollout_id"] for line in compared} == {row["_ng_rollout_id"] for row in lines(files.output)}
    header, counts, *_ = done.stdout.splitlines()
    assert header.split() == ["ENVIRONMENT", "SAME", "CHANGED", "INVALID", "SKIPPED"]
    assert counts.split() == ["sums", "4", "0", "0", "0"]
    assert str(files.reverified) in done.stdout


def test_changed_verdicts_are_listed_and_counted(finished: tuple[Path, RunFiles]) -> None:
    root, _ = finished
    files = copied(finished, "changed")
    of_file = ("gym", "eval", "reverify", str(files.output), "--config", "resources_servers/sums/configs/sums.yaml")
    for words in (("reverify", str(files.output), "environment=sums"), of_file):  # its bonus is 0 now
        done = command(root, *words)
        assert (done.returncode, done.stdout.splitlines()[1].split()) == (1, ["sums", "0", "4", "0", "0"]), done.stderr
    for line in lines(files.reverified):
        assert (line["stored"]["reward"], line["new"]["reward"]) == (1.5, 1.0)


def test_row_comes_from_the_inputs_and_not_from_the_result(finished: tuple[Path, RunFiles]) -> None:
    root, _ = finished
    files = copied(finished, "forged")
    response = lines(files.output)[0]["response"]
    response["output"][0]["content"][0]["text"] = "1000"
    rewrite(files, response=response, expected="1000")
    done = command(root, "reverify", str(files.output))
    assert (done.returncode, done.stdout.splitlines()[1].split()) == (1, ["sums", "3", "1", "0", "0"]), done.stderr
    (changed,) = (line for line in lines(files.reverified) if line["status"] == "changed")
    assert changed["new"]["reward"] == 0.5


def test_row_that_holds_too_little_is_skipped_with_its_reason(finished: tuple[Path, RunFiles]) -> None:
    root, _ = finished
    files = copied(finished, "skipped")
    rewrite(files, verification_skipped=True)
    done = command(root, "reverify", str(files.output))
    assert (done.returncode, done.stdout.splitlines()[1].split()) == (0, ["sums", "3", "0", "0", "1"]), done.stderr
    assert "1 × its agent skips verification" in done.stdout


def test_last_line_that_is_still_being_written_is_left_out(finished: tuple[Path, RunFiles]) -> None:
    root, _ = finished
    files = copied(finished, "unfinished")
    files.output.write_bytes(files.output.read_bytes()[:-9])
    done = command(root, "reverify", str(files.output))
    assert (done.returncode, done.stdout.splitlines()[1].split()) == (0, ["sums", "3", "0", "0", "0"]), done.stderr
    assert "the last line has no end" in done.stderr


def test_rollout_without_a_verdict_is_invalid_and_not_the_same(finished: tuple[Path, RunFiles]) -> None:
    root, _ = finished
    files = copied(finished, "invalid")
    rewrite(files, response={"no": "response"})
    done = command(root, "reverify", str(files.output))
    assert (done.returncode, done.stdout.splitlines()[1].split()) == (1, ["sums", "3", "0", "1", "0"]), done.stderr
    (invalid,) = (line for line in lines(files.reverified) if line["status"] == "invalid")
    assert invalid["failure_kind"] == "verifier_failed" and "new" not in invalid


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("no output", "cannot be read"),
        ("only failures", "give the run's command again with retry_failed=true"),
        ("no results", "holds no rollouts"),
        ("torn", "rollouts.jsonl:1: not a result row"),
        ("no inputs", "belongs beside the output"),
        ("no configuration", "name its environment"),
        ("an empty configuration", "holds no configuration; name its environment"),
        ("a secret", "sums.resources_servers.sums.judge_api_key is a secret"),
        ("nothing", "say which results"),
    ],
)
def test_bad_input_is_named_with_exit_code_2(finished: tuple[Path, RunFiles], broken: str, said: str) -> None:
    root, _ = finished
    files = copied(finished, f"{broken.replace(' ', '_')}_rollouts")
    words = [str(files.output)]
    if broken == "no output":
        files.output.unlink()
    elif broken == "only failures":
        files.output.unlink()
        files.failures.write_text("{}\n")
    elif broken == "no results":
        files.output.write_text("")
    elif broken == "torn":
        files.output.write_text('{"a": 1}\n')
    elif broken == "no inputs":
        files.materialized_inputs.unlink()
    elif broken == "no configuration":
        files.configuration.unlink()
    elif broken == "an empty configuration":
        files.configuration.write_text("")
    elif broken == "a secret":
        text = files.configuration.read_text()
        files.configuration.write_text(text.replace("bonus: 0.5", "judge_api_key: (secret)"))
    else:
        words = []
    done = command(root, "reverify", *words)
    assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
    assert said in done.stderr and no_traceback(done.stderr)


def test_traces_whose_key_was_not_stored_are_not_sent(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "rollouts.jsonl")
    for key, left in (("(secret)", {"sums": 1}), ("7", {"sums": 1, "observability": {"traces": {"headers": "7"}}})):
        stored = {"sums": 1, "observability": {"traces": {"headers": key}}}
        files.configuration.write_text(json.dumps(stored))
        with ExitStack() as temporary:
            (word,) = _settings(files, [], temporary)
            given = yaml.safe_load(Path(word.split("[")[1].strip("'\"]")).read_text())
        assert given == {**left, "error_on_unknown_keys": False}


def test_environment_that_needs_its_live_session_is_refused_by_name(root: Path) -> None:
    declared = "    config: SumConfig\n    REVERIFY_MODE = 'unsupported'\n"
    write(root / "resources_servers/sums/app.py", SUM_APP.replace("    config: SumConfig\n", declared))
    files = collect(root)
    done = command(root, "reverify", str(files.output))
    assert done.returncode == 2 and "'sums' cannot verify again" in done.stderr, done.stderr
    assert not files.reverified.exists()


def test_files_of_nemo_gym_are_graded_again_and_profiled(finished: tuple[Path, RunFiles]) -> None:
    """Rows as NeMo Gym writes them: without this suite's ids, verdict fields, artifacts and database."""
    root, ours = finished
    files = copied(finished, "theirs")
    kept = ("_ng_task_index", "_ng_rollout_index", "agent_ref", "responses_create_params", "response", "reward")
    rows = [{key: row[key] for key in kept} for row in lines(ours.output)]
    files.output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    configuration = files.configuration.read_text()
    files.configuration.write_text(f"a_key_of_a_group: nothing refers to it once it is resolved\n{configuration}")
    done = command(root, "reverify", str(files.output))
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line["_ng_rollout_id"] for line in lines(files.reverified)) == ["0-0", "0-1", "1-0", "1-1"]
    profiled = command(root, "gym", "eval", "profile", "--rollouts", str(files.output))
    assert profiled.returncode == 0, profiled.stderr
    assert len(lines(files.output.with_name("theirs_reward_profiling.jsonl"))) == 2


def test_our_rows_hold_what_nemo_gym_reads_of_a_result(finished: tuple[Path, RunFiles]) -> None:
    """Resuming, profiling and aggregating there read these fields of a row and of the materialized inputs."""
    _, files = finished
    for row in lines(files.output):
        assert {"_ng_task_index", "_ng_rollout_index", "agent_ref", "response", "reward"} <= row.keys()
        assert row["responses_create_params"]["input"] and row["response"]["object"] == "response"
    places = {(row["_ng_task_index"], row["_ng_rollout_index"]) for row in lines(files.materialized_inputs)}
    assert places == {(row["_ng_task_index"], row["_ng_rollout_index"]) for row in lines(files.output)}
    (agent,) = json.loads(files.aggregate_metrics.read_text())
    assert {"agent_ref", "agent_metrics", "key_metrics", "group_level_metrics"} <= agent.keys()
