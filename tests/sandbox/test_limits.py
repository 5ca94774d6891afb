"""Boxes have limits unless somebody says that they shall have none, and the limits hold against what tries them."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import docker
import pytest

from nemo_gym.contract.errors import ConfigError, SandboxCapabilityError, SandboxLostError
from nemo_gym.contract.sandbox import SandboxResources, SandboxSpec, default_limits
from nemo_gym.sandbox.base import ExecOutcome, ExecRequest, SandboxCapabilities
from nemo_gym.sandbox.providers.docker.watchdog import EngineClient, Watchdog, on_disk, watch_disks
from tests.sandbox.docker_boxes import Boxes, until
from tests.sandbox.local_boxes import LocalPlace, local_place

THREADS = (
    "import os, threading, time\n"
    "count = 0\n"
    "try:\n"
    "    while count < 300:\n"
    "        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    "        count += 1\n"
    "except RuntimeError: pass\n"
    "print(count, flush=True); os._exit(0)"
)


def test_open_limits_are_filled_and_unlimited_ones_stay_open() -> None:
    wanted = SandboxResources(memory_mib=100, unlimited=("pids",))
    filled = wanted.filled(SandboxResources(cpu=2, memory_mib=1, pids=3, unlimited=("disk_gib",)))
    assert filled == SandboxResources(cpu=2, memory_mib=100, unlimited=("pids", "disk_gib"))
    # What a provider's settings leave unlimited, the suite's defaults do not limit either.
    assert filled.filled(default_limits(None)) == filled


def test_default_memory_leaves_a_quarter_of_a_small_host() -> None:
    assert default_limits(4096).memory_mib == 3072
    assert default_limits(1 << 20).memory_mib == default_limits(None).memory_mib == 8192


def test_default_limits_are_those_that_the_provider_can_enforce() -> None:
    able = SandboxCapabilities(pids_limit=True)
    assert able.with_default_limits(SandboxResources(), host_memory_mib=None).default_limits == SandboxResources(
        pids=default_limits(None).pids
    )
    # What is configured and cannot be enforced is not dropped in silence.
    configured = able.with_default_limits(SandboxResources(memory_mib=64), host_memory_mib=None)
    with pytest.raises(SandboxCapabilityError, match="memory_limit"):
        configured.check(SandboxSpec(resources=configured.limits(SandboxResources())), "p")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"unlimited": ["memory"]}, r"unlimited holds 'memory' \(did you mean 'memory_mib'\?\)"),
        ({"unlimited": ["pids"], "pids": 4}, "pids is 4 and unlimited; remove one of them"),
        ({"unlimited": "pids"}, "unlimited must be a list of names, not 'pids'"),
    ],
)
def test_contradictory_limits_are_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SandboxResources.from_mapping(values)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[LocalPlace]:
    async with local_place(tmp_path) as made:
        yield made


async def test_limit_of_the_settings_holds_unless_the_spec_says_unlimited(tmp_path: Path) -> None:
    async with local_place(tmp_path, default_resources={"pids": 100}) as place:
        limited = await place.create()
        free = await place.create(resources=SandboxResources(unlimited=("pids",)))
        assert int(await place.run(limited, f"python3 -c '{THREADS}'")) < 100
        assert int(await place.run(free, f"python3 -c '{THREADS}'")) == 300


async def test_box_that_writes_too_much_fails_or_ends_and_its_neighbour_goes_on(place: LocalPlace) -> None:
    writer = await place.create(resources=SandboxResources(disk_gib=0.05))
    neighbour = await place.create(resources=SandboxResources(disk_gib=0.05))
    await place.run(writer, "head -c 20000000 /dev/zero > /var/little")
    done = await place.provider.exec(writer, "head -c 200000000 /dev/zero > /var/big && sleep 600", timeout_s=60)
    if done.outcome is ExecOutcome.LOST:  # for an ordinary user, whose boxes have no disks of their own
        with pytest.raises(SandboxLostError, match=r"wrote more than the 0\.05 GiB that its limit disk_gib allows"):
            await place.provider.start_exec(writer, ExecRequest("true"))
        assert "limit disk_gib" in (await place.provider.overrun(writer) or "")
    else:
        assert await place.provider.overrun(writer) is None
        assert "No space left on device" in (done.stderr or "")
        assert await place.run(writer, "rm /var/big; echo well") == "well\n"
    assert await place.run(neighbour, "head -c 20000000 /dev/zero > /var/little; echo well") == "well\n"


async def test_docker_box_that_writes_too_much_ends_and_its_neighbour_goes_on(boxes: Boxes) -> None:
    resources = SandboxResources(disk_gib=0.05)
    writer, neighbour = await boxes.create(resources=resources), await boxes.create(resources=resources)
    free = await boxes.create(resources=SandboxResources(unlimited=("disk_gib",)))
    little = "head -c 20000000 /dev/zero > /var/little; echo well"
    too_much = "head -c 100000000 /dev/zero > /var/big; echo well"
    assert (await boxes.provider.exec(free, too_much)).stdout == "well\n"
    # Holes of a sparse file are not written.
    assert (await boxes.provider.exec(neighbour, f"truncate -s 10T /var/sparse; {little}")).stdout == "well\n"
    done = await boxes.provider.exec(writer, too_much + "; sleep 600", timeout_s=60)
    assert done.outcome is ExecOutcome.LOST
    assert "its limit disk_gib" in (await boxes.provider.overrun(writer) or "")
    assert await boxes.provider.overrun(free) is None

    async def only_the_others() -> bool:
        return set(await boxes.ids()) == {neighbour.sandbox_id, free.sandbox_id}

    await until(only_the_others)
    assert (await boxes.provider.exec(neighbour, little)).stdout == "well\n"


NEST = (
    "import os, sys\n"
    "for _ in range(int(sys.argv[2])): os.mkdir(sys.argv[1]); os.chdir(sys.argv[1])\n"
    "open('big', 'wb').write(bytes(int(sys.argv[3])))\n"
)
"""Program that nests directories of a name and writes a file into the innermost."""


@pytest.mark.parametrize(("name", "count"), [("d", 1500), ("d" * 250, 40)], ids=["many", "longer than any path"])
def test_watchdog_measures_deep_directories(tmp_path: Path, name: str, count: int) -> None:
    class Described(EngineClient):
        def request(self, method: str, path: str) -> tuple[int, dict[str, Any]]:
            return 200, {"GraphDriver": {"Data": {"UpperDir": str(tmp_path)}}}

    subprocess.run([sys.executable, "-c", NEST, name, str(count), "3000000"], cwd=tmp_path, check=True)
    try:
        # Directories count too.
        assert 3_000_000 <= (on_disk(Described("", None), "box") or 0) < 3_000_000 + 8192 * (count + 1)
    finally:
        subprocess.run(["rm", "-rf", tmp_path / name], check=True)


async def test_a_box_that_takes_long_to_remove_holds_up_no_other_lease() -> None:
    slow_may_end = threading.Event()
    removed: list[str] = []

    class Slow(EngineClient):
        def lease_ends(self) -> dict[str, float | None]:
            return {name: 1.0 for name in ("slow", "other") if name not in removed}

        def remove(self, container_id: str) -> None:
            if container_id == "slow":
                slow_may_end.wait(60)
            removed.append(container_id)

    watchdog = Watchdog(Slow("", None))
    try:
        looks = [await asyncio.wait_for(asyncio.to_thread(watchdog.look), 10) for _ in range(2)]
        await until(lambda: removed == ["other"])
    finally:
        slow_may_end.set()
    await until(lambda: watchdog.look() == 0)
    assert looks[0] == 2 and removed == ["other", "slow"]


def test_watchdog_goes_on_measuring_after_an_unexpected_error(capsys: pytest.CaptureFixture[str]) -> None:
    errors: list[type[BaseException]] = [RecursionError, SystemExit]

    class Failing(EngineClient):
        def containers(self, options: str) -> list[dict[str, Any]]:
            raise errors.pop(0)

    with pytest.raises(SystemExit):
        watch_disks(Failing("", None))
    assert "disk limits could not be checked: RecursionError" in capsys.readouterr().err


async def test_docker_box_that_writes_too_much_below_a_path_too_long_for_the_engine_ends(boxes: Boxes) -> None:
    writer = await boxes.create(resources=SandboxResources(disk_gib=0.05))
    program = ["python3", "-c", NEST + "import time; time.sleep(600)", "d" * 250, "40", "100000000"]
    done = await boxes.provider.exec(writer, program, cwd="/var", timeout_s=60)
    assert done.outcome is ExecOutcome.LOST


async def test_docker_box_has_the_suites_limits_by_default_and_none_where_they_are_unlimited(boxes: Boxes) -> None:
    limits = boxes.provider.capabilities.default_limits
    assert limits.pids == default_limits(None).pids
    limited = await boxes.create()
    free = await boxes.create(resources=SandboxResources(unlimited=("memory_mib", "pids", "disk_gib")))
    with contextlib.closing(docker.APIClient(base_url=boxes.provider.config.base_url)) as client:
        host = client.inspect_container(limited.sandbox_id)["HostConfig"]
        assert (host["Memory"], host["PidsLimit"]) == ((limits.memory_mib or 0) * 1024**2, limits.pids)
        host = client.inspect_container(free.sandbox_id)["HostConfig"]
        assert (host["Memory"], host["PidsLimit"] or 0) == (0, 0)
