"""One run of a CLI in a box: start it, read it as it goes, stop it at its deadline, and say how it ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from nemo_gym.agent.harness.base import (
    CliHarness,
    HarnessCommand,
    HarnessContext,
    HarnessEnded,
    Judgement,
    McpEndpoint,
)
from nemo_gym.agent.harness.event_log import BoundedLog
from nemo_gym.agent.harness.events import EventReader
from nemo_gym.agent.harness.home import home_candidates, setup_script
from nemo_gym.agent.harness.process import Sinks, follow
from nemo_gym.agent.harness.provision import UNFIT_STATUS, fitness_check
from nemo_gym.agent.harness.transcript import InvocationStatus
from nemo_gym.agent.harness.verdict import judge, within_reach
from nemo_gym.agent.harness.watch import until_over
from nemo_gym.agent.topology.world import HarnessRun, OutputLimitError, World
from nemo_gym.contract.errors import AgentError, ConfigError, SandboxLostError
from nemo_gym.contract.session import MODEL_DOOR, AgentOutcome, HarvestItem
from nemo_gym.sandbox.base import ExecEnd, ExecOutcome, ExecRequest

MAX_OUTPUT_BYTES = 512 * 1024 * 1024
"""Of each stream; it is read and thrown away beyond. Nothing near this much is ever held."""
STDERR_BYTES = 16 * 1024
SETUP_TIMEOUT_S = 60.0
NOT_STARTED = (126, 127)
"""Exit statuses of a command that could not be started; a shell that lacks a command ends with them too."""
STARTED = b"echo started\n"
"""What tells the one from the other."""


@dataclass(frozen=True)
class RunSettings:
    """What an agent server sets for a run, beside the context."""

    mcp_servers: tuple[str, ...] = ()
    """Names of the doors behind which the attempt's MCP servers are."""
    harvest: tuple[HarvestItem, ...] = ()
    event_log_bytes: int = 64 * 1024
    max_model_failures: int | None = None
    """Requests to the model that fail one after another until the run is stopped; ``None`` leaves it to the CLI."""


async def run_in_box(
    world: World, run: HarnessRun, harness: CliHarness, context: HarnessContext, settings: RunSettings
) -> None:
    """Run a harness to its end and fill ``run``, also when it is cut short by cancellation.

    ``context`` comes without what only the box knows (``home``, ``model_url``, ``mcp``), which is filled in here.

    Raises:
        ConfigError: the box has no door to the model, or its image cannot run the harness.
        AgentError: the harness's files could not be written in the box.
        SandboxLostError: the box went away.
    """
    started = time.monotonic()
    context, command = await _set_up(world, harness, _placed(world, context, settings), settings)
    reader = harness.reader()
    output, errors = BoundedLog(settings.event_log_bytes), BoundedLog(STDERR_BYTES)
    setup_s = time.monotonic() - started
    timeout_s = None if context.wall_clock_s is None else max(context.wall_clock_s - setup_s, 1.0)
    try:
        process = await world.start_exec(_request(context, command, timeout_s))
        watching = until_over(
            world, reader, max_turns=context.max_turns, max_model_failures=settings.max_model_failures
        )
        end, stopped = await follow(process, Sinks(reader, output, errors), timeout_s, watching)
        if end.outcome is ExecOutcome.LOST:
            lost = f"box {world.handle.sandbox_id} was lost while the harness ran in it"
            raise SandboxLostError(lost, retryable=True)
        ended = _ended(world, end, stopped, errors, reader, settings.mcp_servers)
        run.outcome, run.detail = judge(harness, ended)
        run.within_reach = within_reach(run.outcome, ended)
    except OutputLimitError as over:
        run.outcome, run.detail = AgentOutcome.MAX_OUTPUT, over.message
    except asyncio.CancelledError:
        run.detail = "the attempt was stopped"
        raise
    finally:
        reader.transcript.ends(_status(run.outcome), error_type=None if run.detail is None else str(run.outcome))
        run.response = reader.transcript.response(context.model)
        run.observations.update(_observations(world, harness, reader, output, errors, setup_s, settings))


def _placed(world: World, context: HarnessContext, settings: RunSettings) -> HarnessContext:
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
    said = ""
    for home in home_candidates(world.workdir, settings.harvest):
        placed = replace(context, home=home)
        command = harness.command(placed)
        script = fitness_check(harness.package).encode() + b"\n" + setup_script(home, command.files)
        made = await world.exec(["/bin/sh", "-s"], cwd="/", stdin=STARTED + script, timeout_s=SETUP_TIMEOUT_S)
        if made.ok:
            return placed, command
        said = made.stderr_bytes.decode("utf-8", "replace")[-500:]
        no_shell = made.return_code in NOT_STARTED and not made.stdout_bytes.startswith(b"started")
        if no_shell:
            said = "it has no /bin/sh; use an image with a shell and its usual commands"
        if no_shell or made.return_code == UNFIT_STATUS:
            raise ConfigError(f"image '{world.spec.image}' cannot run {harness.name}: {said}", key="image")
    raise AgentError(f"the files of {harness.name} could not be written in the box: {said}")


def _request(context: HarnessContext, command: HarnessCommand, timeout_s: float | None) -> ExecRequest:
    return ExecRequest(
        command=list(command.argv),
        cwd=context.workdir,
        env={"HOME": context.home, "TMPDIR": f"{context.home}/tmp", **command.env},
        timeout_s=timeout_s,
        stdin=command.stdin,
        max_output_bytes=MAX_OUTPUT_BYTES,
    )


def _ended(
    world: World,
    end: ExecEnd,
    stopped: Judgement | None,
    errors: BoundedLog,
    reader: EventReader,
    mcp_servers: Iterable[str],
) -> HarnessEnded:
    doors = {name: statistics for name in mcp_servers if (statistics := world.door_statistics(name)) is not None}
    return HarnessEnded(
        outcome=end.outcome,
        return_code=end.return_code,
        signal=end.signal,
        stderr=errors.text(),
        reader=reader,
        model_door=world.door_statistics(MODEL_DOOR),
        mcp_doors=doors,
        stopped=stopped,
    )


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
