"""What is particular to boxes that Apptainer makes: images, environment, mounts, and that nothing outlives them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nemo_gym.contract.errors import ConfigError, SandboxCreateError
from nemo_gym.contract.sandbox import Mount, SandboxSpec
from nemo_gym.sandbox.base import ExecOutcome, ExecRequest, SandboxStatus
from nemo_gym.sandbox.facade import create_provider
from nemo_gym.sandbox.providers.apptainer import ApptainerProvider
from nemo_gym.sandbox.providers.local import provider as local_provider
from tests.sandbox.apptainer_program import apptainer
from tests.sandbox.local_boxes import LocalPlace, alive, config_below, leftovers, local_place, until

__all__ = ["apptainer"]

APPLETS = ("cat", "env", "grep", "id", "ls", "mkdir", "ps", "rm", "setsid", "sh", "sleep", "touch")
ENVIRONMENT = "export IMAGE_SAYS=hello PATH=/opt/tool:$PATH\n"


@pytest.fixture
async def place(tmp_path: Path, apptainer: str) -> AsyncIterator[LocalPlace]:
    options = {**config_below(tmp_path), "apptainer": apptainer}
    async with local_place(tmp_path, provider=ApptainerProvider(**options)) as made:
        yield made


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small root filesystem, as Apptainer's own build leaves one."""
    root = tmp_path / "tree"
    for name in ("bin", "etc", "opt/tool", ".singularity.d/env"):
        (root / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox is not None, "busybox is missing; run scripts/install-system"
    shutil.copy(busybox, root / "bin/busybox")
    for name in APPLETS:
        (root / "bin" / name).symlink_to("busybox")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "opt/mark").write_text("first\n")
    (root / ".singularity.d/env/90-environment.sh").write_text(ENVIRONMENT)
    (root / ".singularity.d/env/90-environment.sh").chmod(0o755)
    return root


def sif_of(tree: Path, file: Path, apptainer: str) -> Path:
    done = subprocess.run(
        [apptainer, "--silent", "build", "-F", str(file), str(tree)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return file


async def test_sif_file_is_unpacked_once_and_its_environment_reaches_every_command(
    tmp_path: Path, place: LocalPlace, tree: Path, apptainer: str
) -> None:
    image = str(sif_of(tree, tmp_path / "image.sif", apptainer))
    first, second = await asyncio.gather(*(place.create(image=image, env={"MINE": "yes"}) for _ in range(2)))
    assert len(list((tmp_path / "images" / "layers").iterdir())) == 1
    said = (await place.run(first, "env")).splitlines()
    assert {"IMAGE_SAYS=hello", "MINE=yes", "LANG=C.UTF-8", "HOME=/root"} <= set(said)
    assert any(line.startswith("PATH=/opt/tool:/usr/local/sbin:") for line in said)
    assert not [line for line in said if line.startswith(("APPTAINER", "SINGULARITY", "PS1", "PROMPT"))]
    await place.run(first, "echo changed > /opt/mark")
    assert await place.run(second, "cat /opt/mark") == "first\n"
    connected = await place.provider.connect(await place.provider.serialize_handle(second, scope="operate"))
    assert await place.run(connected, "echo $IMAGE_SAYS $MINE") == "hello yes\n"


async def test_only_a_creates_own_limit_bounds_the_unpacking_which_goes_on_for_later_ones(
    tmp_path: Path, tree: Path, apptainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = str(sif_of(tree, tmp_path / "image.sif", apptainer))
    slow, asked, go = (tmp_path / name for name in ("slow", "asked", "go"))
    wait = f'[ "$1" != sif ] || {{ echo >> {asked}; until [ -e {go} ]; do sleep 0.1; done; }}'
    slow.write_text(f'#!/bin/sh\n{wait}\nexec {apptainer} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setattr(local_provider, "DEFAULT_READY_TIMEOUT_S", 5.0)
    provider = ApptainerProvider(**config_below(tmp_path), apptainer=str(slow))
    async with local_place(tmp_path, provider=provider) as place:
        for _ in range(2):
            with pytest.raises(SandboxCreateError, match="still being unpacked") as caught:
                await place.create(image=image, ready_timeout_s=0.5)
            assert caught.value.retryable
        creating = asyncio.create_task(place.create(image=image))
        await asyncio.sleep(6)
        assert not creating.done()
        go.touch()
        assert await place.run(await creating, "cat /opt/mark") == "first\n"
    assert asked.read_text() == "\n"


async def test_sif_file_that_changed_is_another_image_and_the_old_one_goes(
    tmp_path: Path, place: LocalPlace, tree: Path, apptainer: str
) -> None:
    image = sif_of(tree, tmp_path / "image.sif", apptainer)
    await place.provider.close(await place.create(image=str(image)))
    (tree / "opt/mark").write_text("second\n")
    sif_of(tree, image, apptainer)
    box = await place.create(image=str(image))
    assert await place.run(box, "cat /opt/mark") == "second\n"
    assert len(list((tmp_path / "images" / "layers").iterdir())) == 1


async def test_directory_is_an_image_that_boxes_do_not_change_and_commits_build_on(
    place: LocalPlace, tree: Path
) -> None:
    box = await place.create(image=str(tree))
    await place.run(box, "echo changed > /opt/mark; rm -r /opt/tool; mkdir /srv; touch /srv/new")
    await place.provider.commit(box, "built", {"digest": "d"})
    assert (tree / "opt/mark").read_text() == "first\n"
    again = await place.create(image="built")
    assert await place.run(again, "cat /opt/mark; ls -d /srv/*; ls /opt; echo $IMAGE_SAYS") == (
        "changed\n/srv/new\nmark\nhello\n"
    )


async def test_mounts_are_read_only_and_may_have_any_name(tmp_path: Path, place: LocalPlace, tree: Path) -> None:
    odd = tmp_path / 'odd, "name":x'
    odd.mkdir()
    (odd / "f").write_text("shared\n")
    (tree / "link").symlink_to("/etc")
    mounts = [
        Mount(str(odd), "/opt/in side/dir"),
        Mount(str(odd / "f"), "/link/file"),
        Mount(str(odd), "/usr/share/z"),
    ]
    box = await place.create(image=str(tree), mounts=mounts)
    assert await place.run(box, "cat '/opt/in side/dir/f' /etc/file /usr/share/z/f") == "shared\n" * 3
    refused = await place.provider.exec(box, "echo x > /etc/file; touch /usr/share/z/g")
    assert (refused.stderr or "").count("Read-only file system") == 2, refused
    host = await place.create(mounts=mounts[2:])
    assert await place.run(host, "cat /usr/share/z/f") == "shared\n"
    assert not Path("/usr/share/z").exists()


PROBE = """
find /proc/sys /proc/fs /proc/irq /proc/bus /proc/sys*-trigger /proc/acpi /proc/scsi -type f -perm /222 \\
  -exec sh -c 'for f; do (: >> "$f") 2> /dev/null && echo "$f"; done' x {} + > /opt/written 2> /dev/null
cat /proc/self/status > /opt/status
"""


async def test_scripts_that_an_image_runs_at_the_start_have_no_more_rights_than_commands(
    place: LocalPlace, tree: Path
) -> None:
    script = tree / ".singularity.d/env/91-probe.sh"
    script.write_text(PROBE)
    script.chmod(0o755)
    (tree / "bin/find").symlink_to("busybox")
    box = await place.create(image=str(tree))
    assert await place.run(box, "cat /opt/written") == ""
    status = await place.run(box, "cat /opt/status")
    assert "NoNewPrivs:\t1\n" in status
    assert "Seccomp:\t2\n" in status


async def test_links_of_an_image_lead_no_mount_to_the_host(tmp_path: Path, place: LocalPlace, tree: Path) -> None:
    (tree / "links").mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    for number, start in enumerate(("/proc/self/root", "/proc/1/root", "/..", "../../../../..")):
        (tree / "links" / str(number)).symlink_to(f"{start}{outside}")
        with contextlib.suppress(SandboxCreateError):
            await place.create(image=str(tree), mounts=[Mount(str(tmp_path), f"/links/{number}/made/there")])
    assert not [*outside.iterdir()]


async def test_box_whose_apptainer_is_killed_is_lost_and_gone(tmp_path: Path, place: LocalPlace) -> None:
    box = await place.create()
    process = await place.provider.start_exec(box, ExecRequest("trap '' TERM; sleep 602"))
    watchers = _children(place.supervisor_pid())
    starters = [pid for w in watchers for pid in _children(w) if "starter" in Path(f"/proc/{pid}/comm").read_text()]
    assert len(starters) == 1
    os.kill(starters[0], signal.SIGKILL)
    ends = [event async for event in process.events()]
    assert [end.outcome for end in ends] == [ExecOutcome.LOST]

    async def gone() -> bool:
        return await place.provider.status(box) is SandboxStatus.STOPPED

    await until(gone)
    await until(lambda: not leftovers(tmp_path))


async def test_boxes_of_a_killed_supervisor_lose_their_processes_without_a_successor(
    tmp_path: Path, place: LocalPlace
) -> None:
    box = await place.create()
    await place.run(box, "setsid sh -c 'trap \"\" TERM HUP; sleep 603' >/dev/null 2>&1 &")
    everything = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    inside = [pid for pid in everything if "sleep 603" in _command_line(pid)]
    assert inside
    os.kill(place.supervisor_pid(), signal.SIGKILL)
    await until(lambda: not any(alive(pid) for pid in inside))
    await until(
        lambda: not [line for line in leftovers(tmp_path) if line.startswith(("process ", "mount namespace "))]
    )
    assert (await place.provider.exec(box, "true")).outcome is ExecOutcome.LOST


async def test_burst_of_boxes_works_and_leaves_nothing(tmp_path: Path, place: LocalPlace) -> None:
    boxes = await asyncio.gather(*(place.create() for _ in range(20)))
    said = await asyncio.gather(*(place.run(box, "hostname") for box in boxes))
    assert len(set(said)) == 20
    await asyncio.gather(*(place.provider.close(box) for box in boxes))
    assert not leftovers(tmp_path)


async def test_create_that_is_cancelled_at_any_moment_leaves_nothing(tmp_path: Path, place: LocalPlace) -> None:
    await place.provider.close(await place.create())
    for delay_ms in range(5, 305, 30):
        creating = asyncio.create_task(place.create())
        await asyncio.sleep(delay_ms / 1000)
        creating.cancel()
        await asyncio.wait({creating})
        if not creating.cancelled():
            await place.provider.close(creating.result())
    await until(lambda: not leftovers(tmp_path))


@pytest.mark.parametrize(
    ("image", "why"),
    [
        ("/no/such/image.sif", "No such file or directory"),
        ("{tmp}/empty.sif", "cannot unpack"),
        ("docker-archive:{tmp}/empty.sif", "cannot unpack"),
        ("unheard-of", "there is no image 'unheard-of'"),
    ],
)
async def test_image_that_cannot_be_used_is_refused_with_the_reason(
    tmp_path: Path, place: LocalPlace, image: str, why: str
) -> None:
    (tmp_path / "empty.sif").write_bytes(b"")
    with pytest.raises(SandboxCreateError, match=why):
        await place.create(image=image.format(tmp=tmp_path))
    assert not leftovers(tmp_path)


async def test_missing_program_is_named_with_what_installs_it(tmp_path: Path) -> None:
    provider = ApptainerProvider(**config_below(tmp_path), apptainer="no-such-apptainer")
    assert not provider.capabilities.network_policies
    assert "install-system --with-apptainer" in provider.capabilities.reasons["network_none"]
    with pytest.raises(SandboxCreateError, match="Apptainer was not found as 'no-such-apptainer'"):
        await provider.create(SandboxSpec())


def test_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"apptainer.*aptainer"):
        create_provider({"apptainer": {"aptainer": "x"}})


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""
