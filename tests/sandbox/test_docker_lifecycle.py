from __future__ import annotations

import asyncio
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.contract.errors import (
    ConfigError,
    SandboxCapabilityError,
    SandboxCreateError,
    SandboxError,
    SandboxLostError,
)
from nemo_gym.contract.sandbox import Mount, NetworkPolicy, SandboxResources, SandboxSpec
from nemo_gym.sandbox.base import CAPABILITY_PROTOCOLS, ExecOutcome, SandboxHandle, SandboxStatus
from nemo_gym.sandbox.providers.docker import DockerProvider
from nemo_gym.sandbox.providers.docker.creation import lock_path, program_path
from nemo_gym.sandbox.providers.docker.execution import BoxControl, box_of
from nemo_gym.sandbox.providers.docker.provider import why_users_are_shared
from tests.sandbox.docker_boxes import Boxes, until

ROOT = Path(__file__).resolve().parents[2]


async def wait_until_gone(boxes: Boxes, sandbox_id: str, *, within_s: float) -> None:
    async def gone() -> bool:
        return sandbox_id not in await boxes.ids()

    await until(gone, within_s=within_s)


def test_docker_provider_implements_what_it_declares(docker_engine: str) -> None:
    provider = DockerProvider(base_url=docker_engine)
    for capability, protocol in CAPABILITY_PROTOCOLS.items():
        declared = getattr(provider.capabilities, capability)
        assert isinstance(provider, protocol) or not declared
        assert declared or capability in provider.capabilities.reasons


@pytest.mark.parametrize(
    ("options", "said"), [(["name=seccomp"], "are the host's"), (["name=seccomp", "name=userns"], "userns-remap")]
)
def test_docker_says_whose_users_boxes_share(options: list[str], said: str) -> None:
    assert said in why_users_are_shared({"SecurityOptions": options})


async def test_docker_refuses_a_box_whose_user_must_be_its_own(boxes: Boxes) -> None:
    with pytest.raises(SandboxCapabilityError, match=r"user_limits: .*inotify instances.*use sandbox=local"):
        await boxes.create(requires=("user_limits",))


async def test_docker_create_gives_a_confined_box(boxes: Boxes) -> None:
    handle = await boxes.create(
        resources=SandboxResources(memory_mib=128, cpu=0.5, pids=50), files={"/deep/new/file.txt": "tëxt"}
    )
    done = await boxes.provider.exec(
        handle, "grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status; cat /deep/new/file.txt; ls /sys/class/net"
    )
    fields = (done.stdout or "").split()
    assert fields[1] == fields[3] == "0" * 16
    assert fields[5] == "1"
    assert fields[6:] == ["tëxtlo"]


async def test_docker_create_mounts_read_only(boxes: Boxes, tmp_path: Path) -> None:
    (tmp_path / "shared").write_text("from the host")
    handle = await boxes.create(mounts=[Mount(str(tmp_path), "/cache")])
    done = await boxes.provider.exec(handle, "cat /cache/shared; echo x > /cache/shared || echo refused")
    assert done.stdout == "from the hostrefused\n"


async def test_docker_create_with_open_network_has_a_route(boxes: Boxes) -> None:
    handle = await boxes.create(network=NetworkPolicy.OPEN)
    done = await boxes.provider.exec(handle, "cat /proc/net/route | wc -l")
    assert int(done.stdout or "0") > 1


@pytest.mark.parametrize("network", [NetworkPolicy.NONE, NetworkPolicy.OPEN])
async def test_docker_gives_every_box_the_configured_capabilities(docker_engine: str, network: NetworkPolicy) -> None:
    provider = DockerProvider(base_url=docker_engine, capabilities=["SYS_PTRACE"])
    handle = await provider.create(SandboxSpec(ttl_s=300, network=network))
    try:
        done = await provider.exec(handle, "grep CapBnd /proc/self/status")
        assert int((done.stdout or "").split()[1], 16) & 1 << 19  # CAP_SYS_PTRACE
    finally:
        await provider.close(handle)
        await provider.aclose()


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"requires": ("endpoint",)}, SandboxCapabilityError, "endpoint: boxes have no network"),
        ({"image": "no.such/image:1"}, SandboxCreateError, r"no image 'no\.such/image:1'.*docker load"),
        ({"mounts": [Mount("/does/not/exist", "/x")]}, SandboxCreateError, "mount source '/does/not/exist'"),
        ({"provider_options": {"runtim": "x"}}, ConfigError, "did you mean 'runtime'"),
        ({"provider_options": {"runtime": "nonesuch"}}, SandboxCreateError, "nonesuch"),
        ({"user": "nonesuch"}, SandboxCreateError, "nonesuch"),
        ({"entrypoint": ["true"]}, SandboxCreateError, "stopped at once with exit code 0"),
    ],
)
async def test_docker_create_refuses_with_one_clear_error_and_leaves_nothing(
    boxes: Boxes, fields: dict[str, object], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        await boxes.create(**fields)
    assert await boxes.ids() == []


async def test_docker_create_names_the_policy_when_pulling_is_off(docker_engine: str) -> None:
    provider = DockerProvider(base_url=docker_engine, pull="never", default_image="absent:1")
    with pytest.raises(SandboxCreateError, match=r"no image 'absent:1'.*pull: never"):
        await provider.create(SandboxSpec())
    await provider.aclose()


async def test_docker_create_leaves_nothing_when_cancelled_at_any_moment(boxes: Boxes) -> None:
    await boxes.provider.close(await boxes.create())
    for delay_ms in range(0, 200, 15):
        task = asyncio.create_task(boxes.create())
        await asyncio.sleep(delay_ms / 1000)
        task.cancel()
        try:
            await boxes.provider.close(await task)
        except asyncio.CancelledError:
            pass
        assert await boxes.ids() == [], f"cancelled after {delay_ms} ms"


async def test_docker_create_leaves_nothing_when_cancelled_just_after_the_container_has_started(
    boxes: Boxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, reached, go_on = BoxControl.find, threading.Event(), threading.Event()

    def slow_find(*arguments: Any) -> BoxControl | None:
        reached.set()
        assert go_on.wait(60)
        return find(*arguments)

    monkeypatch.setattr(BoxControl, "find", slow_find)
    task = asyncio.create_task(boxes.create())
    assert await asyncio.to_thread(reached.wait, 60)
    task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await boxes.ids() == []


async def test_docker_create_leaves_nothing_when_it_takes_too_long(boxes: Boxes) -> None:
    with pytest.raises(SandboxCreateError, match=r"ready_timeout_s=0\.05"):
        await boxes.create(ready_timeout_s=0.05)
    assert await boxes.ids() == []


async def test_docker_create_gives_one_box_for_one_idempotency_key(boxes: Boxes) -> None:
    key = f"{boxes.labels['nemo_gym.run']}/1"
    first, *others = await asyncio.gather(*(boxes.create(idempotency_key=key) for _ in range(4)))
    assert {handle.sandbox_id for handle in others} == {first.sandbox_id}
    await boxes.provider.renew(first, 200)
    assert (await boxes.create(idempotency_key=key)).sandbox_id == first.sandbox_id
    assert await boxes.ids() == [first.sandbox_id]
    await boxes.provider.close(first)
    assert (await boxes.create(idempotency_key=key)).sandbox_id != first.sandbox_id


async def test_docker_create_replaces_a_dead_box_of_the_same_idempotency_key(boxes: Boxes) -> None:
    key = f"{boxes.labels['nemo_gym.run']}/2"
    first = await boxes.create(idempotency_key=key)
    os.kill(box_of(first).init_pid, signal.SIGKILL)

    async def dead() -> bool:
        return await boxes.provider.status(first) is SandboxStatus.STOPPED

    await until(dead)
    second = await boxes.create(idempotency_key=key)
    assert (await boxes.provider.exec(second, "echo alive")).stdout == "alive\n"


async def test_docker_box_dies_with_its_lease(boxes: Boxes) -> None:
    handle = await boxes.create(ttl_s=2)
    await wait_until_gone(boxes, handle.sandbox_id, within_s=15)
    assert await boxes.provider.status(handle) is SandboxStatus.STOPPED
    with pytest.raises(SandboxLostError):
        await boxes.provider.renew(handle, 10)


async def test_docker_renewed_box_outlives_its_first_lease_and_dies_with_its_last(boxes: Boxes) -> None:
    handle = await boxes.create(ttl_s=3)
    witness = await boxes.create(ttl_s=3)
    await boxes.provider.renew(handle, 300)
    await wait_until_gone(boxes, witness.sandbox_id, within_s=15)
    [info] = await boxes.provider.list(boxes.labels)
    assert info.sandbox_id == handle.sandbox_id
    assert info.expires_at is not None
    assert info.expires_at > time.time() + 200
    await boxes.provider.renew(handle, 1)
    await wait_until_gone(boxes, handle.sandbox_id, within_s=15)


async def test_docker_box_dies_with_its_lease_when_its_creator_was_killed(boxes: Boxes, docker_engine: str) -> None:
    program = (
        "import asyncio, sys\n"
        "from nemo_gym.sandbox.base import SandboxSpec\n"
        "from nemo_gym.sandbox.providers.docker import DockerProvider\n"
        "async def main():\n"
        f"    p = DockerProvider(base_url={docker_engine!r})\n"
        f"    h = await p.create(SandboxSpec(ttl_s=4, metadata={boxes.labels!r}))\n"
        "    print(h.sandbox_id, flush=True)\n"
        "    await p.exec(h, 'sleep 1000')\n"
        "asyncio.run(main())\n"
    )
    creator = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
    )
    assert creator.stdout is not None
    sandbox_id = (await creator.stdout.readline()).decode().strip()
    assert sandbox_id in await boxes.ids()
    os.killpg(creator.pid, signal.SIGKILL)
    await creator.wait()
    await wait_until_gone(boxes, sandbox_id, within_s=20)


async def test_docker_watchdog_is_one_and_starts_again_when_it_was_killed(boxes: Boxes, docker_engine: str) -> None:
    def watchdogs() -> list[int]:
        wanted = str(lock_path(docker_engine)).encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    arguments = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if wanted in arguments:
                    found.append(int(entry.name))
        return found

    await asyncio.gather(*(boxes.create() for _ in range(4)))
    [pid] = watchdogs()
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not Path(f"/proc/{pid}").exists())
    handle = await boxes.create(ttl_s=2)
    assert len(watchdogs()) == 1
    await wait_until_gone(boxes, handle.sandbox_id, within_s=15)


def test_docker_leaves_no_part_of_the_first_process_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(SandboxCreateError, match="set XDG_CACHE_HOME"):
            program_path()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*(tmp_path / "nemo-gym").iterdir()] == []
    program = program_path()
    assert program is not None and [*program.parent.iterdir()] == [program]
    assert stat.S_IMODE(program.stat().st_mode) == 0o111


async def test_docker_close_is_idempotent_and_leaves_no_process(boxes: Boxes, box: SandboxHandle) -> None:
    init_pid = box_of(box).init_pid
    await asyncio.gather(boxes.provider.close(box), boxes.provider.close(box))
    await boxes.provider.close(box)
    assert not Path(f"/proc/{init_pid}").exists()
    assert await boxes.ids() == []


async def test_docker_reap_takes_only_boxes_with_all_labels(boxes: Boxes) -> None:
    spared = await boxes.create(metadata={**boxes.labels, "nemo_gym.role": "work"})
    doomed = await boxes.create(metadata={**boxes.labels, "nemo_gym.role": "eval"})
    assert await boxes.provider.reap({**boxes.labels, "nemo_gym.role": "eval"}) == [doomed.sandbox_id]
    assert await boxes.ids() == [spared.sandbox_id]
    with pytest.raises(SandboxError, match="at least one label"):
        await boxes.provider.reap({})


async def test_docker_handle_works_from_another_provider_when_serialized(boxes: Boxes, docker_engine: str) -> None:
    handle = await boxes.create(env={"GIVEN": "by the spec"})
    other = DockerProvider(base_url=docker_engine)
    connected = await other.connect(await boxes.provider.serialize_handle(handle, scope="operate"))
    assert (await other.exec(connected, "echo $GIVEN")).stdout == "by the spec\n"
    await boxes.provider.close(handle)
    with pytest.raises(SandboxLostError):
        await other.connect(await boxes.provider.serialize_handle(handle, scope="operate"))
    await other.aclose()


@pytest.mark.full
async def test_docker_hundred_boxes_come_up_and_go_at_once(boxes: Boxes) -> None:
    handles = await asyncio.gather(*(boxes.create(ready_timeout_s=300) for _ in range(100)))
    done = await asyncio.gather(*(boxes.provider.exec(handle, "hostname") for handle in handles))
    assert {(d.stdout or "").strip() for d in done} == {handle.sandbox_id[:12] for handle in handles}
    await asyncio.gather(*(boxes.provider.close(handle) for handle in handles))
    assert await boxes.ids() == []


async def test_box_outlives_contents_that_kill_and_trace_all_they_can(boxes: Boxes, box: SandboxHandle) -> None:
    killing = "for s in 9 15 1 2 3 11; do kill -$s 1; kill -$s -1; done 2>/dev/null; true"
    for _ in range(3):
        assert (await boxes.provider.exec(box, killing, timeout_s=30)).outcome is ExecOutcome.EXITED
    trace = (
        "import ctypes, errno\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "result = libc.ptrace(16, 1, None, None)\n"  # PTRACE_ATTACH
        "print('traced' if result == 0 else errno.errorcode[ctypes.get_errno()])\n"
    )
    done = await boxes.provider.exec(box, ["python3", "-c", trace], timeout_s=30)
    assert (done.stdout or "").strip() == "EPERM"
    await boxes.provider.exec(box, "(sleep 0.05 &) ; exit 0", timeout_s=30)
    await until(lambda: _has_no_zombies(boxes, box))
    assert (await boxes.provider.exec(box, "echo still here", timeout_s=30)).stdout == "still here\n"


async def _has_no_zombies(boxes: Boxes, box: SandboxHandle) -> bool:
    done = await boxes.provider.exec(box, "grep -l '^State:.Z' /proc/[0-9]*/status || true", timeout_s=30)
    return not done.stdout
