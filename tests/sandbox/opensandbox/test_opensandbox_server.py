"""What only a real server shows: daemons and servers that are killed, pauses, published ports, memory."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import docker
import pytest

from nemo_gym.contract.errors import SandboxCreateError, SandboxCreateVerificationError
from nemo_gym.contract.sandbox import DEFAULT_MEMORY_MIB, NetworkPolicy, SandboxResources, SandboxSpec
from nemo_gym.sandbox.base import BoxLabel, ExecOutcome, ExecOutput, ExecRequest, SandboxHandle, SandboxStatus
from nemo_gym.sandbox.conformance.base import eventually
from nemo_gym.sandbox.providers.opensandbox import OpenSandboxProvider
from tests.sandbox.opensandbox.server import Server, opensandbox_server

pytestmark = pytest.mark.full
NewProvider = Callable[..., OpenSandboxProvider]
Start = Callable[..., Awaitable[tuple[OpenSandboxProvider, SandboxHandle]]]


@pytest.fixture
async def start(real_server: Server) -> AsyncIterator[Start]:
    """Start a box, with a provider and a spec of its own."""
    made: list[tuple[OpenSandboxProvider, SandboxSpec]] = []

    async def start(
        *, spec: dict[str, Any] | None = None, **options: Any
    ) -> tuple[OpenSandboxProvider, SandboxHandle]:
        provider = OpenSandboxProvider(**real_server.provider(**options)["opensandbox"])
        wanted = SandboxSpec(ttl_s=300, network=NetworkPolicy.OPEN, metadata={BoxLabel.RUN: uuid.uuid4().hex})
        made.append((provider, wanted))
        return provider, await provider.create(wanted.replace(**(spec or {})))

    yield start
    for provider, wanted in made:
        await provider.reap(wanted.metadata)
        await provider.aclose()


@pytest.mark.parametrize("proxied", [False, True])
async def test_command_is_lost_and_never_zero_when_its_daemon_is_killed(proxied: bool, start: Start) -> None:
    provider, box = await start(use_server_proxy=proxied, silence_s=6)
    process = await provider.start_exec(box, ExecRequest("echo up; sleep 600"))
    events = process.events()
    async with asyncio.timeout(60):
        assert isinstance(await anext(events), ExecOutput)
        killing = await provider.exec(box, "pkill -9 -x execd")
        rest = [event async for event in events]
    # Whoever kills the daemon loses the answer too. Of a daemon that is gone nobody restarts, the server says nothing.
    assert killing.outcome is ExecOutcome.LOST
    assert [event.outcome for event in rest if not isinstance(event, ExecOutput)] == [ExecOutcome.LOST]
    assert await provider.status(box) is SandboxStatus.RUNNING
    async with asyncio.timeout(60):
        assert (await provider.exec(box, "true")).outcome is ExecOutcome.LOST


async def test_command_in_a_paused_box_is_lost_and_the_box_is_of_use_when_resumed(start: Start) -> None:
    provider, box = await start(silence_s=4)
    manager = await provider._connection.manager()
    await manager.pause_sandbox(box.sandbox_id)
    async with asyncio.timeout(60):
        assert (await provider.exec(box, "true", timeout_s=None)).outcome is ExecOutcome.LOST
    await manager.resume_sandbox(box.sandbox_id)
    assert (await provider.exec(box, "echo again")).stdout == "again\n"


async def test_box_that_ends_by_itself_is_told_and_its_commands_are_lost(start: Start) -> None:
    provider, box = await start(spec={"entrypoint": ["/bin/sh", "-c", "while [ ! -e /tmp/end ]; do sleep 0.1; done"]})
    async with asyncio.timeout(60):
        result = await provider.exec(box, "touch /tmp/end; sleep 600")
    assert result.outcome is ExecOutcome.LOST
    assert await provider.status(box) is SandboxStatus.STOPPED


async def test_entry_point_that_ends_at_once_is_a_create_that_failed(start: Start) -> None:
    with pytest.raises(SandboxCreateError):
        await start(spec={"entrypoint": ["/bin/false"], "ready_timeout_s": 10})


async def test_box_has_the_specs_limits_the_suites_or_none(start: Start, docker_engine: str) -> None:
    # The SDK's own create gives every box one core and two gigabytes.
    _, free = await start(spec={"resources": SandboxResources(unlimited=("memory_mib",))})
    _, default = await start()
    _, bound = await start(spec={"resources": SandboxResources(cpu=0.5, memory_mib=256)})
    client = docker.DockerClient(base_url=docker_engine)
    try:
        limits = [
            (host["NanoCpus"], host["Memory"])
            for box in (free, default, bound)
            if (host := client.containers.get(f"sandbox-{box.sandbox_id}").attrs["HostConfig"])
        ]
    finally:
        client.close()
    assert limits == [(0, 0), (0, DEFAULT_MEMORY_MIB * 1024**2), (500_000_000, 256 * 1024 * 1024)]


async def test_ports_of_a_box_are_published_on_loopback_alone(start: Start, docker_engine: str) -> None:
    _, box = await start()
    client = docker.DockerClient(base_url=docker_engine)
    try:
        ports = client.containers.get(f"sandbox-{box.sandbox_id}").attrs["NetworkSettings"]["Ports"]
    finally:
        client.close()
    hosts = {binding["HostIp"] for bindings in ports.values() for binding in bindings or ()}
    assert hosts == {"127.0.0.1"}


async def test_box_without_a_network_does_not_reach_the_daemon_of_another_box(
    start: Start, docker_engine: str
) -> None:
    reach = "import socket, sys; socket.create_connection((sys.argv[1], 44772), 3); print('reached')"
    _, other = await start()
    client = docker.DockerClient(base_url=docker_engine)
    try:
        address = client.containers.get(f"sandbox-{other.sandbox_id}").attrs["NetworkSettings"]["IPAddress"]
    finally:
        client.close()
    provider, box = await start(spec={"network": NetworkPolicy.NONE})
    assert not (await provider.exec(box, ["python3", "-c", reach, address])).ok
    # From a box with a network it is reached: whoever shares the engine's bridge can command it.
    provider, box = await start()
    assert (await provider.exec(box, ["python3", "-c", reach, address])).stdout == "reached\n"


async def test_sidecar_that_denies_names_alone_is_no_box_without_a_network(tmp_path: Path, docker_engine: str) -> None:
    with opensandbox_server(tmp_path, docker_engine, egress_mode="dns") as server:
        provider = OpenSandboxProvider(**server.provider()["opensandbox"])
        run = {BoxLabel.RUN: uuid.uuid4().hex}
        try:
            with pytest.raises(SandboxCreateVerificationError, match="denies names alone"):
                await provider.create(SandboxSpec(ttl_s=300, network=NetworkPolicy.NONE, metadata=run))
            assert await provider.list(run) == []
        finally:
            await provider.reap(run)
            await provider.aclose()


async def test_lease_and_commands_outlive_a_killed_server(tmp_path: Path, docker_engine: str) -> None:
    with opensandbox_server(tmp_path, docker_engine) as server:
        provider = OpenSandboxProvider(**server.provider()["opensandbox"])
        run = {BoxLabel.RUN: uuid.uuid4().hex}
        try:
            spec = SandboxSpec(ttl_s=300, network=NetworkPolicy.OPEN, metadata=run)
            long, short = await asyncio.gather(provider.create(spec), provider.create(spec))
            await provider.renew(short, 8)
            running = asyncio.create_task(provider.exec(long, "sleep 2; echo survived"))
            await asyncio.sleep(0.5)
            server.kill()
            # It goes on between provider and box; the server is not on the way.
            assert (await running).stdout == "survived\n"
            assert await provider.status(long) is SandboxStatus.UNKNOWN
            await asyncio.to_thread(server.start)

            async def gone() -> bool:
                return [info.sandbox_id for info in await provider.list(run)] == [long.sandbox_id]

            await eventually(gone, "the lease that the killed server had kept has ended")
            assert (await provider.exec(long, "echo alive")).stdout == "alive\n"
        finally:
            await provider.reap(run)
            await provider.aclose()
