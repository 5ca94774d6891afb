"""This process's state of a container (`DockerBox`), one exec from its start to its end (`DockerExec`), and the exec's
processes on the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal as signals
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_gym._util.tasks import Backoff, finish
from nemo_gym.contract.errors import SandboxError
from nemo_gym.sandbox import cgroups
from nemo_gym.sandbox.base import ExecEnd, ExecOutcome, ExecOutput, ExecRequest, SandboxHandle
from nemo_gym.sandbox.doors import DoorServer
from nemo_gym.sandbox.egress import EgressProxy
from nemo_gym.sandbox.linux import live_process, uptime_ticks
from nemo_gym.sandbox.providers.docker.engine import (
    EXEC_MARK,
    Attachment,
    AttachRefused,
    Engine,
    attach,
    can_half_close,
    sdk_errors,
    spec_env,
    status_of,
)

# -- Processes -----------------------------------------------------------------------------------------------------
# A box's processes on the host: finding those of one exec, signalling them, and counting memory kills.
#
# This works only if the engine's processes have ids on this machine (`Engine.is_local`). The processes of an exec are
# its descendants, processes with its mark in their environment, and processes in a session that either of these
# opened. A process that detached, dropped its environment and opened a session of its own is found by elimination: it
# belongs to the exec if it began during the exec and no other exec ran meanwhile.

_KILL_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    session: int
    started_ticks: int
    mark: str | None


@dataclass(frozen=True)
class BoxControl:
    """The control groups of one container on the host."""

    init_pid: int
    group: Path
    """The control group with the container's processes."""
    memory: Path | None
    """The control group that counts the container's memory and memory kills."""

    @classmethod
    def find(cls, init_pid: int, container_id: str) -> BoxControl | None:
        """Find a container's groups; ``None`` if its processes are not visible or may not be signalled from here."""
        groups: dict[str, Path] = {}
        try:
            for hierarchy in cgroups.hierarchies(init_pid):
                names = ["unified"] if hierarchy.version == 2 else hierarchy.controllers
                if container_id in str(hierarchy.group):
                    groups |= dict.fromkeys(names, hierarchy.group)
            os.kill(init_pid, 0)
            Path(f"/proc/{init_pid}/environ").read_bytes()
        except OSError:
            return None
        paths = [groups[name] for name in ("pids", "memory", "unified") if name in groups]
        group = next((path for path in paths if (path / "cgroup.procs").is_file()), None)
        memory = next((path for path in paths if cgroups.counts_memory(path)), None)
        return None if group is None else cls(init_pid, group, memory)

    def is_alive(self) -> bool:
        """Whether the box's first process lives. When that begins to exit, the kernel kills all others."""
        process = live_process(self.init_pid)
        return process is not None and not process.is_exiting

    def oom_kills(self) -> int | None:
        """How many of the box's processes the kernel killed for memory; ``None`` if unknown or the box is gone."""
        return None if self.memory is None else cgroups.oom_kills(self.memory)

    def was_full(self) -> bool:
        """Whether the box has ever reached its memory limit. If not, a memory kill means that the host ran out."""
        return self.memory is not None and cgroups.was_full(self.memory)

    def processes(self) -> list[Process]:
        """All processes of the box outside the session of its first process, which only waits and reaps; the idle
        command below it keeps the box alive. An exec starts in its own session and cannot enter this one."""
        pids = cgroups.group_processes(self.group)
        processes = (read_process(pid) for pid in pids if pid != self.init_pid)
        return [process for process in processes if process is not None and process.session != self.init_pid]


def read_process(pid: int) -> Process | None:
    """Read a process's data; ``None`` if the process is gone or a zombie."""
    process = live_process(pid)
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    if process is None:
        return None
    prefix = f"{EXEC_MARK}=".encode()
    mark = next((item[len(prefix) :] for item in environ.split(b"\0") if item.startswith(prefix)), None)
    decoded = None if mark is None else mark.decode(errors="replace")
    return Process(pid, process.parent, process.session, process.started_ticks, decoded)


def select(
    processes: Collection[Process], *, exec_id: str, main_pid: int | None, began_ticks: int, others: Collection[str]
) -> set[int]:
    """Return the pids of one exec's processes.

    Args:
        main_pid: the pid of the command itself, according to the engine.
        began_ticks: when the exec was requested.
        others: ids of execs that ran in the same box at any moment since then.
    """
    by_pid = {p.pid: p for p in processes}

    def ancestry(process: Process) -> list[Process]:
        """The process and its ancestors in the box, nearest first."""
        chain, current = [], by_pid.get(process.pid)
        while current is not None and current not in chain:
            chain.append(current)
            current = by_pid.get(current.parent)
        return chain

    chains = {p.pid: ancestry(p) for p in processes}

    def owner(pid: int) -> str | None:
        """The exec whose mark is nearest. A mark further up may be another exec's, by an accidental reuse of a pid."""
        return next(
            (exec_id if p.pid == main_pid else p.mark for p in chains[pid] if p.mark or p.pid == main_pid), None
        )

    selected = {pid for pid in chains if owner(pid) == exec_id}
    sessions = {by_pid[pid].session for pid in selected}
    for pid, chain in chains.items():
        # A process with an ancestor older than the exec was not started by the exec.
        unclaimed = owner(pid) is None and chain[-1].started_ticks >= began_ticks
        if unclaimed and (by_pid[pid].session in sessions or not others):
            selected.add(pid)
    return selected


Selection = Callable[[Collection[Process]], set[int]]
"""`select` for one exec: its processes' pids among those of the box."""


def send(control: BoxControl, pids: Collection[int], number: int) -> None:
    """Signal processes of the box, but no process outside it that has reused one of the pids since."""
    descriptors: dict[int, int] = {}
    try:
        for pid in pids:
            with contextlib.suppress(OSError):
                descriptors[pid] = os.pidfd_open(pid)
        still = set(cgroups.group_processes(control.group))
        for pid, descriptor in descriptors.items():
            if pid in still:
                with contextlib.suppress(OSError):
                    signals.pidfd_send_signal(descriptor, number)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def signal_exec(control: BoxControl, number: int, select_pids: Selection) -> None:
    """Signal every process of one exec once. Parents come first: a parent that notices its child's end might otherwise
    exit before its own signal arrives."""
    processes = control.processes()
    began = {process.pid: (process.started_ticks, process.pid) for process in processes}
    send(control, sorted(select_pids(processes), key=began.__getitem__), number)


def kill_exec(control: BoxControl, select_pids: Selection) -> bool:
    """Kill every process of one exec; return whether none is left. Blocks for about 10 seconds at most."""
    backoff = Backoff(first_s=0.002, longest_s=0.1, patience_s=_KILL_PATIENCE_S)
    while alive := select_pids(control.processes()):
        # Stop the processes first, so that none forks between being listed and being killed.
        send(control, alive, signals.SIGSTOP)
        send(control, alive, signals.SIGKILL)
        if not backoff.again_blocking():
            return False
    return True


# -- Execs ---------------------------------------------------------------------------------------------------------

_SIGNAL_CODES = {
    128 + number
    for number in (
        signals.SIGILL,
        signals.SIGTRAP,
        signals.SIGABRT,
        signals.SIGBUS,
        signals.SIGFPE,
        signals.SIGKILL,
        signals.SIGSEGV,
        signals.SIGPIPE,
        signals.SIGTERM,
        signals.SIGXCPU,
        signals.SIGXFSZ,
        signals.SIGSYS,
    )
}
"""Exit codes that count as deaths by signal. The engine reports a signal as 128 + its number, as shells do. Codes that
programs also choose themselves (129: git's usage errors; 130) count as exits."""

_DRAIN_S = 2.0
"""How long to wait for the remaining output of a command that timed out."""
_INSPECTION_S = 3.0
"""How long the engine may take to say whether a command whose time is up has ended. Newer engines say so only
once they have closed the command's streams, for which they wait two seconds."""

_DYING_S = 0.3
"""The engine knows that a killed box is dead at most this long after the box's commands ended."""

# Runs inside the box if the host cannot see the box's processes. $1 is the exec's mark, $2 the signal.
_SIGNAL_SCRIPT = """
for d in /proc/[0-9]*; do
  p=${d#/proc/}
  [ "$p" = "$$" ] && continue
  if tr '\\0' '\\n' 2>/dev/null <"$d/environ" | grep -qx "$1"; then kill -"$2" "$p" 2>/dev/null; fi
done
"""


@dataclass
class DockerBox:
    """The type of `SandboxHandle.raw`."""

    container_id: str
    name: str
    """The container's name in the engine; changes with each renewal."""
    env: Mapping[str, str]
    """The spec's environment, added to every exec."""
    init_pid: int
    """The host's pid of the box's first process; 0 if the engine's processes are not visible here."""
    control: BoxControl | None
    """``None`` if the box's processes are not visible here or may not be signalled."""
    has_memory_limit: bool
    user: str = ""
    """The user of the box as its spec or image names it, if any does: name or id, and perhaps ``:group``."""
    running: dict[str, DockerExec] = field(default_factory=dict)
    doors: dict[str, DoorServer | EgressProxy] = field(default_factory=dict)

    @classmethod
    def from_inspection(cls, inspection: Mapping[str, Any], *, local: bool) -> DockerBox:
        """Build from the engine's description of a running container."""
        pid = int(inspection["State"].get("Pid") or 0) if local else 0
        return cls(
            container_id=inspection["Id"],
            name=str(inspection["Name"]).lstrip("/"),
            env=spec_env(inspection["Config"].get("Labels") or {}),
            init_pid=pid,
            control=BoxControl.find(pid, inspection["Id"]) if pid else None,
            has_memory_limit=bool((inspection.get("HostConfig") or {}).get("Memory")),
            user=str(inspection["Config"].get("User") or ""),
        )


def box_of(handle: SandboxHandle) -> DockerBox:
    if not isinstance(handle.raw, DockerBox):
        raise SandboxError(
            f"sandbox handle {handle.sandbox_id} of '{handle.provider_name}' is not the docker provider's"
        )
    return handle.raw


class DockerExec:
    """A running command (`ExecProcess`). ``truncated`` names the streams whose output was cut."""

    def __init__(self, engine: Engine, box: DockerBox, request: ExecRequest) -> None:
        self.exec_id = uuid.uuid4().hex
        self.truncated: set[str] = set()
        self._engine = engine
        self._box = box
        self._request = request
        self._engine_exec_id = ""
        self._attachment: Attachment | None = None
        self._lost = False
        self._timed_out = False
        self._concurrent: set[str] = set()
        self._began = time.monotonic()
        self._began_ticks = uptime_ticks()
        self._oom_before: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._feeding: asyncio.Task[None] | None = None
        self._killing: asyncio.Task[None] | None = None
        self._consumed = False

    # ------------------------------------------------------------------------------------------------- starting

    async def start(self) -> None:
        """Start the command. If the box is gone, the exec's only event is an end with ``LOST``."""
        request, box = self._request, self._box
        if box.control is not None:
            self._oom_before = box.control.oom_kills()
        for other in box.running.values():
            other._concurrent.add(self.exec_id)
            self._concurrent.add(other.exec_id)
        box.running[self.exec_id] = self
        try:
            client = self._engine.client
            created = await self._engine.call(
                client.exec_create,
                box.container_id,
                _argv(request, counts_input=not can_half_close(self._engine.url)),
                stdin=request.stdin is not None,
                user=request.user or "",
                workdir=request.cwd,
                environment={**box.env, **request.env, EXEC_MARK: self.exec_id},
            )
            self._engine_exec_id = created["Id"]
            self._attachment = await attach(self._engine.url, client.api_version, self._engine_exec_id)
        except AttachRefused:
            self._lost = True
        except sdk_errors() as error:
            status = status_of(error) if not isinstance(error, OSError) else None
            if status is not None and status not in (404, 409, 500, 503):
                self._close()
                raise SandboxError(f"docker: the engine refused to run a command: {error}") from error
            self._lost = True
        except BaseException:
            # The command may have started although this call was cancelled.
            await finish(self.kill())
            self._close()
            raise
        if self._lost or self._attachment is None:
            return
        if request.stdin is not None:
            self._feeding = asyncio.ensure_future(self._attachment.feed(request.stdin))
        if request.timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(request.timeout_s, 0), self._on_timeout)

    def _on_timeout(self) -> None:
        self._timed_out = True
        self._killing = asyncio.ensure_future(self._kill_unless_ended())

    async def _kill_unless_ended(self) -> None:
        # The engine keeps the streams of a command that has ended open for a while if background processes hold them.
        with contextlib.suppress(TimeoutError, *sdk_errors(SandboxError)):
            async with asyncio.timeout(_INSPECTION_S):
                inspection = await self._engine.call(self._engine.client.exec_inspect, self._engine_exec_id)
            self._timed_out = bool(inspection["Running"]) or inspection["ExitCode"] is None
        if self._timed_out:
            if self._attachment is not None:
                self._timer = asyncio.get_running_loop().call_later(_DRAIN_S, self._attachment.close)
            await self.kill()

    # ------------------------------------------------------------------------------------------------ streaming

    async def events(self) -> AsyncGenerator[ExecOutput | ExecEnd, None]:
        """Yield the output in order, then one `ExecEnd`. Can be iterated once; stopping early kills the command."""
        if self._consumed:
            raise SandboxError("the events of an exec can be read once")
        self._consumed = True
        kept_bytes = {"stdout": 0, "stderr": 0}
        ended = False
        try:
            if self._attachment is not None:
                async for output in self._attachment.frames():
                    room = self._request.max_output_bytes - kept_bytes[output.stream]
                    data = output.data[: max(room, 0)]
                    if len(data) < len(output.data):
                        self.truncated.add(output.stream)
                    if data:
                        kept_bytes[output.stream] += len(data)
                        yield ExecOutput(output.stream, data)
            end = await self._end()
            ended = True
            yield end
        finally:
            if not ended:
                await finish(self.kill())
            self._close()

    def close_unread(self) -> None:
        """Drop the connection if nobody has begun to read the events: the box is about to go."""
        if not self._consumed:
            self._close()

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._feeding is not None:
            self._feeding.cancel()
        if self._attachment is not None:
            self._attachment.close()
        self._box.running.pop(self.exec_id, None)

    async def _end(self) -> ExecEnd:
        if self._attachment is not None and self._attachment.broken and not self._timed_out:
            # With an exit code, this output, which may lack a part, would pass for the command's whole output.
            await self.kill()
            return ExecEnd(ExecOutcome.LOST, duration_s=time.monotonic() - self._began)
        code = None if self._lost else await self._exit_code()
        if self._killing is not None:
            await asyncio.shield(self._killing)
        duration_s = time.monotonic() - self._began
        if self._timed_out:
            return ExecEnd(ExecOutcome.TIMED_OUT, duration_s=duration_s)
        if code is None:
            return ExecEnd(ExecOutcome.LOST, duration_s=duration_s)
        if code == 128 + signals.SIGKILL:
            # A box that is killed takes its commands with it by SIGKILL, and so does the kernel when memory runs out.
            if await self._ran_out_of_memory():
                control = self._box.control
                if self._box.has_memory_limit and control is not None and not control.was_full():
                    # The host ran out of memory, not the box, so the command is not to blame.
                    return ExecEnd(ExecOutcome.LOST, duration_s=duration_s)
                return ExecEnd(ExecOutcome.OUT_OF_MEMORY, signal=int(signals.SIGKILL), duration_s=duration_s)
            if not await self._box_is_alive():
                return ExecEnd(ExecOutcome.LOST, duration_s=duration_s)
        if code in (126, 127) and not await self._box_is_alive():
            # If the box ends while an exec starts, the engine reports that the command cannot be run.
            return ExecEnd(ExecOutcome.LOST, duration_s=duration_s)
        if code in _SIGNAL_CODES:
            return ExecEnd(ExecOutcome.SIGNALED, signal=code - 128, duration_s=duration_s)
        return ExecEnd(ExecOutcome.EXITED, return_code=code, duration_s=duration_s)

    async def _exit_code(self) -> int | None:
        """Wait for the engine to report the exit code; ``None`` if box or engine are gone, or after a timeout."""
        backoff = Backoff(first_s=0.002, longest_s=0.25)
        while True:
            try:
                inspection = await self._engine.call(self._engine.client.exec_inspect, self._engine_exec_id)
            except sdk_errors(SandboxError):
                return None
            if not inspection["Running"]:
                code = inspection["ExitCode"]
                return code if isinstance(code, int) else None
            if self._killing is not None:
                await asyncio.shield(self._killing)  # until then, the command may still turn out to have ended in time
            if self._timed_out:
                return None
            # The streams end shortly before the engine notices the exit, or long before if the command closed them.
            await backoff.again()

    async def _box_is_alive(self) -> bool:
        if self._box.control is not None:
            return self._box.control.is_alive()
        # The commands of a box that is being killed end shortly before the box does.
        await asyncio.sleep(_DYING_S)
        try:
            inspection = await self._engine.call(self._engine.client.inspect_container, self._box.container_id)
        except sdk_errors(SandboxError):
            return False
        return bool(inspection["State"]["Status"] == "running")

    async def _ran_out_of_memory(self) -> bool:
        control = self._box.control
        if control is not None and self._oom_before is not None:
            oom_kills = control.oom_kills()
            return oom_kills is not None and oom_kills > self._oom_before
        return await self._engine.call(self._saw_oom_event)

    def _saw_oom_event(self) -> bool:
        """Search the engine's recent events for an out-of-memory kill, if the box's counters are not readable here."""
        # The engine's clock may differ from ours by some seconds, so search from 2 s earlier. Blaming this exec for
        # another exec's kill in these seconds is better than missing a kill.
        began = time.time() - (time.monotonic() - self._began) - 2
        filters = {"container": [self._box.container_id], "event": ["oom"]}
        with contextlib.suppress(*sdk_errors()):
            stream = self._engine.client.events(since=int(began), until=int(time.time()) + 1, filters=filters)
            return any(True for _ in stream)
        return False

    # ------------------------------------------------------------------------------------------------- signals

    async def signal(self, number: int) -> None:
        """Send a signal to the command's whole process tree."""
        if self._lost:
            return
        control = self._box.control
        if control is None:
            await self._signal_from_inside(number)
            return
        await self._engine.call(signal_exec, control, number, await self._selection())

    async def kill(self) -> None:
        """Kill the command's whole process tree, including daemons that left its session. Idempotent."""
        if self._lost or not self._engine_exec_id:
            return
        control = self._box.control
        if control is not None:
            all_dead = await self._engine.call(kill_exec, control, await self._selection())
        else:
            for _ in range(3):
                await self._signal_from_inside(signals.SIGKILL)
                if all_dead := await self._main_pid() is None:
                    break
        if not all_dead:
            # Kill the box: losing it is better than keeping one with a command that cannot be stopped.
            with contextlib.suppress(*sdk_errors()):
                await self._engine.call(self._engine.client.kill, self._box.container_id)

    async def _selection(self) -> Selection:
        return functools.partial(
            select,
            exec_id=self.exec_id,
            main_pid=await self._main_pid(),
            began_ticks=self._began_ticks,
            others=frozenset(self._concurrent),
        )

    async def _main_pid(self) -> int | None:
        """The host's pid of the command itself; ``None`` if the command is not running."""
        deadline = time.monotonic() + 5
        while True:
            try:
                inspection = await self._engine.call(self._engine.client.exec_inspect, self._engine_exec_id)
            except sdk_errors(SandboxError):
                return None
            # The engine responds before it starts the command; until then the command neither runs nor has ended.
            starting = not inspection["Pid"] if inspection["Running"] else inspection["ExitCode"] is None
            if starting and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
                continue
            return int(inspection["Pid"]) if inspection["Running"] and inspection["Pid"] else None

    async def _signal_from_inside(self, number: int) -> None:
        argv = ["/bin/sh", "-c", _SIGNAL_SCRIPT, "sh", f"{EXEC_MARK}={self.exec_id}", str(int(number))]

        def run() -> None:
            client = self._engine.client
            created = client.exec_create(self._box.container_id, argv, user=self._request.user or "")
            client.exec_start(created["Id"])

        with contextlib.suppress(*sdk_errors()):
            await self._engine.call(run)


_COUNTED_INPUT = """
command -v head >/dev/null || { echo "standard input over TLS needs the program head in the image" >&2; exit 127; }
head -c "$1" | { shift; exec "$@"; }
"""


def _argv(request: ExecRequest, *, counts_input: bool) -> list[str]:
    """The engine's command line; with ``counts_input`` the command's standard input ends after the bytes sent."""
    argv: Sequence[str]
    argv = ["/bin/sh", "-c", request.command] if isinstance(request.command, str) else list(request.command)
    if request.merge_stderr:
        # A single pipe keeps the order in which both streams were written; the engine's two streams do not.
        argv = ["/bin/sh", "-c", 'exec "$@" 2>&1', "sh", *argv]
    if counts_input and request.stdin is not None:
        argv = ["/bin/sh", "-c", _COUNTED_INPUT, "sh", str(len(request.stdin)), *argv]
    return list(argv)
