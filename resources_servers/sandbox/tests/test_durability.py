"""What the registry's transactions outlive, and for what they wait."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Connection

from nemo_gym.broker import registry
from nemo_gym.broker.registry import (
    BoxRecord,
    BoxState,
    Durability,
    ExecRecord,
    ImageRecord,
    LeaseRecord,
    RegistryWriter,
    open_engine,
)
from nemo_gym.broker.stores import BoxStore, ExecStore, ImageStore
from nemo_gym.contract.credentials import Role
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.session import LeaseScope
from resources_servers.sandbox.tests.postgres import PostgresServer, running_postgres

ON_DISK = {"sqlite": ("PRAGMA synchronous", 2), "postgresql": ("SHOW synchronous_commit", "on")}
"""How a transaction is asked, and what it says when its commit waits for the disk."""


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'registry.sqlite'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()


@asynccontextmanager
async def writing(url: str) -> AsyncIterator[RegistryWriter]:
    writer = RegistryWriter(open_engine(url))
    try:
        yield writer
    finally:
        await writer.aclose()


def waits_for_disk(connection: Connection) -> bool:
    asked, said = ON_DISK[connection.dialect.name]
    return bool(connection.exec_driver_sql(asked).scalar() == said)


async def in_one_transaction(
    writer: RegistryWriter, *asked: tuple[Callable[[Connection], bool], Durability]
) -> list[bool]:
    """Outcomes of operations that waited while the writer had another to do."""
    entered, leave = threading.Event(), threading.Event()

    def long(_: Connection) -> None:
        entered.set()
        assert leave.wait(30)

    first = writer.call(long)  # durable, so it is the writer that is busy
    assert await asyncio.to_thread(entered.wait, 30)
    others = [writer.call(operation, durability) for operation, durability in asked]
    leave.set()
    await first
    return [*await asyncio.gather(*others)]


async def test_transaction_waits_for_disk_unless_all_in_it_outlive_the_process_only(url: str) -> None:
    process, machine = (waits_for_disk, Durability.PROCESS), (waits_for_disk, Durability.MACHINE)
    async with writing(url) as writer:
        assert await writer.call(waits_for_disk) is True
        assert await in_one_transaction(writer, process, process) == [False, False]
        assert await in_one_transaction(writer, process, machine, process) == [True, True, True]
        assert await writer.call(waits_for_disk, Durability.PROCESS) is False
        assert await writer.call(waits_for_disk) is True


@pytest.mark.parametrize("durability", Durability)
async def test_exec_records_are_written_as_durably_as_configured(
    url: str, durability: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Durability] = []
    call = RegistryWriter.call

    def noted(self: RegistryWriter, operation: Callable[[Connection], object], wanted: Durability) -> object:
        asked.append(wanted)
        return call(self, operation, wanted)

    monkeypatch.setattr(RegistryWriter, "call", noted)
    async with writing(url) as writer:
        store = ExecStore(writer, durability)
        assert await store.insert(ExecRecord("box", "exec", b"digest", 1.0)) is None
        await store.end(ExecRecord("box", "exec", b"digest", 1.0, b"{}"))
        found = await store.find("box", "exec")
    assert found is not None
    assert found.end == b"{}"
    assert asked == [durability] * 3


async def test_end_is_written_once_also_when_the_database_forgot_the_intent(url: str) -> None:
    async with writing(url) as writer:
        store = ExecStore(writer)
        ended = ExecRecord("box", "exec", b"digest", 1.0, b"first")
        await store.end(ended)
        await store.end(replace(ended, end=b"second"))
        assert await store.find("box", "exec") == ended
        known = await store.insert(ExecRecord("box", "exec", b"digest", 1.0))
        assert known == ended


async def test_exec_records_need_no_other_thread_when_the_registry_is_a_file_that_nobody_waits_for(url: str) -> None:
    async with writing(url) as writer:
        threads = [await writer.call(_thread, durability) for durability in (Durability.MACHINE, Durability.PROCESS)]
    writers, here = threads[0], threading.get_ident()
    assert writers != here
    assert threads[1] == (here if url.startswith("sqlite") else writers)


def _append(ran: list[int], number: int, _: Connection) -> None:
    ran.append(number)


async def test_operations_are_run_in_order_whoever_runs_them(url: str) -> None:
    ran: list[int] = []
    async with writing(url) as writer:
        for number in range(300):
            durability = Durability.MACHINE if number % 7 == 0 else Durability.PROCESS
            call = writer.call(partial(_append, ran, number), durability)
            if number % 11 == 0:
                await call
        await call
    assert ran == [*range(300)]


async def test_exec_record_waits_beside_the_loop_for_another_program_that_writes(tmp_path: Path) -> None:
    async with writing(f"sqlite:///{tmp_path / 'registry.sqlite'}") as writer:
        store = ExecStore(writer)
        assert await store.insert(ExecRecord("box", "first", b"digest", 1.0)) is None
        with closing(sqlite3.connect(tmp_path / "registry.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            inserting = asyncio.ensure_future(store.insert(ExecRecord("box", "second", b"digest", 1.0)))
            await asyncio.sleep(0)  # here it would stand still if it waited on the loop
            assert not inserting.done()
            other.execute("COMMIT")
        assert await inserting is None
        assert await store.find("box", "second") is not None


async def test_log_of_the_registry_stays_short_however_many_commands_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_CHECKPOINT_PAGES", 20)
    monkeypatch.setattr(registry, "MAX_AT_ONCE", 50)
    async with writing(f"sqlite:///{tmp_path / 'registry.sqlite'}") as writer:
        store = ExecStore(writer)
        for number in range(1000):
            await store.insert(ExecRecord("box", f"exec-{number}", b"digest", 1.0))
        # Each commit writes a page of 4 KiB or more.
        assert (tmp_path / "registry.sqlite-wal").stat().st_size < 1000 * 4096


def _thread(_: Connection) -> int:
    return threading.get_ident()


# -- databases of earlier releases -----------------------------------------------------------------------------------


def as_of_version_1(connection: Connection) -> None:
    """What a broker of the release before images had owners left."""
    connection.exec_driver_sql("DROP TABLE broker_images")
    connection.exec_driver_sql("ALTER TABLE broker_boxes DROP COLUMN creator_role")
    connection.exec_driver_sql("UPDATE broker_meta SET value = '1' WHERE key = 'schema_version'")


def a_box() -> tuple[BoxRecord, LeaseRecord]:
    box = BoxRecord("sb-1", "world", "world", "k", b"d", BoxState.RUNNING, 1.0, 60.0, 2.0, b"sealed")
    return box, LeaseRecord("le-1", "sb-1", LeaseScope.OWNER, 1)


async def test_registry_of_an_earlier_release_is_brought_up_to_date_and_keeps_its_boxes(url: str) -> None:
    async with writing(url) as writer:
        await BoxStore(writer, "one").insert(*a_box(), {})
        await writer.call(as_of_version_1)
    async with writing(url) as first, writing(url) as second:
        # Of two brokers that start at once, one changes the tables and both go on.
        stores = [BoxStore(first, "one"), BoxStore(second, "one")]
        for found in await asyncio.gather(*(store.find("sb-1") for store in stores)):
            assert found is not None
            assert (found.creator, found.creator_role) == ("world", None)
        (kept,) = await stores[0].live()
        assert [lease.lease_id for lease in kept[1]] == ["le-1"]
        image = ImageRecord("evaluation", "world", Role.ENVIRONMENT, 3.0)
        await ImageStore(first, "one").claim(image)
        assert await ImageStore(second, "one").all() == [image]
        assert await ImageStore(second, "another").find("evaluation") is None
    async with writing(url) as writer:
        newer = replace(a_box()[0], sandbox_id="sb-2", idempotency_key="k2", creator_role=Role.AGENT)
        await BoxStore(writer, "one").insert(newer, replace(a_box()[1], lease_id="le-2", sandbox_id="sb-2"), {})
        assert await BoxStore(writer, "one").find("sb-2") == newer


async def test_registry_of_a_later_release_is_refused(url: str) -> None:
    async with writing(url) as writer:
        await BoxStore(writer, "one").ping()
        change = "UPDATE broker_meta SET value = '99' WHERE key = 'schema_version'"
        await writer.call(lambda connection: connection.exec_driver_sql(change) and None)
    async with writing(url) as writer:
        with pytest.raises(ConfigError, match="schema version 99"):
            await BoxStore(writer, "one").ping()
