"""``ng_jobs``: submit, watch, cancel and look at the jobs of a rollout service."""

from __future__ import annotations

import argparse
import json
import sys
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_gym._util.terminal import shown
from nemo_gym.cli import command
from nemo_gym.contract.errors import ConfigError, reject_unknown_keys, require_whole

if TYPE_CHECKING:
    from nemo_gym.service.client import AsyncRolloutClient, JobView

NAME = "ng_jobs"
WHERE = ("url", "token", "run_dir", "run_id")
KEYS = {
    "submit": (*WHERE, "input", "output", "run", "agent_name", "num_repeats", "limit", "priority", "deadline_s"),
    "watch": (*WHERE, "run", "group", "output"),
    "cancel": (*WHERE, "run", "group", "job", "reason"),
    "status": (*WHERE, "job", "run", "group"),
}
MAX_LISTED = 10


def main() -> None:
    command.run(NAME, jobs_command)


def jobs_command(argv: Sequence[str]) -> int:
    """Run one of the commands of `KEYS`."""
    parser = command.parser(
        NAME,
        "submit input=rows.jsonl [run=NAME] [output=out.jsonl]: each row becomes a job, num_repeats of them;"
        " watch [run=NAME] [group=ID] [output=out.jsonl]: results as they come, until all have ended;"
        " cancel run=NAME | group=ID | job=ID; status [job=ID] [run=NAME]. The service is that of url= and token=, of"
        " run_dir= or run_id=, of NEMO_GYM_SERVICE_URL and NEMO_GYM_SERVICE_TOKEN, or the one that runs on this"
        " machine.",
        words="submit|watch|cancel|status key=value",
    )
    parser.add_argument("--watch", action="store_true", help="submit: then watch until all have ended")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_intermixed_args(argv)
    import asyncio

    from nemo_gym._util.tasks import until_signal
    from nemo_gym.config.overrides import given_values

    name, *words = arguments.settings or [""]
    if name not in KEYS:
        raise ConfigError(f"'{name}' is not a command of {NAME}; there are: {', '.join(KEYS)}", key="command")
    values = {key: value for key, value in given_values(words).items() if value is not None}
    reject_unknown_keys(values, KEYS[name], where=f"{NAME} {name}")
    _check_values(values)
    return asyncio.run(until_signal(_run(name, values, arguments), stopped=command.EXIT_INTERRUPTED))


def _check_values(values: dict[str, Any]) -> None:
    """Refuse values that would fail, or be misunderstood, only after jobs were submitted."""
    for key in ("url", "run_dir"):
        if key in values and "run_id" in values:
            raise ConfigError(f"run_id has no effect beside {key}, which names the service; give one", key="run_id")
    for key in ("num_repeats", "limit"):
        if key in values:
            require_whole(key, values[key], 1)
    if "output" in values:
        path = Path(str(values["output"]))
        if path.is_dir() or not path.parent.is_dir():
            raise ConfigError(f"output '{path}' must be a file in a directory that exists", key="output")
        if "input" in values and path.resolve() == Path(str(values["input"])).resolve():
            raise ConfigError(f"output '{path}' is the input itself: choose another 'output'", key="output")


async def _run(name: str, values: dict[str, Any], arguments: argparse.Namespace) -> int:
    async with _client(values) as client:
        return await _COMMANDS[name](client, values, arguments)


def _client(values: dict[str, Any]) -> AsyncRolloutClient:
    import os

    from nemo_gym.service.client import URL_VARIABLE, AsyncRolloutClient

    url, run_dir = values.get("url"), values.get("run_dir")
    if url is None and run_dir is None and ("run_id" in values or not os.environ.get(URL_VARIABLE)):
        from nemo_gym.stack.endpoints import find_stack

        run_dir = find_stack(None, values.get("run_id")).run_dir
    return AsyncRolloutClient(url, values.get("token"), run_dir=run_dir)


async def _submit(client: AsyncRolloutClient, values: dict[str, Any], arguments: argparse.Namespace) -> int:
    from nemo_gym.contract.verdict import new_run_id
    from nemo_gym.rollouts.report import counted

    if "input" not in values:
        raise ConfigError("submit needs input=<file>.jsonl, one row per line", key="input")
    run = str(values.setdefault("run", new_run_id()))
    done = await client.submit(_jobs(Path(str(values["input"])), run, values))
    refused = [{"job_id": each.job_id, "code": each.code, "detail": each.detail} for each in done.refused]
    if arguments.json and not arguments.watch:
        print(json.dumps({"run": run, "accepted": done.accepted, "known": done.known, "refused": refused}))
    else:
        accepted = counted(done.accepted, "job")
        _print_stderr(f"run {run}: {accepted} accepted, {done.known} known before, {len(refused)} refused")
        for each in refused[:MAX_LISTED]:
            _print_stderr(f"  {each['job_id']}: {each['detail']}")
        if len(refused) > MAX_LISTED:
            _print_stderr(f"  … and {len(refused) - MAX_LISTED} more")
    watched = command.EXIT_OK
    if arguments.watch or "output" in values:
        watched = await _watch(client, values, arguments)
    return command.EXIT_USAGE if refused else watched


def _jobs(path: Path, run: str, values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a job for each sample of each row, also for lines that are no JSON: the service refuses and names them."""
    import orjson

    from nemo_gym._util.exact_json import loads_exactly
    from nemo_gym.contract.verdict import group_id_of, rollout_id_of

    if not path.is_file():
        raise ConfigError(
            f"input '{path}' does not exist; 'input' names a JSONL file with one row per line", key="input"
        )
    shared = {"run_id": run, "agent": values.get("agent_name"), "deadline_s": values.get("deadline_s")}
    shared = {key: value for key, value in shared.items() if value is not None}
    with path.open("rb") as lines:
        rows = (line for line in lines if line.strip())
        for index, line in enumerate(rows):
            if index == values.get("limit"):
                return
            try:
                row = loads_exactly(line.removeprefix(BOM_UTF8))
            except orjson.JSONDecodeError:
                row = line.decode(errors="replace")
            for sample in range(values.get("num_repeats", 1)):
                yield {
                    "job_id": rollout_id_of(run, index, sample),
                    "group_id": group_id_of(run, index),
                    "task_index": index,
                    "sample_index": sample,
                    "priority": values.get("priority", 0),
                    "row": row,
                    **shared,
                }


async def _watch_named(client: AsyncRolloutClient, values: dict[str, Any], arguments: argparse.Namespace) -> int:
    await _require_jobs(client, _filters(values))
    return await _watch(client, values, arguments)


async def _watch(client: AsyncRolloutClient, values: dict[str, Any], arguments: argparse.Namespace) -> int:
    """Show results as they arrive. Return 3 if some jobs ended without a verdict."""
    from rich.console import Console

    from nemo_gym.rollouts.result_rows import RunProgress, Tally

    filters = _filters(values)
    total = len([view async for view in client.jobs(**filters)])
    tally = Tally()
    with ExitStack() as undo:
        console = None if arguments.json else Console(stderr=True, width=None if sys.stderr.isatty() else 140)
        progress = undo.enter_context(RunProgress(total, tally, console))
        output = None
        if "output" in values:
            path = Path(str(values["output"]))
            try:
                output = undo.enter_context(path.open("w", encoding="utf-8"))  # noqa: ASYNC230 - nothing else waits
            except OSError as error:
                raise ConfigError(f"output '{path}' cannot be written ({error.strerror})", key="output") from error

        def show(view: JobView) -> None:
            row = dict(view.result or {"reward": None, "failure_kind": view.state})
            progress.add_row(view.agent, row)
            if output is not None:
                output.write(json.dumps(row) + "\n")

        counts = await client.wait(**filters, on_result=show)
    rewards = {name: each.mean_reward for name, each in tally.agents.items()}
    if arguments.json:
        print(json.dumps({"jobs": total, "states": counts, "mean_reward": rewards}))
    else:
        counts_text = ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "no jobs"
        print(f"{counts_text}; {tally.describe()}" if counts else counts_text)
    return command.EXIT_OK if counts.get("done", 0) == total else command.EXIT_MASKED


async def _cancel(client: AsyncRolloutClient, values: dict[str, Any], arguments: argparse.Namespace) -> int:
    if not {"run", "group", "job"} & set(values):
        raise ConfigError("cancel needs run=, group= or job=", key="run")
    if "job" in values:
        await client.job(str(values["job"]))
    await _require_jobs(client, _filters(values))
    done = await client.cancel(
        job_ids=[str(values["job"])] if "job" in values else None,
        reason=values.get("reason"),
        **_filters(values),
    )
    if arguments.json:
        print(json.dumps(asdict(done)))
    else:
        print(
            f"{done.queued} queued and {done.active} active jobs cancelled, {done.released} sessions released, in"
            f" {done.seconds:.2f} s"
        )
    return command.EXIT_OK


async def _status(client: AsyncRolloutClient, values: dict[str, Any], arguments: argparse.Namespace) -> int:
    if "job" in values:
        print(json.dumps(asdict(await client.job(str(values["job"]))), indent=None if arguments.json else 2))
        return command.EXIT_OK
    if filters := _filters(values):
        counts = Counter([view.state async for view in client.jobs(**filters)])
        if not counts:
            await _require_jobs(client, filters)
        shown = ", ".join(f"{count} {state}" for state, count in counts.items())
        print(json.dumps(counts) if arguments.json else shown)
        return command.EXIT_OK
    status = await client.status()
    if arguments.json:
        print(json.dumps(status))
        return command.EXIT_OK
    jobs = ", ".join(f"{count} {state}" for state, count in status["jobs"].items() if count) or "none"
    print(f"pipeline {status['pipeline']} is {status['state']}; jobs: {jobs}")
    command.print_columns(
        ("STAGE", "QUEUED", "ACTIVE", "WORKERS", "OLDEST S"),
        [
            (each["stage"], str(each["queued"]), str(each["active"]), str(each["workers"]), f"{each['oldest_s']:.1f}")
            for each in status["stages"]
        ],
    )
    command.print_columns(
        ("SERVER", "URL", "BUSY", "CAPACITY", "DONE", "S/ROLLOUT", "HEALTH"),
        [
            (
                each["server_id"],
                each["url"],
                str(each["busy"]),
                str(each["capacity"] or "-"),
                str(each["done"]),
                "-" if each["seconds_per_rollout"] is None else f"{each['seconds_per_rollout']:.2f}",
                each["health"],
            )
            for each in status["servers"]
        ],
    )
    return command.EXIT_OK if status["state"] != "stopped" else command.EXIT_FAILED


_COMMANDS = {"submit": _submit, "watch": _watch_named, "cancel": _cancel, "status": _status}


def _filters(values: dict[str, Any]) -> dict[str, str]:
    return {key: str(values[key]) for key in ("run", "group") if key in values}


async def _require_jobs(client: AsyncRolloutClient, filters: dict[str, str]) -> None:
    """Raise `ConfigError` if the service has no job of a run or group that the command line names."""
    from nemo_gym._util.suggest import nearest

    for key, name in filters.items():
        async for _ in client.jobs(**{key: name}):
            break
        else:
            known = [each["run_id"] for each in (await client.runs())["runs"]] if key == "run" else []
            listed = ", ".join(known[:MAX_LISTED]) + (", …" if len(known) > MAX_LISTED else "")
            there = f"; there are: {listed}" if known else ""
            raise ConfigError(f"the service has no jobs of {key} '{name}'{nearest(name, known)}{there}", key=key)


def _print_stderr(text: str) -> None:
    print(shown(text), file=sys.stderr, flush=True)
