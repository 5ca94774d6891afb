"""A SWE-bench row through the server object, with real local boxes: worked on in one, graded in another."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.cli.prepare import prepare
from nemo_gym.prorl.async_server import OpenHandsServer
from nemo_gym.sandbox.base import BoxLabel
from nemo_gym.sandbox.facade import create_provider
from tests.prorl.llm import llm_server

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "resources_servers/swe_bench/data"
TOOLS = ROOT / "responses_api_agents/mini_swe_agent/data/scripted_tools.yaml"
INSTANCE = "examples__slugline-1"
IDLE = """
model: idle
tasks:
  - name: does nothing
    when: {user: .}
    turns: [{text: There is nothing to do., ends: true}]
"""


@pytest.fixture(scope="module")
def row() -> dict[str, Any]:
    """One row as it is published, without a data source; its image is prepared."""
    rows = DATA / "example.jsonl"
    assert prepare(["swe_bench", f"rows={rows}", "sandbox=local", f"instances={INSTANCE}"]) == 0
    found = (json.loads(line) for line in rows.read_text().splitlines())
    return next(each for each in found if each["instance_id"] == INSTANCE)


async def boxes_of(job_id: str) -> list[str]:
    """Boxes that there are now for a job's rollouts."""
    provider = create_provider({"local": {}})
    try:
        found = await provider.list({})
        return [box.sandbox_id for box in found if box.labels.get(BoxLabel.ROLLOUT, "").startswith(f"{job_id}-")]
    finally:
        await provider.aclose()


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ending", ["cancel", "stop"])
def test_box_of_a_job_is_gone_when_it_is_cancelled_and_when_the_server_stops(
    row: dict[str, Any], tmp_path: Path, ending: str
) -> None:
    (tmp_path / "hangs.yaml").write_text(IDLE.replace("ends: true", "ends: true, delay_s: 600"))
    job_id = f"hangs-{uuid.uuid4().hex}"
    with (
        llm_server(str(tmp_path / "hangs.yaml"), str(TOOLS)) as (url, model),
        OpenHandsServer([url]) as server,
        ThreadPoolExecutor(1) as threads,
    ):
        under_way = threads.submit(server.process, row, {}, job_id)
        deadline = time.monotonic() + 120
        while not model.asked:
            assert time.monotonic() < deadline and not under_way.done()
            time.sleep(0.05)
        assert len(asyncio.run(boxes_of(job_id))) == 1
        if ending == "cancel":
            server.cancel_job(job_id)
        else:
            server.stop()
        assert under_way.result(60)["failure"]["kind"] == "cancelled"
        assert asyncio.run(boxes_of(job_id)) == []


@pytest.mark.full
@pytest.mark.timeout(900)
def test_row_is_worked_on_and_graded_and_an_empty_patch_is_skipped_where_that_is_allowed(
    row: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "idle.yaml").write_text(IDLE)
    with (
        llm_server(str(DATA / "scripted_policy.yaml"), str(TOOLS)) as (solver, first),
        llm_server(str(DATA / "scripted_policy.yaml"), str(TOOLS)) as (another, second),
        llm_server(str(tmp_path / "idle.yaml"), str(TOOLS)) as (idle, _),
        OpenHandsServer([solver, another], max_init_workers=2, max_run_workers=2, allow_skip_eval=True) as server,
    ):
        with ThreadPoolExecutor(2) as threads:
            results = list(threads.map(lambda _: server.process(row, {"max_iterations": 30}), range(2)))
        for result in results:
            assert (result["error"], result["reward"], result["resolved"]) == (None, 1.0, True)
            assert "used = -len(separator)" in result["git_patch"]
            assert result["data_source"] == "swebench" and result["outcome"] == "completed"
            assert "test_patch" not in result["eval_results"] and result["eval_results"]["findings"] == []

        assert {result["llm_server"] for result in results} == {solver, another}
        assert len(first.asked) == len(second.asked) == 5, "all turns of a job are asked of one LLM server"

        server.clear_llm_server_addresses()
        server.add_llm_server_address(idle)
        nothing = server.process(row, {"max_iterations": 5})
        assert (nothing["error"], nothing["git_patch"], nothing["resolved"]) == (None, "", False)
        assert nothing["eval_results"]["verification_skipped"] is True
        assert nothing["llm_server"] == idle

        server.clear_llm_server_addresses()
        server.add_llm_server_address(solver)
        short = server.process(row, {"max_iterations": 1})
        assert (short["outcome"], short["reward"]) == ("max_turns", 0.0), (
            "the bound on turns is kept, and work is graded"
        )
