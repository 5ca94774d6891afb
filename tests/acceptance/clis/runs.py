"""Runs a CLI as a process of its own, and ends it as an impatient machine would."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.acceptance.clis.drivers import Cli, Outcome

GRACE_S = 20.0


@dataclass(frozen=True)
class Finished:
    """One process from start to end."""

    status: int
    outcome: Outcome
    seconds: float
    killed: bool
    output: str


async def run_cli(
    cli: Cli,
    prompt: str,
    *,
    resume: str | None = None,
    timeout_s: float = 300.0,
    kill_when: Callable[[], bool] | None = None,
) -> Finished:
    """Run to the end, or until ``kill_when`` says so: then the whole process group is killed at once. Raises
    `TimeoutError` with the end of its output after ``timeout_s``; nothing stays behind."""
    started = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *cli.arguments(prompt, resume),
        cwd=cli.place.work,
        env=cli.environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        limit=2**26,
    )
    assert process.stdout is not None
    reading = asyncio.create_task(process.stdout.read())
    killed = False
    try:
        while not reading.done():
            if kill_when is not None and not killed and kill_when():
                killed = True
                _kill_group(process.pid)
            if time.monotonic() - started > timeout_s:
                _kill_group(process.pid)
                output = (await asyncio.wait_for(reading, GRACE_S)).decode("utf-8", "replace")
                raise TimeoutError(f"{cli.name} was not done after {timeout_s:g} s; its last words: {output[-1500:]}")
            await asyncio.wait({reading}, timeout=0.05)
        status = await asyncio.wait_for(process.wait(), GRACE_S)
    finally:
        _kill_group(process.pid)  # what it left in the background, too
        reading.cancel()
    output = reading.result().decode("utf-8", "replace")
    outcome = cli.outcome(status, _events(output), output)
    return Finished(status, outcome, time.monotonic() - started, killed, output)


def _events(output: str) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for line in output.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            found.append(event)
    return found


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
