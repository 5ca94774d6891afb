"""What each lease may do, and what takes it back."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from nemo_gym.contract.credentials import Role, StackKeys
from resources_servers.sandbox.tests.api import Api, LentBox, calling, eventually
from resources_servers.sandbox.tests.broker_process import INSTANCE, BrokerProcess
from resources_servers.sandbox.tests.conftest import StartBroker

Call = tuple[str, str, dict[str, Any]]

OWNERS: list[Call] = [
    ("PUT", "/lease", {"json": {"ttl_s": 60}}),
    ("POST", "/leases", {"json": {"scope": "read"}}),
    ("DELETE", "/leases/le-x", {}),
    ("DELETE", "/leases", {}),
    ("POST", "/images", {"json": {"image": "x"}}),
    ("DELETE", "", {}),
]
OPERATORS: list[Call] = [
    ("PUT", "/execs/e-1", {"json": {"command": "true"}}),
    ("PUT", "/execs/e-1/stdin", {"data": b"x", "headers": {"Content-Type": "application/octet-stream"}}),
    ("POST", "/execs/e-1/signal", {"json": {"signal": 9}}),
    ("PUT", "/archive?path=/srv", {"data": b"x", "headers": {"Content-Type": "application/x-tar"}}),
    ("PUT", "/doors/d", {"json": {"name": "d", "port": 1, "target": "http://127.0.0.1:9", "allow": ["GET /"]}}),
    ("DELETE", "/doors/d", {}),
]
READERS: list[Call] = [
    ("GET", "", {}),
    ("GET", "/execs/e-1", {}),
    ("GET", "/execs/e-1/output", {}),
    ("GET", "/archive?path=/etc/hosts", {}),
    ("GET", "/archive/failure?request_id=x", {}),
    ("GET", "/doors", {}),
]


async def refused(box: LentBox, routes: list[Call], status: int, code: str) -> None:
    for method, below, options in routes:
        answer = await box.ask(method, below, **options)
        assert (answer.status, answer.code) == (status, code), (method, below, answer.body)
        assert answer.json["started"] == "no"


async def test_each_scope_may_do_what_it_is_for_and_nothing_beyond(api: Api) -> None:
    owner = await api.box()
    operator, reader = await owner.mint("operate"), await owner.mint("read")
    assert (
        await operator.run(
            "echo works",
        )
    ).stdout == b"works\n"
    assert (await reader.ask("GET")).json["ready"] is True
    await refused(operator, OWNERS, 403, "scope")
    await refused(reader, [*OWNERS, *OPERATORS], 403, "scope")
    assert (await owner.run("echo alive")).stdout == b"alive\n"


@pytest.mark.parametrize("scope", ["owner", "operate", "read"])
async def test_minting_only_narrows(scope: str, api: Api) -> None:
    owner = await api.box()
    answer = await owner.ask("POST", "/leases", json={"scope": scope})
    if scope == "owner":
        assert (answer.status, answer.code) == (403, "scope")
        return
    lent = LentBox(api, owner.sandbox_id, answer.json["token"], answer.json)
    for wanted in ("owner", "operate", "read"):
        assert (await lent.ask("POST", "/leases", json={"scope": wanted})).code == "scope"


async def test_token_that_was_forged_or_is_for_another_box_is_refused_on_every_route(
    broker: BrokerProcess, api: Api
) -> None:
    mine, other = await api.box(), await api.box()
    every = [*OWNERS, *OPERATORS, *READERS]
    kind, sandbox_id, lease_id, scope, mac = mine.token.split(".")
    read = await mine.mint("read")
    _, _, read_id, _, read_mac = read.token.split(".")
    forged = {
        "changed mac": f"{kind}.{sandbox_id}.{lease_id}.{scope}.{mac.swapcase()}",
        "upgraded scope": f"{kind}.{sandbox_id}.{read_id}.owner.{read_mac}",
        "another lease": f"{kind}.{sandbox_id}.{lease_id[:-1]}{'10'[lease_id[-1] == '1']}.{scope}.{mac}",
        "nothing": "",
        "not a token": "x" * 200,
        "caller of another stack": StackKeys.generate().caller(Role.OPERATOR, "tests", INSTANCE),
        "caller's credential": broker.credential(),
    }
    for what, token in forged.items():
        routes = [
            route for route in every if what != "caller's credential" or route[:2] not in (("DELETE", ""), ("GET", ""))
        ]
        await refused(LentBox(api, mine.sandbox_id, token, {}), routes, 401, "unauthenticated")
    moved = f"{kind}.{other.sandbox_id}.{lease_id}.{scope}.{mac}"
    await refused(LentBox(api, other.sandbox_id, moved, {}), every, 401, "unauthenticated")
    await refused(LentBox(api, other.sandbox_id, mine.token, {}), every, 404, "sandbox_not_found")
    assert (await mine.run("echo alive")).stdout == b"alive\n"


async def test_caller_routes_refuse_lease_tokens_and_strangers(api: Api) -> None:
    box = await api.box()
    for method, path in (
        ("POST", "/v1/sandboxes"),
        ("GET", "/v1/sandboxes"),
        ("DELETE", "/v1/sandboxes?label=a=b"),
        ("GET", "/v1/images/x"),
        ("DELETE", "/v1/images/x"),
        ("GET", "/metrics"),
    ):
        for token in (box.token, "ngc1.operator.me.sandbox_broker.AAAA", ""):
            answer = await api.ask(method, path, headers={"Authorization": f"Bearer {token}"})
            assert (answer.status, answer.code) == (401, "unauthenticated"), (method, path)
    wrong = await api.ask("GET", "/v1/sandboxes", headers={"X-NeMo-Gym-Credential": "ngc1.operator.me.x.AAAA"})
    assert wrong.status == 401
    assert (await api.ask("GET", "/v1/capabilities", headers={"Authorization": f"Bearer {box.token}"})).status == 200


async def test_lease_that_was_taken_back_is_fenced_and_others_are_not(api: Api) -> None:
    owner = await api.box()
    one, two = await owner.mint("operate"), await owner.mint("operate")
    for _ in range(2):
        assert (await owner.ask("DELETE", f"/leases/{one.lease['lease_id']}")).status == 204
    await refused(one, [*OPERATORS, *READERS], 409, "fenced")
    assert (await two.run("echo works")).stdout == b"works\n"
    assert (await owner.ask("DELETE", f"/leases/{owner.lease['lease_id']}")).code == "scope"
    assert (await owner.ask("DELETE", "/leases/le-none")).code == "lease_not_found"


async def test_new_epoch_fences_every_borrower_and_not_the_owner(api: Api) -> None:
    owner = await api.box()
    operator, reader = await owner.mint("operate"), await owner.mint("read")
    assert (await owner.ask("DELETE", "/leases")).status == 204
    for old in (operator, reader):
        await refused(old, READERS, 409, "fenced")
    new = await owner.mint("operate")
    assert new.lease["epoch"] == 2
    assert (await owner.ask("GET")).json["epoch"] == 2
    assert (await new.run("echo works")).stdout == b"works\n"
    assert (await owner.ask("PUT", "/lease", json={"ttl_s": 60})).status == 200


async def test_commands_of_a_fenced_borrower_are_killed_and_its_streams_cut_and_the_owners_go_on(api: Api) -> None:
    owner = await api.box()
    borrower = await owner.mint("operate")
    theirs, _ = await borrower.submit("while :; do echo x >> /tmp/ticks; sleep 0.05; done")
    mine, _ = await owner.submit("sleep 2; echo mine")
    assert (await owner.ask("DELETE", f"/leases/{borrower.lease['lease_id']}")).status == 204
    assert (await owner.ask("GET", f"/execs/{theirs}")).json["end"]["outcome"] == "signaled"
    before = (await owner.run("wc -l < /tmp/ticks")).stdout
    assert (await owner.output(mine)).stdout == b"mine\n"
    assert (await owner.run("wc -l < /tmp/ticks")).stdout == before


@pytest.mark.parametrize("route", [call for call in OPERATORS if call[2]], ids=lambda call: f"{call[0]} {call[1]}")
async def test_lease_that_is_taken_back_while_a_body_arrives_does_nothing_any_more(route: Call, api: Api) -> None:
    method, below, options = route
    owner = await api.box()
    await owner.submit("cat", "e-2", stdin="attached")
    borrower = await owner.mint("operate")
    body = options.get("data") or orjson.dumps(options.get("json"))

    async def late() -> AsyncIterator[bytes]:
        # The body is asked for only after the lease was checked.
        assert (await owner.ask("DELETE", f"/leases/{borrower.lease['lease_id']}")).status == 204
        yield body

    headers = options.get("headers", {"Content-Type": "application/json"})
    below = below.replace("e-1/", "e-2/")
    answer = await borrower.ask(method, below, data=late(), headers=headers, expect100=True)
    assert (answer.status, answer.code) == (409, "fenced"), answer.body
    assert (await owner.ask("GET", "/doors")).json == {"doors": {}}
    assert (await owner.ask("GET", "/execs/e-1")).status == 404
    assert (await owner.ask("GET", "/execs/e-2")).json["state"] == "awaiting_stdin"


async def test_lease_with_an_end_of_its_own_expires_while_the_box_lives(api: Api) -> None:
    owner = await api.box()
    short = await owner.mint("operate", ttl_s=1)
    assert short.lease["ttl_s"] <= 1
    assert short.lease["expires_at"] <= time.time() + 1

    async def expired() -> bool:
        answer = await short.ask("GET")
        return answer.status == 401 and answer.code == "lease_expired"

    await eventually(expired, "the lease has ended")
    assert (await owner.run("echo alive")).stdout == b"alive\n"


async def test_leases_hold_after_a_restart_and_fenced_ones_stay_fenced(start_broker: StartBroker) -> None:
    broker = start_broker()
    async with calling(broker) as api:
        owner = await api.box()
        fenced, revoked = await owner.mint("operate"), await owner.mint("operate")
        await owner.ask("DELETE", f"/leases/{revoked.lease['lease_id']}")
        await owner.ask("DELETE", "/leases")
        kept = await owner.mint("operate")
        broker.kill()
        broker.start()
        await refused(fenced, READERS, 409, "fenced")
        await refused(revoked, READERS, 409, "fenced")
        assert (await kept.run("echo works")).stdout == b"works\n"
        assert (await owner.ask("PUT", "/lease", json={"ttl_s": 60})).status == 200


async def test_configured_token_is_a_caller_that_sees_its_own_boxes(start_broker: StartBroker) -> None:
    broker = start_broker(caller_tokens={"trainer": "ngl1-s3cret-trainer", "other": "ngl1-s3cret-other"})
    async with calling(broker) as api:
        key = {"Idempotency-Key": uuid.uuid4().hex}
        trainer, other = ({"Authorization": f"Bearer ngl1-s3cret-{name}"} for name in ("trainer", "other"))
        made = await api.ask("POST", "/v1/sandboxes", json={"spec": {}}, headers={**trainer, **key})
        assert made.status == 201
        assert len((await api.ask("GET", "/v1/sandboxes", headers=trainer)).json["sandboxes"]) == 1
        assert (await api.ask("GET", "/v1/sandboxes", headers=other)).json["sandboxes"] == []
        view = f"/v1/sandboxes/{made.json['sandbox']['sandbox_id']}"
        assert [(await api.ask("GET", view, headers=headers)).status for headers in (trainer, other)] == [200, 404]
        assert (await api.ask("GET", "/v1/sandboxes", headers={"Authorization": "Bearer no"})).status == 401
