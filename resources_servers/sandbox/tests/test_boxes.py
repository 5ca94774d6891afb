"""Create, list, look, renew, destroy, reap: over HTTP, with real boxes."""

from __future__ import annotations

import asyncio
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.broker.box import CreateOrder
from nemo_gym.broker.config import BrokerConfig
from nemo_gym.broker.service import BrokerService
from nemo_gym.contract.credentials import Role
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.sandbox.base import SandboxHandle
from nemo_gym.sandbox.facade import create_provider
from nemo_gym.sandbox.wire.models import BoxSpec, CreateSandbox
from resources_servers.sandbox.tests.api import Api, calling, eventually
from resources_servers.sandbox.tests.broker_process import BrokerProcess
from resources_servers.sandbox.tests.conftest import StartBroker


async def test_create_gives_a_ready_box_and_an_owner_lease(api: Api) -> None:
    answer = await api.create(labels={"a": "b"})
    assert answer.status == 201
    made = answer.json
    box, lease = made["sandbox"], made["lease"]
    assert answer.headers["Location"] == f"/v1/sandboxes/{box['sandbox_id']}"
    assert (box["state"], box["ready"], box["labels"], box["provider"]) == ("running", True, {"a": "b"}, "local")
    assert (lease["scope"], lease["epoch"]) == ("owner", 1)
    assert 60 < lease["ttl_s"] <= 120


async def test_repeated_create_gives_the_same_box_and_token_when_key_and_body_are_the_same(api: Api) -> None:
    key = uuid.uuid4().hex
    first, second = await asyncio.gather(api.create(key, labels={"k": key}), api.create(key, labels={"k": key}))
    third = await api.create(key, labels={"k": key})
    assert sorted([first.status, second.status]) == [200, 201]
    assert third.status == 200
    assert len({a.json["sandbox"]["sandbox_id"] for a in (first, second, third)}) == 1
    assert len({a.json["lease"]["token"] for a in (first, second, third)}) == 1
    assert len(await api.ids(k=key)) == 1


async def test_create_is_refused_when_the_key_was_used_for_another_body_or_is_missing(api: Api) -> None:
    key = uuid.uuid4().hex
    assert (await api.create(key)).status == 201
    other = await api.create(key, ttl_s=60)
    assert (other.status, other.code) == (422, "idempotency_key_reused")
    missing = await api.call("POST", "/v1/sandboxes", json={"spec": {}})
    assert (missing.status, missing.code) == (400, "idempotency_key_missing")


async def test_key_of_a_box_that_is_gone_makes_no_second_box(api: Api) -> None:
    key = uuid.uuid4().hex
    made = await api.create(key)
    assert (await api.call("DELETE", made.headers["Location"])).status == 204
    again = await api.create(key)
    assert (again.status, again.code) == (410, "sandbox_gone")


async def test_key_can_be_used_again_when_its_create_failed(api: Api) -> None:
    key = uuid.uuid4().hex
    failed = await api.create(key, spec={"image": "no-such-image"})
    assert (failed.code, failed.json["started"]) == ("sandbox_create", "no")
    assert "no-such-image" in failed.json["detail"]
    again = await api.create(key, spec={"image": "no-such-image"})
    assert again.code == "sandbox_create"
    assert (await api.create(key)).code == "idempotency_key_reused"


async def test_capability_that_the_backend_lacks_is_refused_before_anything_is_made(api: Api) -> None:
    answer = await api.create(spec={"requires": ["teleportation"]}, labels={"x": "teleport"})
    assert (answer.status, answer.code, answer.json["started"]) == (400, "sandbox_capability", "no")
    assert "teleportation" in answer.json["detail"]
    assert await api.ids(x="teleport") == []


async def test_create_taken_back_by_its_key_leaves_no_box_whether_done_under_way_or_still_to_come(api: Api) -> None:
    done, under_way, to_come = (uuid.uuid4().hex for _ in range(3))
    await api.create(done, labels={"t": done})
    taken = await api.call("DELETE", "/v1/sandboxes", params={"idempotency_key": done})
    assert len(taken.json["reaped"]) == 1
    creating = asyncio.create_task(api.create(under_way, labels={"t": under_way}))
    await asyncio.sleep(0.01)
    await api.call("DELETE", "/v1/sandboxes", params={"idempotency_key": under_way})
    await creating
    await api.call("DELETE", "/v1/sandboxes", params={"idempotency_key": to_come})
    late = await api.create(to_come, labels={"t": to_come})
    assert (late.status, late.code) == (410, "sandbox_gone")
    for key in (done, under_way, to_come):
        assert await api.ids(t=key) == []


async def test_list_pages_through_all_boxes_with_the_labels_in_order(api: Api) -> None:
    run = uuid.uuid4().hex
    made = [(await api.box(labels={"run": run, "odd": "a=b ü&"})).sandbox_id for _ in range(5)]
    await api.box(labels={"run": "another"})
    found: list[str] = []
    cursor: str | None = None
    while True:
        query = {"label": f"run={run}", "limit": "2", **({"cursor": cursor} if cursor else {})}
        page = (await api.call("GET", "/v1/sandboxes", params=query)).json
        assert len(page["sandboxes"]) <= 2
        found += [view["sandbox_id"] for view in page["sandboxes"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert found == made
    assert await api.ids(run=run, odd="a=b ü&") == made
    assert await api.ids(run=run, odd="c") == []


async def test_reap_destroys_boxes_with_all_the_labels_and_no_others(api: Api) -> None:
    run = uuid.uuid4().hex
    one, two = await api.box(labels={"run": run, "n": "1"}), await api.box(labels={"run": run, "n": "2"})
    query = [("label", f"run={run}"), ("label", "n=1")]
    assert (await api.call("DELETE", "/v1/sandboxes", params=query)).json == {"reaped": [one.sandbox_id]}
    assert (await api.call("DELETE", "/v1/sandboxes", params=query)).json == {"reaped": []}
    assert (await one.ask("GET")).json["termination_reason"] == "reaped"
    assert (await two.run("echo alive")).stdout == b"alive\n"
    assert (await api.call("DELETE", "/v1/sandboxes")).status == 422


async def test_caller_sees_and_reaps_its_own_boxes_only_unless_it_is_the_pipeline_or_an_operator(
    broker: BrokerProcess, api: Api
) -> None:
    run = uuid.uuid4().hex
    async with (
        calling(broker, "one", Role.ENVIRONMENT) as one,
        calling(broker, "two", Role.AGENT) as two,
        calling(broker, "runner", Role.PIPELINE) as pipeline,
    ):
        box = await one.box(labels={"run": run})
        assert await one.ids(run=run) == await pipeline.ids(run=run) == await api.ids(run=run) == [box.sandbox_id]
        assert await two.ids(run=run) == []
        for method in ("GET", "DELETE"):
            answer = await two.call(method, box.path)
            assert (answer.status, answer.code) == (404, "sandbox_not_found")
        assert (await two.call("DELETE", "/v1/sandboxes", params={"label": f"run={run}"})).json == {"reaped": []}
        assert (await one.call("GET", box.path)).json["ready"] is True
        assert (await pipeline.call("DELETE", "/v1/sandboxes", params={"label": f"run={run}"})).json == {
            "reaped": [box.sandbox_id]
        }


async def test_delete_is_idempotent_and_the_box_is_shown_as_gone_with_the_reason(api: Api) -> None:
    box = await api.box()
    assert [(await box.ask("DELETE")).status for _ in range(2)] == [204, 204]
    view = (await box.ask("GET")).json
    assert (view["state"], view["ready"], view["termination_reason"]) == ("stopped", False, "closed")
    for method, below, options in (
        ("PUT", "/lease", {"json": {"ttl_s": 10}}),
        ("PUT", "/execs/e", {"json": {"command": "true"}}),
        ("GET", "/archive?path=/etc", {}),
        ("GET", "/doors", {}),
    ):
        answer = await box.ask(method, below, **options)
        assert (answer.status, answer.code) == (410, "sandbox_gone")


async def test_box_is_destroyed_when_its_lease_ends_and_lives_on_when_it_is_renewed(api: Api) -> None:
    short, renewed = await asyncio.gather(api.box(ttl_s=2), api.box(ttl_s=2))
    until = time.monotonic() + 5
    while time.monotonic() < until:
        assert (await renewed.ask("PUT", "/lease", json={"ttl_s": 3})).status == 200
        await asyncio.sleep(0.3)

    async def gone() -> bool:
        return bool((await short.ask("GET")).json["termination_reason"] == "expired")

    await eventually(gone, "the box whose lease ended is gone")
    assert (await renewed.run("echo alive")).stdout == b"alive\n"
    answer = await renewed.ask("PUT", "/lease", json={"ttl_s": 500})
    assert 400 < answer.json["ttl_s"] <= 500


async def test_box_that_takes_longer_to_make_than_its_lease_is_made(
    local_backend: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = create_provider(local_backend)
    create, pulled = backend.create, asyncio.Event()

    async def pulling(spec: SandboxSpec) -> SandboxHandle:
        await pulled.wait()
        return await create(spec)

    monkeypatch.setattr(backend, "create", pulling)
    config = BrokerConfig(
        name="broker",
        entrypoint="app.py",
        host="localhost",
        port=1,
        sandbox_provider=local_backend,
        on_stop="destroy",
    )
    broker = BrokerService(config, tmp_path, backend, None)
    await broker.start()
    try:
        body = CreateSandbox(spec=BoxSpec(), ttl_s=60)
        order = CreateOrder("me", Role.OPERATOR, "me", "key", b"digest", 60.0, body)
        creating = asyncio.create_task(broker.creations.create(order))

        async def begun() -> bool:
            return any(box.creating is not None for box in broker.boxes.live.values())

        await eventually(begun, "the create to begin")
        (made,) = broker.boxes.live.values()
        made.deadline = 0.0  # as after a pull of an hour
        await asyncio.sleep(1)
        pulled.set()
        box, _ = await creating
        assert box.ready
        assert box.left_s > 30
    finally:
        pulled.set()
        await broker.aclose()


@pytest.mark.parametrize("ttl_s", [0, -1, 1e12, "NaN", None])
async def test_absurd_lease_is_refused(ttl_s: object, api: Api) -> None:
    box = await api.box()
    answer = await box.ask("PUT", "/lease", json={"ttl_s": ttl_s})
    assert (answer.status, answer.json["started"]) == (422, "no")
    assert "ttl_s" in answer.json["detail"]
    longest = await box.ask("PUT", "/lease", json={"ttl_s": 25 * 3600})
    assert (longest.status, longest.code) == (422, "ttl_too_long")


async def test_broker_told_to_stop_destroys_its_boxes_when_configured_so_and_keeps_them_otherwise(
    start_broker: StartBroker, local_backend: dict[str, object]
) -> None:
    inventory = create_provider(local_backend)
    try:
        for on_stop, left in (("destroy", 0), ("keep", 1)):
            run = uuid.uuid4().hex
            broker = start_broker(on_stop=on_stop)
            async with calling(broker) as api:
                await api.box(labels={"run": run})
            await asyncio.to_thread(broker.stop)
            assert len(await inventory.list({"run": run})) == left
            await inventory.reap({"run": run})
    finally:
        await inventory.aclose()


async def test_second_broker_on_one_state_directory_is_refused(broker: BrokerProcess, tmp_path: object) -> None:
    second = BrokerProcess(broker.state_dir, broker.config["broker_backend"])
    second.log = second.log.with_name("second.log")
    try:
        second.start(wait=False)
        await second.until_dead()
        assert "another broker runs on the state directory" in second.said()
    finally:
        second.close()
