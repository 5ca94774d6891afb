"""The registry and the backend made one again, whatever happened behind the broker's back."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sqlite3
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from nemo_gym.broker.backend import BROKER_LABEL, SANDBOX_LABEL
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.sandbox.base import SandboxStatus
from nemo_gym.sandbox.facade import create_provider
from resources_servers.sandbox.tests.api import LentBox, calling, eventually
from resources_servers.sandbox.tests.conftest import KILLING_PROGRAM, FailingBroker, StartBroker
from resources_servers.sandbox.tests.postgres import PostgresServer, running_postgres


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with running_postgres() as server:
        yield server


async def reason(box: LentBox) -> str | None:
    said: str | None = (await box.ask("GET")).json["termination_reason"]
    return said


async def test_box_that_vanished_is_written_off_and_its_command_is_lost(
    start_broker: StartBroker, local_backend: dict[str, Any]
) -> None:
    broker = start_broker(reconcile_interval_s=0.5)
    backend = create_provider(local_backend)
    try:
        async with calling(broker) as api:
            box = await api.box()
            exec_id, _ = await box.submit("sleep 600")
            await backend.reap({SANDBOX_LABEL: box.sandbox_id})
            assert (await box.output(exec_id)).end["outcome"] == "lost"

            async def written_off() -> bool:
                return await reason(box) == "lost" and await api.ids() == []

            await eventually(written_off, "the box is written off, and listed no more")
            assert (await box.ask("GET")).json["overrun"] is None
    finally:
        await backend.aclose()


@pytest.mark.parametrize("interval_s", [0.1, 600], ids=["reconciled", "asked"])
async def test_box_that_its_backend_ended_for_what_it_wrote_is_told_from_a_lost_one(
    start_broker: StartBroker, docker_engine: str, interval_s: float
) -> None:
    broker = start_broker({"docker": {"base_url": docker_engine}}, reconcile_interval_s=interval_s)
    async with calling(broker) as api:
        box = await api.box(spec={"resources": {"disk_gib": 0.05}})
        written = await box.run("head -c 200000000 /dev/zero > /var/big; sleep 600")
        assert written.end["outcome"] == "lost"
        view = (await box.ask("GET")).json
        assert (view["state"], view["termination_reason"]) == ("stopped", "overrun")
        assert "its limit disk_gib allows 53687091" in view["overrun"]
        assert await api.ids() == []
        broker.kill()
        broker.start()
        again = (await box.ask("GET")).json
        assert (again["termination_reason"], again["overrun"]) == ("overrun", view["overrun"])


async def test_box_without_a_record_is_reaped_and_another_brokers_is_not(
    start_broker: StartBroker, local_backend: dict[str, Any]
) -> None:
    broker = start_broker(reconcile_interval_s=0.5, identity="mine")
    backend = create_provider(local_backend)
    try:
        stray = SandboxSpec(ttl_s=60, metadata={BROKER_LABEL: "mine", SANDBOX_LABEL: "sb-stray"})
        other = SandboxSpec(ttl_s=60, metadata={BROKER_LABEL: "another", SANDBOX_LABEL: "sb-other"})
        await backend.create(stray)
        await backend.create(other)
        async with calling(broker) as api:
            await api.box()

            async def only_recorded() -> bool:
                listed = [info.labels[SANDBOX_LABEL] for info in await backend.list({BROKER_LABEL: "mine"})]
                return listed == await api.ids()

            await eventually(only_recorded, "the box without a record is gone")
        assert len(await backend.list({BROKER_LABEL: "another"})) == 1
    finally:
        await backend.reap({BROKER_LABEL: "another"})
        await backend.aclose()


async def test_box_whose_lease_ended_while_the_broker_was_down_is_gone_with_the_reason(
    start_broker: StartBroker, local_backend: dict[str, Any]
) -> None:
    broker = start_broker()
    async with calling(broker) as api:
        box, lasting = await api.box(ttl_s=2), await api.box(ttl_s=200)
        broker.kill()
        await asyncio.sleep(3)
        broker.start()
        assert await reason(box) == "expired"
        assert (await lasting.run("echo alive")).stdout == b"alive\n"
        assert await api.ids() == [lasting.sandbox_id]


async def test_renewal_that_reached_the_registry_alone_reaches_the_backend_after_a_restart(
    start_broker: StartBroker, local_backend: dict[str, Any]
) -> None:
    broker = start_broker()
    async with calling(broker) as api:
        box = await api.box(ttl_s=12)
        broker.kill()
        with sqlite3.connect(broker.state_dir / "broker.sqlite") as database:
            database.execute("UPDATE broker_boxes SET ttl_s = 100, expires_at = ?", (time.time() + 100,))
        database.close()
        broker.start()
        await asyncio.sleep(12)
        assert (await box.run("echo alive")).stdout == b"alive\n"


async def test_clock_that_jumped_back_makes_no_lease_longer_than_it_was(start_broker: StartBroker) -> None:
    broker = start_broker()
    async with calling(broker) as api:
        box = await api.box(ttl_s=60)
        broker.kill()
        with sqlite3.connect(broker.state_dir / "broker.sqlite") as database:
            database.execute("UPDATE broker_boxes SET expires_at = ?", (time.time() + 10_000_000,))
        database.close()
        broker.start()
        assert (await box.ask("GET")).json["expires_at"] < time.time() + 61


async def test_boxes_of_another_stack_are_destroyed_when_their_seals_cannot_be_opened(
    start_broker: StartBroker, local_backend: dict[str, Any]
) -> None:
    broker = start_broker(identity="resealed")
    backend = create_provider(local_backend)
    try:
        async with calling(broker) as api:
            await api.box()
        broker.kill()
        broker.keys = type(broker.keys).generate()
        broker.start()
        async with calling(broker) as api:
            assert await api.ids() == []
        assert await backend.list({BROKER_LABEL: "resealed"}) == []
    finally:
        await backend.aclose()


async def test_broker_waits_for_a_backend_that_is_not_there_and_says_so(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker()
    broker.stop()
    broker.config["broker_backend"] = {"docker": {"base_url": f"unix://{tmp_path}/none.sock"}}
    broker.start(wait=False)
    async with calling(broker) as api:

        async def says_so() -> bool:
            answer = await api.ask("GET", "/readyz")
            return answer.status == 503 and "not reconciled" in answer.json["detail"]

        await eventually(says_so, "the broker says that it is not ready")
        assert (await api.ask("GET", "/healthz")).status == 200
        assert (await api.create()).status >= 500


async def test_output_of_a_box_that_is_not_taken_over_yet_is_to_be_asked_for_again(
    failing_broker: FailingBroker,
) -> None:
    broker, fail = failing_broker
    async with calling(broker) as api:
        box = await api.box()
        exec_id, _ = await box.submit("sleep 600")
        broker.kill()
        fail.write_text("list SandboxError")
        broker.start(wait=False)
        for answer in (await box.ask("GET", f"/execs/{exec_id}/output"), (await box.submit("true"))[1]):
            assert (answer.code, answer.json["started"]) == ("backend_unreachable", "no")
        fail.unlink()
        await asyncio.to_thread(broker.wait_ready)
        assert (await box.output(exec_id)).end["outcome"] == "lost"


async def test_box_that_its_client_asked_for_again_before_it_was_taken_over_keeps_its_commands(
    failing_broker: FailingBroker,
) -> None:
    broker, fail = failing_broker
    broker.kill()
    broker.env |= {"KILL_NAME": "after create", "KILL_STEP": "1"}
    broker.start()
    async with calling(broker) as api:
        with pytest.raises(aiohttp.ClientError):
            await api.create("key")
        await broker.until_dead()
        broker.env["KILL_STEP"] = "0"
        fail.write_text("list SandboxError")
        broker.start(wait=False)
        box = await api.box(key="key", status=200)
        exec_id, _ = await box.submit("sleep 3; echo done")
        fail.unlink()
        await asyncio.to_thread(broker.wait_ready)
        assert (await box.output(exec_id)).stdout == b"done\n"


async def test_database_that_goes_away_is_said_and_comes_back(
    start_broker: StartBroker, postgres: PostgresServer
) -> None:
    broker = start_broker(database_url=postgres.new_database())
    async with calling(broker) as api:
        key = uuid.uuid4().hex
        box = await api.box()
        exec_id, _ = await box.submit("sleep 1; echo done")
        postgres.stop()
        assert (await api.ask("GET", "/readyz")).status == 503
        refused = await api.create(key)
        assert (refused.status, refused.json["retryable"], refused.json["started"]) == (503, True, "unknown")
        await asyncio.sleep(1.5)
        postgres.start()
        # The end was not told before it was durable, and is now.
        assert (await box.output(exec_id)).stdout == b"done\n"
        assert (await api.create(key)).status == 201
        assert (await box.ask("DELETE")).status == 204


async def test_boxes_of_a_broker_that_started_without_its_database_live_on(
    start_broker: StartBroker, postgres: PostgresServer
) -> None:
    broker = start_broker(database_url=postgres.new_database())
    client = create_provider(broker.remote())
    try:
        async with calling(broker) as api:
            box = await client.create(SandboxSpec(ttl_s=120))
            broker.kill()
            postgres.stop()
            broker.start(wait=False)
            assert (await api.ask("GET", "/healthz")).status == 200
            for method, query in (("GET", ""), ("DELETE", "?label=of=me"), ("DELETE", "?idempotency_key=key")):
                assert (await api.call(method, f"/v1/sandboxes{query}")).code == "backend_unreachable"
            postgres.start()
            assert (await client.exec(box, "echo alive")).stdout == "alive\n"
            assert await client.status(box) is SandboxStatus.RUNNING
            await client.close(box)
            assert await api.ids() == []
    finally:
        await client.aclose()


async def test_box_that_only_the_registry_knows_is_gone_once_the_backend_was_asked_and_not_before(
    start_broker: StartBroker,
) -> None:
    broker = start_broker(reconcile_interval_s=600)
    async with calling(broker) as api:
        box = await api.box(key="key")
        assert (await box.ask("DELETE")).status == 204
        # As after a write that was reported as failed, but was committed.
        with sqlite3.connect(broker.state_dir / "broker.sqlite") as database:
            database.execute("UPDATE broker_boxes SET state = 'running', reason = NULL")
        database.close()
        _, submitted = await box.submit("true")
        for answer in (submitted, await box.ask("GET"), await box.ask("DELETE")):
            assert (answer.code, answer.json["started"]) == ("backend_unreachable", "no")
        again = await api.create("key")  # a client must not create a box at another broker instead
        assert (again.code, again.json["started"]) == ("backend_unreachable", "yes")
        broker.kill()
        broker.start()
        assert await reason(box) == "lost"
        assert (await api.create("key")).code == "sandbox_gone"


async def test_command_runs_once_on_postgresql_too_and_is_known_after_a_restart(
    start_broker: StartBroker, postgres: PostgresServer
) -> None:
    broker = start_broker(database_url=postgres.new_database())
    async with calling(broker) as api:
        box = await api.box()
        command = "echo x >> /tmp/runs"
        answers = await asyncio.gather(*(box.submit(command, "once") for _ in range(5)))
        assert sorted(answer.status for _, answer in answers) == [200] * 4 + [201]
        ended = await box.output("once")
        broker.kill()
        broker.start()
        assert (await box.submit(command, "once"))[1].json["state"] == "ended"
        assert await box.output("once") == ended
        assert (await box.run("wc -l < /tmp/runs")).stdout == b"1\n"


async def test_full_registry_disk_refuses_creates_and_keeps_serving(start_broker: StartBroker) -> None:
    broker = start_broker()
    async with calling(broker) as api:
        box = await api.box()
        assert (await box.run("echo one")).stdout == b"one\n"
        # The process may write no file beyond what it has.
        assert broker.process is not None
        size = (broker.state_dir / "broker.sqlite-wal").stat().st_size
        limits = resource.prlimit(broker.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(broker.process.pid, resource.RLIMIT_FSIZE, (size, limits[1]))
        refused = await api.create()
        assert (refused.status, refused.json["retryable"]) == (503, True)
        assert (await api.ask("GET", "/healthz")).status == 200
        resource.prlimit(broker.process.pid, resource.RLIMIT_FSIZE, limits)
        assert (await api.create()).status == 201
        assert (await box.run("echo two")).stdout == b"two\n"


async def test_commands_of_a_killed_broker_are_killed_in_docker_boxes_and_no_others(
    start_broker: StartBroker, docker_engine: str
) -> None:
    broker = start_broker({"docker": {"base_url": docker_engine}})
    async with calling(broker) as api:
        box = await api.box()
        assert (await box.run("(while :; do echo x >> /tmp/service; sleep 0.1; done >/dev/null 2>&1 &)")).end[
            "outcome"
        ] == "exited"
        exec_id, _ = await box.submit("while :; do echo x >> /tmp/ticks; sleep 0.1; done")

        async def ticks(name: str) -> int:
            return int((await box.run(f"wc -l < /tmp/{name} || echo 0")).stdout or b"0")

        async def began() -> bool:
            return await ticks("ticks") > 0

        await eventually(began, "the command began")
        assert broker.process is not None
        os.kill(broker.process.pid, signal.SIGKILL)
        broker.wait_dead()
        broker.start()
        assert (await box.output(exec_id)).end["outcome"] == "lost"
        before, service = await ticks("ticks"), await ticks("service")
        await asyncio.sleep(1)
        assert await ticks("ticks") == before
        assert await ticks("service") > service


def test_wrong_database_url_is_refused_by_name(start_broker: StartBroker) -> None:
    with pytest.raises(AssertionError, match="database_url"):
        start_broker(database_url="mysql://x/y")


async def test_box_whose_backend_failed_at_the_restart_is_taken_over_soon_after(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    fail = tmp_path / "fail"
    env = {"KILL_LOG": str(tmp_path / "boundaries"), "FAIL_FILE": str(fail)}
    broker = start_broker(program=(KILLING_PROGRAM,), env=env, reconcile_interval_s=600)
    async with calling(broker) as api:
        box = await api.box()
        broker.kill()
        fail.write_text("renew SandboxError")
        broker.start()
        assert not (await box.ask("GET")).json["ready"]
        fail.unlink()

        async def ready() -> bool:
            return bool((await box.ask("GET")).json["ready"])

        await eventually(ready, "the box is taken over")
        assert (await box.run("echo here")).stdout == b"here\n"
