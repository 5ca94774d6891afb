"""What the backend and its network do wrong, and what the provider makes of it. On the double of the server."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from nemo_gym.contract.errors import (
    SandboxArchiveError,
    SandboxCreateError,
    SandboxCreateVerificationError,
    SandboxError,
    SandboxLostError,
)
from nemo_gym.contract.sandbox import NetworkPolicy, SandboxSpec
from nemo_gym.sandbox.base import BoxLabel, ExecEnd, ExecOutcome, ExecRequest, SandboxHandle, SandboxStatus
from nemo_gym.sandbox.conformance.base import eventually
from nemo_gym.sandbox.facade import create_provider
from nemo_gym.sandbox.providers.opensandbox import OpenSandboxProvider, connection, creation, tool
from nemo_gym.sandbox.providers.opensandbox import provider as opensandbox_provider
from nemo_gym_testing.opensandbox import FakeOpenSandbox, serving
from nemo_gym_testing.opensandbox import server as fake_server
from nemo_gym_testing.opensandbox.faults import CommandFault
from tests.sandbox.opensandbox.double import API_KEY as KEY

NewProvider = Callable[..., OpenSandboxProvider]


@pytest.fixture
async def double() -> AsyncIterator[tuple[FakeOpenSandbox, str]]:
    backend = create_provider({"local": {}})
    fake = FakeOpenSandbox(backend, KEY)
    try:
        async with serving(fake) as url:
            yield fake, url
    finally:
        await backend.aclose()


@pytest.fixture
def fake(double: tuple[FakeOpenSandbox, str]) -> FakeOpenSandbox:
    return double[0]


@pytest.fixture
async def new_provider(double: tuple[FakeOpenSandbox, str]) -> AsyncIterator[NewProvider]:
    made: list[OpenSandboxProvider] = []

    def new(**options: Any) -> OpenSandboxProvider:
        chosen = {"url": double[1], "api_key": KEY, "default_image": "host", "use_server_proxy": True, **options}
        made.append(OpenSandboxProvider(**chosen))
        return made[-1]

    yield new
    for provider in made:
        await provider.aclose()


@pytest.fixture
def provider(new_provider: NewProvider) -> OpenSandboxProvider:
    return new_provider()


@pytest.fixture
def spec() -> SandboxSpec:
    return SandboxSpec(ttl_s=300, network=NetworkPolicy.OPEN, metadata={BoxLabel.RUN: uuid.uuid4().hex})


@pytest.fixture
async def box(provider: OpenSandboxProvider, spec: SandboxSpec) -> SandboxHandle:
    return await provider.create(spec)


async def ids(provider: OpenSandboxProvider, spec: SandboxSpec) -> list[str]:
    return [info.sandbox_id for info in await provider.list({BoxLabel.RUN: spec.metadata[BoxLabel.RUN]})]


async def stays_empty(provider: OpenSandboxProvider, spec: SandboxSpec) -> None:
    async def empty() -> bool:
        return not await ids(provider, spec)

    await eventually(empty, "nothing is left", 30)
    # Nor does anything appear later, made by work that went on unseen.
    await asyncio.sleep(1)
    assert await empty()


# --------------------------------------------------------------------------------------------------------- commands


async def test_command_that_surely_never_started_is_sent_again_and_runs_once(
    provider: OpenSandboxProvider, box: SandboxHandle, fake: FakeOpenSandbox
) -> None:
    fake.faults.commands += ["refuse", "refuse"]
    result = await provider.exec(box, "echo ran | tee -a /tmp/runs")
    assert (result.outcome, result.return_code, result.stdout) == (ExecOutcome.EXITED, 0, "ran\n")
    assert fake.faults.commands_seen == 3
    assert (await provider.exec(box, "cat /tmp/runs")).stdout == "ran\n"


async def test_command_whose_answer_was_lost_is_lost_and_not_sent_again(
    provider: OpenSandboxProvider, box: SandboxHandle, fake: FakeOpenSandbox
) -> None:
    # The SDK calls this error retryable.
    fake.faults.commands.append("answer_lost")
    result = await provider.exec(box, "echo ran >> /tmp/runs")
    assert (result.outcome, result.return_code, result.error_type) == (ExecOutcome.LOST, None, "lost")
    assert fake.faults.commands_seen == 1
    assert (await provider.exec(box, "cat /tmp/runs")).stdout == "ran\n"


@pytest.mark.parametrize("fault", ["cut", "cut_politely"])
async def test_command_without_its_end_is_lost_and_never_zero(
    fault: CommandFault, provider: OpenSandboxProvider, box: SandboxHandle, fake: FakeOpenSandbox
) -> None:
    fake.faults.commands.append(fault)
    result = await provider.exec(box, "echo begun; sleep 300")
    assert (result.outcome, result.return_code, result.ok) == (ExecOutcome.LOST, None, False)

    async def dead() -> bool:
        return (await provider.exec(box, "! pgrep -x sleep")).ok or "300" not in (
            (await provider.exec(box, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout or ""
        )

    await eventually(dead, "what nobody hears of any more is killed")


async def test_command_in_a_paused_box_is_lost_after_the_allowed_silence(
    new_provider: NewProvider, spec: SandboxSpec
) -> None:
    provider = new_provider(silence_s=3)
    box = await provider.create(spec)
    manager = await provider._connection.manager()
    await manager.pause_sandbox(box.sandbox_id)
    try:
        async with asyncio.timeout(60):
            result = await provider.exec(box, "echo never heard of", timeout_s=None)
        assert result.outcome is ExecOutcome.LOST
    finally:
        await manager.resume_sandbox(box.sandbox_id)
    assert (await provider.exec(box, "echo resumed")).stdout == "resumed\n"


async def test_command_cancelled_before_it_started_never_runs(
    provider: OpenSandboxProvider, box: SandboxHandle, fake: FakeOpenSandbox
) -> None:
    fake.faults.hold_commands = held = asyncio.Event()
    running = asyncio.create_task(provider.exec(box, "touch /tmp/ran"))

    async def submitted() -> bool:
        return fake.faults.commands_seen == 1

    await eventually(submitted, "the command was submitted")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    async def taken_back() -> bool:
        return not provider._background

    await eventually(taken_back, "the command was taken back")
    fake.faults.hold_commands = None
    held.set()
    await asyncio.sleep(1)
    assert not (await provider.exec(box, "test -e /tmp/ran")).ok


async def test_timeout_is_told_from_a_kill(provider: OpenSandboxProvider, box: SandboxHandle) -> None:
    timed_out = await provider.exec(box, "sleep 300", timeout_s=0.5)
    killed = await provider.exec(box, "kill -9 $$")
    assert (timed_out.outcome, timed_out.signal) == (ExecOutcome.TIMED_OUT, None)
    assert (killed.outcome, killed.signal) == (ExecOutcome.SIGNALED, 9)


async def test_unknown_user_is_refused_by_name(provider: OpenSandboxProvider, box: SandboxHandle) -> None:
    with pytest.raises(SandboxError, match="nobody-of-that-name"):
        await provider.exec(box, "true", user="nobody-of-that-name")


async def test_long_commands_and_environments_arrive_whole(provider: OpenSandboxProvider, box: SandboxHandle) -> None:
    value = "v" * 100_000
    result = await provider.exec(box, 'printf %s "$LONG" | wc -c; : ' + "x" * 60_000, env={"LONG": value})
    assert result.stdout == "100000\n"


async def test_box_whose_helper_was_removed_loses_commands(provider: OpenSandboxProvider, box: SandboxHandle) -> None:
    assert (await provider.exec(box, f"rm -f {box.raw.tool}")).ok
    assert (await provider.exec(box, "true")).outcome is ExecOutcome.LOST


@pytest.mark.parametrize(
    ("reason", "outcome"), [("OOMKilled", ExecOutcome.OUT_OF_MEMORY), ("no room left", ExecOutcome.LOST)]
)
async def test_lost_command_is_out_of_memory_only_if_the_server_says_so(
    provider: OpenSandboxProvider, box: SandboxHandle, fake: FakeOpenSandbox, reason: str, outcome: ExecOutcome
) -> None:
    fake.faults.status_reason = reason
    assert (await provider.exec(box, f"rm -f {box.raw.tool}")).ok
    assert (await provider.exec(box, "true")).outcome is outcome


async def test_stream_that_is_left_takes_its_command_with_it(
    provider: OpenSandboxProvider, box: SandboxHandle
) -> None:
    process = await provider.start_exec(box, ExecRequest("echo up; sleep 4711"))
    async with contextlib.aclosing(process.events()) as events:
        assert not isinstance(await anext(events), ExecEnd)

    async def dead() -> bool:
        listed = await provider.exec(box, "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '")
        return "sleep 4711" not in (listed.stdout or "")

    await eventually(dead, "the command is dead")


# ----------------------------------------------------------------------------------------------------------- create


async def test_cancelled_create_that_the_server_finishes_leaves_nothing(
    provider: OpenSandboxProvider, spec: SandboxSpec, fake: FakeOpenSandbox
) -> None:
    fake.faults.create_takes_s = 1.0
    creating = asyncio.create_task(provider.create(spec))
    await asyncio.sleep(0.3)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    await asyncio.sleep(1.5)
    await stays_empty(provider, spec)


async def test_create_whose_answer_was_lost_is_found_by_its_mark_and_destroyed(
    provider: OpenSandboxProvider, spec: SandboxSpec, fake: FakeOpenSandbox
) -> None:
    fake.faults.lose_creates = 1
    with pytest.raises(SandboxCreateError) as caught:
        await provider.create(spec)
    assert caught.value.retryable
    await stays_empty(provider, spec)


async def test_create_with_a_key_finds_the_box_whose_answer_was_lost(
    provider: OpenSandboxProvider, spec: SandboxSpec, fake: FakeOpenSandbox
) -> None:
    keyed = spec.replace(idempotency_key=uuid.uuid4().hex)
    fake.faults.lose_creates = 1
    with pytest.raises(SandboxCreateError):
        await provider.create(keyed)
    box = await provider.create(keyed)
    assert (await provider.exec(box, "echo usable")).stdout == "usable\n"
    assert await ids(provider, spec) == [box.sandbox_id]


async def test_creates_with_one_key_of_two_processes_agree_on_one_box(
    new_provider: NewProvider, spec: SandboxSpec, fake: FakeOpenSandbox
) -> None:
    fake.faults.create_takes_s = 0.5
    keyed = spec.replace(idempotency_key=uuid.uuid4().hex)
    providers = [new_provider() for _ in range(3)]
    boxes = await asyncio.gather(*(provider.create(keyed) for provider in providers))
    assert len({box.sandbox_id for box in boxes}) == 1
    assert await ids(providers[0], spec) == [boxes[0].sandbox_id]


async def test_create_waits_for_room_as_long_as_a_box_may_take(
    provider: OpenSandboxProvider, spec: SandboxSpec, fake: FakeOpenSandbox
) -> None:
    fake.faults.refuse_creates = 2
    box = await provider.create(spec)
    assert await ids(provider, spec) == [box.sandbox_id]
    fake.faults.refuse_creates = 100
    with pytest.raises(SandboxCreateError, match="no capacity") as caught:
        await provider.create(spec.replace(ready_timeout_s=2.5))
    assert caught.value.retryable


async def test_create_that_waits_for_room_asks_no_more_when_it_is_cancelled(
    provider: OpenSandboxProvider, spec: SandboxSpec, fake: FakeOpenSandbox
) -> None:
    fake.faults.refuse_creates = 2
    creating = asyncio.create_task(provider.create(spec))

    async def refused() -> bool:
        return fake.faults.refuse_creates == 1

    await eventually(refused, "the create is refused", 30)
    creating.cancel()
    await asyncio.wait({creating})
    await provider.aclose()  # waits for what goes on in the background
    assert fake.faults.refuse_creates == 1


async def test_create_that_takes_too_long_raises_in_time_and_leaves_nothing(
    provider: OpenSandboxProvider, spec: SandboxSpec, fake: FakeOpenSandbox
) -> None:
    fake.faults.create_takes_s = 2.0
    with pytest.raises(SandboxCreateError, match=r"ready_timeout_s=0\.5") as caught:
        await provider.create(spec.replace(ready_timeout_s=0.5))
    assert caught.value.retryable
    await asyncio.sleep(2)
    await stays_empty(provider, spec)


async def test_create_without_a_limit_of_its_own_waits_for_a_server_that_pulls(
    provider: OpenSandboxProvider, spec: SandboxSpec, fake: FakeOpenSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opensandbox_provider, "DEFAULT_READY_TIMEOUT_S", 5.0)
    fake.faults.create_takes_s = 6.0
    box = await provider.create(spec)
    assert (await provider.exec(box, "echo usable")).stdout == "usable\n"


async def test_box_whose_lease_ended_while_the_server_pulled_is_made_again(
    provider: OpenSandboxProvider, spec: SandboxSpec, fake: FakeOpenSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (creation, fake_server):
        monkeypatch.setattr(module, "_SHORTEST_TIMEOUT_S", 4)
    fake.faults.create_takes_s = 5.0
    making = asyncio.create_task(provider.create(spec.replace(ttl_s=4.0)))
    await asyncio.sleep(2.0)
    fake.faults.create_takes_s = 0.0  # the server has the image now
    box = await making
    await asyncio.sleep(1.0)
    assert (await provider.exec(box, "echo usable")).stdout == "usable\n"


async def test_network_none_is_refused_where_the_server_has_no_egress_sidecar(
    provider: OpenSandboxProvider, spec: SandboxSpec
) -> None:
    with pytest.raises(SandboxError, match="egress_policy: true"):
        await provider.create(spec.replace(network=NetworkPolicy.NONE))


async def test_box_whose_sidecar_does_not_deny_everything_is_destroyed(
    new_provider: NewProvider, spec: SandboxSpec, fake: FakeOpenSandbox
) -> None:
    provider = new_provider(egress_policy=True)
    closed = spec.replace(network=NetworkPolicy.NONE)
    assert (await provider.exec(await provider.create(closed), "echo closed")).stdout == "closed\n"
    await provider.reap(spec.metadata)
    for fault, said in (("open_sidecars", "does not deny everything"), ("dns_sidecars", "denies names alone")):
        setattr(fake.faults, fault, True)
        with pytest.raises(SandboxCreateVerificationError, match=said):
            await provider.create(closed)
        setattr(fake.faults, fault, False)
        assert await ids(provider, spec) == []


# --------------------------------------------------------------------------------------------------------- listings


@pytest.mark.parametrize("ended", [[4], [4, 3, 2]])
async def test_listing_of_several_pages_names_every_box_that_lives_while_others_end(
    provider: OpenSandboxProvider,
    spec: SandboxSpec,
    fake: FakeOpenSandbox,
    monkeypatch: pytest.MonkeyPatch,
    ended: list[int],
) -> None:
    monkeypatch.setattr(connection, "_PAGE", 2)
    made = [(await provider.create(spec)).sandbox_id for _ in range(5)]
    fake.faults.end_after_page = [made[n] for n in ended]
    listed = await ids(provider, spec)
    assert {box for n, box in enumerate(made) if n not in ended} <= set(listed)


# ------------------------------------------------------------------------------------------------ leases and access


async def test_lease_shorter_than_the_server_allows_is_set_by_a_renewal_and_renewals_may_shorten(
    provider: OpenSandboxProvider, spec: SandboxSpec
) -> None:
    short, long = await asyncio.gather(provider.create(spec.replace(ttl_s=3)), provider.create(spec))
    await provider.renew(long, 2)

    async def gone() -> bool:
        return not await ids(provider, spec)

    await eventually(gone, "both leases have ended", 30)
    assert await provider.status(long) is SandboxStatus.STOPPED
    with pytest.raises(SandboxLostError):
        await provider.renew(short, 60)


@pytest.mark.parametrize("proxied", [True, False])
async def test_servers_key_goes_to_the_server_alone(
    proxied: bool, new_provider: NewProvider, spec: SandboxSpec, fake: FakeOpenSandbox
) -> None:
    provider = new_provider(use_server_proxy=proxied)
    box = await provider.create(spec)
    assert (await provider.exec(box, "cat", stdin=b"given")).stdout == "given"
    to_boxes = [seen for seen in fake.seen if seen.path.startswith("/box/")]
    to_server = [seen for seen in fake.seen if seen.path.startswith("/v1/")]
    assert bool(to_boxes) is not proxied
    assert not any(seen.has_key for seen in to_boxes)
    assert all(seen.has_key for seen in to_server)


async def test_nothing_is_reported_to_the_server_beside_what_is_asked_of_it(
    provider: OpenSandboxProvider, box: SandboxHandle, fake: FakeOpenSandbox
) -> None:
    assert {seen.path.split("/")[2] for seen in fake.seen} == {"sandboxes"}
    assert not [seen for seen in fake.seen if "metric" in seen.path or "telemetry" in seen.path]


async def test_idle_connection_is_given_up_before_a_server_does(
    provider: OpenSandboxProvider, box: SandboxHandle, fake: FakeOpenSandbox
) -> None:
    async def connection() -> int:
        assert await provider.status(box) is SandboxStatus.RUNNING
        return fake.seen[-1].connection

    first = await connection()
    assert await connection() == first
    # Common servers close theirs after 5 s; a request that meets that is a request of unknown fate.
    await asyncio.sleep(4)
    assert await connection() != first


async def test_wrong_key_is_told_with_the_setting_to_change(new_provider: NewProvider, spec: SandboxSpec) -> None:
    with pytest.raises(SandboxCreateError, match="api_key"):
        await new_provider(api_key="wrong").create(spec)


async def test_server_that_is_not_there_is_a_retryable_error_naming_what_was_tried() -> None:
    provider = OpenSandboxProvider(url="http://127.0.0.1:9", default_image="host")
    spec = SandboxSpec(network=NetworkPolicy.OPEN, ready_timeout_s=5)
    with pytest.raises(SandboxCreateError) as caught:
        await provider.create(spec)
    assert caught.value.retryable
    with pytest.raises(SandboxError, match="listing boxes"):
        await provider.list()


async def test_archive_may_be_tried_again_when_the_boxs_machine_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's files are not to blame for it, as they would be for a `SandboxArchiveError`."""

    class Failing:
        def __init__(self, *_: object) -> None:
            pass

        def begin(self) -> None:
            pass

        async def next(self) -> tool.Frame:
            return tool.Frame(
                tool.END, b'{"outcome": "error", "kind": "host", "error": "open x: too many open files"}'
            )

        async def close(self) -> None:
            pass

    monkeypatch.setattr(tool, "ToolRun", Failing)
    with pytest.raises(SandboxError, match="too many open files") as caught:
        async for _ in tool.get(cast(Any, None), "/testbed", exclude=(), max_bytes=None):
            pass
    assert caught.value.retryable and not isinstance(caught.value, SandboxArchiveError)
