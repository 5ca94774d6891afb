"""Every agent in every environment with every sandbox: composed here, and run for real."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.contract.sandbox import NetworkPolicy, SandboxSpec
from nemo_gym.contract.session import Topology
from nemo_gym.sandbox.base import BoxLabel
from nemo_gym.sandbox.facade import create_provider
from tests.acceptance.matrix.cells import ROOT, Cell, Verdict, all_cells, composed, names, verdict
from tests.acceptance.matrix.page import PAGE, render
from tests.acceptance.matrix.run import Outcome, backends, boxes_of, prepare, run
from tests.acceptance.matrix.servers import servers_for
from tests.architecture.docs import write_examples
from tests.docker_engine import docker_engine
from tests.sandbox.apptainer_program import find_apptainer, needs_apptainer
from tests.sandbox.opensandbox.double import API_KEY, double_server

__all__ = ["docker_engine"]
CELLS = list(all_cells())
CLIS = ("claude_code", "codex")
SANDBOXES = ("local", "docker")
SANDBOX_NAMES = names("sandbox", (ROOT,))


@pytest.fixture(scope="module")
def verdicts(docker_engine: str) -> dict[Cell, Verdict]:
    return {cell: verdict(cell) for cell in CELLS}


@pytest.fixture
def opensandbox_url(sandbox: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server for sandboxes whose backend does not come up by itself: the double of one."""
    if "opensandbox" not in sandbox:
        yield ""
        return
    with double_server() as url:
        monkeypatch.setenv("OPEN_SANDBOX_URL", url)
        monkeypatch.setenv("OPEN_SANDBOX_API_KEY", API_KEY)
        yield url


@pytest.fixture
def works(tmp_path: Path, docker_engine: str) -> Callable[[Cell], Outcome]:
    """Runs a cell; fails where it does not work."""

    def proven(cell: Cell) -> Outcome:
        directory = tmp_path / str(cell)
        directory.mkdir()
        with servers_for([cell]):
            prepare(cell)
            outcome = run(cell, directory)
        assert outcome.failures() == [], outcome.log[-3000:]
        return outcome

    return proven


# --------------------------------------------------------------------------------------------------- what composes


def test_matrix_holds_every_file_of_the_groups() -> None:
    assert {cell.agent for cell in CELLS} == {path.stem for path in (ROOT / "configs/agent").glob("*.yaml")}
    assert len(CELLS) == len(set(CELLS)) >= 7 * 3 * 2
    assert {"swe_bench", "example_mcp_weather", "math"} <= {cell.environment for cell in CELLS}


def test_cell_works_somewhere_or_is_refused_with_a_way_out(verdicts: dict[Cell, Verdict]) -> None:
    for found in verdicts.values():
        if found.reason is None:
            assert found.default in found.topologies
        else:
            assert found.default is None
            assert any(way in found.reason for way in ("choose", "use ", "add ", "install", "set ", "Others:")), found


def test_page_is_what_composing_says_now(verdicts: dict[Cell, Verdict]) -> None:
    said, found = PAGE.read_text(encoding="utf-8"), list(verdicts.values())
    if find_apptainer() is None:  # composing tells to install it; what it says of everything else is compared
        for sandbox in filter(of_apptainer, SANDBOX_NAMES):
            said = without_column(said, sandbox)
        found = [v for v in found if not of_apptainer(v.cell.sandbox)]
    assert said == render(found), "make the page anew: python -m tests.acceptance.matrix --write"


def of_apptainer(sandbox: str) -> bool:
    return "apptainer" in sandbox


def without_column(page: str, sandbox: str) -> str:
    """The page as it would be without a sandbox."""
    lines = page.splitlines(keepends=True)
    (head,) = [line for line in lines if line.startswith("| environment |")]
    place = head.split("|").index(f" `sandbox={sandbox}` ")
    return "".join(
        "|".join(cell for number, cell in enumerate(line.split("|")) if number != place)
        if line.startswith("|")
        else line
        for line in lines
    )


def test_agent_that_asks_a_model_says_how_its_tools_are_called(verdicts: dict[Cell, Verdict]) -> None:
    needed = {path for found in verdicts.values() for path in found.data}
    assert {path.split("/")[0] for path in needed} == {"responses_api_agents", "resources_servers"}
    assert [path for path in sorted(needed) if not (ROOT / path).is_file()] == []


def test_agent_and_environment_of_another_folder_join_by_themselves(tmp_path: Path, docker_engine: str) -> None:
    write_examples("add-an-agent.md", tmp_path)
    write_examples("add-an-environment.md", tmp_path)
    for group, folder, name in (
        ("agent", "responses_api_agents", "tiny_agent"),
        ("environment", "resources_servers", "sums"),
    ):
        (tmp_path / "configs" / group).mkdir(parents=True)
        config = f"config_paths: [{folder}/{name}/configs/{name}.yaml]\n"
        (tmp_path / "configs" / group / f"{name}.yaml").write_text(config)
    roots = (tmp_path, ROOT)
    assert {*names("agent", roots)} - {*names("agent", (ROOT,))} == {"tiny_agent"}
    assert Cell("tiny_agent", "sums", "local") in all_cells(roots)
    assert verdict(Cell("tiny_agent", "sums", "local"), roots).default is Topology.AGENT_IN_ENV
    assert verdict(Cell("tiny_agent", "math", "local"), roots).topologies == (Topology.NONE,)
    assert "can only use mcp or http" in (verdict(Cell("simple_agent", "swe_bench", "local"), roots).reason or "")


# ---------------------------------------------------------------------------------------------------- what is wrong


def outcome(**row: Any) -> Outcome:
    right = {"valid": True, "reward": 1.0, "outcome": "completed", "topology": "none"}
    return Outcome(Cell("a", "e", "s", Topology.NONE), ({**right, **row},), (), 1.0, "")


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"valid": False, "reward": None, "failure_kind": "sandbox_lost"}, "no valid verdict: sandbox_lost"),
        ({"reward": 0.0}, "reward 0.0 for a right answer"),
        ({"outcome": "crashed", "outcome_detail": "exit status 3"}, "outcome crashed: exit status 3"),
        ({"topology": "env_sandboxed"}, "ran in topology env_sandboxed"),
    ],
)
def test_cell_does_not_work_when_its_row_says_so(row: dict[str, Any], wrong: str) -> None:
    assert outcome().failures() == []
    (said,) = outcome(**row).failures()
    assert wrong in said


@pytest.mark.parametrize(
    "sandbox",
    [pytest.param(name, marks=needs_apptainer) if of_apptainer(name) else name for name in SANDBOX_NAMES],
)
async def test_box_that_a_run_left_behind_is_found(
    sandbox: str, tmp_path: Path, docker_engine: str, opensandbox_url: str
) -> None:
    composition = composed(Cell("oracle", "swe_bench", sandbox))
    (backend,) = backends(composition)
    run_id = f"left-by-{tmp_path.name}-{sandbox}"
    provider = create_provider(backend)
    closed = NetworkPolicy.NONE in provider.capabilities.network_policies
    network = NetworkPolicy.NONE if closed else NetworkPolicy.OPEN
    spec = SandboxSpec(image="host", ttl_s=60, metadata={BoxLabel.RUN: run_id}, network=network)
    box = await provider.create(spec)
    assert await boxes_of(composition, run_id) == (box.sandbox_id,)
    await provider.close(box)
    await provider.aclose()
    assert await boxes_of(composition, run_id) == ()


# --------------------------------------------------------------------------------------------------------- what runs


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sandbox", SANDBOXES)
@pytest.mark.parametrize("agent", CLIS)
def test_cli_solves_an_example_task_from_within_a_box_without_a_network(
    agent: str, sandbox: str, works: Callable[[Cell], Outcome]
) -> None:
    row = works(Cell(agent, "swe_bench", sandbox)).row
    assert (row["topology"], row["official"]["resolved"]) == ("agent_in_env", True)
    seen = row["ng_agent_observations"]
    assert (seen["turns"], seen["tool_calls"], row["ng_model_session"]["turns"]) == (5, 4, 5)
    assert seen["doors"]["model"]["statuses"] == {"200": 5}
    assert set(seen["doors"]) == {"model"}, "the box's only way out is the model's door"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sandbox", SANDBOXES)
@pytest.mark.parametrize("agent", CLIS)
def test_cli_uses_the_environments_mcp_tool_from_a_box_without_a_network(
    agent: str, sandbox: str, works: Callable[[Cell], Outcome]
) -> None:
    row = works(Cell(agent, "example_mcp_weather", sandbox)).row
    assert row["topology"] == "env_sandboxed"
    assert row["details"]["tool_calls"] == ["get_weather"] * 3
    assert set(row["ng_agent_observations"]["doors"]) == {"model", "example_mcp_weather"}


def test_only_the_environments_name_differs_between_the_cells_of_an_agent() -> None:
    for agent in CLIS:
        first, second = (Cell(agent, e, "local").words((ROOT,)) for e in ("swe_bench", "example_mcp_weather"))
        assert {*first} ^ {*second} == {"environment=swe_bench", "environment=example_mcp_weather"}


def test_right_answer_without_a_world_is_rewarded(works: Callable[[Cell], Outcome]) -> None:
    row = works(Cell("simple_agent", "math", "local")).row
    assert (row["topology"], row["details"]["answer"]) == ("none", "46")
    assert json.loads(json.dumps(row)) == row


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cell_works_in_every_topology_that_is_not_refused(
    cell: Cell, verdicts: dict[Cell, Verdict], works: Callable[[Cell], Outcome]
) -> None:
    for runnable in verdicts[cell].cells():
        works(runnable)
