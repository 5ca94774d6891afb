"""Closed sessions: for how long they answer a repeated finalize, and what they may hold meanwhile."""

from __future__ import annotations

import gc
from datetime import datetime
from pathlib import Path
from typing import Any

from nemo_gym.contract.session import RolloutIdentity
from nemo_gym.gateway.durable_sessions import DurableSessions
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
