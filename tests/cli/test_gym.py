"""``ng`` and ``gym``: NeMo Gym's subcommands and flags, scaffolds, lists, metrics of files."""

from __future__ import annotations

import importlib
import json
import re
import tomllib
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from nemo_gym._util.exact_json import require_exact_integers
from nemo_gym.cli import gym
from nemo_gym.cli.plugins import init_agent, init_environment, list_parts, plugin_folder, run_tests, search
from nemo_gym.cli.profile import aggregate, profile, render
from nemo_gym.config.check import check_everything
from nemo_gym.config.compose import compose
from nemo_gym.config.overrides import given_values
from nemo_gym.contract.errors import ConfigError, RowError

ROOT = Path(__file__).resolve().parents[2]
OWN = {"agent init", "view", "show", "why", "logs", "report", "serve", "jobs"}
"""Subcommands that NeMo Gym does not have."""


def test_flags_of_nemo_gym_are_settings() -> None:
    words = "--agent simple_agent --environment mcqa --model m --model-url http://h/v1 -i a.jsonl -o b.jsonl --limit 2"
    words += " --num-repeats=3 --concurrency 4 --resume --temperature 0.5 ++x=1"
    runs, settings = gym.translated("eval run", words.split())
    assert runs == "run:evaluate_command"
    assert settings == [
        *("agent=simple_agent", "environment=mcqa", "policy_model_name=m", "policy_base_url=http://h/v1"),
        *("input=a.jsonl", "output=b.jsonl", "limit=2", "num_repeats=3", "concurrency=4", "resume=true"),
        *("temperature=0.5", "++x=1", "model=gateway"),
    ]


@pytest.mark.parametrize(
    ("flag", "value", "read"),
    [
        *(("--model-url", "http://h/v1?x=y", "http://h/v1?x=y"), ("--input", "Köln, a=b.jsonl", "Köln, a=b.jsonl")),
        *(("--input", "~/it's (1).jsonl", "~/it's (1).jsonl"), ("--model", "4.10", "4.10"), ("--limit", "3", 3)),
        *(("--temperature", "-0.5", -0.5), ("--input", "'quoted, here.jsonl'", "quoted, here.jsonl")),
        *(("--config", "a b=c.yaml", ["a b=c.yaml"]), ("--model-api-key", "${oc.env:KEY}", "${oc.env:KEY}")),
    ],
)
def test_the_value_of_a_flag_may_hold_every_character(flag: str, value: str, read: object) -> None:
    for words in ([flag, value], [f"{flag}={value}"]):
        _, (setting, *_) = gym.translated("eval run", words)
        assert [*given_values([setting]).values()] == [read]


@pytest.mark.parametrize("flag", ["--dry-run", "--resume", "--disable-aggregation"])
def test_a_flag_without_argument_may_say_true_or_false(flag: str) -> None:
    key = flag[2:].replace("-", "_")
    for word, value in ((flag, "true"), (f"{flag}=true", "true"), (f"{flag}=False", "false")):
        assert gym.translated("eval run", [word])[1] == [f"{key}={value}"]
    assert gym.translated("eval run", ["--no-serve=false"])[0] == "run:evaluate_command"
    for wrong in (f"{flag}=no", f"{flag}=", "--no-serve=0"):
        with pytest.raises(ConfigError, match="must be true or false"):
            gym.translated("eval run", [wrong])


def test_no_serve_collects_with_servers_that_run() -> None:
    runs, settings = gym.translated("eval run", ["--no-serve", "-a", "solver", "-i", "a.jsonl", "-o", "b.jsonl"])
    assert runs == "collect_rollouts:collect_command"
    assert settings == ["agent_name=solver", "input=a.jsonl", "output=b.jsonl"]


@pytest.mark.parametrize("words", ["eval run --no-serve", "eval prepare swe_bench", "eval export input=a.jsonl"])
def test_a_configuration_file_that_a_command_would_not_read_is_refused(words: str) -> None:
    name, rest = gym._named(words.split())
    with pytest.raises(ConfigError, match="composes no servers, so --config would do nothing"):
        gym.translated(name, [*rest, "--config", "new.yaml"])


@pytest.mark.parametrize("flag", ["--benchmark", "--resources-server", "--model-type", "--model", "--model-url"])
def test_a_flag_about_servers_that_run_already_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"--no-serve' composes no servers, so {flag} would do nothing"):
        gym.translated("eval run", ["--no-serve", "-a", "solver", flag, "word"])


def test_grading_again_composes_what_its_flags_say() -> None:
    words = ["out.jsonl", "--config", "new.yaml", "--agent", "solver", "--model-url", "http://h/v1"]
    _, settings = gym.translated("eval reverify", words)
    assert settings == ["out.jsonl", "agent=solver", "policy_base_url=http://h/v1", "+config_paths=[new.yaml]"]
    _, settings = gym.translated("eval reverify", ["out.jsonl", "--model-url", "http://h/v1", "--timeout=3"])
    assert settings == ["out.jsonl", "policy_base_url=http://h/v1", "--timeout=3"]  # of the run's own configuration


def test_a_service_composes_what_its_flags_say() -> None:
    _, settings = gym.translated("serve", ["--agent", "solver", "-c", "new.yaml", "serve.port=0"])
    assert settings == ["agent=solver", "serve.port=0", "+config_paths=[new.yaml]"]


def test_names_of_nemo_gyms_plugins_become_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("resources_servers/quiz/configs/quiz.yaml", "responses_api_models/odd/configs/odd.yaml"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("a: 1")
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(tmp_path))
    _, settings = gym.translated("env start", ["--resources-server", "quiz", "--model-type", "odd", "-c", "more.yaml"])
    files = "more.yaml,resources_servers/quiz/configs/quiz.yaml,responses_api_models/odd/configs/odd.yaml"
    assert settings == [f"+config_paths=[{files}]"]
    _, settings = gym.translated("env start", ["--resources-server", "quiz", "--model-url", "http://h/v1"])
    assert settings[-1] == "model=gateway"
    _, settings = gym.translated("env start", ["--config", "brings_its_model.yaml", "--model-url", "http://h/v1"])
    assert settings == ["policy_base_url=http://h/v1", "+config_paths=[brings_its_model.yaml]"]


def test_a_flavour_of_nemo_gyms_plugin_is_another_file_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [
        "benchmarks/exam/hard.yaml",
        "benchmarks/exam/easy/config.yaml",
        "environments/quiz/remote.yaml",
        "resources_servers/quiz/configs/judge.yaml",
        "responses_api_models/odd/configs/hosted/large.yaml",
    ]
    for path in files:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("a: 1")
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(tmp_path))
    words = "--benchmark exam/hard --benchmark exam/easy --environment quiz/remote --resources-server quiz/judge"
    _, settings = gym.translated("env start", [*words.split(), "--model-type", "odd/hosted/large"])
    assert settings == [f"+config_paths=[{','.join(files)}]"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("eval", "'eval' needs a subcommand: eval run, eval prepare"),
        ("eval runn", "did you mean 'eval run'"),
        ("eval run --limitt 3", "did you mean '--limit'"),
        ("eval run --limit", "--limit needs a value"),
        ("dataset upload", "does not exist here: `huggingface-cli upload`"),
    ],
)
def test_a_word_that_is_none_is_named_with_what_is_meant(words: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        gym.dispatch(words.split())


def test_help_names_every_command_and_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert gym.dispatch(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in gym.COMMANDS)
    assert all(name in said for flag in gym.FLAGS for name in flag.names)


def test_every_old_name_is_installed_and_leads_somewhere() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for name in ("ng", "gym", *gym.OLD_NAMES):
        assert scripts[name] == "nemo_gym.cli.gym:main"
    assert {gym._named(name.split())[0] for name in gym.OLD_NAMES.values() if name and name[0] != "-"}


def test_all_plugins_with_tests_are_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, body in (
        (first / "resources_servers" / "good", "pass"),
        (second / "resources_servers" / "good", "assert False, 'hidden by the first root'"),
        (second / "responses_api_agents" / "bad", "assert False"),
        (second / "responses_api_agents" / "odd", None),
    ):
        (folder / "tests").mkdir(parents=True)
        (folder / "app.py").touch()
        if body is not None:
            (folder / "tests" / "test_app.py").write_text(f"def test_it() -> None:\n    {body}\n")
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", f"{first}:{second}")
    monkeypatch.setattr("sys.argv", ["ng_test_all"])
    assert gym.dispatch(["-q"]) == 1
    said = capfd.readouterr().out
    assert f"plugins tested: 2; failed: {second / 'responses_api_agents' / 'bad'}" in said
    (second / "responses_api_agents" / "bad" / "tests" / "test_app.py").unlink()
    assert gym.dispatch(["-q"]) == 0
    with pytest.raises(ConfigError, match="--all tests every plugin; leave out 'good'"):
        gym.dispatch(["good"])


LINES = {"qa": 15, "mcp": 30, "box": 30, "step": 45, "judge": 40}


@pytest.fixture(params=LINES)
def environment(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(tmp_path))
    assert init_environment(["my_world", f"--{request.param}", "--search-dir", str(tmp_path)]) == 0
    return request.param, tmp_path / "resources_servers" / "my_world"


def test_a_new_environment_is_short_composes_and_passes_its_tests(environment: tuple[str, Path]) -> None:
    kind, folder = environment
    written = [line for line in (folder / "app.py").read_text().splitlines() if line.strip()]
    assert len(written) <= LINES[kind]
    sandbox = ["sandbox=local"] if kind == "box" else []
    agent = "mini_swe_agent" if kind == "box" else "simple_agent"
    composition = compose([f"agent={agent}", "environment=my_world", "model=scripted", *sandbox])
    check_everything(composition)
    assert composition.chosen["environment"] == "my_world"
    assert run_tests([str(folder), "-q"]) == 0
    # The steps of an attempt are gone once it has ended.
    assert ("ReverifyMode.UNSUPPORTED" in (folder / "app.py").read_text()) == (kind == "step")


def test_a_new_environment_with_a_box_refuses_agents_that_cannot_work_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(tmp_path))
    assert init_environment(["boxed", "--box", "--search-dir", str(tmp_path)]) == 0
    assert init_agent(["asks_once", "--search-dir", str(tmp_path)]) == 0
    for agent in ("simple_agent", "asks_once"):
        with pytest.raises(ConfigError, match=f"'boxed' is reached by exec, and agent '{agent}' can only use mcp or"):
            check_everything(compose([f"agent={agent}", "environment=boxed", "model=scripted", "sandbox=local"]))


def test_a_new_environments_judge_answers_in_its_first_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(tmp_path))
    assert init_environment(["judged_world", "--judge", "--search-dir", str(tmp_path)]) == 0
    file = tmp_path / "resources_servers" / "judged_world" / "tests" / "test_app.py"
    tried = file.read_text().partition("async def test_")[0].removesuffix("\n")
    file.write_text(
        f"""{tried}
async def test_judged() -> None:
    assert (await grade("Yes.")).reward == 1.0
    for judged in ("yes/no", "Note that I cannot say.", "Nobody knows", ""):
        assert orjson.loads((await grade(judged)).body)["reward"] is None
"""
    )
    assert run_tests([str(file.parents[1]), "-q"]) == 0


def test_a_new_agent_composes_and_passes_its_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(tmp_path))
    assert init_agent(["asks_once", "--search-dir", str(tmp_path)]) == 0
    assert init_agent(["runs_it", "--command", "--search-dir", str(tmp_path)]) == 0
    printed = capfd.readouterr().out
    assert "environment=mcqa model=scripted output=results/asks_once.jsonl" in printed
    assert not set("…<>") & set(printed)  # the commands work as they are
    for agent in ("asks_once", "runs_it"):
        check_everything(compose([f"agent={agent}", "environment=mcqa", "model=scripted", "sandbox=local"]))
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", "")
    assert run_tests(["asks_once", "--search-dir", str(tmp_path), "-q"]) == 0
    assert "Warning" not in capfd.readouterr().err


def test_a_scaffold_is_of_one_kind(capfd: pytest.CaptureFixture[str]) -> None:
    for init, flags in ((init_environment, ("--qa", "--mcp")), (init_agent, ("--python", "--command"))):
        with pytest.raises(SystemExit):
            init(["both", *flags])
        assert f"argument {flags[1]}: not allowed with argument {flags[0]}" in capfd.readouterr().err


@pytest.mark.parametrize("init", [init_environment, init_agent])
def test_a_scaffold_replaces_nothing(init: object, tmp_path: Path) -> None:
    assert callable(init)
    words = ["twice", "--search-dir", str(tmp_path)]
    assert init(words) == 0
    with pytest.raises(ConfigError, match="exists already"):
        init(words)
    with pytest.raises(ConfigError, match="small letters"):
        init(["Not-A-Name", "--search-dir", str(tmp_path)])


@pytest.mark.parametrize(
    ("init", "name", "told"),
    [
        (init_environment, "../outside", "for another folder use --search-dir"),
        (init_environment, "responses_api_agents/outside", "for another folder use --search-dir"),
        (init_environment, "math", "resources_servers/math exists already, and the new one would hide it"),
        (init_agent, "simple_agent", "simple_agent exists already, and the new one would hide it"),
    ],
)
def test_a_scaffold_stands_where_it_is_told_and_hides_nothing(
    init: Callable[[list[str]], int], name: str, told: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        init([name, "--search-dir", str(tmp_path)])
    assert [*tmp_path.iterdir()] == []
    parent = "resources_servers" if init is init_environment else "responses_api_agents"
    assert init([f"+entrypoint={parent}/new", "--search-dir", str(tmp_path)]) == 0
    assert (tmp_path / parent / "new" / "app.py").is_file()


def test_a_plugin_that_is_nowhere_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mcqa'"):
        plugin_folder("mcqaa")


def test_lists_say_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert list_parts([]) == 0
    said = capsys.readouterr().out
    for name in ("simple_agent", "mcqa", "docker", "gateway"):
        assert re.search(rf"^  {name} +\S", said, re.MULTILINE), name
    assert search(["weather"]) == 0
    assert "example_mcp_weather" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="did you mean 'agents'"):
        list_parts(["agentz"])


def results(path: Path, *rewards: float) -> Path:
    rows = [
        {"_ng_task_index": 0, "_ng_rollout_index": index, "agent_ref": {"name": "a"}, "reward": reward}
        for index, reward in enumerate(rewards)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_metrics_of_files_need_no_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = results(tmp_path / "one.jsonl", 1.0, 0.0), results(tmp_path / "other.jsonl", 1.0, 1.0)
    assert profile(["--rollouts", str(one)]) == 0
    task = json.loads((tmp_path / "one_reward_profiling.jsonl").read_text())
    assert task["mean/reward"] == 0.5 and task["agent_ref"] == {"name": "a"}
    assert aggregate([str(one), str(other)]) == 0
    assert json.loads((tmp_path / "aggregate_metrics.json").read_text())[0]["agent_metrics"]["mean/reward"] == 0.75
    assert "mean/reward: 0.75" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="cannot be read"):
        profile(["--rollouts", str(tmp_path / "none.jsonl")])
    with pytest.raises(ConfigError, match="did you mean 'rollouts_jsonl_fpath'"):
        profile([f"rollout_jsonl_fpath={one}"])


def test_metrics_leave_out_a_last_line_that_is_still_being_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = results(tmp_path / "one.jsonl", 1.0, 0.0)
    whole = path.read_bytes()
    path.write_bytes(whole.rstrip(b"\n"))  # other tools leave the last line end out
    assert profile(["--rollouts", str(path)]) == 0
    assert json.loads((tmp_path / "one_agent_metrics.json").read_text())[0]["mean/reward"] == 0.5
    assert not caplog.messages
    path.write_bytes(whole + whole[:30])
    assert profile(["--rollouts", str(path)]) == 0
    assert json.loads((tmp_path / "one_agent_metrics.json").read_text())[0]["rollouts/total"] == 2
    assert caplog.messages == [f"{path}: the last line has no end (30 bytes) and is left out"]
    path.write_bytes(whole[:30] + b"\n" + whole)
    with pytest.raises(ConfigError, match="line 1 is no JSON"):
        profile(["--rollouts", str(path)])


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl", "link.jsonl", "a_failures.jsonl"])
def test_metrics_replace_no_file_of_a_run(name: str, tmp_path: Path) -> None:
    files = [results(tmp_path / f"{letter}.jsonl", 1.0) for letter in "ab"]
    results(tmp_path / "a_failures.jsonl", 0.0)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    before = (tmp_path / name).read_bytes()
    with pytest.raises(ConfigError, match="is a file of the run itself"):
        aggregate([*map(str, files), "--output", str(tmp_path / name)])
    assert (tmp_path / name).read_bytes() == before
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        aggregate([str(files[0]), "--output", str(tmp_path / "none" / "metrics.json")])


def dataset_results(path: Path, name: str, *rewards: float, sample: int = 0) -> Path:
    common = {"_ng_rollout_index": sample, "agent_ref": {"name": "a"}, "valid": True, "mask_sample": False}
    rows = [
        {"_ng_rollout_id": f"{path.stem}.{index}-{sample}", "_ng_task_index": index, "task_id": f"{name}-{index}"}
        | {"reward": reward, **common}
        for index, reward in enumerate(rewards)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def metrics_of(path: Path) -> dict[str, Any]:
    (metrics,) = json.loads(path.read_text())
    return dict(metrics["agent_metrics"])


def test_tasks_of_several_data_sets_are_told_apart_and_rollouts_count_once(tmp_path: Path) -> None:
    math, code = (
        dataset_results(tmp_path / f"{name}.jsonl", name, *rewards)
        for name, rewards in (("math", (1.0, 1.0)), ("code", (0.0, 0.0)))
    )
    again = dataset_results(tmp_path / "again.jsonl", "code", 1.0, 0.0, sample=1)
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(math.read_bytes())
    out = tmp_path / "all.jsonl"
    assert aggregate([*map(str, (math, code, math, copy, again)), "-o", str(out)]) == 0
    counts = metrics_of(tmp_path / "all_aggregate_metrics.json")
    assert (counts["tasks/total"], counts["tasks/solved"], counts["rollouts/total"]) == (4, 3, 6)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["_ng_task_index"], row["task_id"]) for row in rows] == [
        *((0, "math-0"), (1, "math-1"), (2, "code-0"), (3, "code-1"), (2, "code-0"), (3, "code-1"))
    ]
    assert aggregate([str(out), str(code), "-o", str(tmp_path / "same.json")]) == 0
    assert metrics_of(tmp_path / "same.json") == counts


def test_rollouts_of_runs_with_the_same_chosen_id_are_all_counted(tmp_path: Path) -> None:
    files = []
    for name, rewards in (("math", (1.0, 1.0)), ("code", (0.0, 0.0))):
        (tmp_path / name).mkdir()
        files.append(str(dataset_results(tmp_path / name / "nightly.jsonl", name, *rewards)))
    assert aggregate([*files, "-o", str(tmp_path / "all.jsonl")]) == 0
    counts = metrics_of(tmp_path / "all_aggregate_metrics.json")
    assert (counts["tasks/total"], counts["tasks/solved"], counts["rollouts/total"]) == (4, 2, 4)
    assert len((tmp_path / "all.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("words", "merges"),
    [
        (["--input-glob", "{}/r-*.jsonl, {}/r-1*.jsonl", "--output", "{}/r-all.jsonl"], True),
        (["+input_glob={}/r-*.jsonl", "+output_jsonl_fpath={}/r-all.jsonl", "+config_paths=[a.yaml]"], True),
        (["--input-glob", "{}/r-*.jsonl", "--output", "{}/r-all.jsonl", "+merge_shards=false"], False),
    ],
)
def test_results_are_aggregated_as_nemo_gym_words_it(words: list[str], merges: bool, tmp_path: Path) -> None:
    for shard, rewards in enumerate(((1.0, 0.0), (0.0,))):
        path = dataset_results(tmp_path / f"r-{shard}.jsonl", "t", *rewards, sample=shard)
        path.with_name(f"{path.stem}_materialized_inputs.jsonl").write_bytes(path.read_bytes())
    given = [word.replace("{}", str(tmp_path)) for word in words]
    for _ in range(2):
        assert aggregate(given) == 0
        assert metrics_of(tmp_path / "r-all_aggregate_metrics.json")["rollouts/total"] == 3
    out = tmp_path / "r-all.jsonl"
    assert out.exists() == merges
    if merges:
        assert out.read_bytes() == b"".join((tmp_path / f"r-{shard}.jsonl").read_bytes() for shard in (0, 1))
    with pytest.raises(ConfigError, match="no result file matches"):
        aggregate([f"input_glob={tmp_path}/x*.jsonl"])


def test_rows_are_merged_into_no_file_of_somebody_else(tmp_path: Path) -> None:
    one, kept = results(tmp_path / "one.jsonl", 1.0), results(tmp_path / "kept.jsonl", 0.0)
    before = kept.read_bytes()
    with pytest.raises(ConfigError, match="was not written by this command"):
        aggregate([str(one), "--output", str(kept)])
    (tmp_path / "kept_aggregate_metrics.json").write_text("[]")
    (tmp_path / "kept_materialized_inputs.jsonl").write_text("")
    for words in ([], ["+merge_shards=false"]):
        with pytest.raises(ConfigError, match="was not written by this command"):
            aggregate([str(one), "--output", str(kept), *words])
    assert kept.read_bytes() == before
    kept.unlink()  # a run that has no result yet
    with pytest.raises(ConfigError, match="was not written by this command"):
        aggregate([str(one), "--output", str(kept)])


def test_a_result_may_hold_every_character(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    row = {"_ng_task_index": 0, "_ng_rollout_index": 0, "reward": 1.0, "answer": "a\u2028b\u2029c\x85d\x0be"}
    path.write_text(json.dumps(row, ensure_ascii=False) + "\r\n")
    assert profile(["--rollouts", str(path)]) == 0
    assert json.loads((tmp_path / "odd_agent_metrics.json").read_text())[0]["mean/reward"] == 1


def test_metrics_of_a_file_need_less_memory_than_the_file(tmp_path: Path) -> None:
    tokens = {"output": [{"generation_token_ids": [*range(1000, 9000)]}], "usage": {"output_tokens": 8000}}
    rows = [
        {
            "_ng_task_index": index,
            "_ng_rollout_index": 0,
            "agent_ref": {"name": "a"},
            "reward": 1.0,
            "response": tokens,
        }
        for index in range(40)
    ]
    path = tmp_path / "tokens.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert profile(["--rollouts", str(path)]) == 0  # imports
    tracemalloc.start()
    try:
        assert profile(["--rollouts", str(path)]) == 0
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size
    finally:
        tracemalloc.stop()
    assert json.loads((tmp_path / "tokens_agent_metrics.json").read_text())[0]["mean/output_tokens"] == 8000


def test_numbers_of_a_result_may_be_too_large_for_a_float(tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    rows = [{"_ng_task_index": 0, "reward": 1.0, "count": 10**400}, {"_ng_task_index": 1, "reward": 10**400}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert profile(["--rollouts", str(path)]) == 0
    (counts,) = json.loads((tmp_path / "large_agent_metrics.json").read_text())
    assert (counts["mean/reward"], counts["rollouts/valid"], counts["rollouts/invalid"]) == (1.0, 1, 1)
    assert "mean/count" not in counts


def test_metrics_count_each_failed_rollout_of_the_files_once(tmp_path: Path) -> None:
    one = results(tmp_path / "one.jsonl", 1.0)
    failure = {"agent_ref": {"name": "a"}, "_ng_task_index": 0, "_ng_failure_class": "agent_crashed", "reward": None}
    lines = [{**failure, "_ng_rollout_index": index, "failure_kind": "agent_crashed"} for index in (0, 1, 1)]
    failures = tmp_path / "one_failures.jsonl"
    failures.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for words in ([str(one)], [str(one), str(failures)]):
        assert aggregate([*words, "-o", str(tmp_path / "metrics.json")]) == 0
        (metrics,) = json.loads((tmp_path / "metrics.json").read_text())
        counts = metrics["agent_metrics"]
        assert (counts["rollouts/valid"], counts["rollouts/invalid"], counts["mean/reward"]) == (1, 1, 1.0)
    one.unlink()
    assert profile(["--rollouts", str(one)]) == 0
    (metrics,) = json.loads((tmp_path / "one_agent_metrics.json").read_text())
    assert (metrics["tasks/total"], metrics["tasks/solved"], metrics["rollouts/total"]) == (1, 0, 2)
    assert metrics["rollouts/invalid"] == 2 and "mean/reward" not in metrics


def test_metrics_name_the_kind_of_a_failure_that_nemo_gym_wrote(tmp_path: Path) -> None:
    one = results(tmp_path / "one.jsonl", 1.0)
    failure = {"agent_ref": {"name": "a"}, "_ng_task_index": 1, "_ng_rollout_index": 0}
    lines = [{**failure, "_ng_failure_class": "agent_crashed"}, {**failure, "_ng_task_index": 2, "mask_sample": True}]
    (tmp_path / "one_failures.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert profile(["--rollouts", str(one)]) == 0
    (metrics,) = json.loads((tmp_path / "one_agent_metrics.json").read_text())
    kinds = {name: count for name, count in metrics.items() if "rollouts/invalid/" in name}
    assert kinds == {"rollouts/invalid/agent_crashed": 1, "rollouts/invalid/verifier_failed": 1}


def test_rows_get_the_prompts_of_a_template(tmp_path: Path) -> None:
    rows, template, out = tmp_path / "rows.jsonl", tmp_path / "prompt.yaml", tmp_path / "worded.jsonl"
    rows.write_text('{"a": 1, "b": 2}\n')
    template.write_text("user: 'What is {a} + {b}?'\n")
    assert render(["-i", str(rows), "--prompt-config", str(template), "-o", str(out)]) == 0
    worded = json.loads(out.read_text())
    assert worded["responses_create_params"]["input"] == [{"role": "user", "content": "What is 1 + 2?"}]
    with pytest.raises(ConfigError, match="did you mean 'prompt_config'"):
        render(["-i", str(rows), f"promt_config={template}", "-o", str(out)])


def test_rows_may_be_worded_in_place(tmp_path: Path) -> None:
    rows, template, link = tmp_path / "rows.jsonl", tmp_path / "prompt.yaml", tmp_path / "link.jsonl"
    rows.write_text('{"a": "1\u2028"}\n\n{"a": 2}')
    rows.chmod(0o640)
    link.symlink_to(rows)
    template.write_text("user: 'What is {a}?'\n")
    assert render(["-i", str(rows), "--prompt-config", str(template), "-o", str(link)]) == 0
    worded = [json.loads(line) for line in rows.read_bytes().split(b"\n") if line]
    said = [row["responses_create_params"]["input"][0]["content"] for row in worded]
    assert said == ["What is 1\u2028?", "What is 2?"]
    assert link.is_symlink() and rows.stat().st_mode & 0o777 == 0o640
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "prompt.yaml", "link.jsonl"}


@pytest.mark.parametrize(
    ("line", "template", "told"),
    [
        ('{"a": ', "{a}", ":2:7: not a JSON value"),
        ('["a"]', "{a}", ":2:1: a row is one JSON object, this is a list"),
        ('{"a": 1, "responses_create_params": "text"}', "{a}", ":2: 'responses_create_params' must be an object"),
        ('{"b": 1}', "{a}", ":2: the prompt uses 'a', but the row has only the fields ['b']"),
        ('{"a": "x"}', "{a:d}", ":2: the prompt's 'user' cannot be filled in: Unknown format code 'd'"),
        ('{"a": "x"}', "{a[b]}", ":2: the prompt's 'user' cannot be filled in"),
        ('{"a": 1}', "{a.b}", ":1: the prompt's 'user' cannot be filled in"),
        ('{"a": 1}', "{a", ":1: the prompt's 'user' cannot be filled in"),
        ('{"a": [1, {"b": 18446744073709551616}]}', "{a}", ":2: 'a[1].b' is an integer of over 64 bits"),
        ('{"a": ' + "[" * 300 + "]" * 300 + "}", "{a}", ":2: the row: a value is nested too deeply"),
    ],
)
def test_a_row_that_cannot_be_worded_is_named_and_no_file_changes(
    line: str, template: str, told: str, tmp_path: Path
) -> None:
    rows, prompt = tmp_path / "rows.jsonl", tmp_path / "prompt.yaml"
    first = '{"a": 1}' if "b]" not in template else '{"a": {"b": 1}}'
    rows.write_text(f"{first}\n{line}\n{first}\n")
    prompt.write_text(f"user: '{template}'\n")
    before = rows.read_bytes()
    with pytest.raises(RowError, match=re.escape(told)):
        render(["-i", str(rows), "--prompt-config", str(prompt), "-o", str(rows)])
    assert rows.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "prompt.yaml"}


@pytest.mark.parametrize(
    ("value", "is_exact"),
    [
        *(("18446744073709551615", True), ("-9223372036854775808", True), ("0.12345678901234567890123", True)),
        *(('"18446744073709551616"', True), ("18446744073709551616", False), ("-9223372036854775809", False)),
        ("9" * 5000, False),
    ],
)
def test_an_integer_is_kept_exactly_or_refused(value: str, is_exact: bool) -> None:
    line = f'{{"a": {{"b": [0, {value}]}}}}'.encode()
    if is_exact:
        require_exact_integers(line)
        assert orjson.loads(line) == json.loads(line)
        return
    with pytest.raises(ValueError, match=r"^'a\.b\[1\]' is an integer of over 64 bits, .*; write it as text$"):
        require_exact_integers(line)


def commands_of_the_page() -> list[tuple[str, str]]:
    page = (ROOT / "fern" / "pages" / "coming-from-nemo-gym.md").read_text()
    return re.findall(r"^\| `gym ([^`]+)` \| (\w+)", page, re.MULTILINE)


@pytest.mark.parametrize(("words", "here"), commands_of_the_page())
def test_each_command_of_the_page_does_what_the_page_says(words: str, here: str) -> None:
    if here == "refused":
        with pytest.raises(ConfigError):
            gym.dispatch(words.split())
        return
    name, rest = gym._named(words.split())
    module, function = gym.COMMANDS[name].runs.split(":")
    assert callable(getattr(importlib.import_module(f"nemo_gym.cli.{module}"), function))
    if gym.COMMANDS[name].plain:
        return
    runs, settings = gym.translated(name, rest)
    is_here = "a.yaml" not in words and "--benchmark" not in words
    if is_here and runs.startswith(("run:", "validate:")):
        compose([word for word in settings if not word.startswith("-")])


def test_the_page_has_each_subcommand() -> None:
    shown = {gym._named(words.split())[0] for words, _ in commands_of_the_page()}
    assert shown == set(gym.COMMANDS) - OWN


def test_every_line_of_a_list_is_a_whole_sentence_and_brokers_are_no_environments(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert list_parts([]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert len(lines) > 20
    assert [line for line in lines if not line.endswith((".", "…"))] == []
    assert [line for line in lines if "](" in line] == []
    assert list_parts(["environments"]) == 0
    assert " sandbox " not in capsys.readouterr().out
