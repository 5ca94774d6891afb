"""The commands as a user runs them: exit codes, what they print, and what they leave behind."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stack.stacks import (
    GROUPS,
    children_of,
    command,
    environment,
    is_alive,
    ng_run,
    no_traceback,
    until,
    unwritable,
    write,
    write_rows,
)

STATUS = "collect_rollouts:main_status"
RESULTS = "results.jsonl"


def rewards(path: Path) -> list[float | None]:
    return [json.loads(line)["reward"] for line in path.read_text().splitlines()]


def test_plugins_the_core_has_never_seen_run_from_rows_to_rewards(root: Path) -> None:
    rows = write_rows(root / "rows.jsonl", 5)
    output = root / RESULTS
    with ng_run(root, *GROUPS, f"input={rows}", f"output={output}", "num_repeats=2") as stack:
        assert stack.wait_end() == 0, stack.stderr
        assert "All 3 / 3 servers ready" in stack.stdout
        assert rewards(output) == [1.0] * 10
        assert json.loads(output.read_text().splitlines()[0])["agent_ref"]["name"] == "adder"
        assert not (stack.run_dir / "stack.json").exists()
        assert no_traceback(stack.stderr)


def test_wrong_answers_are_rewarded_with_nothing(root: Path) -> None:
    rows = write_rows(root / "rows.jsonl", 2)
    wrong = "policy_model.responses_api_models.calculator.offset=1"
    with ng_run(root, *GROUPS, wrong, f"input={rows}", f"output={root / RESULTS}") as stack:
        assert stack.wait_end() == 0, stack.stderr
        assert rewards(root / RESULTS) == [0.0, 0.0]


def test_relative_paths_of_servers_start_where_the_command_was_typed(root: Path) -> None:
    rows = write_rows(root / "rows.jsonl", 1)
    kept = "sums.resources_servers.sums.state_dir=kept/attempts"
    with ng_run(root, *GROUPS, kept, f"input={rows}", f"output={root / RESULTS}") as stack:
        assert stack.wait_end() == 0, stack.stderr
    assert [path.suffix for path in (root / "kept" / "attempts").glob("*.sqlite")] == [".sqlite"]


@pytest.mark.parametrize("how", ["full disk", "no reader"])
def test_run_goes_on_to_its_end_and_its_exit_code_although_nothing_can_be_printed(root: Path, how: str) -> None:
    rows = write_rows(root / "rows.jsonl", 2)
    rows.write_text(rows.read_text() + json.dumps({"responses_create_params": {"input": "1 + 1?"}}) + "\n")
    words = (*GROUPS, f"input={rows}", f"output={root / RESULTS}", "max_attempts=2", "retry_delay_s=0")
    with (
        unwritable(how) as stream,
        ng_run(root, *words, streams={"stdout": stream, "stderr": stream}) as stack,
    ):
        assert stack.wait_end() == 3
    assert rewards(root / RESULTS) == [1.0, 1.0]


def test_command_that_only_prints_ends_quietly_when_its_reader_has_gone(root: Path) -> None:
    with unwritable("no reader") as stream:
        ended = subprocess.run(
            [sys.executable, "-c", "from nemo_gym.cli.collect_rollouts import main_status; main_status()"],
            stdout=stream,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(root),
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_run_that_is_complete_with_rollouts_that_have_no_verdict_ends_with_3(root: Path) -> None:
    rows = write_rows(root / "rows.jsonl", 2)
    without_answer = {"responses_create_params": {"input": "What is 1 + 1?"}, "id": "sum-x"}
    rows.write_text(rows.read_text() + json.dumps(without_answer) + "\n")
    with ng_run(root, *GROUPS, f"input={rows}", f"output={root / RESULTS}", "max_attempts=1") as stack:
        assert stack.wait_end() == 3, stack.stderr
    assert rewards(root / RESULTS) == [1.0, 1.0]


@pytest.mark.parametrize("words", [["run=mine"], ["+config_paths=[configs/run/mine.yaml]"]])
def test_groups_that_a_file_chooses_are_a_complete_command(root: Path, words: list[str]) -> None:
    write_rows(write(root / "resources_servers/sums/data/example.jsonl", ""), 2)
    write(root / "configs/run/mine.yaml", "agent: adder\nenvironment: sums\nmodel: calculator\nlimit: 1\n")
    assert "run: 1 rollout of 1 task, 1 left to run" in command(root, "validate", *words).stdout
    done = command(root, "run", *words)
    assert done.returncode == 0, done.stderr
    assert [rewards(path) for path in (root / "results").glob("*/rollouts.jsonl")] == [[1.0]]


def test_stack_that_only_serves_says_that_no_rows_will_be_run(root: Path) -> None:
    with ng_run(root, *GROUPS) as stack:  # its `run_dir` names it
        stack.wait_ready()
        assert "ng_run: serving; no rows will be run: add input=…" in stack.stderr
    with ng_run(root, *GROUPS, "input=null", run_dir=root / "second") as stack:
        stack.wait_ready()
        assert "no rows will be run" not in stack.stderr


def test_dry_run_checks_and_starts_nothing(root: Path) -> None:
    rows = write_rows(root / "rows.jsonl", 1)
    words = [*GROUPS, f"input={rows}", f"output={root / RESULTS}", "+dry_run=true"]
    done = command(root, "run", *words)
    assert done.returncode == 0, done.stderr
    assert "dry run: 3 servers were checked and none was started" in done.stderr
    assert not (root / RESULTS).exists()
    assert command(root, "run", *words, "agent=addr").returncode == 2
    assert "dry_run must be true or false, got 3" in command(root, "run", *GROUPS, "+dry_run=3").stderr


def test_key_that_does_nothing_here_is_named_with_what_it_is_elsewhere(root: Path) -> None:
    given = [*GROUPS, "+uv_cache_dir=/x", "+ray_head_node_address=auto", "+agent_map={a: b}", "+fan_out={a: [b]}"]
    done = command(root, "validate", *given)
    assert done.returncode == 0, done.stderr
    assert "notice: 'uv_cache_dir' does nothing here; in NeMo Gym it is uv's cache; here pip installs" in done.stdout
    assert len(json.loads(command(root, "validate", *given, "--json").stdout)["notices"]) == 4
    assert "ng_run: 'uv_cache_dir' does nothing here" in command(root, "run", *given, "+dry_run=true").stderr


def test_ports_of_servers_come_from_the_range_that_is_given(root: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        taken = held.getsockname()[1]
        low = min(taken, 65530)
        words = [*GROUPS, f"port_range_low={low}", f"port_range_high={low + 5}", f"disallowed_ports=[{low + 1}]"]
        with ng_run(root, *words) as stack:
            stack.wait_ready()
            ports = {int(server["url"].rpartition(":")[2]) for server in stack.entry["servers"]}
        assert len(ports) == 3 and ports <= {*range(low, low + 6)} - {taken, low + 1}
        too_few = [
            *GROUPS,
            f"port_range_low={taken}",
            f"port_range_high={taken + 1}",
            f"disallowed_ports=[{taken + 1}]",
        ]
        assert f"port {taken} on 127.0.0.1 is in use" in command(root, "run", *too_few).stderr
    for name in ("run", "validate"):
        done = command(root, name, *GROUPS, "port_range_low=9", "port_range_high=8")
        assert done.returncode == 2 and "leave no port for servers" in done.stderr
        assert "got 'x', 20000 and []" in command(root, name, *GROUPS, "port_range_low=x").stderr


def test_skipped_verification_holds_for_every_agent_that_does_not_say_otherwise(root: Path) -> None:
    rows = write_rows(root / "rows.jsonl", 2)
    wrong = "policy_model.responses_api_models.calculator.offset=1"
    words = [*GROUPS, wrong, f"input={rows}", "skip_verification=true", "skip_verification_reward=0.25"]
    with ng_run(root, *words, f"output={root / RESULTS}") as stack:
        assert stack.wait_end() == 0, stack.stderr
        assert "does nothing here" not in stack.stderr
    assert rewards(root / RESULTS) == [0.25, 0.25]
    own = "adder.responses_api_agents.adder.skip_verification=false"
    with ng_run(root, *words, own, f"output={root / 'own.jsonl'}", run_dir=root / "second") as stack:
        assert stack.wait_end() == 0, stack.stderr
    assert rewards(root / "own.jsonl") == [0.0, 0.0]


def test_wrong_value_is_named_by_the_path_that_a_user_types(root: Path) -> None:
    path = "sums.resources_servers.sums.bonus"
    with ng_run(root, *GROUPS, f"{path}=much") as stack:
        assert stack.wait_end() == 2
        assert f"{path}: Input should be a valid number" in stack.stderr


def test_rollouts_run_against_a_stack_that_runs_already(root: Path) -> None:
    rows = write_rows(root / "rows.jsonl", 3)
    with ng_run(root, *GROUPS) as stack:
        stack.wait_ready()
        done = command(root, "collect_rollouts", f"+input_jsonl_fpath={rows}", f"+output_jsonl_fpath={root / RESULTS}")
        assert done.returncode == 0, done.stderr
        assert rewards(root / RESULTS) == [1.0] * 3
        again = command(
            root, "collect_rollouts", f"input={rows}", f"output={root / 'again.jsonl'}", f"run_dir={stack.run_dir}"
        )
        assert again.returncode == 0, again.stderr
        assert stack.process.poll() is None


def test_interrupted_run_stops_servers_and_can_be_resumed(root: Path) -> None:
    rows = write_rows(root / "rows.jsonl", 400)
    words = [*GROUPS, f"input={rows}", f"output={root / RESULTS}", "concurrency=2"]
    with ng_run(root, *words) as stack:
        until(lambda: (root / RESULTS).exists() and (root / RESULTS).read_text().count("\n") >= 3, "some results")
        processes = children_of(stack.process.pid)
        stack.signal(signal.SIGINT)
        assert stack.wait_end() == 130
        assert not any(map(is_alive, processes))
        assert no_traceback(stack.stderr)
        assert "the same command continues" in stack.stdout
    kept = len(rewards(root / RESULTS))
    assert 3 <= kept < 400
    with ng_run(root, *words) as stack:
        assert stack.wait_end() == 0, stack.stderr
    assert rewards(root / RESULTS) == [1.0] * 400


def test_finished_run_is_shown_again_and_no_server_starts(root: Path) -> None:
    rows = write_rows(root / "rows.jsonl", 2)
    words = [*GROUPS, f"input={rows}", f"output={root / RESULTS}"]
    with ng_run(root, *words) as stack:
        assert stack.wait_end() == 0, stack.stderr
    with ng_run(root, *words, run_dir=root / "second") as stack:
        assert stack.wait_end() == 0, stack.stderr
        assert "2 rollouts of 2 tasks, finished before" in stack.stdout
        assert "nothing was run again" in stack.stdout
        assert "was started with other values" not in stack.stderr
        assert not stack.run_dir.exists()
    bonus = "sums.resources_servers.sums.bonus"
    with ng_run(root, *words, f"{bonus}=0.5", run_dir=root / "other") as stack:
        assert stack.wait_end() == 0, stack.stderr
        assert f"the run in '{root / RESULTS}' was started with other values of {bonus}; its fin" in stack.stderr
    with ng_run(root, *words, "limit=1", run_dir=root / "third") as stack:
        assert stack.wait_end() == 2
        assert "overwrite=true" in stack.stderr
        assert not stack.run_dir.exists()
    assert rewards(root / RESULTS) == [1.0, 1.0]
    assert "run: 2 rollouts of 2 tasks, finished" in command(root, "validate", *words).stdout


@pytest.mark.parametrize("key", ["observability.metrics_port", "serve.port"])
def test_port_that_is_taken_is_named_by_the_key_that_a_user_types(root: Path, key: str) -> None:
    rows = write_rows(root / "rows.jsonl", 1)
    run = [] if key == "serve.port" else [f"input={rows}", f"output={root / RESULTS}"]
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        ng_run(root, *GROUPS, f"+{key}={taken.getsockname()[1]}", *run) as stack,
    ):
        assert stack.wait_end() == 2
        assert f"choose another '{key}', or 0 for a free one" in stack.stderr


@pytest.mark.parametrize("name", ["run", "validate"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["input=bad.jsonl", "output=o.jsonl"], "bad.jsonl:2:1: not a JSON value"),
        (["input=array.jsonl", "output=o.jsonl"], "is one JSON array; 'input' takes one object per line: jq -c"),
        (["input=nothing.jsonl", "output=o.jsonl"], "input 'nothing.jsonl' does not exist"),
        (["input=rows.jsonl", "output=rows.jsonl/o.jsonl"], "'rows.jsonl' is not a directory"),
        (["input=rows.jsonl", "output=foreign.jsonl"], "discard the file with overwrite=true"),
        (["input=rows.jsonl", "output=rows.jsonl", "overwrite=true"], "output 'rows.jsonl' is the input itself"),
        (
            ["input=rows.jsonl", "output=own.jsonl", "+config_paths=[own_config.yaml]", "overwrite=true"],
            "a file that the run itself writes or removes ('own_config.yaml'): choose another 'output'",
        ),
        (["input=rows.jsonl", "output=held.jsonl"], "another collector (process"),
        (["input=blank.jsonl", "output=o.jsonl"], "blank.jsonl:3: the row has no prompt"),
        (["num_repeats=two"], "num_repeats"),
        (["limit=0"], "limit"),
        (["concurrency=-1"], "concurrency"),
        (["+sums.resources_servers.sums.host=1.2.3.4"], "sums.host: '1.2.3.4' is not a loopback address"),
        (["default_host=1.2.3.4"], "default_host: '1.2.3.4' is not a loopback address"),
        (["dispatch=ry"], "dispatch must be processes (this host's) or ray, got 'ry'"),
        (["input=rows.jsonl", "output=o.jsonl", "validation=gold"], "'adder' is not configured for it (row_access: v"),
        (["input=rows.jsonl", "output=o.jsonl", "agent_name=addr"], "unknown agent 'addr' (did you mean 'adder'?)"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_run_is_checked_before_any_server_starts(root: Path, name: str, words: list[str], message: str) -> None:
    write_rows(root / "rows.jsonl", 2)
    (root / "bad.jsonl").write_text((root / "rows.jsonl").read_text().splitlines()[0] + "\nno json\n")
    (root / "array.jsonl").write_text('[\n {"responses_create_params": {"input": "x"}}\n]\n')
    blank = '{"responses_create_params": {"input": " "}, "expected": "3"}\n'
    (root / "blank.jsonl").write_text((root / "rows.jsonl").read_text() + blank)
    (root / "foreign.jsonl").write_text("precious\n")
    (root / "own_config.yaml").write_text("num_repeats: 2\n")
    with (root / "held.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = command(root, name, *GROUPS, *words, f"run_dir={root / 'run'}")
    assert done.returncode == 2
    assert message in done.stderr
    assert no_traceback(done.stderr)
    assert not (root / "run").exists()
    assert (root / "foreign.jsonl").read_text() == "precious\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["num_repeats=two"], "num_repeats must be a whole number from 1, got 'two'"),
        (["num_repeats=1.7"], "num_repeats must be a whole number from 1, got 1.7"),
        (["limit=all"], "limit must be a whole number from 1, got 'all'"),
        (["limit=-1"], "limit must be a whole number from 1, got -1"),
        (["output=nowhere/o.jsonl"], "output 'nowhere/o.jsonl' must be a file in a directory that exists"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_jobs_are_not_submitted_with_a_value_that_cannot_be_meant(root: Path, words: list[str], message: str) -> None:
    write_rows(root / "rows.jsonl", 2)
    done = command(root, "jobs", "submit", "input=rows.jsonl", "url=http://127.0.0.1:9", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert no_traceback(done.stderr)


def test_agent_killed_in_mid_run_costs_no_rollout(root: Path) -> None:
    rows = write_rows(root / "rows.jsonl", 150)
    with ng_run(root, *GROUPS, f"input={rows}", f"output={root / RESULTS}", "concurrency=4") as stack:
        until(lambda: (root / RESULTS).exists() and (root / RESULTS).read_text().count("\n") >= 5, "some results")
        os.kill(stack.server("adder")["pid"], signal.SIGKILL)
        assert stack.wait_end() == 0, stack.stderr
        assert "server 'adder' ended with signal SIGKILL; restart 1 of 5" in stack.stderr
    assert rewards(root / RESULTS) == [1.0] * 150


def test_status_lists_servers_and_tells_a_dead_one(root: Path) -> None:
    assert "no stack runs" in command(root, STATUS).stdout
    with ng_run(root, *GROUPS, "max_restarts=5") as stack:
        stack.wait_ready()
        done = command(root, STATUS, "--json")
        assert done.returncode == 0, done.stderr
        (report,) = json.loads(done.stdout)["stacks"]
        assert report["run_dir"] == str(stack.run_dir)
        servers = {server["instance"]: server for server in report["servers"]}
        assert set(servers) == {"adder", "sums", "policy_model"}
        assert {server["health"] for server in servers.values()} == {"ok"}
        assert all(server["pss_mib"] > 1 for server in servers.values())
        assert "root_key" not in done.stdout
        os.kill(servers["sums"]["pid"], signal.SIGSTOP)
        stuck = command(root, STATUS, f"run_dir={stack.run_dir}")
        assert stuck.returncode == 1
        assert "silent" in stuck.stdout
        os.kill(servers["sums"]["pid"], signal.SIGCONT)
    assert "no stack runs" in command(root, STATUS).stdout


def test_stack_of_a_killed_supervisor_is_not_taken_for_a_running_one(root: Path) -> None:
    with ng_run(root, "environment=sums") as stack:
        stack.wait_ready()
        stack.signal(signal.SIGKILL)
        stack.wait_end()
        done = command(root, "collect_rollouts", "input=a.jsonl", "output=b.jsonl", f"run_dir={stack.run_dir}")
        assert done.returncode == 2
        assert "no longer runs" in done.stderr
    with ng_run(root, "environment=sums") as stack:
        stack.wait_ready()  # the stale file is in nobody's way


@pytest.mark.parametrize("name", ["run", "collect_rollouts", "status", "validate", "prepare"])
def test_help_explains_and_ends_well(root: Path, name: str) -> None:
    done = command(root, STATUS if name == "status" else name, "--help")
    assert done.returncode == 0
    assert f"usage: ng_{name}" in done.stdout


def test_help_of_agents_names_those_that_run_a_cli(root: Path) -> None:
    done = command(root, "prepare", "agents", "--help")
    assert done.returncode == 0
    assert "agents=NAME,NAME" in done.stdout
    assert "claude_code, codex" in done.stdout


def test_agents_that_cannot_be_fetched_keep_no_other_from_being_tried(root: Path, tmp_path: Path) -> None:
    (tmp_path / "no-npm").mkdir()
    nothing = {"PATH": str(tmp_path / "no-npm"), "NEMO_GYM_CACHE_DIR": str(tmp_path / "cache")}
    done = command(root, "prepare", "agents", "agents=codex,qwen_code", **nothing)
    assert done.returncode == 2
    assert "codex: fetching agent CLIs needs npm" in done.stderr
    assert "qwen_code: fetching agent CLIs needs npm" in done.stderr


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("run", [], "nothing to run"),
        ("run", ["agent=addr"], "unknown agent 'addr' (did you mean 'adder'?)"),
        ("run", [*GROUPS, "input=rows.jsonl"], "input 'rows.jsonl' does not exist"),
        ("run", [*GROUPS, "output=o.jsonl"], "add input=<file>.jsonl"),
        ("run", [*GROUPS, "input=rows.jsonl", "output=o.jsonl", "num_repeats=0"], "error: num_repeats: Input"),
        ("run", [*GROUPS, "input=rows.jsonl", "output=o.json"], "error: output 'o.json' must end in .jsonl"),
        ("run", ["agnt=adder"], "unknown key 'agnt' (did you mean 'agent'?)"),
        ("collect_rollouts", ["input=a.jsonl", "output=b.jsonl"], "no stack runs: start one with ng_run"),
        ("collect_rollouts", ["inptu=a.jsonl"], "unknown key 'inptu' (did you mean 'input'?)"),
        ("status", ["run_dri=x"], "unknown key 'run_dri' (did you mean 'run_dir'?)"),
        ("validate", ["environment=sum"], "did you mean 'sums'?"),
        ("prepare", [], "which environment?"),
        ("prepare", ["sums"], "'sums' needs no preparation"),
        ("prepare", ["sum"], "did you mean 'sums'?"),
    ],
)
def test_expected_error_is_one_message_and_exit_code_2(root: Path, name: str, words: list[str], message: str) -> None:
    done = command(root, STATUS if name == "status" else name, *words)
    assert done.returncode == 2
    assert f"ng_{name}: error: " in done.stderr
    assert message in done.stderr
    assert no_traceback(done.stderr)


def test_missing_sandbox_program_is_one_error_and_stops_the_servers(root: Path) -> None:
    write(root / "box.yaml", "sandbox: {local: {bwrap: no-such-program}}\n")
    needs = "sums.resources_servers.sums.sandbox_provider=sandbox"
    with ng_run(root, *GROUPS, "sandbox=box.yaml", needs) as stack:
        assert stack.wait_end() == 2
        assert "ng_run: error: sandbox provider 'local' cannot serve 'sums' on this machine" in stack.stderr
        assert "install the package bubblewrap" in stack.stderr
        assert no_traceback(stack.stderr)


def test_missing_input_file_is_one_error_and_stops_the_servers(root: Path) -> None:
    with ng_run(root, *GROUPS, "input=nothing.jsonl", f"output={root / RESULTS}") as stack:
        assert stack.wait_end() == 2
        assert "nothing.jsonl" in stack.stderr
        assert no_traceback(stack.stderr)


def test_validate_prints_what_would_run_without_secrets(root: Path) -> None:
    write(root / "env.yaml", "policy_api_key: very-secret-key\n")
    words = [*GROUPS, "policy_model.responses_api_models.calculator.api_key='${policy_api_key}'"]
    done = command(root, "validate", *words, "--dump")
    assert done.returncode == 0, done.stderr
    assert "valid: 3 servers" in done.stderr
    assert "api_key: (secret)" in done.stdout
    report = json.loads(command(root, "validate", *words, "--json", "--dump").stdout)
    assert report["valid"] is True
    assert report["topology"] == "none"
    assert report["composition"] == {"agent": "adder", "environment": "sums", "model": "policy_model"}
    assert "very-secret-key" not in json.dumps(report) + done.stdout + done.stderr


@pytest.mark.parametrize(
    "words",
    [
        GROUPS,
        ["agent=mini_swe_agent", "environment=swe_bench", "sandbox=local", "model=scripted", "topology=env_sandboxed"],
        ["agent=mini_swe_agent", "environment=swe_bench", "sandbox=local", "model=scripted", "topology=agent_in_env"],
    ],
)
def test_dump_alone_is_standard_output_and_composes_the_same_as_a_file(root: Path, words: list[str]) -> None:
    dumped = command(root, "validate", *words, "--dump")
    file = write(root / "dumped.yaml", dumped.stdout)
    done = command(root, "validate", f"+config_paths=[{file}]")
    assert done.returncode == 0, done.stderr
    first, again = (
        [re.sub(r" \(.*\)", "", line) for line in said.splitlines() if not line.startswith("verified: ")]
        for said in (dumped.stderr, done.stdout)
    )
    assert again == first


def test_refused_url_is_named_without_its_password(root: Path) -> None:
    done = command(root, "validate", *GROUPS, "store=postgresql://user:hunter2@host/name")
    assert done.returncode == 2 and "postgresql://user:(secret)@host/name" in done.stderr


def test_validate_reports_errors_as_json(root: Path) -> None:
    done = command(root, "validate", "environment=sum", "--json")
    assert done.returncode == 2
    report = json.loads(done.stdout)
    assert report["valid"] is False
    assert "did you mean 'sums'?" in report["error"]
    write_rows(root / "rows.jsonl", 1)
    (root / "rows.jsonl").write_text((root / "rows.jsonl").read_text() + "{\n")
    bad = command(root, "validate", *GROUPS, "input=rows.jsonl", "output=out.jsonl", "--json")
    assert bad.returncode == 2, bad.stderr
    report = json.loads(bad.stdout)
    assert report["valid"] is False and "1 row of 'rows.jsonl' cannot be used" in report["error"]
    assert report["details"]["line"] == 2


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def main(overrides):\n    print('got', overrides)\n    return 3\n", 3),
        ("async def main(overrides):\n    print('got', overrides)\n", 0),
        ("def prepare():\n    from resources_servers.sums.helper import expected_of\n    print('got', [])\n", 0),
    ],
)
def test_prepare_calls_the_environments_script(root: Path, source: str, expected: int) -> None:
    write(root / "resources_servers/sums/prepare.py", source)
    words = ["rows=a.jsonl", "--force"] if "overrides" in source else []
    done = command(root, "prepare", "sums", *words)
    assert done.returncode == expected, done.stderr
    assert f"got {words}" in done.stdout


@pytest.mark.parametrize(("name", "file"), [("exam", "config"), ("exam/hard", "hard")])
def test_prepare_runs_the_script_that_a_benchmark_of_nemo_gym_names(root: Path, name: str, file: str) -> None:
    data = (
        f"{{type: benchmark, jsonl_fpath: benchmarks/exam/data/rows.jsonl, prepare_script: benchmarks/exam/{file}.py}}"
    )
    agent = f"{{responses_api_agents: {{simple_agent: {{datasets: [{data}]}}}}}}"
    write(root / f"benchmarks/exam/{file}.yaml", f"exam_agent: {agent}\n")
    source = "from benchmarks.exam.made import MADE\n"
    source += "def prepare(split='test', most=1):\n    print('got', split, most, MADE)\n"
    write(root / f"benchmarks/exam/{file}.py", source + "\ndef main():\n    raise SystemExit('parses sys.argv')\n")
    write(root / "benchmarks/exam/made.py", "MADE = 'rows'\n")
    words = [f"benchmark={name}", "+prepare_script_args.split=dev"]
    older = [f"+config_paths=[benchmarks/exam/{file}.yaml]", words[1]]
    for ordered in (words, words[::-1], older):
        done = command(root, "prepare", *ordered)
        assert done.returncode == 0, done.stderr
        assert "got dev 1 rows" in done.stdout
    assert "there is no benchmark 'exan'" in command(root, "prepare", "benchmark=exan").stderr


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("def main(overrides):\n    raise ValueError('no such image')\n", "ValueError: no such image"),
        ("import not_installed\n", "ModuleNotFoundError: No module named 'not_installed'"),
        ("def main(:\n", "SyntaxError: "),
    ],
)
def test_prepare_script_that_fails_is_named_with_its_own_part_of_the_traceback(
    root: Path, source: str, error: str
) -> None:
    script = root / "resources_servers/sums/prepare.py"
    write(script, source)
    done = command(root, "prepare", "sums")
    assert done.returncode == 1
    assert f"ng_prepare: error: {script} failed: {error}" in done.stderr.splitlines()[-1]
    assert error in done.stderr.splitlines()[-2]
    assert "nemo_gym/cli" not in done.stderr


def with_gold(root: Path) -> Path:
    """Its environment, which knows its solutions."""
    folder = root / "resources_servers/sums"
    app = folder / "app.py"
    gold = "    async def gold_solution(self, row):\n        return {'text': row['expected']}\n\n    async def verify("
    app.write_text(app.read_text().replace("    async def verify(", gold))
    (folder / "data").mkdir()
    write_rows(folder / "data/example.jsonl", 3)
    return folder


def test_environment_whose_gold_is_rewarded_and_nothing_is_not_carries_a_marker(root: Path) -> None:
    folder = with_gold(root)
    assert "verified: no; ng_validate environment=" in command(root, "validate", *GROUPS).stdout

    bonus = "sums.resources_servers.sums.bonus=1.0"
    fooled = command(root, "validate", "environment=sums", "--oracle", "topology=none", bonus)
    assert fooled.returncode == 1, fooled.stderr
    assert "sum-0 with oracle=nothing: reward 1" in fooled.stderr
    explained = Path(fooled.stdout.split("Rollouts: ")[-1].splitlines()[0])
    assert explained.name == "nothing.jsonl" and explained.exists()
    shutil.rmtree(explained.parent)
    assert not (folder / "verified.yaml").exists()

    digest = hashlib.sha256((folder / "data/example.jsonl").read_bytes()).hexdigest()
    before = {"commit": "unknown", "input_sha256": digest, "providers": ["docker"]}  # with which sources, nobody knows
    write(folder / "verified.yaml", json.dumps({"verified": before}))
    passed = command(root, "validate", "environment=sums", "topology=none", "--oracle")
    assert passed.returncode == 0, passed.stderr
    done = command(root, "validate", *GROUPS)
    assert "3 rows of data/example.jsonl, on no sandbox, commit unknown (the folder is not under" in done.stdout
    marker = json.loads(command(root, "validate", *GROUPS, "--json").stdout)["verified"]
    assert (marker["rows"], marker["providers"]) == (3, [])
    assert command(root, "validate", "--oracle", *GROUPS).returncode == 2  # the agent is its own


def test_oracle_checks_the_rows_of_nemo_gyms_spelling(root: Path) -> None:
    with_gold(root)
    write_rows(root / "rows, é (1).jsonl", 2)
    words = ("environment=sums", "topology=none", "--oracle")
    done = command(root, "validate", *words, "input_jsonl_fpath='rows, é (1).jsonl'")
    assert done.returncode == 0, done.stderr
    assert "2 rows of rows, é (1).jsonl" in command(root, "validate", *GROUPS).stdout
    assert command(root, "validate", *words, "output_jsonl_fpath=out.jsonl").returncode == 2


@pytest.mark.parametrize(
    ("program", "handler", "code", "said"),
    [
        ("bin/ng_run", "SIG_DFL", 130, "ng_run: error: interrupted\n"),
        ("train.py", "SIG_DFL", -signal.SIGINT, "KeyboardInterrupt"),  # a program's own matter
        ("ng_train.py", "SIG_DFL", -signal.SIGINT, "KeyboardInterrupt"),
        ("bin/ng_run", "SIG_IGN", 0, ""),
    ],
)
def test_interrupt_during_the_imports_of_a_command_is_one_line(
    program: str, handler: str, code: int, said: str
) -> None:
    source = f"import sys; sys.argv[0] = {program!r}; import nemo_gym.cli, signal; signal.raise_signal(signal.SIGINT)"
    begin = (
        f"import os, signal, sys; signal.signal(signal.SIGINT, signal.{handler}); os.execv(sys.argv[1], sys.argv[1:])"
    )
    start = [sys.executable, "-c", begin, sys.executable, "-c", source]
    done = subprocess.run(start, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and said in done.stderr, done.stderr
    if not program.endswith(".py"):
        assert done.stderr == said


def test_marker_keeps_the_providers_of_before_until_the_sources_change(root: Path) -> None:
    folder = with_gold(root)
    oracle = ("environment=sums", "topology=none", "--oracle")

    def commit() -> None:
        git = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@example.invalid"]
        subprocess.run([*git, "add", "resources_servers"], check=True)
        subprocess.run([*git, "commit", "-q", "-m", "next"], check=True)

    marker = folder / "verified.yaml"
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    commit()
    assert command(root, "validate", *oracle).returncode == 0
    marker.write_text(marker.read_text().replace("providers: []", "providers: [docker]"))
    commit()
    assert command(root, "validate", *oracle).returncode == 0
    assert "- docker" in marker.read_text()
    (folder / "new.py").touch()
    assert ", changed since" in command(root, "validate", *GROUPS).stdout
    (folder / "new.py").unlink()
    (folder / "helper.py").write_text((folder / "helper.py").read_text() + "\n# changed\n")
    assert ", changed since" in command(root, "validate", *GROUPS).stdout
    refused = command(root, "validate", *oracle)
    assert "the marker names a commit; commit first" in refused.stderr
    assert "Rollouts:" not in refused.stdout  # before anything was run
    commit()
    assert command(root, "validate", *oracle).returncode == 0
    assert "providers: []" in marker.read_text()
