"""One cell for real: servers, boxes, the agent itself and a scripted policy, by ``ng_run`` as a person types it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nemo_gym.cli.prepare import cli_packages
from nemo_gym.config.composition import SANDBOX, Composition
from nemo_gym.config.sandbox_blocks import resolve_provider_config
from nemo_gym.config.servers import references
from nemo_gym.sandbox.base import BoxLabel
from nemo_gym.sandbox.facade import create_provider
from tests.acceptance.matrix.cells import MODEL, ROOT, Cell, asks_a_model, composed, folder, rows_of

PREPARE_TIMEOUT_S = 900.0
RUN_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Outcome:
    """What became of the one row, and of the boxes."""

    cell: Cell
    rows: tuple[dict[str, Any], ...]
    boxes_left: tuple[str, ...]
    seconds: float
    log: str
    """What ``ng_run`` printed."""

    @property
    def row(self) -> dict[str, Any]:
        (row,) = self.rows
        return row

    def failures(self) -> list[str]:
        """What keeps the cell from working; empty where it works."""
        if len(self.rows) != 1:
            return [f"{len(self.rows)} results instead of one: {self.log[-1500:]}"]
        row, found = self.row, []
        if row.get("valid") is not True:
            found.append(f"no valid verdict: {row.get('failure_kind')}: {row.get('failure_reason')}")
        elif row.get("reward") != 1.0:
            found.append(f"reward {row.get('reward')} for a right answer, details {row.get('details')}")
        if row.get("outcome") != "completed":
            found.append(f"outcome {row.get('outcome')}: {row.get('outcome_detail')}")
        if self.cell.topology is not None and row.get("topology") != str(self.cell.topology):
            found.append(f"ran in topology {row.get('topology')}")
        if self.boxes_left:
            found.append(f"boxes left: {', '.join(self.boxes_left)}")
        return found


class CellError(Exception):
    """A cell could not be run at all: a command failed. Holds what it printed."""


def prepare(cell: Cell) -> None:
    """What has to be there once. Raises `CellError`."""
    prepare_agent(cell.agent)
    prepare_environment(cell.environment, cell.sandbox)


@cache
def prepare_agent(agent: str) -> None:
    """The CLI that an agent runs."""
    name = folder("agent", agent, (ROOT,)).name.removesuffix("_agent")
    if name in cli_packages():
        _ng("ng_prepare", ["agents", f"agents={name}"], PREPARE_TIMEOUT_S)


@cache
def prepare_environment(environment: str, sandbox: str) -> None:
    """The images of an environment's first row."""
    plugin = folder("environment", environment, (ROOT,))
    if (plugin / "prepare.py").is_file():
        with TemporaryDirectory(prefix="matrix-") as directory:
            rows = first_row(environment, Path(directory))
            _ng("ng_prepare", [plugin.name, f"rows={rows}", f"sandbox={sandbox}"], PREPARE_TIMEOUT_S)


def first_row(environment: str, directory: Path) -> Path:
    rows = directory / f"{environment}.jsonl"
    rows.write_text(rows_of(environment).read_text(encoding="utf-8").splitlines()[0] + "\n", encoding="utf-8")
    return rows


def run(cell: Cell, directory: Path) -> Outcome:
    """Run the environment's first row. Raises `CellError` where ``ng_run`` fails."""
    composition = composed(cell)
    run_id = f"matrix-{uuid.uuid4().hex[:12]}"
    output = directory / "rollouts.jsonl"
    words = [*cell.words((ROOT,)), f"input={first_row(cell.environment, directory)}", f"output={output}"]
    if asks_a_model(composition):
        words.append(f"model={MODEL}")
    began = time.monotonic()
    log = _ng("ng_run", [*words, f"run_id={run_id}", f"run_dir={directory / 'run'}"], RUN_TIMEOUT_S)
    seconds = time.monotonic() - began
    rows = tuple(json.loads(line) for line in output.read_text(encoding="utf-8").splitlines())
    return Outcome(cell, rows, asyncio.run(boxes_of(composition, run_id)), seconds, log)


async def boxes_of(composition: Composition, run_id: str) -> tuple[str, ...]:
    """The boxes of a run that there are now, as those say who make them."""
    found: list[str] = []
    for backend in backends(composition):
        provider = create_provider(backend)
        try:
            found += [box.sandbox_id for box in await provider.list({BoxLabel.RUN: run_id})]
        finally:
            await provider.aclose()
    return tuple(found)


def backends(composition: Composition) -> list[dict[str, Any]]:
    """The provider blocks that servers use, without those that ask another server for boxes: that server is gone with
    the run, and its own block is among the others."""
    names = {str(server.values.get("sandbox_provider", SANDBOX)) for server in composition.servers.values()}
    blocks = [resolve_provider_config(name, composition.values) for name in sorted(names)]
    return [block for block in blocks if not [*references(block)]]


def _ng(command: str, words: Sequence[str], timeout_s: float) -> str:
    path = Path(sys.executable).parent / command
    try:
        done = subprocess.run(
            [str(path), *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            env={**os.environ, "COLUMNS": "200"},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CellError(f"{command} {' '.join(words)} did not end within {timeout_s:g} s: {error.output!r}") from None
    if done.returncode != 0:
        raise CellError(f"{command} {' '.join(words)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout
