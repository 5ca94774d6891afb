"""The log: groups, torn ends, damage, segments, a disk that fails."""

from __future__ import annotations

import asyncio
import os
import zlib
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaigns.faults.gateway_restart import small_disk
from nemo_gym.gateway.journal_log import (
    Durability,
    JournalBusyError,
    JournalDamagedError,
    JournalError,
    JournalFullError,
    JournalLog,
    framed,
    read_frames,
)


def frame(payload: bytes) -> bytes:
    return b"".join(framed((payload,)))


def opened(directory: Path, **options: int) -> tuple[JournalLog, list[bytes]]:
    records: list[bytes] = []
    log = JournalLog.open(directory, lambda _, payload, __: records.append(bytes(payload)), **options)  # type: ignore[arg-type]
    return log, records


async def written(directory: Path, *payloads: bytes, **options: int) -> None:
    log, _ = opened(directory, **options)
    await asyncio.gather(*(log.append(payload) for payload in payloads))
    await log.aclose()


async def contents(directory: Path) -> list[bytes]:
    log, records = opened(directory)
    await log.aclose()
    return records


async def test_records_come_back_in_order(tmp_path: Path) -> None:
    payloads = [os.urandom(size) for size in (0, 1, 100, 70_000)]
    await written(tmp_path, *payloads)
    await written(tmp_path, b"later")
    assert await contents(tmp_path) == [*payloads, b"later"]


async def test_many_appends_share_a_sync(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    await asyncio.gather(*(log.append(b"x") for _ in range(1000)))
    assert log.groups < 100
    await log.aclose()
    assert len(await contents(tmp_path)) == 1000


async def test_torn_end_is_cut_off_wherever_it_was_torn(tmp_path: Path) -> None:
    whole = frame(b"first") + frame(b"second")
    for cut in range(len(whole)):
        directory = tmp_path / str(cut)
        directory.mkdir()
        (directory / "00000001.log").write_bytes(whole[:cut])
        await written(directory, b"next")
        kept = [] if cut < len(frame(b"first")) else [b"first"]
        assert await contents(directory) == [*kept, b"next"]


@pytest.mark.parametrize("position", [0, 4, 8, 12, 16])
async def test_damage_before_a_whole_record_is_an_error_and_not_a_torn_end(tmp_path: Path, position: int) -> None:
    await written(tmp_path, b"first", b"second", b"third")
    path = tmp_path / "00000001.log"
    data = bytearray(path.read_bytes())
    data[len(frame(b"first")) + position] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(JournalDamagedError, match=r"00000001\.log is damaged at byte 17"):
        opened(tmp_path)
    assert path.read_bytes() == data, "nothing was cut off"


async def test_torn_end_of_an_earlier_segment_is_damage(tmp_path: Path) -> None:
    await written(tmp_path, b"a" * 100, b"b" * 100, segment_bytes=120)
    path = tmp_path / "00000001.log"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(JournalDamagedError):
        opened(tmp_path)


async def test_second_process_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    with pytest.raises(JournalBusyError, match="a directory of its own"):
        opened(tmp_path)
    await log.aclose()
    again, _ = opened(tmp_path)
    await again.aclose()


async def test_segments_roll_and_only_the_oldest_may_be_dropped(tmp_path: Path) -> None:
    log, _ = opened(tmp_path, segment_bytes=300)
    for number in range(9):
        await log.append(bytes([number]) * 100)
    assert log.segments() == [1, 2, 3, 4, 5]
    log.drop_segment(2)
    log.drop_segment(5)
    assert log.segments() == [1, 2, 3, 4, 5]
    log.drop_segment(1)
    await log.aclose()
    assert [record[0] for record in await contents(tmp_path)] == [2, 3, 4, 5, 6, 7, 8]


async def test_failed_write_ends_the_log_for_good(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    await log.append(b"kept")
    unwritable = os.open("/dev/null", os.O_RDONLY)
    os.dup2(unwritable, log._file)
    os.close(unwritable)
    undone: list[int] = []
    for number in range(3):
        with pytest.raises(JournalError, match="cannot be written"):
            await log.append(b"lost", undo=partial(undone.append, number))
    assert log.refusal is not None and not isinstance(log.refusal, JournalFullError)
    await log.aclose()
    with pytest.raises(JournalError, match="cannot be written"):
        await log.append(b"later", undo=partial(undone.append, 3))
    assert undone == [0, 1, 2, 3]
    assert await contents(tmp_path) == [b"kept"]


@pytest.mark.parametrize("durability", ["process", "power_loss"])
async def test_full_disk_fails_what_does_not_fit_and_is_gone_on_with_once_there_is_room(
    tmp_path: Path, durability: Durability
) -> None:
    with small_disk(tmp_path / "disk", "256k") as resize:
        log = JournalLog.open(tmp_path / "disk", lambda *_: None, durability=durability, segment_bytes=100_000)
        kept, number = [], 0
        with pytest.raises(JournalFullError, match="is full"):
            for number in range(100):
                kept.append(b"%d" % number * 5000)
                await log.append(kept[-1])
        kept.pop()
        assert number > 10
        assert isinstance(log.refusal, JournalFullError)
        undone: list[int] = []
        outcomes = await asyncio.gather(
            *(log.append(bytes(200_000), undo=partial(undone.append, at)) for at in range(3)), return_exceptions=True
        )
        assert all(isinstance(outcome, JournalFullError) for outcome in outcomes)
        if durability == "power_loss":
            assert undone == [2, 1, 0]  # together, the latest first
        resize("2m")
        assert log.refusal is None
        for payload in (b"after", b"x" * 90_000, b"y" * 90_000):
            path, start = log.place
            await log.append(payload)
            kept.append(payload)
            assert log.place[0] != path or log.place[1] > start
        assert log.place[0].stat().st_size == log.place[1]
        await log.aclose()
        assert await contents(tmp_path / "disk") == kept


async def test_what_was_appended_after_a_record_that_does_not_fit_fails_with_it(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "128k") as resize:
        log, _ = opened(tmp_path / "disk")
        await log.append(b"first")
        outcomes = await asyncio.gather(
            *(log.append(payload) for payload in (bytes(500_000), b"on a hole", b"on a hole")), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [JournalFullError] * 3
        await log.append(b"small enough")
        resize("1m")
        await log.append(bytes(500_000))
        await log.aclose()
        assert await contents(tmp_path / "disk") == [b"first", b"small enough", bytes(500_000)]


async def test_closed_log_refuses_and_has_written_everything_before(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    pending = [log.append(b"x") for _ in range(50)]
    await log.aclose()
    await asyncio.gather(*pending)
    with pytest.raises(JournalError, match="closed"):
        await log.append(b"y")
    assert len(await contents(tmp_path)) == 50


async def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    await written(directory, b"x")
    assert directory.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in directory.iterdir())


@given(pieces=st.lists(st.binary(max_size=70), max_size=5))
def test_checksums_are_those_of_zlib_so_that_any_build_reads_the_journal(pieces: list[bytes]) -> None:
    head = framed(pieces)[0]
    assert int.from_bytes(bytes(head)[8:12], "little") == zlib.crc32(b"".join(pieces))
    assert read_frames(b"".join(framed(pieces))).payloads == [b"".join(pieces)]
