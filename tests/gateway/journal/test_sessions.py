"""Sessions over restarts: states, turns, deadlines, forgetting."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from campaigns.faults.gateway_restart import small_disk
from nemo_gym.contract.errors import ContractError, FencedError
from nemo_gym.gateway.journal import JournaledBody, ReplayedSession, SessionJournal, SessionRecord, SessionState
from nemo_gym.gateway.journal_log import JournalDamagedError, JournalError, JournalFullError


def record(session_id: str, deadline_at: float = 5000.0) -> SessionRecord:
    return SessionRecord(
        session_id, {"rollout_id": f"r-{session_id}", "attempt": 1}, "idig", "cdig", 1000.0, deadline_at, {"top_k": 5}
    )


@asynccontextmanager
async def life(
    directory: Path, segment_bytes: int = 2**20
) -> AsyncIterator[tuple[SessionJournal, dict[str, ReplayedSession]]]:
    """The journal from a start to a clean end; what a kill leaves is tested with real processes."""
    journal, replayed = SessionJournal.open(directory, segment_bytes=segment_bytes)
    try:
        yield journal, {session.record.session_id: session for session in replayed}
    finally:
        await journal.aclose()


async def test_open_session_comes_back_with_its_turns(tmp_path: Path) -> None:
    async with life(tmp_path) as (journal, _):
        await journal.opened(record("a"))
        for index in range(3):
            assert (await journal.commit_turn("a", bytes([index, 10, 255]), fingerprint=f"f{index}", key="k"))[
                0
            ] == index
        journal.sent("a", 0)
    async with life(tmp_path) as (journal, sessions):
        found = sessions["a"]
        assert found.record == record("a") and found.state is SessionState.OPEN
        assert [(turn.body, turn.fingerprint, turn.key, turn.sent) for turn in found.turns] == [
            (b"\x00\n\xff", "f0", "k", True),
            (b"\x01\n\xff", "f1", "k", False),
            (b"\x02\n\xff", "f2", "k", False),
        ]
        assert (await journal.commit_turn("a", b"more", fingerprint="f3"))[0] == 3


async def test_bodies_are_read_again_where_the_journal_says_in_any_segment(tmp_path: Path) -> None:
    kept: list[JournaledBody] = []
    bodies = [bytes([number]) * 300 for number in range(12)]
    for start in (0, 6):
        async with life(tmp_path, segment_bytes=1000) as (journal, _):
            if not start:
                await journal.opened(record("a"))
            for number in range(start, start + 6):
                pieces = [bodies[number][:100], memoryview(bodies[number])[100:]]
                _, body = await journal.commit_turn("a", pieces, fingerprint=f"f{number}")
                kept.append(body)
                assert kept[-1].read(0, 300) == bodies[number]
    assert len({body.path for body in kept}) > 3
    assert [body.read(90, 20) for body in kept] == [body[90:110] for body in bodies]
    with pytest.raises(JournalError, match="cut off"):
        kept[-1].read(200, 101)
    kept[0].path.unlink()
    with pytest.raises(JournalError, match="cannot be read"):
        kept[0].read(0, 1)


async def test_finalize_answers_the_same_ever_after(tmp_path: Path) -> None:
    async with life(tmp_path) as (journal, _):
        await journal.opened(record("a"))
        assert await journal.finalize("a", b"first") == b"first"
        assert await journal.finalize("a", b"second") == b"first"
    async with life(tmp_path) as (journal, sessions):
        assert (sessions["a"].state, sessions["a"].result) == (SessionState.FINALIZED, b"first")
        assert await journal.finalize("a", b"third") == b"first"


@pytest.mark.parametrize(
    ("steps", "allowed"),
    [
        (["complete", "finalize"], True),
        (["complete", "complete", "abort", "abort"], True),
        (["finalize", "finalize"], True),
        (["finalize", "abort"], False),
        (["finalize", "complete"], False),
        (["abort", "finalize"], False),
        (["abort", "complete"], False),
    ],
)
@pytest.mark.parametrize("restart", [False, True])
async def test_first_end_of_a_session_is_final(tmp_path: Path, steps: list[str], allowed: bool, restart: bool) -> None:
    async def take(journal: SessionJournal, name: str) -> None:
        if name == "finalize":
            await journal.finalize("a", b"{}")
        elif name == "abort":
            await journal.abort("a", "said so")
        else:
            await journal.complete("a", b'{"reward": 1}')

    async with life(tmp_path) as (journal, _):
        await journal.opened(record("a"))
        for name in steps[:-1]:
            await take(journal, name)
        if not restart and allowed:
            await take(journal, steps[-1])
        elif not restart:
            with pytest.raises(FencedError, match="'a'"):
                await take(journal, steps[-1])
    if restart:
        async with life(tmp_path) as (journal, _):
            if allowed:
                await take(journal, steps[-1])
            else:
                with pytest.raises(FencedError, match="'a'"):
                    await take(journal, steps[-1])


@pytest.mark.parametrize("end", ["complete", "finalize", "abort"])
async def test_ended_session_takes_no_turn(tmp_path: Path, end: str) -> None:
    async with life(tmp_path) as (journal, _):
        await journal.opened(record("a"))
        await {
            "complete": lambda: journal.complete("a"),
            "finalize": lambda: journal.finalize("a", b"x"),
            "abort": lambda: journal.abort("a", "x"),
        }[end]()
        with pytest.raises(FencedError):
            await journal.commit_turn("a", b"late", fingerprint="f")
        assert journal.turns("a") == 0


async def test_completed_session_keeps_its_reward_info_for_its_owner(tmp_path: Path) -> None:
    async with life(tmp_path) as (journal, _):
        await journal.opened(record("a"))
        await journal.complete("a", b'{"reward": 0.5}')
    async with life(tmp_path) as (_, sessions):
        assert (sessions["a"].state, sessions["a"].result) == (SessionState.COMPLETE, b'{"reward": 0.5}')


async def test_turn_stays_committed_when_its_caller_stops_waiting(tmp_path: Path) -> None:
    async with life(tmp_path) as (journal, _):
        await journal.opened(record("a"))
        waiting = asyncio.create_task(journal.commit_turn("a", b"kept", fingerprint="f"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await journal.commit_turn("a", b"next", fingerprint="g"))[0] == 1
    async with life(tmp_path) as (_, sessions):
        assert [turn.body for turn in sessions["a"].turns] == [b"kept", b"next"]


async def test_turns_of_many_sessions_at_once_keep_their_order(tmp_path: Path) -> None:
    async with life(tmp_path, segment_bytes=4096) as (journal, _):
        names = [f"s{number}" for number in range(20)]
        await asyncio.gather(*(journal.opened(record(name)) for name in names))
        await asyncio.gather(
            *(
                journal.commit_turn(name, f"{name}/{turn}".encode(), fingerprint="f")
                for turn in range(30)
                for name in names
            )
        )
        assert journal.log.groups < 300
    async with life(tmp_path) as (_, sessions):
        for name in names:
            assert [turn.body.decode() for turn in sessions[name].turns] == [f"{name}/{turn}" for turn in range(30)]


async def write_whole(journal: SessionJournal, name: str) -> None:
    """Write a session with five turns, longer together than a segment of 1,000 bytes."""
    await journal.opened(record(name))
    for _ in range(5):
        await journal.commit_turn(name, b"x" * 200, fingerprint="f")
    await journal.finalize(name, b"{}")


async def test_forgotten_session_is_gone_and_its_segments_go_with_it(tmp_path: Path) -> None:
    async with life(tmp_path, segment_bytes=1000) as (journal, _):
        for number in range(20):
            await write_whole(journal, f"s{number}")
            if number != 7:
                await journal.forget(f"s{number}")
                await journal.forget(f"s{number}")
        kept = journal.log.segments()
        assert len(kept) > 10, "what came after the session that is still needed stays"
        with pytest.raises(ContractError):
            journal.state("s6")
    async with life(tmp_path, segment_bytes=1000) as (journal, sessions):
        assert list(sessions) == ["s7"] and len(sessions["s7"].turns) == 5
        await journal.forget("s7")
        assert len(journal.log.segments()) <= 2
    async with life(tmp_path) as (_, sessions):
        assert sessions == {}


async def test_segment_that_cannot_be_removed_is_removed_with_the_next_forgotten_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with life(tmp_path, segment_bytes=1000) as (journal, _):
        for number in range(4):
            await write_whole(journal, f"s{number}")
        for number in range(2):
            with monkeypatch.context() as patched:
                patched.setattr(Path, "unlink", failing)
                await journal.forget(f"s{number}")
        kept = len(journal.log.segments())
        await journal.forget("s2")
        assert len(journal.log.segments()) < kept


def failing(path: Path) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


async def test_any_start_finds_whole_sessions_whatever_was_dropped_before(tmp_path: Path) -> None:
    """Sessions overlap, so that segments are dropped while later ones still speak of the forgotten."""
    async with life(tmp_path, segment_bytes=700) as (journal, _):
        for number in range(12):
            await journal.opened(record(f"s{number}"))
            for other in range(max(0, number - 3), number + 1):
                await journal.commit_turn(f"s{other}", b"y" * 150, fingerprint="f")
            if number >= 3:
                await journal.forget(f"s{number - 3}")
    async with life(tmp_path, segment_bytes=700) as (_, sessions):
        assert {name: len(found.turns) for name, found in sessions.items()} == {"s9": 3, "s10": 2, "s11": 1}


async def test_missing_beginning_is_damage(tmp_path: Path) -> None:
    async with life(tmp_path, segment_bytes=300) as (journal, _):
        await journal.opened(record("a"))
        for _ in range(5):
            await journal.commit_turn("a", b"x" * 200, fingerprint="f")
    (tmp_path / "00000001.log").unlink()
    for _ in range(2):  # and the refused journal is not left locked
        with pytest.raises(JournalDamagedError, match="beginning of sessions"):
            SessionJournal.open(tmp_path)


async def test_turn_that_cannot_be_written_leaves_no_gap(tmp_path: Path) -> None:
    async with life(tmp_path) as (journal, _):
        await journal.opened(record("a"))
        with pytest.raises(TypeError):
            await journal.commit_turn("a", b"x", fingerprint=object())  # type: ignore[arg-type]
        assert (await journal.commit_turn("a", b"x", fingerprint="f"))[0] == 0
    async with life(tmp_path) as (_, sessions):
        assert len(sessions["a"].turns) == 1


async def test_steps_that_the_full_disk_did_not_take_can_be_made_again(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "128k") as resize:
        async with life(tmp_path / "disk") as (journal, _):
            for name in "abc":
                await journal.opened(record(name))
            await journal.commit_turn("a", b"kept", fingerprint="f")
            undone: list[str] = []
            with pytest.raises(JournalFullError):
                await journal.commit_turn("a", bytes(200_000), fingerprint="f", undo=lambda: undone.append("turn"))
            assert (journal.turns("a"), undone) == (1, ["turn"])
            filling = tmp_path / "disk" / "others"
            with pytest.raises(OSError, match="No space"), filling.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(512))
            room = journal.log.place[1] % 4096
            for step in (
                lambda: journal.finalize("a", bytes(4096 - room)),
                lambda: journal.abort("b", "x" * 4096),
                lambda: journal.opened(record("d" * 4096)),
            ):
                with pytest.raises(JournalFullError):
                    await step()
            assert (journal.state("a"), journal.state("b")) == (SessionState.OPEN, SessionState.OPEN)
            resize("1m")
            filling.unlink()
            assert (await journal.commit_turn("a", b"next", fingerprint="f"))[0] == 1
            await journal.finalize("a", b"result")
            await journal.opened(record("d" * 4096))
        async with life(tmp_path / "disk") as (_, sessions):
            assert [turn.body for turn in sessions["a"].turns] == [b"kept", b"next"]
            assert sessions["a"].result == b"result"
            assert sessions["b"].state is SessionState.OPEN
            assert "d" * 4096 in sessions


async def test_session_id_is_taken_once(tmp_path: Path) -> None:
    async with life(tmp_path) as (journal, _):
        await journal.opened(record("a"))
        with pytest.raises(ContractError, match="'a' already"):
            await journal.opened(record("a"))
        with pytest.raises(ContractError, match="'b' is not known"):
            await journal.finalize("b", b"")
