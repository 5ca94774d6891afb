"""Boxes belong to labels and leases, not to the process that made them."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from nemo_gym.contract.errors import NemoGymError, SandboxLostError
from nemo_gym.contract.sandbox import Door, NetworkPolicy, SandboxSpec
from nemo_gym.sandbox import labels
from nemo_gym.sandbox.base import SandboxProvider, SandboxStatus
from nemo_gym.sandbox.capabilities import Connectable
from nemo_gym.sandbox.conformance.base import PATIENCE_S, Checks, StartBox, eventually, sh
from nemo_gym.sandbox.facade import AsyncSandbox
from nemo_gym.sandbox.registry import create_provider


@asynccontextmanager
async def other_process(**order: Any) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    """Another process with a box, and what it said about it; killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "nemo_gym.sandbox.conformance.client",
        json.dumps(order),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            line = await process.stdout.readline()
            assert line, (await process.stderr.read()).decode()
        yield process, json.loads(line)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


class OwnershipChecks(Checks):
    async def test_labels_are_kept_and_found(
        self, provider: SandboxProvider, start: StartBox, run_labels: dict[str, str]
    ) -> None:
        odd = {"x.odd": "ünï \"quoted\" 'text' = , / \\ $HOME", "x.long": "v" * 500, "x.empty": ""}
        box = await start(metadata={**run_labels, **odd})
        (info,) = await provider.list({labels.RUN: run_labels[labels.RUN]})
        assert info.sandbox_id == box.handle.sandbox_id
        assert info.status is SandboxStatus.RUNNING
        assert {**run_labels, **odd}.items() <= info.labels.items()

    async def test_list_gives_boxes_with_all_the_labels_and_no_others(
        self, provider: SandboxProvider, start: StartBox, run_labels: dict[str, str]
    ) -> None:
        one = await start(metadata={**run_labels, "x.a": "1", "x.b": "1"})
        two = await start(metadata={**run_labels, "x.a": "1", "x.b": "2"})
        run = {labels.RUN: run_labels[labels.RUN]}
        ids = {one.handle.sandbox_id, two.handle.sandbox_id}

        async def listed(**more: str) -> set[str]:
            return {info.sandbox_id for info in await provider.list({**run, **more})}

        assert await listed() == ids
        assert await listed(**{"x.a": "1"}) == ids
        assert await listed(**{"x.a": "1", "x.b": "2"}) == {two.handle.sandbox_id}
        assert await listed(**{"x.a": "2"}) == set()
        assert await listed(**{"x.a": ""}) == set()
        assert ids <= {info.sandbox_id for info in await provider.list()}

    async def test_listing_tells_when_the_lease_ends_and_renewing_moves_it(
        self, provider: SandboxProvider, start: StartBox, run_labels: dict[str, str]
    ) -> None:
        box = await start(ttl_s=100)
        (info,) = await provider.list({labels.RUN: run_labels[labels.RUN]})
        assert info.expires_at is not None
        assert 40 < info.expires_at - time.time() <= 101
        await box.renew(1000)
        (info,) = await provider.list({labels.RUN: run_labels[labels.RUN]})
        assert info.expires_at is not None
        assert 900 < info.expires_at - time.time() <= 1001

    async def test_reap_destroys_what_carries_the_labels_and_nothing_else(
        self, provider: SandboxProvider, start: StartBox, run_labels: dict[str, str]
    ) -> None:
        one = await start(metadata={**run_labels, "x.side": "left"})
        two = await start(metadata={**run_labels, "x.side": "right"})
        wanted = {labels.RUN: run_labels[labels.RUN], "x.side": "left"}
        assert await provider.reap(wanted) == [one.handle.sandbox_id]
        assert await provider.reap(wanted) == []
        assert await one.status() is SandboxStatus.STOPPED
        assert (await two.exec("echo alive")).stdout == "alive\n"

    async def test_reap_without_labels_is_refused(self, provider: SandboxProvider, box: AsyncSandbox) -> None:
        with pytest.raises((NemoGymError, ValueError), match="label"):
            await provider.reap({})
        assert (await box.exec("true")).ok

    async def test_boxes_stay_when_a_provider_object_is_closed(
        self,
        provider_config: Mapping[str, Any],
        provider: SandboxProvider,
        spec: SandboxSpec,
        run_labels: dict[str, str],
    ) -> None:
        first = create_provider(provider_config)
        handle = await first.create(spec)
        await first.aclose()
        assert await self.mine(provider, run_labels) == {handle.sandbox_id}
        assert await provider.reap({labels.RUN: run_labels[labels.RUN]}) == [handle.sandbox_id]

    async def test_box_of_a_process_that_ended_is_found_and_reaped_by_its_labels(
        self,
        provider_config: Mapping[str, Any],
        provider: SandboxProvider,
        image: str | None,
        run_labels: dict[str, str],
        network: NetworkPolicy,
    ) -> None:
        spec = {"image": image, "ttl_s": 120, "metadata": run_labels, "network": network}
        async with other_process(provider=provider_config, spec=spec, command="echo made", then="exit") as (
            child,
            said,
        ):
            assert said["stdout"] == "made\n"
            async with asyncio.timeout(PATIENCE_S):
                assert await child.wait() == 0
            assert await self.mine(provider, run_labels) == {said["sandbox_id"]}
            assert await provider.reap({labels.RUN: run_labels[labels.RUN]}) == [said["sandbox_id"]]
        assert await self.mine(provider, run_labels) == set()

    async def test_box_of_a_killed_process_goes_with_its_lease(
        self,
        provider_config: Mapping[str, Any],
        provider: SandboxProvider,
        image: str | None,
        run_labels: dict[str, str],
        network: NetworkPolicy,
    ) -> None:
        spec = {"image": image, "ttl_s": 4, "metadata": run_labels, "network": network}
        async with other_process(provider=provider_config, spec=spec, command="true", then="wait") as (child, said):
            child.kill()
            await child.wait()
            assert said["sandbox_id"]

            async def gone() -> bool:
                return not await self.mine(provider, run_labels)

            await eventually(gone, "the box of a killed process is gone after its lease")

    async def test_other_process_connects_and_leaves_the_box_alive(
        self, provider_config: Mapping[str, Any], provider: SandboxProvider, box: AsyncSandbox
    ) -> None:
        self.needs(provider, "connect")
        await sh(box, "echo shared > /tmp/note")
        descriptor = json.loads(json.dumps(await box.serialize(scope="operate")))
        order = {"provider": provider_config, "connect": descriptor, "command": "cat /tmp/note", "then": "exit"}
        async with other_process(**order) as (child, said):
            assert said == {"sandbox_id": box.handle.sandbox_id, "stdout": "shared\n"}
            async with asyncio.timeout(PATIENCE_S):
                assert await child.wait() == 0
        assert (await box.exec("echo alive")).stdout == "alive\n"

    async def test_connected_box_takes_files_renewal_and_close(
        self, provider_config: Mapping[str, Any], provider: SandboxProvider, box: AsyncSandbox
    ) -> None:
        self.needs(provider, "connect")
        descriptor = await box.serialize(scope="owner")
        other = create_provider(provider_config)
        try:
            assert isinstance(other, Connectable)
            handle = await other.connect(descriptor)
            await other.renew(handle, 200)
            chunks = [chunk async for chunk in other.get_archive(handle, "/etc/passwd")]
            assert b"root" in b"".join(chunks)
            await other.close(handle)
            assert await box.status() is SandboxStatus.STOPPED
            with pytest.raises(SandboxLostError):
                await other.connect(descriptor)
        finally:
            await other.aclose()

    async def test_serialized_handle_holds_no_door_headers(self, provider: SandboxProvider, start: StartBox) -> None:
        self.needs(provider, "connect")
        self.needs(provider, "loopback_door")
        headers = {"Authorization": "Bearer door-secret"}
        box = await start(doors=[Door("model", 8000, "http://127.0.0.1:9", ("GET /",), headers)])
        assert "door-secret" not in json.dumps(await box.serialize(scope="operate"))
