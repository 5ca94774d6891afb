"""Boxes of the local provider end with their lease, whoever is killed meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_gym._util.files import INSTALL_ROOT
from nemo_gym.contract.errors import SandboxLostError
from nemo_gym.contract.sandbox import SandboxResources
from nemo_gym.sandbox.base import ExecOutcome, ExecRequest, SandboxStatus
from nemo_gym.sandbox.cgroups import CommandGroups
from nemo_gym.sandbox.providers.apptainer import construction as apptainer_construction
from nemo_gym.sandbox.providers.apptainer.provider import ApptainerOptions
from nemo_gym.sandbox.providers.local import LocalProvider
from nemo_gym.sandbox.providers.local.client import LocalOptions, SupervisedOptions, supervisor_sources
from nemo_gym.sandbox.providers.local.supervisor import construction, processes
from nemo_gym.sandbox.providers.local.supervisor.boxes import RunningCommand
from nemo_gym.sandbox.providers.local.supervisor.construction import BoxPlan, BuiltBox
from nemo_gym.sandbox.providers.local.supervisor.main import SOCKET_NAME
from nemo_gym.sandbox.providers.local.supervisor.processes import Command
from tests.sandbox.local_boxes import LocalPlace, alive, config_below, leftovers, local_place, until

ALL_LIMITS = {"memory_mib": 256, "pids": 64, "cpu": 1.0}
CLIENT = """
import asyncio, json, sys
from nemo_gym.contract.sandbox import SandboxResources, SandboxSpec
from nemo_gym.sandbox.providers.local import LocalProvider

async def main():
    provider = LocalProvider(**json.loads(sys.argv[1]))
    spec = SandboxSpec(ttl_s=float(sys.argv[2]), resources=SandboxResources(**json.loads(sys.argv[3])))
    boxes = [await provider.create(spec) for _ in range(3)]
    for box in boxes:
        await provider.exec(box, "setsid sh -c 'trap : TERM HUP INT; while :; do sleep 1; done' >/dev/null 2>&1 &")
    print(json.dumps([box.sandbox_id for box in boxes]), flush=True)
    await asyncio.gather(*(provider.exec(box, "sleep 600") for box in boxes))

asyncio.run(main())
"""

LINE_BY_LINE = """
import asyncio, json, sys
from nemo_gym.contract.sandbox import SandboxResources, SandboxSpec
from nemo_gym.sandbox.providers.local import LocalProvider

async def main():
    provider = LocalProvider(**json.loads(sys.argv[1]))
    box = None
    while word := (await asyncio.to_thread(sys.stdin.readline)).strip():
        if word == "create":
            box = await provider.create(SandboxSpec(ttl_s=120))
            said = "made"
        elif word == "exec":
            done = await provider.exec(box, "echo works")
            said = done.stdout or done.outcome
        else:
            for info in await provider.list():
                place = {"sandbox_id": info.sandbox_id, "state_dir": str(provider.options.state_dir)}
                await provider.close(await provider.connect(place))
            said = json.loads((provider.supervisor_dir / "supervisor.json").read_text())["pid"]
            await provider.aclose()
        print(json.dumps(said), flush=True)

asyncio.run(main())
"""


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[LocalPlace]:
    async with local_place(tmp_path) as made:
        yield made


async def start_client(base: Path, ttl_s: float) -> tuple[asyncio.subprocess.Process, list[str]]:
    """Another process with three busy boxes, a daemon in each."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", CLIENT, json.dumps(config_below(base)), str(ttl_s), json.dumps(ALL_LIMITS)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        return process, json.loads(await process.stdout.readline())


async def test_nothing_is_left_when_the_client_is_killed_and_the_lease_has_ended(tmp_path: Path) -> None:
    client, boxes = await start_client(tmp_path, ttl_s=6)
    assert len(boxes) == 3
    place = LocalPlace(LocalProvider(**config_below(tmp_path)), tmp_path)
    supervisor = place.supervisor_pid()
    client.kill()
    await client.wait()
    assert alive(supervisor)
    assert leftovers(tmp_path), "boxes outlive their client until the lease ends"
    await until(lambda: not leftovers(tmp_path))
    await until(lambda: not alive(supervisor))
    assert not (place.state_dir / "socket").exists()


async def test_commands_of_a_killed_client_are_killed_at_once(tmp_path: Path, place: LocalPlace) -> None:
    client, boxes = await start_client(tmp_path, ttl_s=100)
    handle = await place.provider.connect({"sandbox_id": boxes[0], "state_dir": str(place.base / "state")})

    async def runs() -> bool:
        return "sleep 600" in await place.run(handle, "ps -eo args")

    async def gone() -> bool:
        return not await runs()

    await until(runs)
    client.kill()
    await client.wait()
    await until(gone)
    assert "sleep 1" in await place.run(handle, "ps -eo args"), "what a finished command left running stays"


async def test_boxes_die_with_a_killed_supervisor_and_the_next_one_sweeps(tmp_path: Path, place: LocalPlace) -> None:
    handle = await place.create(resources=SandboxResources(**ALL_LIMITS))
    process = await place.provider.start_exec(handle, ExecRequest("trap '' TERM; sleep 600"))
    first = place.supervisor_pid()
    os.kill(first, signal.SIGKILL)
    ends = [event async for event in process.events()]
    assert [end.outcome for end in ends] == [ExecOutcome.LOST]
    assert (await place.provider.exec(handle, "true")).outcome is ExecOutcome.LOST
    with pytest.raises(SandboxLostError):
        await place.provider.renew(handle, 60)
    second = await place.create()
    assert place.supervisor_pid() != first
    assert await place.run(second, "echo works") == "works\n"
    await place.provider.close(second)
    await place.provider.close(handle)
    assert not leftovers(tmp_path)


async def test_boxes_of_a_killed_supervisor_lose_their_processes_without_a_successor(
    tmp_path: Path, place: LocalPlace
) -> None:
    handle = await place.create()
    await place.run(handle, "setsid sh -c 'trap \"\" TERM HUP; sleep 601' >/dev/null 2>&1 &")
    os.kill(place.supervisor_pid(), signal.SIGKILL)

    def processes() -> list[str]:
        return [line for line in leftovers(tmp_path) if not line.startswith(("cgroup ", "file "))]

    await until(lambda: not processes())


async def test_renewal_keeps_a_box_beyond_its_first_lease(place: LocalPlace) -> None:
    kept, left = await place.create(ttl_s=2), await place.create(ttl_s=2)
    await place.provider.renew(kept, 100)

    async def gone() -> bool:
        return await place.provider.status(left) is SandboxStatus.STOPPED

    await until(gone)
    assert await place.run(kept, "echo here") == "here\n"
    assert (await place.provider.exec(left, "true")).outcome is ExecOutcome.LOST


async def test_clients_that_start_together_share_one_supervisor(tmp_path: Path) -> None:
    async with local_place(tmp_path) as place:
        others = [LocalProvider(**place.config) for _ in range(8)]
        lists = await asyncio.gather(*(other.list() for other in others))
        assert lists == [[]] * 8
        handle = await place.create()
        for other in others:
            assert [info.sandbox_id for info in await other.list()] == [handle.sandbox_id]
            await other.aclose()


@pytest.mark.parametrize("options", [LocalOptions, ApptainerOptions])
def test_a_release_is_named_after_every_module_that_a_supervisor_loads(options: type[SupervisedOptions]) -> None:
    script = (
        f"import sys; sys.path.append({str(INSTALL_ROOT)!r})\n"
        f"import nemo_gym.sandbox.providers.local.supervisor.main, {options.builder}\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('nemo_gym.')), sep='\\n')"
    )
    command = [sys.executable, "-I", "-S", "-c", script]
    loaded = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert any(path.endswith("tar_stream.py") for path in loaded)
    assert loaded <= set(map(str, supervisor_sources()))


async def test_supervisor_of_another_release_is_left_alone_and_swept_when_it_is_dead(
    tmp_path: Path, place: LocalPlace
) -> None:
    live, dead = tmp_path / "state" / "livelivelive", tmp_path / "state" / "deaddeaddead"
    for other in (live, dead):
        (other / "boxes" / "box").mkdir(parents=True)
        (other / "supervisor.lock").touch()
    with (live / "supervisor.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        await place.create()
    assert (live / "boxes" / "box").exists()
    assert not dead.exists()


async def test_supervisor_starts_when_the_lock_of_another_release_cannot_be_opened(
    tmp_path: Path, place: LocalPlace
) -> None:
    # As when another supervisor sweeps it at the same time; a program that runs cannot be opened for writing.
    lock = tmp_path / "state" / "otherrelease" / "supervisor.lock"
    lock.parent.mkdir(parents=True)
    shutil.copy("/bin/sleep", lock)
    running = await asyncio.create_subprocess_exec(lock, "600")
    try:
        assert await place.run(await place.create(), "echo works") == "works\n"
    finally:
        running.kill()
        await running.wait()


async def test_supervisors_of_one_path_in_two_mount_namespaces_leave_each_others_boxes_alone(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    arguments = [sys.executable, "-c", LINE_BY_LINE, json.dumps(config_below(tmp_path))]
    script = f'mount -t tmpfs none "{tmp_path}/state" && exec "$@"'
    command = ["unshare", "-m" if os.geteuid() == 0 else "-rm", "sh", "-c", script, "sh", *arguments]
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    stays, leaves = [await asyncio.create_subprocess_exec(*command, **pipes) for _ in range(2)]

    async def ask(client: asyncio.subprocess.Process, word: str) -> Any:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(f"{word}\n".encode())
        async with asyncio.timeout(60):
            return json.loads(await client.stdout.readline())

    try:
        for client in (stays, leaves):
            assert await ask(client, "create") == "made"
            assert await ask(client, "exec") == "works\n"
        left = await ask(leaves, "leave")
        await until(lambda: not alive(left))
        assert await ask(stays, "exec") == "works\n"
        assert await ask(stays, "create") == "made"
        assert await ask(stays, "exec") == "works\n"
        kept = await ask(stays, "leave")
        await until(lambda: not alive(kept))
    finally:
        for client in (stays, leaves):
            if client.returncode is None:
                client.kill()
            await client.wait()


def test_supervisor_that_leaves_without_answering_is_not_remembered_as_a_lack_of_capabilities(tmp_path: Path) -> None:
    provider = LocalProvider(**config_below(tmp_path))
    provider.supervisor_dir.mkdir(parents=True)
    path = provider.supervisor_dir / SOCKET_NAME
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as leaving, contextlib.chdir(path.parent):
        leaving.bind(SOCKET_NAME)
        leaving.listen()

        def leave() -> None:
            connection, _ = leaving.accept()
            path.unlink()
            connection.close()

        thread = threading.Thread(target=leave)
        thread.start()
        capabilities = provider.capabilities
        thread.join()
    assert capabilities.loopback_door, capabilities.reasons
    assert provider.capabilities is capabilities


async def test_same_idempotency_key_gives_the_same_box(place: LocalPlace) -> None:
    first, second = await asyncio.gather(*(place.create(idempotency_key="k") for _ in range(2)))
    other = await place.create(idempotency_key="other")
    assert first.sandbox_id == second.sandbox_id != other.sandbox_id
    assert len(await place.provider.list()) == 2
    await place.provider.close(first)
    again = await place.create(idempotency_key="k")
    assert again.sandbox_id != first.sandbox_id


async def test_burst_of_a_hundred_boxes_works_and_leaves_nothing(tmp_path: Path, place: LocalPlace) -> None:
    boxes = await asyncio.gather(*(place.create() for _ in range(100)))
    said = await asyncio.gather(*(place.run(box, "hostname") for box in boxes))
    assert len(set(said)) == 100
    await asyncio.gather(*(place.provider.close(box) for box in boxes))
    assert not leftovers(tmp_path)


async def test_box_ends_although_its_supervisor_can_start_no_process_and_its_files_go_later(tmp_path: Path) -> None:
    async with local_place(tmp_path, use_cgroups=False) as place:
        first, second = await place.create(), await place.create()
        _, hard = resource.prlimit(place.supervisor_pid(), resource.RLIMIT_NOFILE)
        soft = resource.prlimit(place.supervisor_pid(), resource.RLIMIT_NOFILE, (3, hard))[0]
        try:
            await place.provider.close(first)
        finally:
            resource.prlimit(place.supervisor_pid(), resource.RLIMIT_NOFILE, (soft, hard))
        assert [info.sandbox_id for info in await place.provider.list()] == [second.sandbox_id]
        assert await place.provider.status(first) is SandboxStatus.STOPPED
        await place.provider.close(second)
        assert [*(place.state_dir / "boxes").iterdir()] == []


async def start_job(_: Path) -> None:
    await processes.run(lambda _: None)


async def start_command(_: Path) -> None:
    groups = CommandGroups(tracker=None, memory=None, join=[])
    command = Command(["true"], {}, "/", None, (0, 1, 2), 0, max_uid=0, first_id=None, watched=True)
    await RunningCommand(groups, 1, lambda _: None).start(command, 0, None)


def start_box(build: Callable[[BoxPlan], Awaitable[BuiltBox]]) -> Callable[[Path], Awaitable[Any]]:
    async def start(directory: Path) -> None:
        plan = BoxPlan(
            directory=directory,
            layers=directory,
            overlays=[],
            program="bwrap",
            hostname="box",
            open_network=False,
            mounts=[],
            hidden=[],
            memory_bytes=None,
            disk_bytes=None,
            user_overlays=False,
            identity="0 0 1",
            first_id=None,
            stage="/run",
            network_files={},
        )
        await build(plan)

    return start


@pytest.mark.parametrize(
    "start",
    [start_job, start_command, start_box(construction.build), start_box(apptainer_construction.build)],
    ids=["job", "command", "box", "apptainer_box"],
)
async def test_nothing_stays_open_of_a_process_that_the_kernel_refuses_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[[Path], Awaitable[Any]]
) -> None:
    def refuse() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(processes.os, "fork", refuse)
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(BlockingIOError):
        await start(tmp_path)
    assert len([*Path("/proc/self/fd").iterdir()]) == before
