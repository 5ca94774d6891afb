"""Boxes that wait: handed out alive, once, and out of the way when their places are wanted."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from nemo_gym.broker import creation
from nemo_gym.broker.backend import SANDBOX_LABEL
from nemo_gym.broker.config import BrokerConfig, WarmPool
from nemo_gym.broker.service import BrokerService
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.sandbox.base import SandboxHandle
from nemo_gym.sandbox.facade import create_provider
from nemo_gym.sandbox.wire.models import BoxSpec
from resources_servers.sandbox.tests.api import Api, calling, eventually
from resources_servers.sandbox.tests.broker_process import BrokerProcess
from resources_servers.sandbox.tests.conftest import KILLING_PROGRAM, StartBroker

WARM = {"size": 2, "spec": {"env": {"KIND": "warm"}}}
SPEC = {"env": {"KIND": "warm"}}


async def warm_ids(api: Api) -> list[str]:
    return await api.ids(**{"nemo_gym.role": "warm"})


async def filled(api: Api, size: int = 2) -> list[str]:
    async def full() -> bool:
        views = (await api.call("GET", "/v1/sandboxes", params={"label": "nemo_gym.role=warm"})).json["sandboxes"]
        return len([view for view in views if view["ready"]]) == size

    await eventually(full, f"{size} boxes are warm")
    return await warm_ids(api)


@contextmanager
def writes_held_back(broker: BrokerProcess) -> Iterator[None]:
    """Another program writes to the registry meanwhile; the broker waits for it (at most 5 s)."""
    with closing(sqlite3.connect(broker.state_dir / "broker.sqlite", isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        yield


async def test_create_is_served_by_a_warm_box_that_then_belongs_to_its_asker_alone(start_broker: StartBroker) -> None:
    broker = start_broker(warm=[WARM])
    async with calling(broker) as api:
        warm = await filled(api)
        answers = await asyncio.gather(*(api.create(f"key-{n}", spec=SPEC, labels={"n": str(n)}) for n in range(2)))
        assert sorted(a.json["sandbox"]["sandbox_id"] for a in answers) == sorted(warm)
        box = await api.box(spec={"env": {"KIND": "another"}})
        assert box.sandbox_id not in warm
        again = await api.create("key-0", spec=SPEC, labels={"n": "0"})
        assert again.status == 200
        assert again.json["lease"]["token"] == answers[0].json["lease"]["token"]
        assert await api.ids(n="1") == [answers[1].json["sandbox"]["sandbox_id"]]
        assert not set(await filled(api)) & set(warm)
        broker.kill()
        broker.start()
        assert await api.ids(n="1") == [answers[1].json["sandbox"]["sandbox_id"]]


async def test_warm_box_that_died_is_not_handed_out(start_broker: StartBroker, local_backend: dict[str, Any]) -> None:
    broker = start_broker(warm=[{**WARM, "size": 1}], reconcile_interval_s=600)
    backend = create_provider(local_backend)
    try:
        async with calling(broker) as api:
            (dead,) = await filled(api, 1)
            assert len(await backend.reap({SANDBOX_LABEL: dead})) == 1
            box = await api.box(spec=SPEC)
            assert box.sandbox_id != dead
            assert (await box.run('echo "$KIND"')).stdout == b"warm\n"
    finally:
        await backend.aclose()


async def test_pools_are_filled_after_a_restart_in_which_old_warm_boxes_cannot_be_destroyed(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    fail = tmp_path / "fail"
    env = {"KILL_LOG": str(tmp_path / "boundaries"), "FAIL_FILE": str(fail)}
    broker = start_broker(program=(KILLING_PROGRAM,), env=env, warm=[WARM], reconcile_interval_s=0.5)
    async with calling(broker) as api:
        old = await filled(api)
        broker.kill()
        fail.write_text("close SandboxError")
        broker.start()
        fail.unlink()

        async def made_anew() -> bool:
            return len(set(await warm_ids(api)) - set(old)) == 2

        await eventually(made_anew, "the pool is filled")


def config_of(local_backend: dict[str, Any], *kinds: str, on_stop: Literal["keep", "destroy"]) -> BrokerConfig:
    """Of a broker with one warm box of each kind."""
    return BrokerConfig(
        name="broker",
        entrypoint="app.py",
        host="localhost",
        port=1,
        sandbox_provider=local_backend,
        warm=[WarmPool(size=1, spec=BoxSpec(env={"KIND": kind})) for kind in kinds],
        on_stop=on_stop,
    )


async def test_warm_boxes_of_an_earlier_process_are_destroyed_at_the_same_time(
    local_backend: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = BrokerService(
        config_of(local_backend, "a", "b", on_stop="keep"), tmp_path, create_provider(local_backend), None
    )
    await first.start()

    async def made() -> bool:
        return sum(box.ready for box in first.boxes.live.values()) == 2

    await eventually(made, "the boxes are made")
    await first.aclose()
    backend = create_provider(local_backend)
    close, both = backend.close, asyncio.Barrier(2)

    async def close_both(handle: SandboxHandle) -> None:
        await both.wait()
        await close(handle)

    monkeypatch.setattr(backend, "close", close_both)
    second = BrokerService(config_of(local_backend, on_stop="destroy"), tmp_path, backend, None)
    try:
        async with asyncio.timeout(60):
            await second.start()
        assert not second.boxes.live
    finally:
        await both.abort()
        await second.aclose()


async def test_warm_box_is_kept_while_another_pool_waits_for_its_image(
    local_backend: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(creation, "_LEASE_S", 6.0)
    backend = create_provider(local_backend)
    create, pulled = backend.create, asyncio.Event()

    async def pulling(spec: SandboxSpec) -> SandboxHandle:
        if spec.env["KIND"] == "pulled":
            await pulled.wait()
        return await create(spec)

    monkeypatch.setattr(backend, "create", pulling)
    config = config_of(local_backend, "warm", "pulled", on_stop="destroy")
    broker = BrokerService(config, tmp_path / "state", backend, None)
    await broker.start()
    try:

        async def made() -> bool:
            return any(box.ready for box in broker.boxes.live.values())

        await eventually(made, "the box is made")
        (box,) = [box for box in broker.boxes.live.values() if box.ready]
        await asyncio.sleep(creation._LEASE_S + 2)
        assert box.ready
    finally:
        pulled.set()
        await broker.aclose()


async def test_create_cut_off_during_the_hand_over_finds_its_box_when_repeated(start_broker: StartBroker) -> None:
    broker = start_broker(warm=[{**WARM, "size": 1}])
    async with calling(broker) as api:
        (warm,) = await filled(api, 1)
        with writes_held_back(broker):
            cut = asyncio.create_task(api.create("key", spec=SPEC, labels={"of": "me"}))
            await asyncio.sleep(1)
            cut.cancel()
            await asyncio.wait({cut})
            await asyncio.sleep(1)
        made = await api.create("key", spec=SPEC, labels={"of": "me"})
        assert made.json["sandbox"]["labels"] == {"of": "me"}
        assert await api.ids(of="me") == [warm]


async def test_create_undone_during_the_hand_over_leaves_no_box(start_broker: StartBroker) -> None:
    broker = start_broker(warm=[{**WARM, "size": 1}])
    async with calling(broker) as api:
        (warm,) = await filled(api, 1)
        with writes_held_back(broker):
            made = asyncio.create_task(api.create("key", spec=SPEC))
            await asyncio.sleep(1)
            undone = asyncio.create_task(api.call("DELETE", "/v1/sandboxes?idempotency_key=key"))
            await asyncio.sleep(1)
        assert (await undone).json["reaped"] == [warm]
        await made
        assert (await api.create("key", spec=SPEC)).code == "sandbox_gone"
        assert warm not in await api.ids()


async def test_key_of_a_failed_create_gets_a_warm_box(start_broker: StartBroker) -> None:
    broker = start_broker(warm=[{**WARM, "size": 1}])
    async with calling(broker) as api:
        await filled(api, 1)
        first = await api.create("key", spec=SPEC)
        await api.call("DELETE", f"/v1/sandboxes/{first.json['sandbox']['sandbox_id']}")
        with closing(sqlite3.connect(broker.state_dir / "broker.sqlite")) as database, database:
            database.execute("UPDATE broker_boxes SET reason = 'create_failed' WHERE idempotency_key = 'key'")
        (warm,) = await filled(api, 1)
        again = await api.create("key", spec=SPEC)
        assert (again.status, again.json["sandbox"]["sandbox_id"]) == (201, warm)


async def test_concurrent_creates_get_no_more_warm_boxes_than_their_owner_may_have(start_broker: StartBroker) -> None:
    broker = start_broker(warm=[WARM], max_boxes_per_owner=1, queue_timeout_s=1)
    async with calling(broker) as api:
        await filled(api)
        answers = await asyncio.gather(*(api.create(spec=SPEC) for _ in range(2)))
        assert sorted(answer.status for answer in answers) == [201, 429]


async def test_warm_boxes_give_way_when_their_places_are_wanted(start_broker: StartBroker) -> None:
    broker = start_broker(warm=[WARM], max_boxes=2, queue_timeout_s=60)
    async with calling(broker) as api:
        await filled(api)
        boxes = [await api.box(spec={"env": {"n": str(n)}}) for n in range(2)]
        assert len({box.sandbox_id for box in boxes}) == 2
        assert len(await api.ids()) == 2
        await boxes[0].ask("DELETE")
        await filled(api, 1)


async def test_prefetched_image_leaves_no_box_and_a_missing_one_no_broken_broker(start_broker: StartBroker) -> None:
    broker = start_broker(prefetch=["host", "no-such-image"])
    async with calling(broker) as api:

        async def tried() -> bool:
            return b"image_not_fetched" in broker.log.read_bytes() and await api.ids() == []

        await eventually(tried, "both images were tried")
        await api.box()
