"""Life of a box: creation, lease, end, and who may find and reap it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from nemo_gym.contract.errors import (
    ConfigError,
    NemoGymError,
    SandboxCapabilityError,
    SandboxCreateError,
    SandboxLostError,
)
from nemo_gym.contract.sandbox import Door, Mount, NetworkPolicy, SandboxResources, SandboxSpec
from nemo_gym.sandbox.base import BoxLabel, Connectable, ExecRequest, SandboxProvider, SandboxStatus
from nemo_gym.sandbox.conformance.base import PATIENCE_S, Checks, StartBox, assert_lost, collect, eventually, sh
from nemo_gym.sandbox.facade import AsyncSandbox, create_provider, keep_renewed

# -- Life ----------------------------------------------------------------------------------------------------------


class LifecycleChecks(Checks):
    async def test_create_gives_a_running_box_that_executes(self, box: AsyncSandbox) -> None:
        assert await box.status() is SandboxStatus.RUNNING
        assert (await box.exec("echo ready")).stdout == "ready\n"

    async def test_close_stops_the_box_and_is_idempotent(self, provider: SandboxProvider, start: StartBox) -> None:
        handle = (await start()).handle
        await asyncio.gather(provider.close(handle), provider.close(handle))
        await provider.close(handle)
        assert await provider.status(handle) is SandboxStatus.STOPPED

    async def test_exec_is_lost_and_never_zero_when_the_box_is_closed(
        self, provider: SandboxProvider, start: StartBox
    ) -> None:
        handle = (await start()).handle
        await provider.close(handle)
        assert_lost(await provider.exec(handle, "true"))
        try:
            _, _, ends = await collect(await provider.start_exec(handle, ExecRequest("true")))
        except SandboxLostError:
            return
        assert [end.outcome for end in ends] == ["lost"]

    async def test_running_exec_is_lost_when_the_box_is_closed_under_it(
        self, provider: SandboxProvider, box: AsyncSandbox
    ) -> None:
        running = asyncio.create_task(box.exec("touch /tmp/started; sleep 600", timeout_s=None))

        async def started() -> bool:
            return (await box.exec("test -e /tmp/started")).ok

        await eventually(started, "the command started")
        await provider.close(box.handle)
        async with asyncio.timeout(60):
            assert_lost(await running)

    async def test_create_raises_and_leaves_nothing_when_the_image_is_missing(
        self, provider: SandboxProvider, spec: SandboxSpec, run_labels: dict[str, str]
    ) -> None:
        with pytest.raises(SandboxCreateError, match="no-such-image"):
            await provider.create(spec.replace(image="no-such-image:conformance"))
        assert await self.mine(provider, run_labels) == set()

    async def test_unsupported_spec_is_refused_with_the_reason_before_anything_is_created(
        self, provider: SandboxProvider, spec: SandboxSpec, run_labels: dict[str, str]
    ) -> None:
        with pytest.raises(SandboxCapabilityError, match="teleportation") as caught:
            await provider.create(spec.replace(requires=("teleportation",)))
        assert provider.name in str(caught.value)
        if not provider.capabilities.gpu:
            with pytest.raises(SandboxCapabilityError, match="gpu"):
                await provider.create(spec.replace(resources=SandboxResources(gpu=1)))
        assert await self.mine(provider, run_labels) == set()

    async def test_unknown_provider_option_is_refused_by_name(
        self, provider: SandboxProvider, spec: SandboxSpec, run_labels: dict[str, str]
    ) -> None:
        with pytest.raises((ConfigError, SandboxCapabilityError, SandboxCreateError), match="no_such_option"):
            await provider.create(spec.replace(provider_options={"no_such_option": 1}))
        assert await self.mine(provider, run_labels) == set()

    async def test_cancelling_create_leaves_nothing(
        self, provider: SandboxProvider, spec: SandboxSpec, run_labels: dict[str, str]
    ) -> None:
        for delay_s in (0.0, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3):
            creating = asyncio.create_task(provider.create(spec))
            await asyncio.sleep(delay_s)
            creating.cancel()
            try:
                await provider.close(await creating)  # it was faster than the cancellation
            except asyncio.CancelledError:
                pass
            await eventually(
                lambda: self.nothing(provider, run_labels),
                f"nothing is left of a create cancelled after {delay_s:g} s",
                10,
            )

        async def nothing_for_two_seconds() -> bool:
            for _ in range(10):
                if not await self.nothing(provider, run_labels):
                    return False
                await asyncio.sleep(0.2)
            return True

        # A backend that is slow finishes a box only now. It may appear, but not stay.
        await eventually(nothing_for_two_seconds, "no box of a cancelled create appears and stays", 60)

    async def test_creates_with_one_idempotency_key_give_one_box(
        self, provider: SandboxProvider, spec: SandboxSpec, run_labels: dict[str, str]
    ) -> None:
        self.needs(provider, "idempotent_create")
        keyed = spec.replace(idempotency_key=run_labels["nemo_gym.run"])
        first, second = await asyncio.gather(provider.create(keyed), provider.create(keyed))
        third = await provider.create(keyed)
        assert first.sandbox_id == second.sandbox_id == third.sandbox_id
        assert (await provider.exec(third, "echo 1")).stdout == "1\n"
        assert len(await self.mine(provider, run_labels)) == 1

    async def test_lease_that_ends_closes_the_box(
        self, provider: SandboxProvider, start: StartBox, run_labels: dict[str, str]
    ) -> None:
        box = await start(ttl_s=2)
        running = asyncio.create_task(box.exec("sleep 600", timeout_s=None))
        await eventually(lambda: self.nothing(provider, run_labels), "a box whose lease of 2 s ended is gone")
        assert await box.status() is SandboxStatus.STOPPED
        assert_lost(await box.exec("true"))
        async with asyncio.timeout(60):
            assert_lost(await running)

    async def test_renewals_at_the_same_time_are_all_granted(self, box: AsyncSandbox) -> None:
        """Covers a client that repeats a request because its response was lost."""
        for _ in range(3):
            await asyncio.gather(*(box.renew(300) for _ in range(4)))
        assert await box.status() is SandboxStatus.RUNNING

    async def test_renewing_lets_the_box_live_longer(self, provider: SandboxProvider, start: StartBox) -> None:
        box = await start(ttl_s=3)
        started = time.monotonic()
        async with keep_renewed(provider, box.handle, 3):
            while time.monotonic() - started < 7:
                assert (await box.exec("true")).ok
                await asyncio.sleep(0.5)
        await box.renew(120)
        await asyncio.sleep(4)
        assert (await box.exec("echo alive")).stdout == "alive\n"

    async def test_renewing_a_box_that_is_gone_raises_lost(self, provider: SandboxProvider, start: StartBox) -> None:
        handle = (await start()).handle
        await provider.close(handle)
        with pytest.raises(SandboxLostError):
            await provider.renew(handle, 60)

    async def test_spec_gives_files_workdir_and_env(self, start: StartBox) -> None:
        box = await start(
            workdir="/srv/site",
            files={"/srv/site/a/note.txt": "ünïcode\n", "/etc/conformance.conf": "x=1\n"},
            env={"GREETING": "hello 'world' $HOME", "EMPTY": ""},
        )
        assert await sh(box, "pwd") == "/srv/site\n"
        assert await sh(box, "cat a/note.txt /etc/conformance.conf") == "ünïcode\nx=1\n"
        assert await sh(box, 'printf %s "$GREETING"') == "hello 'world' $HOME"
        assert await sh(box, 'printf %s "${EMPTY-unset}"') == ""

    async def test_working_directory_of_the_spec_is_made(self, start: StartBox) -> None:
        box = await start(workdir="/srv/not/in/the/image")
        assert await sh(box, "touch f; pwd") == "/srv/not/in/the/image\n"

    async def test_environment_of_the_host_is_not_inherited(
        self, monkeypatch: pytest.MonkeyPatch, start: StartBox
    ) -> None:
        monkeypatch.setenv("CONFORMANCE_HOST_SECRET", "leaked-value")
        box = await start()
        assert "leaked-value" not in await sh(box, "env; cat /proc/1/environ || true")

    async def test_mounted_directory_is_visible_and_read_only(
        self, tmp_path_factory: pytest.TempPathFactory, start: StartBox
    ) -> None:
        source = tmp_path_factory.mktemp("mount")
        (source / "tool").write_text("shared\n")
        box = await start(mounts=[Mount(str(source), "/opt/shared")])
        assert await sh(box, "cat /opt/shared/tool") == "shared\n"
        assert not (await box.exec("echo x > /opt/shared/tool")).ok
        assert not (await box.exec("mount -o remount,rw /opt/shared && echo x > /opt/shared/tool")).ok
        assert (source / "tool").read_text() == "shared\n"

    async def test_entrypoint_of_the_spec_runs(self, provider: SandboxProvider, start: StartBox) -> None:
        self.needs(provider, "entrypoint")
        box = await start(entrypoint=["/bin/sh", "-c", "echo up > /tmp/entry; exec sleep 600"])

        async def up() -> bool:
            return (await box.exec("cat /tmp/entry")).stdout == "up\n"

        await eventually(up, "the entry point ran")

    async def test_boxes_do_not_see_each_others_files_or_processes(self, start: StartBox) -> None:
        one, two = await asyncio.gather(start(), start())
        await sh(one, "echo secret > /tmp/of_one; (sleep 987654 >/dev/null 2>&1 &)")
        assert not (await two.exec("test -e /tmp/of_one")).ok
        assert "987654" not in await sh(two, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")

    async def test_twenty_boxes_start_at_once(self, start: StartBox) -> None:
        boxes = await asyncio.gather(*(start() for _ in range(20)))
        assert len({box.handle.sandbox_id for box in boxes}) == 20
        outputs = await asyncio.gather(*(box.exec(f"echo {n}") for n, box in enumerate(boxes)))
        assert [result.stdout for result in outputs] == [f"{n}\n" for n in range(20)]

    async def test_provider_can_be_closed_twice(self, provider: SandboxProvider, box: AsyncSandbox) -> None:
        await box.stop()
        await provider.aclose()
        await provider.aclose()


# -- Ownership -----------------------------------------------------------------------------------------------------


async def run_other_process(order: dict[str, Any]) -> None:
    """In another process: create a box or connect to one, then exit or wait. ``order`` holds ``provider`` (its
    configuration), ``spec`` (fields of the box) or ``connect`` (a serialized handle), and ``then``: ``exit`` or
    ``wait``."""
    provider = create_provider(order["provider"])
    if "connect" in order:
        box = await AsyncSandbox.connect(order["connect"], provider=provider)
    else:
        box = await AsyncSandbox(
            provider, SandboxSpec(**order["spec"] | {"network": NetworkPolicy(order["spec"]["network"])})
        ).start()
    result = await box.exec(order["command"])
    sys.stdout.write(json.dumps({"sandbox_id": box.handle.sandbox_id, "stdout": result.stdout}) + "\n")
    sys.stdout.flush()
    if order["then"] == "wait":
        await asyncio.sleep(3600)
    if "connect" in order:
        await box.stop()
    await provider.aclose()


@asynccontextmanager
async def other_process(**order: Any) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    """Start another process with a box; yield the process and its report. Kill it at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        f"import asyncio, json, sys, {__name__} as m; asyncio.run(m.run_other_process(json.loads(sys.argv[1])))",
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
        (info,) = await provider.list({BoxLabel.RUN: run_labels[BoxLabel.RUN]})
        assert info.sandbox_id == box.handle.sandbox_id
        assert info.status is SandboxStatus.RUNNING
        assert {**run_labels, **odd}.items() <= info.labels.items()

    async def test_list_gives_boxes_with_all_the_labels_and_no_others(
        self, provider: SandboxProvider, start: StartBox, run_labels: dict[str, str]
    ) -> None:
        one = await start(metadata={**run_labels, "x.a": "1", "x.b": "1"})
        two = await start(metadata={**run_labels, "x.a": "1", "x.b": "2"})
        run = {BoxLabel.RUN: run_labels[BoxLabel.RUN]}
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
        (info,) = await provider.list({BoxLabel.RUN: run_labels[BoxLabel.RUN]})
        assert info.expires_at is not None
        assert 40 < info.expires_at - time.time() <= 101
        await box.renew(1000)
        (info,) = await provider.list({BoxLabel.RUN: run_labels[BoxLabel.RUN]})
        assert info.expires_at is not None
        assert 900 < info.expires_at - time.time() <= 1001

    async def test_reap_destroys_what_carries_the_labels_and_nothing_else(
        self, provider: SandboxProvider, start: StartBox, run_labels: dict[str, str]
    ) -> None:
        one = await start(metadata={**run_labels, "x.side": "left"})
        two = await start(metadata={**run_labels, "x.side": "right"})
        labels = {BoxLabel.RUN: run_labels[BoxLabel.RUN], "x.side": "left"}
        assert await provider.reap(labels) == [one.handle.sandbox_id]
        assert await provider.reap(labels) == []
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
        assert await provider.reap({BoxLabel.RUN: run_labels[BoxLabel.RUN]}) == [handle.sandbox_id]

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
            report,
        ):
            assert report["stdout"] == "made\n"
            async with asyncio.timeout(PATIENCE_S):
                assert await child.wait() == 0
            assert await self.mine(provider, run_labels) == {report["sandbox_id"]}
            assert await provider.reap({BoxLabel.RUN: run_labels[BoxLabel.RUN]}) == [report["sandbox_id"]]
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
        async with other_process(provider=provider_config, spec=spec, command="true", then="wait") as (child, report):
            child.kill()
            await child.wait()
            assert report["sandbox_id"]
            gone = partial(self.nothing, provider, run_labels)
            await eventually(gone, "the box of a killed process is gone after its lease")

    async def test_other_process_connects_and_leaves_the_box_alive(
        self, provider_config: Mapping[str, Any], provider: SandboxProvider, box: AsyncSandbox
    ) -> None:
        self.needs(provider, "connect")
        await sh(box, "echo shared > /tmp/note")
        descriptor = json.loads(json.dumps(await box.serialize(scope="operate")))
        order = {"provider": provider_config, "connect": descriptor, "command": "cat /tmp/note", "then": "exit"}
        async with other_process(**order) as (child, report):
            assert report == {"sandbox_id": box.handle.sandbox_id, "stdout": "shared\n"}
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
