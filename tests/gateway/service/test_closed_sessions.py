"""Closed sessions: for how long they answer a repeated finalize, and what they may hold meanwhile."""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
import weakref
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.contract.session import RolloutIdentity
from nemo_gym.gateway.durable_sessions import DurableSessions
from nemo_gym.gateway.journal import SessionJournal
from nemo_gym.gateway.journal_log import Durability, JournalFullError, JournalLog
from nemo_gym.gateway.sessions import KEEP_CLOSED_AT_LEAST, KEEP_CLOSED_BYTES, OpenedSession


class Conversations:
    def forget_requests(self) -> None: ...

    def rows(self, session_id: str, **_: object) -> list[object]:
        return []


class Silent:
    """A backend of which only conversations are wanted."""

    def conversations(self, now: datetime) -> Conversations:
        return Conversations()

    def forget(self, session_id: str) -> None: ...


async def closed(sessions: DurableSessions[Any, Any], count: int, size: int) -> list[OpenedSession]:
    """Sessions that were finalized with so many bytes of conversation."""
    ended = []
    for number in range(count):
        rollout = RolloutIdentity(rollout_id=f"r{number}-{size}", task_id="t", group_id="g")
        ended.append(await sessions.open(rollout))
        sessions.live(ended[-1].session_id).share.bytes = size
        await sessions.finalize(ended[-1].session_id, ended[-1].control_token)
    return ended


async def test_closed_sessions_answer_again_as_long_as_their_conversations_are_no_burden(tmp_path: Path) -> None:
    sessions: DurableSessions[Any, Any] = DurableSessions(Silent())  # type: ignore[arg-type]
    await sessions.open_journal(tmp_path)
    try:
        large = await closed(sessions, 40, KEEP_CLOSED_BYTES // 20)
        again = [each for each in large if each.session_id in sessions._table._by_id]
        assert again == large[-len(again) :] and 20 <= len(again) <= 22
        for each in again:
            await sessions.finalize(each.session_id, each.control_token)
        huge = await closed(sessions, 20, KEEP_CLOSED_BYTES)
        assert [each for each in huge if each.session_id in sessions._table._by_id] == huge[
            -KEEP_CLOSED_AT_LEAST - 1 :
        ]
    finally:
        await sessions.aclose()


async def test_conversations_of_sessions_closed_long_ago_are_let_go(tmp_path: Path) -> None:
    sessions: DurableSessions[Any, Any] = DurableSessions(Silent(), keep_closed_s=0)  # type: ignore[arg-type]
    await sessions.open_journal(tmp_path)
    try:
        await closed(sessions, 5, 1)
        gc.collect()
        held = [each for each in gc.get_objects() if isinstance(each, Conversations)]
        assert len(held) <= 1
    finally:
        await sessions.aclose()


@pytest.mark.parametrize("cancelled", [False, True])
async def test_session_that_the_full_disk_did_not_forget_is_forgotten_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    writing, may_fail = threading.Event(), threading.Event()

    def write_to_full_disk(*_: object) -> None:
        writing.set()
        assert may_fail.wait(20)
        raise OSError(errno.ENOSPC, "No space left on device")

    durability: Durability = "power_loss" if cancelled else "process"  # only this one writes while others go on
    sessions: DurableSessions[Any, Any] = DurableSessions(Silent(), keep_closed_s=0)  # type: ignore[arg-type]
    await sessions.open_journal(tmp_path, durability)
    try:
        (stuck,) = await closed(sessions, 1, 1)
        with monkeypatch.context() as disk:
            disk.setattr(JournalLog, "_write", write_to_full_disk)
            if not cancelled:
                may_fail.set()
            opening = asyncio.create_task(sessions.open(RolloutIdentity(rollout_id="r", task_id="t", group_id="g")))
            if cancelled:
                await asyncio.to_thread(writing.wait, 20)
                opening.cancel()
                may_fail.set()
            with pytest.raises(asyncio.CancelledError if cancelled else JournalFullError):
                await opening
        await closed(sessions, 1, 2)
        assert stuck.session_id not in sessions._table._by_id
    finally:
        await sessions.aclose()
    journal, replayed = SessionJournal.open(tmp_path, durability=durability)
    await journal.aclose()
    assert stuck.session_id not in [session.record.session_id for session in replayed]


async def test_aborted_sessions_hold_none_of_their_answers(tmp_path: Path) -> None:
    sessions: DurableSessions[Any, Any] = DurableSessions(Silent())  # type: ignore[arg-type]
    await sessions.open_journal(tmp_path)
    try:
        opened = await sessions.open(RolloutIdentity(rollout_id="r", task_id="t", group_id="g"))
        answer: Any = Conversations()
        sessions.live(opened.session_id).answers.restore("f", None, answer, sent=False)
        held = weakref.ref(answer)
        del answer
        await sessions.abort(opened.session_id, opened.control_token)
        gc.collect()
        assert held() is None
    finally:
        await sessions.aclose()


async def test_one_session_of_a_key_is_open_though_its_openers_wait_for_closed_ones(tmp_path: Path) -> None:
    sessions: DurableSessions[Any, Any] = DurableSessions(Silent(), keep_closed_s=0)  # type: ignore[arg-type]
    await sessions.open_journal(tmp_path)
    try:
        await closed(sessions, 1, 1)
        rollout = RolloutIdentity(rollout_id="r", task_id="t", group_id="g")
        await asyncio.gather(*(sessions.open(rollout) for _ in range(2)))
        assert sessions.states["open"] == 1
    finally:
        await sessions.aclose()
