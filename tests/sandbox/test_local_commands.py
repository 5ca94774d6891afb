"""Commands in local boxes: whole trees end, with cgroups and without, and every end is told truly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nemo_gym.contract.errors import SandboxCapabilityError, SandboxError, SandboxLostError
from nemo_gym.contract.sandbox import SandboxResources
from nemo_gym.sandbox.base import ExecEnd, ExecOutcome, ExecRequest, SandboxHandle
from nemo_gym.sandbox.conformance.base import eventually
from nemo_gym.sandbox.providers.local import LocalProvider
from tests.sandbox.local_boxes import LocalPlace, local_place, until

# Leaves its parent and its session twice over, and ignores every signal that can be ignored.
DAEMON = (
    "import os, signal, time\n"
    "for number in range(1, 65):\n"
    "    try: signal.signal(number, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork() == 0:\n"
    "        os.closerange(0, 3)\n"
    "        for _ in range(4): os.fork()\n"
    "        while True: time.sleep(1)\n"
    "    os._exit(0)\n"
)


@pytest.fixture(params=[True, False], ids=["cgroups", "no_cgroups"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LocalPlace]:
    async with local_place(tmp_path, use_cgroups=request.param) as made:
        yield made


async def processes(place: LocalPlace, handle: SandboxHandle, pattern: str) -> int:
    """How many processes in the box have a command line that begins like ``pattern``."""
    return int(await place.run(handle, f"ps -eo args | grep -c '^{pattern}' || true"))


async def test_timeout_kills_daemons_that_left_the_session(place: LocalPlace) -> None:
    handle = await place.create(files={"/srv/daemon.py": DAEMON})
    done = await place.provider.exec(handle, "python3 /srv/daemon.py; sleep 600", timeout_s=2)
    assert (done.outcome, done.error_type, done.return_code) == (ExecOutcome.TIMED_OUT, "timeout", None)
    assert await processes(place, handle, "python3 .*daemon.py") == 0
    assert await processes(place, handle, "sleep 600") == 0


async def test_kill_ends_one_tree_and_spares_another(place: LocalPlace) -> None:
    handle = await place.create(files={"/srv/daemon.py": DAEMON})
    doomed = await place.provider.start_exec(handle, ExecRequest("python3 /srv/daemon.py; sleep 600"))
    spared = await place.provider.start_exec(handle, ExecRequest("(sleep 601 & ); sleep 602"))

    async def running() -> bool:
        return (
            await processes(place, handle, "python3 .*daemon.py") >= 16
            and await processes(place, handle, "sleep 60[12]") == 2
        )

    await until(running)
    await doomed.kill()
    events = [event async for event in doomed.events()]
    assert events == [ExecEnd(ExecOutcome.SIGNALED, signal=9, duration_s=events[-1].duration_s)]
    assert await processes(place, handle, "python3 .*daemon.py") == 0
    assert await processes(place, handle, "sleep 60[12]") == 2
    await spared.kill()


@pytest.mark.parametrize("leaves", [False, True], ids=["cancelled", "client_leaves"])
async def test_command_whose_caller_is_gone_while_it_starts_is_killed_and_holds_up_nobody(
    place: LocalPlace, leaves: bool
) -> None:
    handle = await place.create()
    try:
        for turns in (1, 2, 3, 5, 8, 13, 21):
            client = LocalProvider(**place.config)
            same = await client.connect(await place.provider.serialize_handle(handle, scope="box"))
            starting = asyncio.create_task(client.start_exec(same, ExecRequest("sleep 987")))
            for _ in range(turns):
                await asyncio.sleep(0)
            if leaves:
                await client.aclose()
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError, SandboxLostError):
                (await starting).abandon()
            async with asyncio.timeout(30):
                assert await place.run(handle, "echo answers") == "answers\n"
            await client.aclose()

        async def gone() -> bool:
            return await processes(place, handle, "sleep 987") == 0

        await eventually(gone, "no command is left")
    finally:
        os.kill(place.supervisor_pid(), signal.SIGCONT)  # for the other tests, if the supervisor stopped itself


async def test_box_closes_although_a_command_was_just_starting(place: LocalPlace) -> None:
    boxes = [await place.create() for _ in range(3)]
    async with asyncio.timeout(25):
        for handle in boxes:
            starting = asyncio.create_task(place.provider.start_exec(handle, ExecRequest("sleep 600")))
            await asyncio.sleep(0)
            await place.provider.close(handle)
            with contextlib.suppress(SandboxLostError):
                (await starting).abandon()


async def test_background_process_survives_the_end_of_its_command(place: LocalPlace) -> None:
    handle = await place.create()
    done = await place.provider.exec(handle, "(while :; do echo tick; sleep 0.05; done) & echo started", timeout_s=60)
    assert done.ok
    assert (done.stdout or "").startswith(("started\n", "tick\n"))

    async def ticks() -> bool:
        return await processes(place, handle, "sleep 0.05") >= 1

    # Between two sleeps there is none for a moment.
    await eventually(ticks, "the process goes on when its command has ended")
    await place.run(handle, "sleep 0.5")
    await eventually(ticks, "its output pipe does not kill it")


async def test_box_survives_a_command_that_kills_everything_it_can(place: LocalPlace) -> None:
    handle = await place.create()
    done = await place.provider.exec(handle, "kill -9 -1", timeout_s=20)
    assert done.outcome in (ExecOutcome.SIGNALED, ExecOutcome.EXITED)
    assert (await place.provider.exec(handle, ["/bin/sh", "-c", "kill -9 1; kill -TERM 1; echo ok"])).stdout == "ok\n"
    assert await place.run(handle, "echo alive") == "alive\n"


async def test_tree_is_killed_although_the_command_killed_its_watcher(tmp_path: Path) -> None:
    async with local_place(tmp_path, use_cgroups=False) as place:
        handle = await place.create(files={"/srv/daemon.py": DAEMON})
        done = await place.provider.exec(handle, "python3 /srv/daemon.py; kill -9 $PPID; sleep 600", timeout_s=20)
        assert done.outcome in (ExecOutcome.SIGNALED, ExecOutcome.TIMED_OUT)
        assert await processes(place, handle, "python3 .*daemon.py") == 0
        assert await processes(place, handle, "sleep 600") == 0


async def test_limits_are_refused_where_there_are_no_cgroups(tmp_path: Path) -> None:
    async with local_place(tmp_path, use_cgroups=False) as place:
        assert not place.provider.capabilities.memory_limit
        with pytest.raises(SandboxCapabilityError, match=r"memory_limit.*use_cgroups"):
            await place.create(resources=SandboxResources(memory_mib=64))
        assert await place.provider.list() == []


async def test_out_of_memory_is_told_even_when_a_shell_hides_it(tmp_path: Path) -> None:
    async with local_place(tmp_path) as place:
        handle = await place.create(resources=SandboxResources(memory_mib=64))
        eat = "python3 -c 'x = bytearray(200_000_000)'"
        for command in (eat, f"{eat}; exit 5", f'sh -c "{eat}" | cat; exit 1'):
            done = await place.provider.exec(handle, command, timeout_s=60)
            assert (done.outcome, done.error_type) == (ExecOutcome.OUT_OF_MEMORY, "oom"), command
        assert (await place.provider.exec(handle, "exit 5")).outcome is ExecOutcome.EXITED


async def test_command_that_the_hosts_want_of_memory_killed_is_lost_and_never_the_boxes_fault(tmp_path: Path) -> None:
    async with local_place(tmp_path) as place:
        handle = await place.create(resources=SandboxResources(memory_mib=4096))
        # All boxes together have less than this one may have, as on a host that is full of others.
        for base in json.loads((place.state_dir / "supervisor.json").read_text())["cgroups"]:
            for name in ("memory.max", "memory.limit_in_bytes"):
                if Path(base, name).exists():
                    Path(base, name).write_text(str(64 * 1024 * 1024))
        done = await place.provider.exec(handle, "python3 -c 'x = bytearray(200_000_000)'; exit 5", timeout_s=60)
        assert done.outcome is ExecOutcome.LOST


async def test_files_in_memory_leave_room_to_delete_them(tmp_path: Path) -> None:
    async with local_place(tmp_path) as place:
        handle = await place.create(resources=SandboxResources(memory_mib=64))
        filled = await place.provider.exec(
            handle, "for d in /dev/shm /run; do cat /dev/zero > $d/f; done", timeout_s=60
        )
        assert not filled.ok
        await place.run(handle, "rm /dev/shm/f /run/f")


async def test_cancelled_upload_ends_although_its_stream_stands_still(tmp_path: Path) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async with local_place(tmp_path) as place:
        handle = await place.create()
        uploading = asyncio.create_task(place.provider.put_archive(handle, "/opt", chunks()))
        await asyncio.wait({uploading}, timeout=0.5)
        uploading.cancel()
        ended, _ = await asyncio.wait({uploading}, timeout=30)
        assert ended
        assert uploading.cancelled()


async def test_unknown_user_is_refused_by_name(place: LocalPlace) -> None:
    handle = await place.create()
    with pytest.raises(SandboxError, match="no user 'postmaster'"):
        await place.provider.exec(handle, "true", user="postmaster")


async def test_box_that_refused_many_commands_can_be_closed(place: LocalPlace) -> None:
    handle = await place.create()
    for number in range(300):
        user = "u" * (5000 if number % 4 == 0 else 3)
        with pytest.raises(SandboxError, match="no user 'uuu"):
            await place.provider.exec(handle, "true", user=user)
    async with asyncio.timeout(60):
        await place.provider.close(handle)


async def test_command_not_found_and_missing_directory_are_exit_codes(place: LocalPlace) -> None:
    handle = await place.create()
    missing = await place.provider.exec(handle, ["no-such-program", "x"])
    assert (missing.return_code, missing.stderr) == (127, "no-such-program: No such file or directory\n")
    nowhere = await place.provider.exec(handle, "true", cwd="/no/where")
    assert (nowhere.return_code, nowhere.stderr) == (
        126,
        "cannot change to directory /no/where: No such file or directory\n",
    )


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (ExecRequest("echo \ud83d"), "/bin/sh: 'utf-8' codec can't encode character '\\ud83d'"),
        (ExecRequest("true", env={"PORT": 8080}), "/bin/sh: expected str, bytes or os.PathLike object, not int"),  # type: ignore[dict-item]
        (ExecRequest("true", env={"A": "\0"}), "/bin/sh: embedded null byte"),
        (ExecRequest("true", cwd="/tmp/\ud83d"), "cannot change to directory /tmp/\\ud83d: 'utf-8' codec"),
    ],
    ids=["surrogate", "number", "zero_byte", "directory"],
)
async def test_command_that_no_system_call_takes_says_why_it_did_not_start(
    request_: ExecRequest, reason: str, place: LocalPlace
) -> None:
    handle = await place.create()
    result = await place.provider.exec(handle, request_.command, cwd=request_.cwd, env=request_.env)
    assert result.return_code == 126
    assert (result.stderr or "").startswith(reason)


async def test_refused_command_leaves_no_descriptor(place: LocalPlace) -> None:
    handle = await place.create()
    await place.run(handle, "true")
    before = len([*Path("/proc/self/fd").iterdir()])
    for command in ("echo \0", [], ["echo", "\0"]):
        with pytest.raises(SandboxError, match="at least one word"):
            await place.provider.exec(handle, command)
    assert len([*Path("/proc/self/fd").iterdir()]) == before
