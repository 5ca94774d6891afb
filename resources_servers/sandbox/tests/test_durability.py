"""What the registry's transactions outlive: each is as durable as the most demanding of what is written in it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Connection

from resources_servers.sandbox.registry.database import Durability, open_engine
from resources_servers.sandbox.registry.execs import ExecStore
from resources_servers.sandbox.registry.records import ExecRecord
from resources_servers.sandbox.registry.writer import GroupCommitWriter
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
async def writing(url: str) -> AsyncIterator[GroupCommitWriter]:
    writer = GroupCommitWriter(open_engine(url))
    try:
        yield writer
    finally:
        await writer.aclose()


def waits_for_disk(connection: Connection) -> bool:
    asked, said = ON_DISK[connection.dialect.name]
    return bool(connection.exec_driver_sql(asked).scalar() == said)


async def in_one_transaction(
    writer: GroupCommitWriter, *asked: tuple[Callable[[Connection], bool], Durability]
) -> list[bool]:
    """Outcomes of operations that waited while the writer had another to do."""
    entered, leave = threading.Event(), threading.Event()

    def long(_: Connection) -> None:
        entered.set()
        assert leave.wait(30)

    first = writer.call(long, Durability.PROCESS)
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
    call = GroupCommitWriter.call

    def noted(self: GroupCommitWriter, operation: Callable[[Connection], object], wanted: Durability) -> object:
        asked.append(wanted)
        return call(self, operation, wanted)

    monkeypatch.setattr(GroupCommitWriter, "call", noted)
    async with writing(url) as writer:
        store = ExecStore(writer, durability)
        assert await store.insert("box", "exec", b"digest") is None
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
        known = await store.insert("box", "exec", b"digest")
        assert known == ended
