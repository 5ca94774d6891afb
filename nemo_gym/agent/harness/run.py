"""One run of a CLI in a box: prepare its home, start it, read its output, stop it, and judge how it ended.

The output of a process in a box is untrusted. A failure of the model counts only by evidence that the policy cannot
forge: the door's own failures to reach the model, its 5xx and 429 responses, and broken streams. A harness that claims
success without ever getting an answer from the model has failed.

A turn is an answer of the model to anything in the box: the agent, its sub-agents, and side requests (titles,
summaries). The model's door counts turns and forwards no more than the limit, so neither a sub-agent nor a command of
the policy can exceed it. If the provider keeps no door statistics, the limit applies to the turns in the CLI's events;
these cover only the main conversation, and are only as reliable as the process that prints them.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import PurePosixPath
from typing import Any

import structlog

from nemo_gym._util.tasks import finish
from nemo_gym.agent.acts import at_wall_clock
from nemo_gym.agent.harness.base import (
    CliHarness,
    HarnessCommand,
    HarnessContext,
    HarnessEnded,
    Judgement,
    McpEndpoint,
)
from nemo_gym.agent.harness.events import BoundedLog, EventReader, InvocationStatus, LineSplitter
from nemo_gym.agent.harness.provision import UNFIT_STATUS, fitness_check
from nemo_gym.agent.world import HarnessRun, OutputLimitError, World
from nemo_gym.contract.errors import AgentError, ConfigError, SandboxError, SandboxLostError
from nemo_gym.contract.session import (
    MODEL_DOOR,
    AgentOutcome,
    CommandHarvest,
    FilesHarvest,
    GitDiffHarvest,
    HarvestItem,
)
from nemo_gym.contract.verdict import is_context_exceeded, outcome_of_refusal
from nemo_gym.http.telemetry import step
from nemo_gym.sandbox.base import ExecEnd, ExecOutcome, ExecProcess, ExecRequest
from nemo_gym.sandbox.door_statistics import DoorStatistics

log = structlog.get_logger(__name__)

# /tmp comes last: some CLIs distrust it.
CANDIDATES = ("/var/tmp/nemo-gym-agent", "/tmp/nemo-gym-agent", "/run/nemo-gym-agent", "/nemo-gym-agent")
"""The same in every box: CLIs put their paths into prompts, and samples of one task should have the same prompt."""
POLL_S = 0.2
MAX_OUTPUT_BYTES = 512 * 1024 * 1024
"""The limit for each output stream; beyond it, output is read and discarded. Far less is ever kept in memory."""
STDERR_BYTES = 16 * 1024
SETUP_TIMEOUT_S = 60.0
NOT_STARTED = (126, 127)
"""Exit statuses of a command that could not be started; a shell that lacks a command also ends with them."""
STARTED = b"echo started\n"
"""The script's first line. Its output proves that the shell itself was started."""
PAST_PROXIES = """
if [ -n "$http_proxy$https_proxy$all_proxy$HTTP_PROXY$HTTPS_PROXY$ALL_PROXY" ]; then
  direct=${no_proxy:-$NO_PROXY}
  export no_proxy="localhost,127.0.0.1,::1${direct:+,$direct}"
  export NO_PROXY="$no_proxy"
fi
exec "$@"
"""
"""Runs a command that connects to doors directly, because a proxy that the image sets cannot reach them."""
STOP_TIMEOUT_S = 20.0
"""How long a killed process may take to end; also the value to pass to `act_in_world` as ``grace_s``."""


# A harness's own directory in the box: fresh, and outside of the work directory and of harvested paths


def home_candidates(workdir: str, harvest: Iterable[HarvestItem]) -> Iterator[str]:
    """Yield paths outside of the work directory and of harvested paths. Raises `AgentError` if there are none."""
    occupied = [PurePosixPath(path) for path in _harvested_paths(harvest)]
    if workdir != "/":
        occupied.append(PurePosixPath(workdir))
    free = [path for path in CANDIDATES if not any(PurePosixPath(path).is_relative_to(other) for other in occupied)]
    if not free:
        raise AgentError(
            f"there is no place in the box for the agent's own files: all of {', '.join(CANDIDATES)} are harvested"
        )
    yield from free


def _harvested_paths(harvest: Iterable[HarvestItem]) -> Iterator[str]:
    for item in harvest:
        match item:
            case GitDiffHarvest():
                yield item.path
            case FilesHarvest():
                yield from item.paths
            case CommandHarvest():
                pass


def setup_script(home: str, files: Mapping[str, bytes]) -> bytes:
    """A POSIX shell script (for standard input) that creates ``home``, which must not exist, and writes ``files``."""
    lines = ["set -e", "umask 077", f"mkdir -p {shlex.quote(str(PurePosixPath(home).parent))}"]
    lines.append(f"mkdir {shlex.quote(home)} {shlex.quote(home + '/tmp')}")
    for path, content in files.items():
        lines.append(f"mkdir -p {shlex.quote(str(PurePosixPath(path).parent))}")
        lines.append(f"printf {_printf_arguments(content)} > {shlex.quote(path)}")
    return ("\n".join(lines) + "\n").encode()


def _printf_arguments(content: bytes) -> str:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" not in text:
        return f"%s {shlex.quote(text)}"
    return "'" + "".join(f"\\{byte:03o}" for byte in content) + "'"


# How a run ended


def judge(harness: CliHarness, ended: HarnessEnded) -> Judgement:
    """The outcome of a run whose process has ended, and one sentence unless it is ``completed``."""
    model = ended.model_door
    if model is not None and model.over_limit:
        return AgentOutcome.MAX_TURNS, f"it asked the model for more than its {model.turns} answers"
    if ended.stopped is not None and ended.stopped[0] is AgentOutcome.MAX_TURNS:
        return ended.stopped
    judgement = ended.stopped or _harness_judgement(harness, ended)
    if model is not None and model.refused and not model.answered and not model.failing:
        # The policy never answered, so it cannot have caused this.
        if _too_long(model):
            return AgentOutcome.CONTEXT_EXCEEDED, f"the first request does not fit{model.reason}"
        if judgement[0] in (AgentOutcome.COMPLETED, AgentOutcome.CRASHED, AgentOutcome.TIMED_OUT):
            return AgentOutcome.MODEL_REFUSED, _model_detail(model, judgement)
    if model is not None and _model_failed(judgement[0], model):
        return outcome_of_refusal(model.last_status, model.last_error or ""), _model_detail(model, judgement)
    for name, door in ended.mcp_doors.items():
        if _served_nothing(door):
            return AgentOutcome.MCP_FAILED, f"MCP server '{name}' served none of {door.requests} requests{door.reason}"
    if model is None or model.failing:
        return judgement
    if judgement[0] is AgentOutcome.CRASHED and model.refused and _too_long(model):
        return AgentOutcome.MAX_TURNS, f"the conversation no longer fits{model.reason}"
    if judgement[0] is AgentOutcome.TIMED_OUT:
        return at_wall_clock(model, judgement[1] or "it ran out of time")
    if judgement[0] is AgentOutcome.COMPLETED and not model.answered:
        reason = "it never asked" if not model.requests else f"none of its {model.requests} requests was answered"
        return AgentOutcome.CRASHED, f"{harness.name} says it completed without the model: {reason}{model.reason}"
    return judgement


def within_reach(outcome: AgentOutcome, ended: HarnessEnded) -> bool:
    """Whether the policy could have caused the outcome: it acts in the box of the process once the model has answered.
    It cannot cause failures that the doors observed themselves."""
    if outcome is AgentOutcome.MCP_FAILED and any(map(_served_nothing, ended.mcp_doors.values())):
        return False
    if outcome not in (AgentOutcome.CRASHED, AgentOutcome.MCP_FAILED):
        return False
    door = ended.model_door
    return bool(door.answered if door is not None else ended.reader.transcript.turns)


def _served_nothing(door: DoorStatistics) -> bool:
    return bool(door.failures) and not any(status < 400 for status in door.statuses)


def _model_failed(outcome: AgentOutcome, model: DoorStatistics) -> bool:
    if outcome is AgentOutcome.MAX_TURNS:
        return False
    return model.explains_timeout if outcome is AgentOutcome.TIMED_OUT else model.failing


def _harness_judgement(harness: CliHarness, ended: HarnessEnded) -> Judgement:
    match ended.outcome:
        case ExecOutcome.TIMED_OUT:
            return AgentOutcome.TIMED_OUT, "stopped at the end of its wall-clock time"
        case ExecOutcome.OUT_OF_MEMORY:
            return AgentOutcome.CRASHED, "killed: the box ran out of memory"
        case ExecOutcome.EXITED | ExecOutcome.SIGNALED | ExecOutcome.LOST:
            return harness.outcome(ended)


def _too_long(model: DoorStatistics) -> bool:
    """Whether the last request exceeded the model's context, or the size that its server takes."""
    return model.last_status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE or is_context_exceeded(model.last_error or "")


def _model_detail(model: DoorStatistics, ending: Judgement) -> str:
    detail = model.unanswered("the model")
    if ending[0] is AgentOutcome.MODEL_UNREACHABLE:
        return f"{detail}; {ending[1]}"
    return f"{detail}; by the harness it {ending[0].replace('_', ' ')}" + (f": {ending[1]}" if ending[1] else "")


# What ends a run early


async def until_over(
    world: World, reader: EventReader, *, max_turns: int | None, max_model_failures: int | None
) -> Judgement:
    """Wait until a limit is exceeded, and return the judgement; without limits, wait forever."""
    while True:
        door = world.door_statistics(MODEL_DOOR)
        turns = 0 if door is not None else reader.transcript.turns
        if (door is not None and door.over_limit) or (max_turns is not None and turns > max_turns):
            return AgentOutcome.MAX_TURNS, f"stopped after the {max_turns} turns it was given"
        if door is not None and max_model_failures is not None and door.failures_since_answer >= max_model_failures:
            return AgentOutcome.MODEL_UNREACHABLE, f"stopped after {door.failures_since_answer} failures in a row"
        await asyncio.sleep(POLL_S)


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run that the harness's command line does not depend on."""

    mcp_servers: tuple[str, ...] = ()
    """The names of the attempt's MCP servers, which are also the names of their doors."""
    harvest: tuple[HarvestItem, ...] = ()
    event_log_bytes: int = 64 * 1024
    max_model_failures: int | None = None
    """Consecutive failed requests to the model after which the run is stopped; ``None`` leaves it to the CLI."""


async def run_in_box(
    world: World, run: HarnessRun, harness: CliHarness, context: HarnessContext, settings: RunSettings
) -> None:
    """Run a harness to its end and fill ``run``, even if the run is cancelled.

    This fills in the fields of ``context`` that depend on the box (``home``, ``workdir``, ``model_url``, ``mcp``).

    Raises:
        ConfigError: the box has no door to the model, or its image cannot run the harness.
        AgentError: the harness's files could not be written in the box.
        SandboxLostError: the box was lost.
    """
    started = time.monotonic()
    context = _with_box_fields(world, context, settings)
    run.model = world.door_statistics(MODEL_DOOR)
    context, command = await _set_up(world, harness, context, settings)
    reader = harness.reader()
    output, errors = BoundedLog(settings.event_log_bytes), BoundedLog(STDERR_BYTES)
    setup_s = time.monotonic() - started
    timeout_s = None if context.wall_clock_s is None else max(context.wall_clock_s - setup_s, 1.0)
    try:
        with step("box_exec", command=harness.name, sandbox_id=world.handle.sandbox_id):
            process = await world.start_exec(
                ExecRequest(
                    command=["/bin/sh", "-c", PAST_PROXIES, "sh", *command.argv],
                    cwd=context.workdir,
                    env={"HOME": context.home, "TMPDIR": f"{context.home}/tmp", **command.env},
                    timeout_s=timeout_s,
                    stdin=command.stdin,
                    max_output_bytes=MAX_OUTPUT_BYTES,
                )
            )
            watching = until_over(
                world, reader, max_turns=context.max_turns, max_model_failures=settings.max_model_failures
            )
            end, stopped = await follow(
                process, reader, output=output, errors=errors, timeout_s=timeout_s, watching=watching
            )
        if end.outcome is ExecOutcome.LOST:
            lost = f"box {world.handle.sandbox_id} was lost while the harness ran in it"
            raise SandboxLostError(lost, retryable=True)
        doors = {name: world.door_statistics(name) for name in settings.mcp_servers}
        ended = HarnessEnded(
            outcome=end.outcome,
            return_code=end.return_code,
            signal=end.signal,
            stderr=errors.text(),
            reader=reader,
            model_door=world.door_statistics(MODEL_DOOR),
            mcp_doors={name: statistics for name, statistics in doors.items() if statistics is not None},
            stopped=stopped,
        )
        run.outcome, run.detail = judge(harness, ended)
        run.within_reach = within_reach(run.outcome, ended)
    except OutputLimitError as error:
        run.outcome, run.detail = AgentOutcome.MAX_OUTPUT, error.message
    except asyncio.CancelledError:
        run.detail = "the attempt was stopped"
        raise
    finally:
        reader.transcript.ends(_status(run.outcome), error_type=None if run.detail is None else str(run.outcome))
        run.response = reader.transcript.response(context.model)
        try:
            run.observations.update(_observations(world, harness, reader, output, errors, setup_s, settings))
        except Exception as error:
            # What an untrusted process printed may cost its own record, but not the outcome of the run.
            log.exception("observations_lost", harness=harness.name)
            run.observations["observations_error"] = f"{type(error).__name__}: {error}"[:500]


def _with_box_fields(world: World, context: HarnessContext, settings: RunSettings) -> HarnessContext:
    model_url = world.door_url(MODEL_DOOR)
    if model_url is None:
        raise ConfigError(
            "the agent runs in a box, and the attempt has no model to open a door to; give it a model_server",
            key="model_server",
        )
    mcp = ((name, world.door_url(name)) for name in settings.mcp_servers)
    endpoints = tuple(McpEndpoint(name, f"{url}/mcp") for name, url in mcp if url is not None)
    return replace(context, model_url=model_url, mcp=endpoints, workdir=world.workdir)


async def _set_up(
    world: World, harness: CliHarness, context: HarnessContext, settings: RunSettings
) -> tuple[HarnessContext, HarnessCommand]:
    problem = ""
    for home in home_candidates(world.workdir, settings.harvest):
        placed = replace(context, home=home)
        command = harness.command(placed)
        script = fitness_check(harness.package).encode() + b"\n" + setup_script(home, command.files)
        result = await world.exec(["/bin/sh", "-s"], cwd="/", stdin=STARTED + script, timeout_s=SETUP_TIMEOUT_S)
        if result.ok:
            return placed, command
        problem = result.stderr_bytes.decode("utf-8", "replace")[-500:]
        no_shell = result.return_code in NOT_STARTED and not result.stdout_bytes.startswith(b"started")
        if no_shell:
            problem = "it has no /bin/sh; use an image with a shell and its usual commands"
        if no_shell or result.return_code == UNFIT_STATUS:
            raise ConfigError(f"image '{world.spec.image}' cannot run {harness.name}: {problem}", key="image")
    raise AgentError(f"the files of {harness.name} could not be written in the box: {problem}")


def _status(outcome: AgentOutcome) -> InvocationStatus:
    if outcome is AgentOutcome.COMPLETED:
        return "completed"
    limited = (AgentOutcome.MAX_TURNS, AgentOutcome.MAX_OUTPUT, AgentOutcome.TIMED_OUT)
    return "incomplete" if outcome in limited else "failed"


def _observations(
    world: World,
    harness: CliHarness,
    reader: EventReader,
    output: BoundedLog,
    errors: BoundedLog,
    setup_s: float,
    settings: RunSettings,
) -> dict[str, object]:
    transcript, model = reader.transcript, world.door_statistics(MODEL_DOOR)
    answers = 0 if model is None else model.turns
    if answers and not transcript.turns:
        transcript.gap("no_turns_in_the_events", "turns are the answers that the model's door counted")
    doors = {
        name: statistics.as_dict()
        for name in (MODEL_DOOR, *settings.mcp_servers)
        if (statistics := world.door_statistics(name)) is not None
    }
    return {
        "turns": transcript.turns or answers,
        "tool_calls": transcript.tool_calls,
        **{name: count for name, count in transcript.usage.items() if count},
        "harness": harness.name,
        "harness_version": harness.package.version,
        "setup_seconds": round(setup_s, 3),
        "doors": doors,
        "records": transcript.bundle(harness.name).model_dump(mode="json", exclude_none=True),
        "event_log": {"text": output.text(), "bytes": output.size},
        "stderr": {"text": errors.text(), "bytes": errors.size},
    }


async def follow(
    process: ExecProcess,
    reader: EventReader,
    *,
    output: BoundedLog,
    errors: BoundedLog,
    timeout_s: float | None,
    watching: Coroutine[Any, Any, Judgement],
) -> tuple[ExecEnd, Judgement | None]:
    """Read a process until it ends. Returns its end, and why ``watching`` stopped it, if it did.

    Args:
        reader: gets standard output line by line; ``output`` and ``errors`` get both streams.
        timeout_s: the time after which the provider ends the process; if it does not, this function soon does.
        watching: the process and its descendants are killed when this ends. It is cancelled if the process ends first.
    """
    lines, stopped = LineSplitter(reader), None
    end: ExecEnd | None = None

    async def stop() -> None:
        nonlocal stopped
        stopped = await watching
        bound.reschedule(asyncio.get_running_loop().time() + STOP_TIMEOUT_S / 2)
        await _kill(process.kill())

    bound = asyncio.timeout(None if timeout_s is None else timeout_s + STOP_TIMEOUT_S / 2)
    try:
        async with bound:
            watch = asyncio.create_task(stop())
            try:
                async for event in process.events():
                    if isinstance(event, ExecEnd):
                        end = event
                    elif event.stream == "stdout":
                        output.write(event.data)
                        lines.feed(event.data)
                    else:
                        errors.write(event.data)
            finally:
                watch.cancel()
    except TimeoutError:
        end = ExecEnd(ExecOutcome.TIMED_OUT)
    finally:
        lines.finish()
        if end is None or end.outcome is ExecOutcome.TIMED_OUT:
            await _kill(process.kill())
    await asyncio.wait({watch})
    if not watch.cancelled() and (error := watch.exception()) is not None:
        raise error
    return end or ExecEnd(ExecOutcome.LOST), stopped


async def _kill(killing: Coroutine[Any, Any, None]) -> None:
    """Wait for the kill, even while being cancelled. If it fails, the process ends with its box at the latest."""
    try:
        await finish(killing, timeout_s=STOP_TIMEOUT_S / 2)
    except TimeoutError:
        log.warning("harness_kill_timed_out")
    except SandboxError as error:
        log.warning("harness_kill_failed", error=str(error))
