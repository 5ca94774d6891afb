"""One box as an object: nothing leaks when it is cancelled, and a borrowed box is not destroyed.

The provider here is real in what matters: it has boxes that exist until they are closed, and lets a test decide when
a create goes on. What real backends do is checked by the conformance suite.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.contract.errors import ConfigError, SandboxCapabilityError, SandboxError, SandboxLostError
from nemo_gym.sandbox import AsyncSandbox, Sandbox, SandboxExecResult, SandboxHandle, SandboxSpec, SandboxStatus
from nemo_gym.sandbox.facade import keep_renewed, register_provider

pytestmark = pytest.mark.usefixtures("clean_registry")
SPEC = SandboxSpec(image="x")


class Boxes:
    """A provider of NeMo Gym's original protocol, plus leases and connect."""

    name = "boxes"

    def __init__(self, *, stubborn: bool = False) -> None:
        self.live: set[str] = set()
        self.renewed: list[float] = []
        self.renew_errors: list[Exception] = []
        self.creating = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.stubborn = stubborn
        self.closed_itself = False
        self.thread = threading.current_thread()

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        self.creating.set()
        box = f"box{len(self.live)}"
        self.live.add(box)
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            if not self.stubborn:
                self.live.discard(box)
                raise
        return SandboxHandle(box, self.name)

    async def exec(
        self,
        handle: SandboxHandle,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        user: str | None = None,
    ) -> SandboxExecResult:
        return SandboxExecResult(stdout=f"{command} {timeout_s:g}", return_code=0)

    async def upload_file(self, handle: SandboxHandle, source: Path, target: str) -> None:
        assert isinstance(source, Path)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        return SandboxStatus.RUNNING if handle.sandbox_id in self.live else SandboxStatus.STOPPED

    async def renew(self, handle: SandboxHandle, ttl_s: float) -> None:
        if self.renew_errors:
            raise self.renew_errors.pop(0)
        self.renewed.append(ttl_s)

    async def close(self, handle: SandboxHandle) -> None:
        self.live.discard(handle.sandbox_id)

    async def aclose(self) -> None:
        self.closed_itself = True

    async def serialize_handle(self, handle: SandboxHandle, *, scope: str) -> dict[str, Any]:
        return {"id": handle.sandbox_id, "scope": scope}

    async def connect(self, descriptor: Mapping[str, Any]) -> SandboxHandle:
        if descriptor["id"] not in self.live:
            raise SandboxLostError("gone")
        return SandboxHandle(descriptor["id"], self.name)


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  what is waited for is no event
            await asyncio.sleep(0.005)


async def test_box_lives_from_start_to_stop_and_exec_waits_180_s_by_default() -> None:
    provider: Any = Boxes()
    async with AsyncSandbox(provider, SPEC) as box:
        assert await box.start() is box
        assert (await box.exec("ls")).stdout == "ls 180"
        assert await box.status() is SandboxStatus.RUNNING
        await box.upload(__file__, "/x")
    assert provider.live == set()
    assert await box.status() is SandboxStatus.STOPPED
    assert not provider.closed_itself
    await box.stop()


async def test_spec_may_come_with_start() -> None:
    provider: Any = Boxes()
    box = AsyncSandbox(provider)
    with pytest.raises(ConfigError, match="no spec"):
        await box.start()
    with pytest.raises(SandboxError, match="not started"):
        await box.exec("ls")
    assert await (await box.start(SPEC)).start(SPEC) is box
    with pytest.raises(ConfigError, match="another spec"):
        await box.start(SandboxSpec(image="y"))
    await box.stop()
    assert provider.live == set()


async def test_provider_made_from_configuration_ends_with_the_box() -> None:
    made: list[Boxes] = []

    def make(**settings: Any) -> Any:
        made.append(Boxes(**settings))
        return made[-1]

    register_provider("boxes", make)
    async with AsyncSandbox({"boxes": {"stubborn": False}}, SPEC):
        assert made[0].live
    assert made[0].closed_itself


@pytest.mark.parametrize("stubborn", [False, True])
async def test_cancelling_start_leaves_no_box(stubborn: bool) -> None:
    provider: Any = Boxes(stubborn=stubborn)
    provider.go_on.clear()
    task = asyncio.create_task(AsyncSandbox(provider, SPEC).start())
    await provider.creating.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert provider.live == set()


async def test_cancelling_the_body_destroys_the_box() -> None:
    provider: Any = Boxes()

    async def use() -> None:
        async with AsyncSandbox(provider, SPEC):
            await asyncio.sleep(3600)

    task = asyncio.create_task(use())
    await until(lambda: provider.live)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert provider.live == set()


async def test_borrowed_box_survives_the_borrowers_stop() -> None:
    provider: Any = Boxes()
    owner = await AsyncSandbox(provider, SPEC).start()
    borrower = await AsyncSandbox.connect(await owner.serialize(), provider=provider)
    assert (await borrower.exec("ls")).ok
    await borrower.stop()
    assert await owner.status() is SandboxStatus.RUNNING
    await owner.stop()
    with pytest.raises(SandboxLostError):
        await AsyncSandbox.connect({"id": "box0"}, provider=provider)


async def test_ability_the_provider_lacks_is_refused_with_its_name() -> None:
    provider: Any = Boxes()
    async with AsyncSandbox(provider, SPEC) as box:
        with pytest.raises(SandboxCapabilityError, match=r"SupportsEndpoint.*port 80"):
            await box.endpoint(80)


async def test_lease_is_renewed_while_the_context_lives_and_not_after() -> None:
    provider: Any = Boxes()
    provider.renew_errors = [SandboxError("the backend is away")]
    async with keep_renewed(provider, SandboxHandle("box0", "boxes"), 0.03):
        await until(lambda: len(provider.renewed) >= 3)
    count = len(provider.renewed)
    assert set(provider.renewed) == {0.03}
    await asyncio.sleep(0.05)
    assert len(provider.renewed) == count


async def test_renewing_ends_when_the_box_is_lost() -> None:
    provider: Any = Boxes()
    provider.renew_errors = [SandboxLostError("gone")]
    async with keep_renewed(provider, SandboxHandle("box0", "boxes"), 0.03):
        await until(lambda: not provider.renew_errors)
        await asyncio.sleep(0.05)
    assert provider.renewed == []


def test_sync_sandbox_runs_on_one_loop_thread() -> None:
    register_provider("boxes", lambda: Boxes())  # type: ignore[arg-type, return-value]
    with Sandbox({"boxes": {}}, SPEC) as box:
        assert box.exec("ls", timeout_s=5).stdout == "ls 5"
        assert box.status() is SandboxStatus.RUNNING
        provider: Any = box._box.provider
        with Sandbox.connect(box.serialize(), provider=provider) as borrowed:
            assert borrowed.exec("ls").ok
        assert box.status() is SandboxStatus.RUNNING
    assert provider.live == set()
    assert provider.thread is not threading.current_thread()
    assert provider.thread.daemon


async def test_sync_sandbox_raises_instead_of_blocking_an_event_loop() -> None:
    with pytest.raises(SandboxError, match="use AsyncSandbox"):
        Sandbox({"boxes": {}}, SPEC)
