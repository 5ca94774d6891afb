"""The remote provider when the network or the broker fails under it: nothing runs twice, nothing is made up."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from nemo_gym.contract.errors import InvalidBodyError, SandboxCreateError, SandboxError, SandboxLostError
from nemo_gym.contract.sandbox import Door, SandboxSpec
from nemo_gym.http.connections import watched_socket
from nemo_gym.sandbox.archive import pack_bytes
from nemo_gym.sandbox.base import ExecEnd, ExecOutcome, ExecRequest, SandboxHandle, SandboxStatus
from nemo_gym.sandbox.conformance.base import upstream
from nemo_gym.sandbox.doors import GENERATION_ROUTES, INFERENCE_ROUTES
from nemo_gym.sandbox.providers.remote import RemoteProvider
from nemo_gym.sandbox.providers.remote.connection import box_of
from resources_servers.sandbox.tests.broker_process import BrokerProcess
from tests.sandbox.unreliable_network import Relay, relay


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    backend = {"local": {"state_dir": str(tmp_path / "boxes"), "linger_s": 1}}
    broker = BrokerProcess(tmp_path / "broker", backend, on_stop="destroy")
    try:
        broker.start()
        yield broker
    finally:
        if not broker.runs:
            broker.start()  # so that it clears up
        broker.close()


@pytest.fixture
async def network(broker: BrokerProcess) -> AsyncIterator[Relay]:
    async with relay(broker.port) as made:
        yield made


@pytest.fixture
async def remote(broker: BrokerProcess, network: Relay) -> AsyncIterator[RemoteProvider]:
    provider = RemoteProvider(url=network.url, token=broker.credential(), patience_s=20)
    yield provider
    await provider.aclose()


@pytest.fixture
async def box(remote: RemoteProvider) -> SandboxHandle:
    return await remote.create(SandboxSpec(ttl_s=300))


async def clean(remote: RemoteProvider, network: Relay, handle: SandboxHandle, command: str) -> str:
    """What a command prints, over a network that works."""
    network.cut_answers_after = network.cut_requests_after = None
    network.break_all()
    result = await remote.exec(handle, command, timeout_s=60)
    assert result.ok, result
    return result.stdout or ""


@pytest.mark.parametrize("cut_after", [700, 5_000, 200_000])
async def test_output_is_whole_and_the_command_runs_once_however_often_the_answer_breaks(
    cut_after: int, remote: RemoteProvider, network: Relay, box: SandboxHandle
) -> None:
    network.break_all()
    network.cut_answers_after, network.max_cuts = cut_after, 25
    command = "echo ran >> /tmp/ran; head -c 3000000 /dev/zero | tr '\\0' x; echo err >&2; echo end; exit 3"
    result = await remote.exec(box, command, timeout_s=60)
    assert (result.outcome, result.return_code, result.stderr) == (ExecOutcome.EXITED, 3, "err\n")
    assert hashlib.sha256(result.stdout_bytes).digest() == hashlib.sha256(b"x" * 3_000_000 + b"end\n").digest()
    assert network.cuts >= 10
    assert await clean(remote, network, box, "cat /tmp/ran") == "ran\n"


@pytest.mark.parametrize("cut_after", [0, 1, 150, 400])
async def test_command_runs_once_when_its_submission_breaks(
    cut_after: int, remote: RemoteProvider, network: Relay, box: SandboxHandle
) -> None:
    network.break_all()
    network.cut_requests_after = network.cut_answers_after = max(cut_after, 1)
    network.max_cuts = 4
    for number in range(2):
        result = await remote.exec(box, f"cat; echo {number} >> /tmp/ran", stdin=b"fed", timeout_s=60)
        assert (result.outcome, result.return_code, result.stdout) == (ExecOutcome.EXITED, 0, "fed")
    assert network.cuts >= 2
    assert await clean(remote, network, box, "cat /tmp/ran") == "0\n1\n"


async def test_create_that_breaks_makes_one_box(remote: RemoteProvider, network: Relay) -> None:
    network.cut_answers_after, network.max_cuts = 1, 6
    handle = await remote.create(SandboxSpec(ttl_s=300, metadata={"x.test": "once"}))
    network.cut_answers_after = None
    assert [info.sandbox_id for info in await remote.list({"x.test": "once"})] == [handle.sandbox_id]


async def test_create_that_is_cancelled_without_an_answer_leaves_no_box(
    broker: BrokerProcess, remote: RemoteProvider, network: Relay
) -> None:
    await remote.list()
    network.break_all()
    network.swallow_answers = True
    creating = asyncio.create_task(remote.create(SandboxSpec(ttl_s=300, metadata={"x.test": "cancelled"})))
    await asyncio.sleep(2)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    network.swallow_answers = False
    network.break_all()
    await remote.aclose()  # waits for what was started in the background
    assert await remote.list({"x.test": "cancelled"}) == []


@pytest.mark.parametrize(("ready_timeout_s", "within"), [(0.3, "0.5 s"), (None, "1.2 s")])
async def test_create_without_its_own_time_limit_leaves_time_for_the_image(
    ready_timeout_s: float | None,
    within: str,
    remote: RemoteProvider,
    network: Relay,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await remote.create(SandboxSpec(ttl_s=300))  # the abilities are known now
    for name, seconds in (("_ADMISSION_S", 0.2), ("DEFAULT_READY_TIMEOUT_S", 0.3), ("_IMAGE_S", 0.7)):
        monkeypatch.setattr(f"nemo_gym.sandbox.providers.remote.provider.{name}", seconds)
    network.break_all()
    network.swallow_answers = True
    with pytest.raises(SandboxCreateError, match=f"within {within}"):
        await remote.create(SandboxSpec(ready_timeout_s=ready_timeout_s, ttl_s=300))
    network.swallow_answers = False
    network.break_all()


async def test_broken_archive_is_lost_and_never_short(
    remote: RemoteProvider, network: Relay, box: SandboxHandle
) -> None:
    await remote.exec(box, "head -c 2000000 /dev/urandom > /srv/f", timeout_s=60)
    network.break_all()
    network.cut_answers_after, network.max_cuts = 300_000, 1
    with pytest.raises(SandboxLostError, match="broke off"):
        async for _ in remote.get_archive(box, "/srv/f"):
            pass
    network.cut_answers_after = None
    network.cut_requests_after, network.max_cuts = 300_000, 2
    network.break_all()

    taken = 0

    async def tar() -> AsyncIterator[bytes]:
        nonlocal taken
        taken += 1
        for _ in range(40):
            yield b"\0" * 65536

    with pytest.raises(SandboxError):
        await remote.put_archive(box, "/srv/in", tar())
    assert taken == 1


async def test_path_that_is_not_utf8_is_refused_and_not_taken_for_its_directory(
    remote: RemoteProvider, box: SandboxHandle
) -> None:
    await remote.exec(box, "mkdir /srv/d; echo other > /srv/d/other")
    with pytest.raises(InvalidBodyError, match="cannot be sent"):
        async for _ in remote.get_archive(box, "/srv/d/\udcff"):
            pass


async def test_whole_archive_passes_after_connections_broke(
    remote: RemoteProvider, network: Relay, box: SandboxHandle
) -> None:
    async def tar() -> AsyncIterator[bytes]:
        yield pack_bytes("f", b"kept")

    network.break_all()
    await remote.put_archive(box, "/srv", tar())
    assert await clean(remote, network, box, "cat /srv/f") == "kept"


async def test_running_command_is_lost_when_the_broker_is_killed_and_its_box_goes_on(
    broker: BrokerProcess, remote: RemoteProvider, network: Relay, box: SandboxHandle
) -> None:
    process = await remote.start_exec(box, ExecRequest("echo begun; sleep 600"))
    events = process.events()
    first = await anext(events)
    assert not isinstance(first, ExecEnd)
    assert first.data == b"begun\n"
    broker.kill()
    await asyncio.to_thread(broker.start)
    async with asyncio.timeout(60):
        rest = [event async for event in events]
    assert [event.outcome for event in rest if isinstance(event, ExecEnd)] == [ExecOutcome.LOST]
    assert rest[-1].return_code is None if isinstance(rest[-1], ExecEnd) else False
    assert await clean(remote, network, box, "echo alive") == "alive\n"


async def test_output_of_an_ended_command_is_read_from_a_broker_that_was_restarted(
    broker: BrokerProcess, remote: RemoteProvider, box: SandboxHandle
) -> None:
    process = await remote.start_exec(box, ExecRequest("head -c 4000000 /dev/zero | tr '\\0' y; exit 4"))
    ended = await remote.exec(box, "sleep 2; true", timeout_s=60)
    assert ended.ok
    broker.kill()
    await asyncio.to_thread(broker.start)
    size, ends = 0, []
    async with asyncio.timeout(60):
        async for event in process.events():
            if isinstance(event, ExecEnd):
                ends.append((event.outcome, event.return_code))
            else:
                size += len(event.data)
    assert (size, ends) == (4_000_000, [(ExecOutcome.EXITED, 4)])


async def test_broker_that_does_not_come_back_means_lost_and_not_gone(
    broker: BrokerProcess, network: Relay, box: SandboxHandle
) -> None:
    network.break_all()
    patient = RemoteProvider(url=network.url, token=broker.credential(), patience_s=2)
    capabilities = await asyncio.to_thread(lambda: patient.capabilities)
    assert capabilities.connect
    await network.stop()
    started = time.monotonic()
    result = await patient.exec(box, "true")
    assert (result.outcome, result.return_code, result.error_type) == (ExecOutcome.LOST, None, "lost")
    assert time.monotonic() - started >= 1
    assert await patient.status(box) is SandboxStatus.UNKNOWN
    with pytest.raises(SandboxError) as caught:
        await patient.renew(box, 60)
    assert (isinstance(caught.value, SandboxLostError), caught.value.retryable) == (False, True)
    with pytest.raises(SandboxCreateError) as refused:
        await patient.create(SandboxSpec())
    assert refused.value.retryable
    with pytest.raises(SandboxLostError):
        async for _ in patient.get_archive(box, "/etc"):
            pass
    await patient.aclose()
    direct = RemoteProvider(url=broker.url, token=broker.credential())
    box_of(box).broker_url = broker.url
    assert await direct.status(box) is SandboxStatus.RUNNING
    await direct.aclose()


async def test_cancelled_command_is_killed_although_its_submission_got_no_answer(
    remote: RemoteProvider, network: Relay, box: SandboxHandle
) -> None:
    network.break_all()
    network.swallow_answers = True
    running = asyncio.create_task(remote.exec(box, "echo $$ > /tmp/pid; exec sleep 600"))
    await asyncio.sleep(1.5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    network.swallow_answers = False
    network.break_all()
    deadline = time.monotonic() + 60
    while await clean(remote, network, box, "ps ax -o args | grep -c '[s]leep 600' || true") != "0\n":
        assert time.monotonic() < deadline, "the cancelled command still runs"
        await asyncio.sleep(0.2)


@pytest.mark.parametrize("status", [200, 302, 404])
async def test_answer_that_is_no_brokers_is_an_error_that_says_so(status: int) -> None:
    async def handle(request: web.BaseRequest) -> web.Response:
        return web.Response(status=status, text="<html>It works!</html>", headers={"Location": "/elsewhere"})

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    remote = RemoteProvider(url=f"http://127.0.0.1:{port}", patience_s=1)
    try:
        with pytest.raises(SandboxError, match="It works!"):
            await remote.create(SandboxSpec())
        with pytest.raises(SandboxError, match="It works!"):
            _ = await asyncio.to_thread(lambda: remote.capabilities)
    finally:
        await remote.aclose()
        await runner.cleanup()


async def test_counts_of_a_door_are_exact_when_a_command_has_ended(remote: RemoteProvider, box: SandboxHandle) -> None:
    code = (
        "import urllib.request\n"
        "for path in ('responses', 'responses', 'nothing'):\n"
        "    try: urllib.request.urlopen(f'http://127.0.0.1:8000/v1/{path}', b'{}').read()\n"
        "    except OSError as error: print(error.code)"
    )
    async with upstream() as behind:
        door = Door("model", 8000, behind.url, INFERENCE_ROUTES, counted=GENERATION_ROUTES, max_answers=5)
        await remote.open_door(box, door)
        held = remote.door_statistics(box)["model"]
        for round_number in (1, 2):
            result = await remote.exec(box, ["python3", "-c", code], timeout_s=60)
            assert result.stdout == "403\n", result
            assert remote.door_statistics(box)["model"] is held
            assert (held.answered, held.turns, held.forbidden) == (2 * round_number, 2 * round_number, round_number)
        over = await remote.exec(box, ["python3", "-c", code], timeout_s=60)
        assert (over.stdout, held.turns, held.over_limit) == ("403\n403\n", 5, 1)
        await remote.close_door(box, "model")
        assert dict(remote.door_statistics(box)) == {}


async def test_reference_works_through_another_address_of_the_broker(
    broker: BrokerProcess, remote: RemoteProvider, box: SandboxHandle
) -> None:
    ref = json.loads(json.dumps(await remote.serialize_handle(box, scope="operate")))
    assert ref["broker_url"] != broker.url
    direct = RemoteProvider(url=broker.url)
    borrower = RemoteProvider()
    try:
        for provider in (direct, borrower):
            handle = await provider.connect(ref)
            assert (await provider.exec(handle, "echo in")).stdout == "in\n"
    finally:
        await direct.aclose()
        await borrower.aclose()
    with pytest.raises(SandboxError, match="lease_token"):
        await borrower.connect({"provider": "local", "sandbox_id": "x"})


async def test_connections_notice_a_peer_that_vanished() -> None:
    for family in (socket.AF_INET, socket.AF_INET6):
        with watched_socket((family, socket.SOCK_STREAM, 0, "", ("", 0))) as made:
            assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert 0 < made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 30
            assert 0 < made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 60_000
