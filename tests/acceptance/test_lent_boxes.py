"""Agents in boxes that their environment owns: the harness is the same, and the registry says who owned what."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import pytest

from nemo_gym.sandbox.base import BoxLabel, SandboxInfo
from nemo_gym.sandbox.facade import create_provider
from tests.acceptance.matrix.cells import MODEL, ROOT, Cell, composed
from tests.acceptance.matrix.run import Outcome, backends, first_row, prepare, run
from tests.docker_engine import docker_engine

__all__ = ["docker_engine"]


def registry(directory: Path) -> sqlite3.Connection:
    return sqlite3.connect(directory / "run/state/sandbox_broker/broker.sqlite")


def solved(cell: Cell, directory: Path) -> Outcome:
    prepare(cell)
    directory.mkdir()
    outcome = run(cell, directory)
    assert outcome.failures() == [], outcome.log[-3000:]
    return outcome


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("agent", "sandbox"),
    [("claude_code", "broker_local"), ("claude_code", "broker_docker"), ("mini_swe_agent", "broker_local")],
)
def test_agent_solves_a_task_in_a_box_that_the_environment_made_and_lent(
    agent: str, sandbox: str, tmp_path: Path, docker_engine: str
) -> None:
    row = solved(Cell(agent, "swe_bench", sandbox), tmp_path / "cell").row
    assert (row["topology"], row["official"]["resolved"]) == ("agent_in_env", True)
    with closing(registry(tmp_path / "cell")) as db:
        boxes = db.execute("select creator, state from broker_boxes").fetchall()
        lent = db.execute("select scope, revoked from broker_leases where scope != 'owner'").fetchall()
    assert {*boxes} == {("swe_bench", "gone")}, "no box was the agent's"
    assert lent == [("operate", 1)], "one box was lent, and taken back before the harvest"


@pytest.mark.timeout(600)
def test_box_is_gone_within_its_lease_when_the_pipeline_is_killed(tmp_path: Path) -> None:
    """The servers go on, as on other machines; only nobody says any more that the attempt matters."""
    cell = Cell("claude_code", "swe_bench", "broker_local")
    prepare(cell)
    composition = composed(cell)
    (backend,) = backends(composition)
    run_id = f"killed-{tmp_path.name}"
    script = tmp_path / "slow.yaml"
    script.write_text("tasks: [{name: slow, repeat_last: true, turns: [{text: I think., delay_s: 600}]}]\n")
    chosen = [*cell.words((ROOT,)), f"model={MODEL}", f"script={script}"]
    chosen += ["swe_bench.resources_servers.swe_bench.work_lease_s=5", f"run_dir={tmp_path / 'run'}"]
    with Started("ng_run", chosen, tmp_path) as servers:
        until(lambda: "servers ready" in servers.log.read_text(), "the servers are ready")
        words = [f"run_dir={tmp_path / 'run'}", f"run_id={run_id}", f"input={first_row('swe_bench', tmp_path)}"]
        with Started("ng_collect_rollouts", [*words, f"output={tmp_path / 'out.jsonl'}"], tmp_path) as pipeline:
            until(lambda: bool(working(backend, run_id)), "the agent works in its box")
            time.sleep(8)  # longer than the lease: it lives by heartbeats
            assert working(backend, run_id)
            pipeline.process.send_signal(signal.SIGKILL)
            pipeline.process.wait()
        until(lambda: not working(backend, run_id), "the box is gone with its lease")
        assert servers.process.poll() is None


class Started:
    """A command in the background; killed with the block."""

    def __init__(self, command: str, words: list[str], directory: Path) -> None:
        self.log = directory / f"{command}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(Path(sys.executable).parent / command), *words],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={**os.environ, "COLUMNS": "200"},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:  # a model's answer is under way, and nobody is left to call it off
                self.process.terminate()
                self.process.wait(90)


def working(backend: Mapping[str, Any], run_id: str) -> list[SandboxInfo]:
    async def ask() -> list[SandboxInfo]:
        provider = create_provider(backend)
        try:
            return await provider.list({BoxLabel.RUN: run_id, BoxLabel.ROLE: "work"})
        finally:
            await provider.aclose()

    return asyncio.run(ask())


def until(condition: Callable[[], bool], what: str, within_s: float = 150) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"within {within_s:g} s: {what}"
        time.sleep(0.2)
