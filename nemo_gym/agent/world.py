"""One attempt in its world: acquire the box, run the harness within its limits, harvest, and leave nothing behind.

The agent server owns the box (see `nemo_gym.agent.bindings` for which box that is). It renews the lease while
the act runs, and the act runs only while the pipeline stays connected. If the environment lends the box, the
environment renews, harvests and destroys it; the agent server only connects to it, works in it and disconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from nemo_gym._util.tasks import finish
from nemo_gym.agent.acts import at_wall_clock
from nemo_gym.agent.bindings import AgentBoxes, Binding, bind, response_object
from nemo_gym.contract.errors import (
    AgentError,
    ConfigError,
    FencedError,
    ModelError,
    NemoGymError,
    SandboxCapabilityError,
    SandboxError,
    SandboxLostError,
)
from nemo_gym.contract.sandbox import Door, SandboxRole, SandboxSpec
from nemo_gym.contract.session import (
    MODEL_DOOR,
    ActRequest,
    ActResponse,
    AgentOutcome,
    Artifact,
    HarvestItem,
    SandboxRef,
    Topology,
)
from nemo_gym.contract.verdict import outcome_of_model_error
from nemo_gym.sandbox.base import (
    DEFAULT_MAX_OUTPUT_BYTES,
    Connectable,
    ExecEnd,
    ExecOutput,
    ExecProcess,
    ExecRequest,
    SandboxExecResult,
    SandboxHandle,
    SandboxProvider,
    SupportsDoorStatistics,
    SupportsLoopbackDoor,
    box_labels,
    overrun_of,
    require,
)
from nemo_gym.sandbox.door_statistics import DoorStatistics
from nemo_gym.sandbox.egress import HarnessNeeds
from nemo_gym.sandbox.facade import create_provider, keep_renewed
from nemo_gym.sandbox.harvest import harvest_all

log = structlog.get_logger(__name__)

CLOSE_TIMEOUT_S = 60.0


# Releasing an attempt's resources, even if the attempt is cancelled meanwhile


async def shielded(teardown: Awaitable[None], timeout_s: float, *, what: str) -> None:
    """Finish a teardown within ``timeout_s``, even if the act is cancelled; the lease ends the box in any case."""
    try:
        await finish(teardown, timeout_s=timeout_s)
    except TimeoutError:
        log.warning("teardown_timed_out", what=what, timeout_s=timeout_s)
    except Exception as error:  # noqa: BLE001 - a teardown that fails must not replace the act's own outcome
        log.warning("teardown_failed", what=what, error=str(error))


BROKER_CLIENT = "remote"
"""The name of the provider that can use references to lent boxes."""


@contextlib.asynccontextmanager
async def borrowed(
    provider: SandboxProvider, ref: SandboxRef, doors: Sequence[Door]
) -> AsyncIterator[tuple[SandboxProvider, SandboxHandle]]:
    """Connect to a lent box and open ``doors`` in it. Yields the provider to use it with, and its handle. The provider
    is ``provider`` if that is a broker's client, else a temporary one.

    Raises:
        SandboxLostError: the box is gone, or the reference is no longer valid.
        SandboxError: a door cannot be opened.
    """
    lender = provider if provider.name == BROKER_CLIENT else create_provider(BROKER_CLIENT)
    try:
        require(lender, Connectable, why="to use a box that the environment lends")
        assert isinstance(lender, Connectable)
        handle = await lender.connect(ref.model_dump())
        try:
            if doors:
                require(lender, SupportsLoopbackDoor, why="to open the model's door in a lent box")
                assert isinstance(lender, SupportsLoopbackDoor)
                await asyncio.gather(*(lender.open_door(handle, door) for door in doors))
            yield lender, handle
        finally:
            await shielded(_disconnect(lender, handle, doors), CLOSE_TIMEOUT_S, what="leave a lent box")
    finally:
        if lender is not provider:
            await shielded(lender.aclose(), CLOSE_TIMEOUT_S, what="close a broker's client")


async def _disconnect(lender: SandboxProvider, handle: SandboxHandle, doors: Sequence[Door]) -> None:
    try:
        # If the environment has already taken the box back, its doors are closed.
        with contextlib.suppress(SandboxLostError, FencedError):
            for door in doors:
                assert isinstance(lender, SupportsLoopbackDoor)
                await lender.close_door(handle, door.name)
    finally:
        await lender.close(handle)


DEFAULT_LEASE_TTL_S = 120.0
"""The lease of a working box: how long it outlives a killed agent server."""
HARVEST_TIMEOUT_S = 600.0


@dataclass
class HarnessRun:
    """A harness's report, updated while it works, so that a run cut short still has one."""

    response: dict[str, Any] = field(default_factory=dict)
    """An OpenAI Responses object."""
    outcome: AgentOutcome = AgentOutcome.COMPLETED
    detail: str | None = None
    within_reach: bool = False
    """See `ActResponse.within_reach`."""
    observations: dict[str, Any] = field(default_factory=dict)
    model: DoorStatistics | None = None
    """Counts all requests of the harness to the model: `PolicyClient.statistics` if it calls the model from the agent
    server, or its door's. If they are set and count none at the wall clock, the attempt is not graded."""


class OutputLimitError(AgentError):
    """The harness's processes wrote more than `Limits.max_output_bytes` allows."""


@dataclass
class OutputMeter:
    """Counts the output of one attempt's processes, and enforces its limit."""

    limit: int | None = None
    used: int = 0

    def cap(self, wanted: int) -> int:
        """How many bytes of one stream to keep: at most one more than remain, to detect an excess."""
        return wanted if self.limit is None else min(wanted, self.limit - self.used + 1)

    def add(self, count: int) -> None:
        self.used += count
        if self.limit is not None and self.used > self.limit:
            raise OutputLimitError(f"stopped: the output limit of {self.limit} bytes was exceeded")


@dataclass
class _MeteredProcess:
    """An `ExecProcess` whose output counts against the limit."""

    process: ExecProcess
    meter: OutputMeter

    def __post_init__(self) -> None:
        self.exec_id = self.process.exec_id

    async def events(self) -> AsyncIterator[ExecOutput | ExecEnd]:
        async for event in self.process.events():
            if isinstance(event, ExecOutput):
                self.meter.add(len(event.data))
            yield event

    async def signal(self, number: int) -> None:
        await self.process.signal(number)

    async def kill(self) -> None:
        await self.process.kill()


@dataclass(frozen=True)
class World:
    """The box of one attempt, as a harness uses it. Its execs raise `OutputLimitError` when the attempt exceeds its
    output limit."""

    provider: SandboxProvider
    handle: SandboxHandle
    spec: SandboxSpec
    topology: Topology
    output: OutputMeter = field(default_factory=OutputMeter)

    @property
    def workdir(self) -> str:
        return self.spec.workdir or "/"

    async def exec(self, command: str | Sequence[str], **options: Any) -> SandboxExecResult:
        """Run a command like `SandboxProvider.exec`, by default in the workdir. Raises `SandboxLostError`."""
        options.setdefault("cwd", self.workdir)
        options["max_output_bytes"] = self.output.cap(options.get("max_output_bytes", DEFAULT_MAX_OUTPUT_BYTES))
        result = await self.provider.exec(self.handle, command, **options)
        if result.error_type == "lost":
            raise SandboxLostError(f"box {self.handle.sandbox_id} was lost while a command ran in it", retryable=True)
        self.output.add(len(result.stdout_bytes) + len(result.stderr_bytes))
        return result

    async def start_exec(self, request: ExecRequest) -> ExecProcess:
        """Start a command with streamed output, like `SandboxProvider.start_exec`. The request needs a ``cwd``."""
        return _MeteredProcess(await self.provider.start_exec(self.handle, request), self.output)

    def door_url(self, name: str) -> str | None:
        """The root URL of a door for processes in the box; ``None`` if there is no such door."""
        port = next((door.port for door in self.spec.doors if door.name == name), None)
        return None if port is None else f"http://127.0.0.1:{port}"

    def door_statistics(self, name: str) -> DoorStatistics | None:
        """A door's statistics so far; ``None`` if there is no such door or the provider keeps no statistics."""
        if not isinstance(self.provider, SupportsDoorStatistics):
            return None
        return self.provider.door_statistics(self.handle).get(name)


Harness = Callable[[World, HarnessRun], Awaitable[None]]
"""Runs the agent in a world. It reports through the `HarnessRun`, and raises `ModelError` or `AgentError` for failures
that are not the policy's."""


async def act_in_world(
    request: ActRequest,
    provider: SandboxProvider,
    harness: Harness,
    *,
    needs: HarnessNeeds | None = None,
    boxes: AgentBoxes | None = None,
    topologies: Sequence[Topology] = (Topology.AGENT_IN_ENV,),
    default_wall_clock_s: float | None = None,
    grace_s: float = 0.0,
    lease_ttl_s: float = DEFAULT_LEASE_TTL_S,
) -> ActResponse:
    """Run one attempt in its box and harvest it.

    Args:
        boxes: the agent's own boxes, for topologies in which its harness is not in the environment's world.
        default_wall_clock_s: the harness's time limit if the descriptor sets none.
        grace_s: extra time for a harness that enforces the limit itself, to stop and report its outcome.
        lease_ttl_s: how long the box outlives this process at most.

    Raises:
        ConfigError: the descriptor needs a topology or world that this agent cannot serve.
        SandboxError: the box could not be created, or was lost before it could be harvested.
    """
    descriptor = request.descriptor
    topology = descriptor.placement.topology
    if topology not in topologies:
        raise ConfigError(
            f"this agent cannot serve topology '{topology}' of environment '{descriptor.environment}'; it serves"
            f" {', '.join(topologies)}",
            key="topology",
        )
    binding = bind(request, topology, needs or HarnessNeeds(), boxes or AgentBoxes())
    run = HarnessRun()
    async with _acquire_box(request, provider, topology, binding, lease_ttl_s) as world:
        started = time.monotonic()
        wall_clock_s = request.wall_clock_s(default_wall_clock_s)
        items = request.descriptor.harvest if binding.is_world and binding.lent is None else ()
        try:
            await _run_in_bounds(harness, world, run, wall_clock_s, grace_s)
            artifacts = await _harvest(world, items)
        except SandboxLostError:
            if (overrun := await overrun_of(world.provider, world.handle)) is None:
                raise
            # The policy can do this whenever it likes: another attempt or a masked sample would be at its command.
            run.outcome, run.detail, run.within_reach = AgentOutcome.CRASHED, overrun, True
            artifacts = [Artifact.of(item.name, item.kind, b"", error=overrun) for item in items]
        run.observations.setdefault("seconds", round(time.monotonic() - started, 3))
    return ActResponse(
        response=run.response or response_object([], model="none"),
        outcome=run.outcome,
        outcome_detail=run.detail,
        within_reach=run.within_reach,
        artifacts=artifacts,
        observations=run.observations,
    )


@contextlib.asynccontextmanager
async def _acquire_box(
    request: ActRequest, provider: SandboxProvider, topology: Topology, binding: Binding, lease_ttl_s: float
) -> AsyncIterator[World]:
    output = OutputMeter(request.descriptor.limits.max_output_bytes)
    if binding.lent is not None:
        async with borrowed(provider, binding.lent, binding.spec.doors) as (lender, handle):
            yield World(lender, handle, binding.spec, topology, output)
        return
    rollout = request.descriptor.rollout
    spec = binding.spec.replace(
        ttl_s=min(binding.spec.ttl_s or lease_ttl_s, lease_ttl_s),
        metadata=box_labels(
            run=rollout.run_id, rollout=rollout.rollout_id, attempt=rollout.attempt, role=SandboxRole.WORK
        ),
    )
    handle = await provider.create(spec)
    try:
        async with keep_renewed(provider, handle, spec.ttl_s or lease_ttl_s):
            yield World(provider, handle, spec, topology, output)
    finally:
        await shielded(provider.close(handle), CLOSE_TIMEOUT_S, what="close a working box")


async def _run_in_bounds(
    harness: Harness, world: World, run: HarnessRun, wall_clock_s: float | None, grace_s: float
) -> None:
    """Run the harness and set the outcome by how it ended. Raises cancellation, and errors that are neither the
    model's nor the agent's, such as a lost box."""
    try:
        async with asyncio.timeout(wall_clock_s and wall_clock_s + grace_s) as deadline:
            await harness(world, run)
    except TimeoutError:
        if not deadline.expired():
            run.outcome, run.detail = (
                AgentOutcome.CRASHED,
                "the harness raised TimeoutError before the attempt's deadline",
            )
        else:
            door = world.door_statistics(MODEL_DOOR)
            # A harness that sets no statistics may call the model past the door, or need none.
            model = run.model or (door if door is not None and door.requests else None)
            run.outcome, run.detail = at_wall_clock(model, f"stopped after {wall_clock_s:g} s of wall-clock time")
    except OutputLimitError as error:
        run.outcome, run.detail = AgentOutcome.MAX_OUTPUT, error.message
    except ModelError as error:
        run.outcome, run.detail = outcome_of_model_error(error), error.message
    except (SandboxLostError, SandboxCapabilityError):
        raise
    except AgentError as error:
        run.outcome, run.detail = AgentOutcome.CRASHED, error.message
    except NemoGymError:
        raise
    except Exception as error:
        log.exception("harness_crashed")
        run.outcome, run.detail = AgentOutcome.CRASHED, f"{type(error).__name__}: {error}"


async def _harvest(world: World, items: Sequence[HarvestItem]) -> list[Artifact]:
    if not items:
        return []
    try:
        async with asyncio.timeout(HARVEST_TIMEOUT_S):
            return await harvest_all(world.provider, world.handle, world.spec, items, world.spec.metadata)
    except TimeoutError:
        raise SandboxError(f"harvest did not end within {HARVEST_TIMEOUT_S:g} s", retryable=True) from None
