"""``kill -9`` at every boundary of a write or a backend call, judged by the backend's own inventory."""

from __future__ import annotations

import asyncio
import io
import random
import tarfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from nemo_gym.broker.backend import BROKER_LABEL, SANDBOX_LABEL
from nemo_gym.contract.errors import NemoGymError, SandboxLostError
from nemo_gym.contract.sandbox import Door, SandboxSpec
from nemo_gym.sandbox.base import ExecRequest, SandboxExecResult, SandboxProvider, SupportsLoopbackDoor
from nemo_gym.sandbox.facade import AsyncSandbox, create_provider
from resources_servers.sandbox.tests.api import calling
from resources_servers.sandbox.tests.broker_process import BrokerProcess
from resources_servers.sandbox.tests.conftest import KILLING_PROGRAM
from resources_servers.sandbox.tests.postgres import PostgresServer, running_postgres

IDENTITY = f"killed-tests-{uuid.uuid4().hex[:8]}"
"""A broker removes boxes of its name that it does not know: other processes with these tests have other names."""


@dataclass
class Scene:
    """One broker that is killed and comes back, and what its client saw."""

    broker: BrokerProcess
    backend: SandboxProvider
    results: dict[str, SandboxExecResult] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)
    boundaries: list[str] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.broker.state_dir / "boundaries"

    async def restart_when_killed(self, kill_steps: list[int]) -> None:
        """Serve until cancelled: each time the broker dies it comes back, to be killed at the next of the steps."""
        while True:
            while self.broker.runs:  # noqa: ASYNC110 - a process has no event to wait for
                await asyncio.sleep(0.02)
            self.broker.env["KILL_STEP"] = str(kill_steps.pop(0) if kill_steps else 0)
            self.broker.start(wait=False)

    async def work(self, client: SandboxProvider) -> None:
        """What one owner does with a box; every answer that is neither a result nor *lost* fails."""
        run = uuid.uuid4().hex
        box = await AsyncSandbox(client, SandboxSpec(ttl_s=90, metadata={"run": run})).start()
        sandbox_id = box.handle.sandbox_id
        await self._exec(box, "first")
        await box.renew(120)
        await self._put(box)
        assert isinstance(client, SupportsLoopbackDoor)
        await client.open_door(box.handle, Door("d", 8123, "http://127.0.0.1:9", ("GET /",), {"x-secret": "s"}))
        descriptor = await box.serialize(scope="operate")
        lent = await AsyncSandbox.connect(descriptor, provider=client)
        await self._exec(lent, "second")
        for mark in ("first", "second"):
            found = await box.exec(f"cat /tmp/runs-{mark} 2>/dev/null | wc -l")
            if found.error_type is None:
                self.counted[mark] = int(found.stdout or "0")
        await box.stop()
        self.closed.append(sandbox_id)

    async def _exec(self, box: AsyncSandbox, mark: str) -> None:
        command = f"echo x >> /tmp/runs-{mark}; echo said {mark}"
        process = await box.start_exec(ExecRequest(command))
        stdout, ends = b"", []
        async for event in process.events():
            if hasattr(event, "data"):
                stdout += event.data
            else:
                ends.append(event)
        (end,) = ends
        self.results[mark] = SandboxExecResult(
            stdout=stdout.decode(), return_code=end.return_code, outcome=end.outcome, error_type=None
        )

    @staticmethod
    async def _put(box: AsyncSandbox) -> None:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            info = tarfile.TarInfo("f")
            info.size = 5
            tar.addfile(info, io.BytesIO(b"hello"))

        async def stream() -> AsyncIterator[bytes]:
            yield buffer.getvalue()

        try:
            await box.put_archive("/srv", stream())
        except SandboxLostError:
            return  # a stream that was begun is not sent again: the client knows that it does not know

    async def judge(self) -> None:
        """After everything: what the registry says is what the backend has, and nothing ran twice."""
        recorded = await self._recorded()
        inventory = {info.labels[SANDBOX_LABEL] for info in await self.backend.list({BROKER_LABEL: IDENTITY})}
        assert inventory == recorded, "boxes without a record, or records without a box"
        assert not inventory & set(self.closed), "a box that was closed is still there"
        for mark, result in self.results.items():
            ran = self.counted.get(mark)
            assert ran is None or ran <= 1, f"exec '{mark}' ran {ran} times"
            assert result.outcome in ("exited", "lost"), (mark, result)
            if result.outcome == "exited":
                assert result.stdout == f"said {mark}\n", "output that was acknowledged is lost"
                assert ran in (None, 1)

    async def _recorded(self) -> set[str]:
        """What the broker lists, once it is there: it may just be dying at its last boundary."""
        async with calling(self.broker) as api:
            while True:
                try:
                    if (await api.ask("GET", "/readyz")).status == 200:
                        return set(await api.ids())
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)


@asynccontextmanager
async def scene(place: Path, backend: dict[str, Any], kill_steps: list[int], **settings: Any) -> AsyncIterator[Scene]:
    broker = BrokerProcess(
        place / "state",
        backend,
        program=(KILLING_PROGRAM,),
        env={"KILL_LOG": str(place / "state" / "boundaries")},
        identity=IDENTITY,
        on_stop="destroy",
        **settings,
    )
    provider = create_provider(backend)
    playing = Scene(broker, provider)
    watching = asyncio.create_task(playing.restart_when_killed(kill_steps))
    try:
        yield playing
    finally:
        watching.cancel()
        await asyncio.wait({watching})
        await asyncio.to_thread(broker.close)
        await provider.reap({BROKER_LABEL: IDENTITY})
        await provider.aclose()


async def play(place: Path, backend: dict[str, Any], kill_steps: list[int], **settings: Any) -> list[str]:
    """The scene once, with the broker killed at these boundaries one after the other; the boundaries crossed until
    the first kill, or all of them."""
    async with scene(place, backend, list(kill_steps), **settings) as playing:
        client = create_provider({"remote": {**playing.broker.remote()["remote"], "patience_s": 90}})
        try:
            async with asyncio.timeout(240):
                await playing.work(client)
                await playing.judge()
        except (NemoGymError, AssertionError) as error:
            said = f"{error!r} {getattr(error, 'details', '')}; closed: {playing.closed}"
            crossed = playing.log.read_text()
            raise AssertionError(f"{said}\n{crossed}\n{playing.broker.said()}") from error
        finally:
            await client.aclose()
        return playing.log.read_text().splitlines()


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def settings(request: pytest.FixtureRequest) -> Callable[[], dict[str, Any]]:
    """Further settings of the broker: the registry's database."""
    if request.param == "sqlite":
        return dict
    server: PostgresServer = request.getfixturevalue("postgres")
    return lambda: {"database_url": server.new_database()}


@pytest.mark.timeout(900)
async def test_nothing_is_lost_leaked_or_run_twice_when_the_broker_is_killed_at_some_boundaries(
    tmp_path: Path, local_backend: dict[str, Any], settings: Callable[[], dict[str, Any]]
) -> None:
    crossed = await play(tmp_path / "whole", local_backend, [0], **settings())
    assert any("create" in name for name in crossed) and any("BoxStore._update" in name for name in crossed)
    first = next(n for n, name in enumerate(crossed, 1) if "BoxStore.insert" in name)
    steps = random.Random(5).sample(range(first, len(crossed) + 1), 4)
    for step in steps:
        await play(tmp_path / f"kill-{step}", local_backend, [step], **settings())


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("backend_name", ["local", "docker"])
async def test_nothing_is_lost_leaked_or_run_twice_when_the_broker_is_killed_at_any_boundary(
    backend_name: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    local_backend: dict[str, Any],
    settings: Callable[[], dict[str, Any]],
) -> None:
    backend = local_backend
    if backend_name == "docker":
        backend = {"docker": {"base_url": request.getfixturevalue("docker_engine")}}
    crossed = await play(tmp_path / "whole", backend, [0], **settings())
    chance = random.Random(7)
    for step in range(1, len(crossed) + 1):
        # Killed again while it makes good what the first kill left.
        again = [chance.randrange(1, 12)] if chance.random() < 0.3 else []
        try:
            await play(tmp_path / f"kill-{step}", backend, [step, *again], **settings())
        except AssertionError as error:
            where = crossed[step - 1]
            raise AssertionError(f"killed at boundary {step}, {where} (and again at {again}): {error}") from error
