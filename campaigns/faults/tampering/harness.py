"""Plays entries end to end: ``ng_run`` with mini-swe-agent and a policy whose commands do what the entry says.

Rows, prompts and images are those of any other run. The policy recognizes the entry by the problem statement, so one
run plays at most one entry of each instance. Entries with their own row and patches of lying agent servers cannot be
played this way.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shlex
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from campaigns.faults.tampering.corpus import Entry

ROOT = Path(__file__).resolve().parents[3]
EXECUTABLES = Path(sys.executable).parent
RUN_TIMEOUT_S = 900.0


def playable(entry: Entry) -> bool:
    """Whether an agent in a box can play the entry with an unchanged row."""
    return entry.row is None and (entry.patch is None or entry.kind == "honest")


def waves(entries: Sequence[Entry], count: int) -> list[list[Entry]]:
    """Return ``count`` entries, each instance at most once in a wave: two waves of attacks, one of honest work, and so
    on."""
    attacks = sorted((entry for entry in entries if entry.kind == "attack"), key=_interest)
    attacking, honest = _waves(attacks), _waves(entry for entry in entries if entry.kind == "honest")
    chosen: list[list[Entry]] = []
    while count > 0 and (attacking or honest):
        line = honest if honest and (len(chosen) % 3 == 2 or not attacking) else attacking
        chosen.append(line.pop(0)[:count])
        count -= len(chosen[-1])
    return chosen


def _interest(entry: Entry) -> tuple[bool, bool]:
    """Sort first the attacks that fool the official run, and among them those whose source is not ``own``."""
    return not entry.finding, entry.source == "own"


def _waves(entries: Iterable[Entry]) -> list[list[Entry]]:
    by_instance: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        if playable(entry):
            by_instance[entry.instance].append(entry)
    return [[entry for entry in wave if entry] for wave in zip_longest(*by_instance.values())]


async def play_through_harness(
    sandbox: str, rows: Mapping[str, dict[str, Any]], entries: Sequence[Entry], count: int, concurrency: int
) -> list[dict[str, Any]]:
    """Play ``count`` of the entries; for each its id, kind, reward, findings and how the rollout failed, if it did.

    Raises:
        RuntimeError: ``ng_run`` failed; the message ends with what it printed.
    """
    played: list[dict[str, Any]] = []
    for wave in waves(entries, count):
        with tempfile.TemporaryDirectory(prefix="tampering-") as directory:
            results = await _run(Path(directory), sandbox, rows, wave, concurrency)
        for entry in wave:
            result = results.get(entry.instance, {})
            played.append(
                {
                    "id": entry.id,
                    "kind": entry.kind,
                    "reward": result.get("reward"),
                    "findings": [finding["kind"] for finding in result.get("findings") or ()],
                    "problem": None if result.get("valid") else str(result.get("failure_kind", "no result")),
                }
            )
    return played


async def _run(
    directory: Path, sandbox: str, rows: Mapping[str, dict[str, Any]], wave: Sequence[Entry], concurrency: int
) -> dict[str, dict[str, Any]]:
    policy = {"model": "tampering", "tasks": [_task(entry, rows[entry.instance]) for entry in wave]}
    script = directory / "policy.yaml"
    script.write_text(yaml.safe_dump(policy))
    source, output = directory / "in.jsonl", directory / "out.jsonl"
    source.write_text("".join(json.dumps(rows[entry.instance]) + "\n" for entry in wave))
    environment = "swe_bench.resources_servers.swe_bench"
    command = [
        str(EXECUTABLES / "ng_run"),
        "agent=mini_swe_agent",
        "environment=swe_bench",
        f"sandbox={sandbox}",
        "model=scripted",
        f"script={script}",
        f"input={source}",
        f"output={output}",
        f"run_dir={directory / 'run'}",
        f"concurrency={concurrency}",
        f"++{environment}.eval_timeout_s=60",
    ]
    for resources in ("work_resources", "eval_resources"):
        command += [f"++{environment}.{resources}.memory_mib=1536", f"++{environment}.{resources}.pids=512"]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(RUN_TIMEOUT_S):
            shown, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    written = [path for path in (output, directory / "out_failures.jsonl") if path.exists()]
    if not written:
        raise RuntimeError(f"{shlex.join(command)}\n{shown.decode('utf-8', 'replace')[-4000:]}")
    results = [json.loads(line) for path in written for line in path.read_text().splitlines()]
    return {result["task_id"]: result for result in results}


def _task(entry: Entry, row: Mapping[str, Any]) -> dict[str, Any]:
    patch = row["patch"] if entry.gold else entry.patch
    commands = [f"cd /testbed; {_unpacked(patch)} | git apply"] if patch is not None else []
    if entry.run:
        commands.append(f"{_unpacked(entry.run)} > /tmp/entry.sh; cd /testbed; bash /tmp/entry.sh")
    title = row["problem_statement"].splitlines()[0]
    turns: list[dict[str, Any]] = [{"tool_calls": [{"shell": command}]} for command in commands]
    return {
        "name": entry.id,
        "when": {"user": re.escape(title)},
        "turns": [*turns, {"text": "Done.", "ends": True}],
    }


def _unpacked(text: str) -> str:
    """Return a command that prints the text, without any character that a shell or a parser on the way interprets."""
    return f"echo {base64.b64encode(text.encode()).decode()} | base64 -d"
