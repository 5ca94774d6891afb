"""Configurations written for NeMo Gym: environment servers, and what its own files may say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_gym.cli.gym import translated
from nemo_gym.cli.run import check_rollout_run, compose_stack
from nemo_gym.config.check import check_everything, notices
from nemo_gym.config.compose import compose
from nemo_gym.config.composition import Composition
from nemo_gym.config.run import RolloutRunConfig
from nemo_gym.config.run_defaults import complete_run
from nemo_gym.contract.errors import ConfigError, RowError

APP = """
from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer
class Config(BaseResourcesServerConfig):
    sandbox_provider: str | None = None
    more: dict | None = None
    resources_server: dict | None = None
class Server(SimpleResourcesServer):
    config: Config
if __name__ == "__main__":
    Server.run_webserver()
"""
AGENT = (
    APP.replace("base_resources_server", "base_responses_api_agent")
    .replace("BaseResourcesServerConfig", "BaseResponsesAPIAgentConfig")
    .replace("SimpleResourcesServer", "SimpleResponsesAPIAgent")
)
ENVIRONMENT = "env: {resources_servers: {quiz: {entrypoint: app.py, domain: other}}}\n"
SOLVER = """
solver:
  responses_api_agents:
    solver:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: env}
"""
RELAY = """
relay:
  environment_servers:
    legacy_agent:
      entrypoint: app.py
      agent_server: {type: responses_api_agents, name: solver}
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for folder, app in (("resources_servers/quiz", APP), ("responses_api_agents/solver", AGENT)):
        place = tmp_path / folder
        place.mkdir(parents=True)
        (place / "app.py").write_text(app)
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(tmp_path))
    return tmp_path


def composed(root: Path, text: str) -> Composition:
    file = root / "resources_servers" / "quiz" / "config.yaml"
    file.write_text(text)
    composition = compose([f"+config_paths=[{file}]"])
    check_everything(composition)
    return composition


def written_for_nemo_gym(root: Path) -> None:
    (root / "resources_servers" / "quiz" / "requirements.txt").write_text("-e nemo-gym[dev] @ ../../\n")


def test_the_agent_of_an_environment_server_is_run_itself(root: Path) -> None:
    composition = composed(root, ENVIRONMENT + SOLVER + RELAY)
    assert sorted(composition.servers) == ["env", "solver"]


def test_an_agent_gets_the_environment_that_its_environment_server_names(root: Path) -> None:
    alone = SOLVER.replace("      resources_server: {type: resources_servers, name: env}\n", "")
    relay = RELAY + "      resources_server: {type: resources_servers, name: env}\n"
    composition = composed(root, ENVIRONMENT + alone + relay)
    assert composition.servers["solver"].values["resources_server"]["name"] == "env"


def test_an_environment_server_that_drives_by_itself_is_refused(root: Path) -> None:
    own = "own: {environment_servers: {user_sim: {entrypoint: app.py}}}\n"
    with pytest.raises(ConfigError, match="names no 'agent_server'"):
        composed(root, ENVIRONMENT + SOLVER + own)


STRAY = "stray: {a: 1}\n"
UNKNOWN = ENVIRONMENT.replace("domain: other", "domain: other, max_steps: 4, num_workers: none")
BOXED = ENVIRONMENT.replace("domain: other", "domain: other, sandbox_provider: sandbox")
DEEP = ENVIRONMENT.replace("domain: other", "domain: other, more: {a: {type: resources_servers, name: nobody}}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (ENVIRONMENT + STRAY, "unknown block 'stray'"),
        (UNKNOWN, "unknown key 'max_steps'"),
        (UNKNOWN.replace("max_steps: 4, ", ""), "num_workers is the number of server processes; it must be"),
        (BOXED, "needs a sandbox"),
        (DEEP, "no server instance 'nobody'"),
    ],
)
def test_what_nemo_gym_lets_pass_is_a_warning_in_its_files_and_a_mistake_in_others(
    root: Path, text: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        composed(root, text + SOLVER)
    from nemo_gym.config.strict import _belongs

    written_for_nemo_gym(root)
    _belongs.cache_clear()
    assert told in "\n".join(notices(composed(root, text + SOLVER)))


def test_a_reference_of_a_servers_own_keys_is_checked_in_every_file(root: Path) -> None:
    written_for_nemo_gym(root)
    with pytest.raises(ConfigError, match="no server instance 'envv'"):
        composed(root, ENVIRONMENT + SOLVER.replace("name: env", "name: envv"))


def test_rows_of_a_plugin_are_found_by_their_path_below_its_root(root: Path) -> None:
    rows = root / "resources_servers" / "quiz" / "data" / "example.jsonl"
    rows.parent.mkdir()
    rows.write_text("{}\n")
    config = RolloutRunConfig.parse({"input": "resources_servers/quiz/data/example.jsonl", "output": "out.jsonl"})
    assert config.input == rows
    elsewhere = RolloutRunConfig.parse({"input": "nowhere.jsonl", "output": "out.jsonl"})
    assert elsewhere.input == Path("nowhere.jsonl")


def benchmark(root: Path, *datasets: str, type: str = "benchmark") -> list[str]:
    """Write NeMo Gym's ``benchmarks/quiz``, whose agent has these data sets, and return the words that choose it."""
    keys = [f"{{name: quiz, type: {type}, jsonl_fpath: benchmarks/quiz/data/rows.jsonl{more}}}" for more in datasets]
    example = "{name: example, type: example, jsonl_fpath: resources_servers/quiz/data/example.jsonl}"
    (root / "benchmarks" / "quiz" / "data").mkdir(parents=True)
    (root / "benchmarks" / "quiz" / "data" / "rows.jsonl").write_text("{}\n")
    (root / "resources_servers" / "quiz" / "data").mkdir()
    (root / "resources_servers" / "quiz" / "data" / "example.jsonl").write_text("{}\n")
    file = root / "benchmarks" / "quiz" / "config.yaml"
    file.write_text(f"{ENVIRONMENT}{SOLVER}      datasets: [{', '.join([example, *keys])}]\n")
    return translated("eval run", ["--benchmark", "quiz"])[1]


def test_a_benchmark_runs_its_own_rows_as_often_as_it_says(root: Path) -> None:
    words = benchmark(root, ", num_repeats: 4")
    composition = compose(words)
    complete_run(composition, wanted=True)
    assert composition.values["input"] == str(root / "benchmarks" / "quiz" / "data" / "rows.jsonl")
    assert (composition.values["num_repeats"], composition.values["agent_name"]) == (4, "solver")
    composition = compose([*words, "num_repeats=1"])
    complete_run(composition, wanted=True)
    assert composition.values["num_repeats"] == 1
    composition = compose([*words, "input=mine.jsonl"])
    complete_run(composition, wanted=True)
    assert composition.values["input"] == "mine.jsonl" and "num_repeats" not in composition.values
    composition = compose(words)
    complete_run(composition, wanted=False)  # the servers alone
    assert not composition.has_run


def test_a_benchmark_runs_with_the_prompts_of_its_template(root: Path) -> None:
    words = benchmark(root, ", prompt_config: benchmarks/quiz/p.yaml")
    (root / "benchmarks" / "quiz" / "p.yaml").write_text("user: 'What is {a}?'\n")
    (root / "mine.yaml").write_text("{system: 'Be {b}.', user: '{a}'}\n")
    rows = root / "benchmarks" / "quiz" / "data" / "rows.jsonl"
    rows.write_text('{"a": 1, "b": "brief", "responses_create_params": {"temperature": 0.5}}\n')
    asked = {"role": "user", "content": "What is 1?"}
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1"}]
    for more, messages in (([], [asked]), (["--prompt-config", "mine.yaml"], own)):
        composition = compose([*words, *translated("eval run", more)[1], f"output={root}/out.jsonl"])
        complete_run(composition, wanted=True)
        config, outlook = check_rollout_run(composition, keep=True)
        outlook.inputs.write(root / "written.jsonl")
        outlook.inputs.close()
        params = json.loads((root / "written.jsonl").read_text())["responses_create_params"]
        assert params == {"temperature": 0.5, "input": messages}
        assert config.agent_name == "solver"
    rows.write_text('{"b": 1}\n')
    with pytest.raises(RowError, match=r"rows.jsonl:1: the prompt uses 'a', but the row has only the fields"):
        check_rollout_run(composition, keep=False)


@pytest.mark.parametrize(("type", "file"), [("validation", "config.yaml"), ("benchmark", "hard.yaml")])
def test_a_split_is_the_data_set_of_that_type_of_the_agent(root: Path, type: str, file: str) -> None:
    benchmark(root, "", type=type)
    written = root / "benchmarks" / "quiz" / "config.yaml"
    chosen = written.rename(written.with_name(file))
    for words in ([f"+config_paths=[{chosen}]", f"split={type}"], [f"+config_paths=[{chosen}]", f"++split={type}"]):
        composition = compose(words)
        complete_run(composition, wanted=True)
        assert composition.values["input"] == str(root / "benchmarks" / "quiz" / "data" / "rows.jsonl")
        assert composition.values["agent_name"] == "solver"
    composition = compose([f"+config_paths=[{chosen}]", "split=train"])
    with pytest.raises(ConfigError, match="0 data sets of the type train"):
        complete_run(composition, wanted=True)
    composition = compose([f"+config_paths=[{chosen}]", f"split={type}", "input=mine.jsonl"])
    with pytest.raises(ConfigError, match="split= is a part of a data set"):
        complete_run(composition, wanted=True)


def test_a_benchmark_of_another_name_never_runs_the_examples_of_its_environment(root: Path) -> None:
    benchmark(root, "")
    written = root / "benchmarks" / "quiz" / "config.yaml"
    written.rename(written.with_name("hard.yaml"))
    composition = compose(translated("eval run", ["--benchmark", "quiz/hard"])[1])
    complete_run(composition, wanted=True)
    assert composition.values["input"] == str(root / "benchmarks" / "quiz" / "data" / "rows.jsonl")


@pytest.mark.parametrize(
    ("datasets", "type", "told"),
    [
        ((), "benchmark", "0 data sets of the type benchmark.*; name the rows with --input"),
        (
            ("", ""),
            "benchmark",
            r"2 data sets of the type benchmark.*with dataset=:(\n  benchmarks/quiz/data/rows.jsonl){2}$",
        ),
        (("",), "train", "0 data sets of the type benchmark.*; name the rows with --input"),
    ],
)
def test_a_benchmark_never_runs_the_examples_of_its_environment(
    root: Path, datasets: tuple[str, ...], type: str, told: str
) -> None:
    composition = compose(benchmark(root, *datasets, type=type))
    with pytest.raises(ConfigError, match=told):
        complete_run(composition, wanted=True)


def test_the_agent_is_no_choice_where_it_has_several_data_sets_itself(root: Path) -> None:
    words = benchmark(root, "", "")
    file = root / "benchmarks" / "quiz" / "config.yaml"
    alone = "      datasets: [{name: more, type: benchmark, jsonl_fpath: more.jsonl}]\n"
    file.write_text(file.read_text() + SOLVER.replace("solver:\n  resp", "other:\n  resp") + alone)
    rows = "benchmarks/quiz/data/rows.jsonl"
    with pytest.raises(ConfigError, match=rf"3 data sets.*agent.*:\n  {rows}\n  {rows}\n  more.jsonl: --agent other$"):
        complete_run(compose(words), wanted=True)


def test_a_benchmark_whose_rows_are_not_made_yet_is_refused(root: Path) -> None:
    words = benchmark(root, ", prepare_script: benchmarks/quiz/prepare.py")
    (root / "benchmarks" / "quiz" / "data" / "rows.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"rows\.jsonl is not there.*benchmarks/quiz/prepare\.py makes it.*--input"):
        complete_run(compose(words), wanted=True)


def test_an_evaluation_without_rows_is_refused_and_serves_nothing(root: Path) -> None:
    file = root / "mine.yaml"
    file.write_text(ENVIRONMENT + SOLVER)
    with pytest.raises(ConfigError, match="no rows to run; name them with --input"):
        compose_stack([f"+config_paths=[{file}]"], wants_run=True)
    compose_stack([f"+config_paths=[{file}]"])
