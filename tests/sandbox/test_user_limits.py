"""What the kernel counts per user is a box's own: one that holds all of it takes nothing from the host or another box.

Each test uses up the box's whole share, ends, and frees it; on the host only what one or two more would take is tried.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nemo_gym.contract.sandbox import Mount
from nemo_gym.sandbox.base import ExecOutput, ExecRequest, SandboxHandle
from nemo_gym.sandbox.providers.docker import DockerProvider
from nemo_gym.sandbox.providers.local import LocalProvider
from tests.sandbox.docker_boxes import Boxes
from tests.sandbox.local_boxes import LocalPlace, local_place

HOLD = {
    "inotify instances": (
        "import ctypes, time\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "held = 0\n"
        "while held < 20000 and libc.inotify_init() >= 0: held += 1\n"
        "print(held, ctypes.get_errno(), flush=True); time.sleep(600)"
    ),
    "queued signals": (
        "import ctypes, os, signal, time\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])\n"
        "value = ctypes.c_void_p(0)\n"
        "held = 0\n"
        "while held < 300000 and libc.sigqueue(os.getpid(), signal.SIGRTMIN, value) == 0: held += 1\n"
        "print(held, ctypes.get_errno(), flush=True); time.sleep(600)"
    ),
}
TRY = {
    "inotify instances": "import ctypes; print(ctypes.CDLL(None).inotify_init() >= 0)",
    "queued signals": (
        "import ctypes; t = ctypes.c_void_p(); print(ctypes.CDLL(None).timer_create(1, None, ctypes.byref(t)) == 0)"
    ),
}
EAGAIN, EMFILE = 11, 24


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[LocalPlace]:
    async with local_place(tmp_path) as made:
        yield made


@contextlib.asynccontextmanager
async def holding(provider: LocalProvider | DockerProvider, box: SandboxHandle, what: str) -> AsyncIterator[int]:
    """A command of the box that holds as many as it gets; how many, and freed at the end."""
    process = await provider.start_exec(box, ExecRequest(["python3", "-c", HOLD[what]]))
    try:
        said = b""
        # Kept, and not left by a break: a stream of events that is given up ends its command.
        events = process.events()
        while b"\n" not in said:
            event = await anext(events)
            assert isinstance(event, ExecOutput) and event.stream == "stdout", event
            said += event.data
        held, number = map(int, said.split())
        assert number == {"inotify instances": EMFILE, "queued signals": EAGAIN}[what]
        yield held
    finally:
        await process.kill()


def host_still_can(what: str) -> bool:
    return subprocess.run([sys.executable, "-c", TRY[what]], capture_output=True, check=True).stdout == b"True\n"


@pytest.mark.parametrize("what", HOLD)
async def test_box_that_holds_all_it_may_takes_nothing_from_host_or_neighbour(place: LocalPlace, what: str) -> None:
    greedy, neighbour = await place.create(requires=("user_limits",)), await place.create()
    async with holding(place.provider, greedy, what) as held:
        assert held > 10
        assert await place.run(neighbour, f"python3 -c '{TRY[what]}'") == "True\n"
        assert host_still_can(what)


async def test_files_have_the_owners_they_have_in_the_image_whatever_ids_a_box_has(
    place: LocalPlace, tmp_path: Path
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "secret").write_text("of root")
    (tmp_path / "shared" / "secret").chmod(0o600)
    first = await place.create()
    await place.run(first, "chmod 777 /opt; echo b > /opt/own")
    await place.run(first, "echo a > /opt/theirs; chmod 600 /opt/theirs", user="1234:4321")
    await place.provider.commit(first, "owned", {})
    second = await place.create(image="owned", mounts=[Mount(str(tmp_path / "shared"), "/opt/shared")])
    maps = [(await place.run(box, "cat /proc/self/uid_map")).split() for box in (first, second)]
    assert maps[0][1] != maps[1][1], "two boxes have the same ids outside"
    assert await place.run(second, "stat -c %u:%g /opt/theirs /opt/own /etc/passwd") == "1234:4321\n0:0\n0:0\n"
    assert await place.run(second, "cat /opt/theirs; echo c >> /opt/theirs", user="1234") == "a\n"
    assert not (await place.provider.exec(second, "cat /opt/theirs", user="1235")).ok
    assert await place.run(second, "cat /opt/shared/secret") == "of root"
    # Standard output is a pipe of ours, which the command's user may open again.
    assert await place.run(second, "echo again > /dev/stdout", user="1234") == "again\n"


async def test_ids_of_a_box_that_is_gone_are_given_to_another(place: LocalPlace) -> None:
    seen = []
    for _ in range(12):
        box = await place.create()
        seen.append(await place.run(box, "cat /proc/self/uid_map"))
        await place.provider.close(box)
    # Other programs of the machine make boxes meanwhile, and may be given some of them.
    assert len(set(seen)) < len(seen)


async def test_docker_box_that_queues_all_the_signals_it_may_leaves_some_to_the_host(boxes: Boxes) -> None:
    greedy = await boxes.create()
    async with holding(boxes.provider, greedy, "queued signals") as held:
        assert 10 < held <= 4096
        assert host_still_can("queued signals")
