"""The documentation says what the code does: pages, links, commands, keys and examples.

The capability table of the page on sandboxes stands between two comments; `capability_table` makes it anew.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from nemo_gym.agent.harness.agent import CliAgentConfig
from nemo_gym.base_resources_server import BaseResourcesServerConfig
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig
from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig
from nemo_gym.cli import jobs, plan_placement, profile, prorl_server
from nemo_gym.cli.prepare import chosen_agents, cli_packages
from nemo_gym.config import sandbox_blocks
from nemo_gym.config.check import check_everything
from nemo_gym.config.compose import compose
from nemo_gym.config.datasets import DataSet
from nemo_gym.config.keys import SUITE_KEYS
from nemo_gym.config.overrides import given_values, parse_overrides
from nemo_gym.config.run import RUN_KEYS, RolloutRunConfig
from nemo_gym.config.strict import known_keys
from nemo_gym.config_types import BaseRunServerInstanceConfig
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.sandbox import SandboxResources, SandboxSpec, default_limits
from nemo_gym.contract.session import AgentOutcome, SessionDescriptor
from nemo_gym.contract.verdict import FailureKind
from nemo_gym.sandbox import facade
from nemo_gym.sandbox.base import (
    CAPABILITY_PROTOCOLS,
    DEFAULT_MAX_OUTPUT_BYTES,
    ExecOutcome,
    SandboxCapabilities,
    SandboxProvider,
)
from nemo_gym.sandbox.providers.apptainer.provider import ApptainerOptions
from nemo_gym.sandbox.providers.docker.engine import DockerConfig
from nemo_gym.sandbox.providers.local.client import LocalOptions
from nemo_gym.sandbox.providers.remote.connection import RemoteOptions
from resources_servers.math.app import MathConfig
from resources_servers.mcqa.app import McqaConfig
from resources_servers.swe_bench import prepare
from resources_servers.swe_bench.app import SweBenchConfig
from responses_api_agents.claude_code_agent.app import ClaudeCodeOptions
from responses_api_agents.codex_agent.app import CodexOptions
from responses_api_agents.composite_agent.app import CompositeOptions
from responses_api_agents.mini_swe_agent.app import MiniSWEAgentConfig
from responses_api_agents.opencode_agent.app import OpencodeOptions
from responses_api_agents.oracle_agent.app import OracleAgentConfig
from responses_api_agents.qwen_code_agent.app import QwenCodeOptions
from responses_api_agents.simple_agent.app import SimpleAgentConfig
from responses_api_models.openai_model.app import SimpleModelServerConfig
from responses_api_models.scripted_model.app import ScriptedModelConfig
from tests.architecture.docs import (
    PAGES,
    ROOT,
    CommandLine,
    anchors,
    command_lines,
    documents,
    links,
    table,
    write_examples,
)
from tests.docker_engine import docker_engine

__all__ = ["docker_engine"]

COMMANDS = [line for path in documents() for line in command_lines(path)]
SUMS = "add-an-environment.md"
SHELL_AGENT = "add-an-agent.md"
SMALL_BOXES = "add-a-sandbox-provider.md"
READMES = [path for path in documents() if path.parent.parent.name.startswith("res")]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the pages' examples in it, where their commands work."""
    write_examples(SUMS, tmp_path)
    write_examples(SHELL_AGENT, tmp_path)
    write_examples(SMALL_BOXES, tmp_path)
    for readme in READMES:
        write_examples(readme, tmp_path)
    (tmp_path / "pyproject.toml").unlink()  # of a package; pytest would read it here
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setattr(sandbox_blocks, "registered_providers", {})
    facade.register_provider("small_boxes", small_boxes(tmp_path))
    yield tmp_path


def small_boxes(directory: Path) -> Any:
    namespace: dict[str, Any] = {"__name__": "small_boxes"}
    path = directory / "small_boxes.py"
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), namespace)
    return namespace["SmallBoxes"]


# ------------------------------------------------------------------------------------------------ pages and links


def test_site_lists_every_page_once() -> None:
    site = yaml.safe_load((ROOT / "fern" / "docs.yml").read_text(encoding="utf-8"))
    listed = [page["path"] for section in site["navigation"] for page in section["contents"]]
    assert sorted(listed) == sorted(f"pages/{path.name}" for path in PAGES.glob("*.md"))


def test_every_server_folder_explains_itself() -> None:
    folders = [path.parent for path in ROOT.glob("res*/*/app.py")]
    assert folders
    assert [folder.name for folder in folders if not (folder / "README.md").is_file()] == []


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(path: Path) -> None:
    broken = []
    for target in links(path.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def test_files_of_the_architecture_page_exist() -> None:
    page = (PAGES / "architecture.md").read_text()
    named = re.findall(r"`((?:nemo_gym|resources_servers|testing|campaigns|tests|configs)[\w/]*(?:/|\.py))`", page)
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_names_on_the_architecture_page_stand_in_their_files() -> None:
    page = (PAGES / "architecture.md").read_text()
    named = re.findall(r"`([\w/]+\.py)`: `([\w.]+)`", page)
    assert len(named) >= 3
    defined = {
        (path, name)
        for path, name in named
        if re.search(rf"^\s*(class|(async )?def) {name.rsplit('.', 1)[-1]}\b", (ROOT / path).read_text(), re.MULTILINE)
    }
    assert set(named) - defined == set()


def test_licence_file_is_the_one_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    text = " ".join((ROOT / "LICENSE").read_text(encoding="utf-8").split())
    assert text.startswith("Apache License Version 2.0, January 2004")
    assert text.endswith("limitations under the License.")


# ------------------------------------------------------------------------------------------------------- commands


def test_documents_show_every_command() -> None:
    shown = {line.program for line in COMMANDS}
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    # NeMo Gym's spellings of others stand on one page, whose table `tests/cli/test_gym.py` tries.
    page = (PAGES / "coming-from-nemo-gym.md").read_text(encoding="utf-8")
    spellings = {name for name, target in scripts.items() if target == scripts["ng"]}
    assert all(re.search(rf"`{name}\b", page) for name in spellings)
    assert shown - spellings == set(scripts) - spellings


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line.where)
def test_command_lines_use_keys_that_exist(line: CommandLine, place: Path) -> None:
    settings = [word for word in line.words[1:] if not word.startswith("--")]
    match line.program:
        case "ng_run" | "ng_validate" if line.has_gaps:
            _keys_exist(settings)
        case "ng_run" | "ng_validate":
            if line.is_refused:
                with pytest.raises(ConfigError):
                    check_everything(compose(settings))
            else:
                check_everything(compose(settings))
        case "ng_collect_rollouts":
            _keys_exist(settings)
        case "ng_serve_rollouts" if any(word.startswith("attach=") for word in settings):
            _keys_exist([word for word in settings if not word.startswith("attach=")])
        case "ng_serve_rollouts":
            composition = compose(settings)
            composition.values.setdefault("serve", {})
            check_everything(composition)
        case "ng_jobs":
            assert set(given_values(settings[1:])) <= set(jobs.KEYS[settings[0]])
        case "ng_prepare" if settings[:1] == ["agents"]:
            assert set(chosen_agents(settings[1:], cli_packages())) <= set(cli_packages())
        case "ng_prepare" if settings[1].startswith("dataset="):
            DataSet.parse(settings[1].partition("=")[2], None, ROOT / "resources_servers" / settings[0])
        case "ng_prepare":
            prepare.Options.parse(settings[1:])
        case "ng_export_trajectories":
            assert all(word.partition("=")[0] in profile.EXPORT_KEYS for word in settings)
        case "ng_reverify":
            assert settings and settings[0].endswith(".jsonl")
            _keys_exist(settings[1:])
        case "ng_plan_placement":
            assert plan_placement.plan(line.words[1:]) == 0
        case "ng_prorl_server":
            assert set(prorl_server.words_of(settings)) <= set(prorl_server.KEYS)
        case "ng_view" | "ng_show" | "ng_why" | "ng_logs" | "ng_report":
            _seeing_works(line, place)
        case "ng_status":
            assert all(word.partition("=")[0] in ("run_dir", "run_id") for word in settings)
        case _:
            pytest.fail(f"{line.where}: there is no command {line.program}")


def _seeing_works(line: CommandLine, place: Path) -> None:
    """The command does what it says, over a result file in the place that the page names."""
    from nemo_gym.cli import profile, show, view
    from nemo_gym.view.runs import Runs
    from tests.view.results import failed, row, write

    folder = place / "results"
    folder.mkdir(exist_ok=True)
    write(folder / "rollouts.jsonl", row(0), row(1), row(3))
    write(folder / "rollouts_failures.jsonl", failed(4))
    write(folder / "yesterday.jsonl", row(0, reward=1.0), row(1))
    match line.program:
        case "ng_show":
            assert show.show(line.words[1:]) == 0
        case "ng_why":
            assert show.why(line.words[1:]) == 0
        case "ng_report":
            assert profile.write_report(line.words[1:]) == 0
        case "ng_logs":  # no server of it ever ran
            assert show.logs(line.words[1:]) == 1
        case _:
            assert view.NAME == "ng_view"
            shown = [word for word in line.words[1:] if not word.startswith("--")]
            if "://" in shown[0]:  # tests/view/test_watched_service.py opens one
                assert line.words[2] == "--token-file" and line.words[3].endswith("/service.json")
            else:
                assert len(Runs([place / word for word in shown]).all()) == 2


def _keys_exist(words: list[str]) -> None:
    given = parse_overrides([word for word in words if "=" in word])
    # Declared by the files of model=scripted, agent=oracle and model=vllm.
    extra = {"script", "script_tools", "oracle", "policy_path"}
    assert [override.key for override in given if override.path[0] not in known_keys() | extra] == []


def test_make_targets_in_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    used = {
        target
        for path in documents()
        for target in re.findall(r"(?:`|^|\$ )(?:\w+=\S+ )*make ([a-z-]+)", path.read_text(encoding="utf-8"), re.M)
    }
    assert {"rollouts", "test"} <= used <= targets


def test_variables_of_make_rollouts_are_those_of_its_script() -> None:
    script = (ROOT / "scripts" / "rollouts").read_text(encoding="utf-8")
    documented = table(PAGES / "first-rollouts.md", "variable")
    assert [name for name in documented if f"${{{name}" not in script] == []
    assert {"SANDBOX", "MODEL_URL", "MODEL_NAME", "MODEL_API_KEY", "OUTPUT"} == set(documented)


# ----------------------------------------------------------------------------------------------------------- keys


def _own(config: type[BaseModel], base: type[BaseModel]) -> set[str]:
    return set(config.model_fields) - set(base.model_fields)


SERVERS = ROOT / "responses_api_models", ROOT / "responses_api_agents"


@pytest.mark.parametrize(
    ("page", "header", "keys"),
    [
        (PAGES / "swe-bench.md", "key (`swe_bench", _own(SweBenchConfig, BaseResourcesServerConfig)),
        (PAGES / "sandboxes.md", "key (`sandbox.local", {field.name for field in dataclasses.fields(LocalOptions)}),
        (
            PAGES / "sandboxes.md",
            "key (`sandbox.apptainer",
            {field.name for field in dataclasses.fields(ApptainerOptions)},
        ),
        (PAGES / "leases.md", "key (`sandbox.remote", {field.name for field in dataclasses.fields(RemoteOptions)}),
        (PAGES / "sandboxes.md", "key (`sandbox.docker", {field.name for field in dataclasses.fields(DockerConfig)}),
        (
            SERVERS[1] / "mini_swe_agent" / "README.md",
            "key",
            _own(MiniSWEAgentConfig, BaseResponsesAPIAgentConfig),
        ),
        (
            SERVERS[1] / "oracle_agent" / "README.md",
            "key",
            _own(OracleAgentConfig, BaseResponsesAPIAgentConfig) | {"row_access"},
        ),
        (SERVERS[1] / "simple_agent" / "README.md", "key", _own(SimpleAgentConfig, BaseResponsesAPIAgentConfig)),
        (SERVERS[1] / "claude_code_agent" / "README.md", "key", _own(CliAgentConfig, BaseResponsesAPIAgentConfig)),
        (SERVERS[1] / "claude_code_agent" / "README.md", "option", set(ClaudeCodeOptions.model_fields)),
        (SERVERS[1] / "composite_agent" / "README.md", "key", _own(CliAgentConfig, BaseResponsesAPIAgentConfig)),
        (SERVERS[1] / "composite_agent" / "README.md", "option", set(CompositeOptions.model_fields)),
        (SERVERS[1] / "codex_agent" / "README.md", "key", _own(CliAgentConfig, BaseResponsesAPIAgentConfig)),
        (SERVERS[1] / "codex_agent" / "README.md", "option", set(CodexOptions.model_fields)),
        (SERVERS[1] / "opencode_agent" / "README.md", "key", _own(CliAgentConfig, BaseResponsesAPIAgentConfig)),
        (SERVERS[1] / "opencode_agent" / "README.md", "option", set(OpencodeOptions.model_fields)),
        (SERVERS[1] / "qwen_code_agent" / "README.md", "key", _own(CliAgentConfig, BaseResponsesAPIAgentConfig)),
        (SERVERS[1] / "qwen_code_agent" / "README.md", "option", set(QwenCodeOptions.model_fields)),
        (ROOT / "resources_servers" / "math" / "README.md", "key", _own(MathConfig, BaseResourcesServerConfig)),
        (ROOT / "resources_servers" / "mcqa" / "README.md", "key", _own(McqaConfig, BaseResourcesServerConfig)),
        (
            SERVERS[0] / "openai_model" / "README.md",
            "key",
            _own(SimpleModelServerConfig, BaseResponsesAPIModelConfig) | {"session_ttl_s", "request_timeout_s"},
        ),
        (
            SERVERS[0] / "scripted_model" / "README.md",
            "configuration key",
            _own(ScriptedModelConfig, BaseResponsesAPIModelConfig),
        ),
        (PAGES / "configuration.md", "run key", set(RolloutRunConfig.model_fields)),
        (
            PAGES / "configuration.md",
            "server key",
            {
                *BaseRunServerInstanceConfig.model_fields,
                *BaseResourcesServerConfig.model_fields,
                *BaseResponsesAPIAgentConfig.model_fields,
                *BaseResponsesAPIModelConfig.model_fields,
                "allowed_agents",
                "allowed_model_types",
                "topologies",
                "requires",
                "sandbox_provider",
            }
            - {"name"},
        ),
        (
            PAGES / "configuration.md",
            "stack key",
            set(SUITE_KEYS - RUN_KEYS - {"config_paths", "topology"}) | {"run_dir", "run_id"},
        ),
        (
            PAGES / "swe-bench.md",
            "key of ng_prepare",
            {field.name for field in dataclasses.fields(prepare.Options)},
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else value if isinstance(value, str) else "",
)
def test_tables_of_keys_are_complete_and_true(page: Path, header: str, keys: set[str]) -> None:
    documented = set(table(page, header))
    assert documented - keys == set(), "documented, but no such key"
    assert keys - documented == set(), "not documented"


def test_results_page_lists_every_failure_and_finding() -> None:
    page = PAGES / "results.md"
    assert set(table(page, "kind of failure")) == set(FailureKind)
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "resources_servers").rglob("*.py"))
    kinds = set(re.findall(r"Finding\(\s*kind=\"(\w+)\"", source))
    assert kinds
    assert set(table(page, "`kind`")) == kinds


def test_agent_page_lists_every_outcome() -> None:
    assert set(table(PAGES / "add-an-agent.md", "outcome")) == set(AgentOutcome)


def test_example_descriptor_is_one() -> None:
    page = (PAGES / "session-contract.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    SessionDescriptor.model_validate_json(example)
    assert set(table(PAGES / "session-contract.md", "field")) | {"extensions"} == set(SessionDescriptor.model_fields)


def test_provider_page_lists_the_whole_protocol() -> None:
    page = PAGES / SMALL_BOXES
    methods = {name for name in vars(SandboxProvider) if not name.startswith("_")}
    assert set(table(page, "method")) == methods
    assert {name: cells[0] for name, cells in table(page, "capability").items()} == {
        name: f"`{protocol.__name__}`" for name, protocol in CAPABILITY_PROTOCOLS.items()
    }


def test_documented_limits_are_the_default_ones() -> None:
    page = PAGES / "sandboxes.md"
    documented = {name: cells[0] for name, cells in table(page, "limit").items()}
    limits = default_limits(None)
    assert documented.pop("cpu") == "none" and limits.cpu is None
    for name in ("memory_mib", "pids", "disk_gib"):
        assert re.match(r"\d+", documented.pop(name)).group() == f"{getattr(limits, name):g}", name  # type: ignore[union-attr]
    assert documented == {}
    assert f"| output of a command | {DEFAULT_MAX_OUTPUT_BYTES >> 20} MiB per stream |" in page.read_text()


# --------------------------------------------------------------------------------------------------- capabilities


def _told(capabilities: SandboxCapabilities, name: str) -> str:
    if name.startswith("network_"):
        has = any(f"network_{policy}" == name for policy in capabilities.network_policies)
    else:
        has = bool(getattr(capabilities, name))
    return "yes" if has else f"no: {capabilities.reasons[name]}"


def capability_table(local: SandboxCapabilities, docker: SandboxCapabilities) -> list[tuple[str, str, str]]:
    others = ("reasons", "network_policies", "default_limits")
    names = [f.name for f in dataclasses.fields(SandboxCapabilities) if f.name not in others]
    return [(name, _told(local, name), _told(docker, name)) for name in ("network_none", "network_open", *names)]


def test_capability_table_is_what_the_providers_say(docker_engine: str, tmp_path: Path) -> None:
    local = facade.create_provider({"local": {"state_dir": str(tmp_path), "linger_s": 1}}).capabilities
    docker = facade.create_provider({"docker": {"base_url": docker_engine}}).capabilities
    documented = table(PAGES / "sandboxes.md", "capability")
    for name, *told in capability_table(local, docker):
        if os.geteuid() == 0:
            assert documented.pop(name) == told, name
        else:  # who is no root is told more
            assert documented.pop(name), name
    assert documented == {}


# ------------------------------------------------------------------------------------------------------- examples


def _ng_run(place: Path, output: str, *words: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-c", "from nemo_gym.cli.run import main; main()", *words, f"output={output}"]
    env = {**os.environ, "NEMO_GYM_CACHE_DIR": str(place / "cache")}
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (place / output).read_text().splitlines()]


def test_example_environment_rewards_the_work_of_an_agent(place: Path) -> None:
    (shown,) = [
        line
        for line in command_lines(PAGES / SUMS)
        if "agent=mini_swe_agent" in line.words and line.program == "ng_run"
    ]
    words = [word for word in line_words(shown) if not word.startswith("output=")]
    rows = _ng_run(place, "sums.jsonl", *words)
    assert [row["reward"] for row in rows] == [1.0] * 4
    assert {row["details"]["answer"] for row in rows} == {16.0, -5.0}


def test_example_agent_does_its_command_in_the_box(place: Path) -> None:
    (shown,) = [line for line in command_lines(PAGES / SHELL_AGENT) if "agent=shell_agent" in line.words]
    words = [word for word in line_words(shown) if not word.startswith("output=")]
    rows = _ng_run(place, "shell.jsonl", *words)
    assert sorted((row["task_id"], row["reward"]) for row in rows) == [("negative", 0.0), ("small", 1.0)]


@pytest.mark.parametrize(("environment", "tasks"), [("sums", 2), ("adder", 1)])
@pytest.mark.parametrize(("oracle", "reward"), [("gold", 1.0), ("nothing", 0.0)])
def test_example_environment_passes_its_validation(
    place: Path, environment: str, tasks: int, oracle: str, reward: float
) -> None:
    data = f"input=resources_servers/{environment}/data/example.jsonl"
    words = ("agent=oracle", f"environment={environment}", "sandbox=local", f"oracle={oracle}", data)
    rows = _ng_run(place, "o.jsonl", *words)
    assert [(row["reward"], row["validation"]) for row in rows] == [(reward, oracle)] * tasks


def line_words(line: CommandLine) -> tuple[str, ...]:
    return line.words[1:]


async def test_example_provider_limits_boxes(place: Path) -> None:
    provider = facade.create_provider(
        {"small_boxes": {"memory_mib": 64, "state_dir": str(place / "boxes"), "linger_s": 1}}
    )
    box = await provider.create(SandboxSpec(resources=SandboxResources(memory_mib=4096), ttl_s=60))
    try:
        result = await provider.exec(box, ["python3", "-c", "len(bytearray(200_000_000))"], timeout_s=60)
        assert result.outcome is ExecOutcome.OUT_OF_MEMORY
    finally:
        await provider.close(box)
        await provider.aclose()


@pytest.mark.parametrize(
    "selection",
    [
        "declared or round_trip or lease",
        pytest.param("", marks=[pytest.mark.full, pytest.mark.timeout(900)]),
    ],
)
def test_example_provider_passes_the_conformance_suite_as_printed(tmp_path: Path, selection: str) -> None:
    write_examples(SMALL_BOXES, tmp_path)
    # What installing the package leaves, without writing to the environment that runs this.
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    installed = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    points = [
        line
        for group, found in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in found.items()))
    ]
    (installed / "entry_points.txt").write_text("\n".join(points))
    (shown,) = re.findall(r"^\$ pytest (.*)$", (PAGES / SMALL_BOXES).read_text(encoding="utf-8"), re.MULTILINE)
    command = [sys.executable, "-m", "pytest", *shown.split(), "-p", "no:cacheprovider", "-k", selection]
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE), done.stdout


# ------------------------------------------------------------------------------------------- examples of plugins

POLICY_OF_ONE_COMMAND = """
model: one-command
tasks:
  - {name: tired, when: {user: 'Second'}, turns: [{text: ' '}]}
  - name: sum
    when: {user: 'sum of numbers'}
    turns: [{text: "python3 -c 'print(sum(map(int, open(\\"numbers.txt\\"))))' > sum.txt"}]
"""


def test_readme_example_of_a_composite_agent_works_and_ends_by_its_exit_status(place: Path) -> None:
    rows = [
        json.loads(line) for line in (place / "resources_servers/sums/data/example.jsonl").read_text().splitlines()
    ]
    rows[1]["responses_create_params"]["input"] = "Second: write the sum of numbers.txt to sum.txt."
    (place / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (place / "policy.yaml").write_text(POLICY_OF_ONE_COMMAND)
    done = _ng_run(
        place,
        "my_agent.jsonl",
        *("agent=my_agent", "environment=sums", "sandbox=local", "model=scripted", "script=policy.yaml"),
        "input=rows.jsonl",
    )
    assert sorted((row["task_id"], row["reward"], row["outcome"]) for row in done) == [
        ("negative", 0.0, "max_turns"),
        ("small", 1.0, "completed"),
    ]


def untitled_yaml(readme: Path) -> list[str]:
    return re.findall(r"^```yaml\n(.*?)^```$", readme.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


# Those of the scripted model are no configuration, and read by its own tests.
@pytest.mark.parametrize(
    "readme",
    [path for path in READMES if untitled_yaml(path) and path.parent.name != "scripted_model"],
    ids=lambda path: path.parent.name,
)
def test_readme_example_of_configuration_is_accepted(readme: Path, place: Path) -> None:
    for number, block in enumerate(untitled_yaml(readme)):
        (place / f"{number}.yaml").write_text(block)
        check_everything(compose([f"+config_paths=[{place / f'{number}.yaml'}]"]))
