"""Sessions that outlive the gateway's process: the journal has every committed turn, and a restart continues them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Generic, Literal

import orjson
import structlog

from nemo_gym._util.tasks import finish
from nemo_gym.contract.errors import ContractError, CredentialError, FencedError, InvalidBodyError
from nemo_gym.contract.session import NONE_CHOSEN, SESSION_TTL_S, ChosenLimits, RolloutIdentity
from nemo_gym.gateway.backend import Backend, C, D
from nemo_gym.gateway.journal import DEADLINE_REASON, ReplayedSession, SessionJournal, SessionRecord, SessionState
from nemo_gym.gateway.journal_log import Durability, JournalDamagedError, JournalError, JournalFullError
from nemo_gym.gateway.live_session import LiveSession, SessionAnswers, decode_committed, large_texts_of
from nemo_gym.gateway.policy_request import Usage
from nemo_gym.gateway.sessions import (
    KEEP_CLOSED_AT_LEAST,
    KEEP_CLOSED_BYTES,
    KEEP_CLOSED_S,
    KEEP_CLOSED_SESSIONS,
    PIPELINE,
    GatewaySession,
    OpenedSession,
    SessionTable,
    new_tokens,
    refuse_older,
    token_digest,
)
from nemo_gym.http.webserver import give_back_memory

SWEEP_INTERVAL_S = 1.0
RewardSource = Literal["environment", "runner"]
log = structlog.get_logger(__name__)


class DurableSessions(Generic[C, D]):
    """The sessions of one gateway; implements `GatewaySessions`. Call ``open_journal`` before the first other method,
    and ``aclose`` after the last."""

    def __init__(
        self, backend: Backend[C, D], *, ttl_s: float = SESSION_TTL_S, keep_closed_s: float = KEEP_CLOSED_S
    ) -> None:
        """``keep_closed_s``: how long a closed session still answers a repeated finalize."""
        self._backend = backend
        self._ttl_s = ttl_s
        self._keep_closed_s = keep_closed_s
        self._table: SessionTable[LiveSession[C]] = SessionTable()
        self._closed: deque[LiveSession[C]] = deque()
        self._closed_bytes = 0
        self._sweeping: asyncio.Task[None] | None = None
        self.memory_is_free = False
        """Set when something large was dropped: the next sweep returns free memory to the system."""
        self.journal: SessionJournal

    # -- the process ---------------------------------------------------------------------------------------------

    async def open_journal(self, directory: Path, durability: Durability = "process") -> None:
        """Open the journal and restore every session in it. Raises `JournalBusyError`, `JournalDamagedError`."""
        self.journal, replayed = SessionJournal.open(directory, durability=durability)
        for session in replayed:
            self._table.add(self._restored(session))
        if replayed:
            self.memory_is_free = True
            log.info(
                "sessions restored", sessions=len(replayed), turns=sum(len(session.turns) for session in replayed)
            )
        self._sweeping = asyncio.create_task(self._sweep())

    async def aclose(self) -> None:
        """Wait for answers that are being committed, and end everything else."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait({self._sweeping})
            self._sweeping = None
            await asyncio.gather(*(live.answers.aclose() for live in self._table))
            await self.journal.aclose()

    @property
    def states(self) -> Mapping[str, int]:
        """The number of sessions in each state."""
        return Counter(str(live.state) for live in self._table)

    # -- routes --------------------------------------------------------------------------------------------------

    async def open(
        self,
        rollout: RolloutIdentity,
        sampling: Mapping[str, Any] | None = None,
        *,
        opener: str = PIPELINE,
        limits: ChosenLimits = NONE_CHOSEN,
        ttl_s: float | None = None,
        reward_source: RewardSource = "environment",
    ) -> OpenedSession:
        """Open a session for this attempt; see `GatewaySessions.open`. ``ttl_s``: seconds until its deadline, when it
        is aborted; at most the gateway's own limit. With ``reward_source`` ``runner``, ``complete`` accepts a reward,
        for runs without an environment."""
        key = (opener, rollout.run_id, rollout.rollout_id)
        await self._forget_closed()
        # Checked again after each wait: another request may have opened a session of this key meanwhile.
        while (current := self._table.current(key)) is not None:
            refuse_older(rollout, current.session.rollout.attempt)
            if current.state not in (SessionState.OPEN, SessionState.COMPLETE):
                break
            await self._end(current, f"replaced by attempt {rollout.attempt}")
        now = time.time()
        opened = new_tokens(now + min(ttl_s or self._ttl_s, self._ttl_s))
        record = SessionRecord(
            opened.session_id,
            rollout.model_dump(mode="json"),
            token_digest(opened.inference_token),
            token_digest(opened.control_token),
            now,
            opened.expires_at,
            dict(sampling or {}),
            {
                "now": datetime.now().astimezone().isoformat(),
                "reward_source": reward_source,
                "opener": opener,
                **({"limits": chosen} if (chosen := limits.given()) else {}),
            },
        )
        live = self._new(record)
        self._table.add(live)
        try:
            await self.journal.opened(record)
        except BaseException:
            self._table.drop(live)
            raise
        return opened

    def authorize(self, inference_token: str) -> GatewaySession:
        """See `GatewaySessions.authorize`."""
        return self.authorized(inference_token).session

    def authorized(self, inference_token: str) -> LiveSession[C]:
        """Return the live session that a token opens; raises the same errors as `authorize`."""
        live = self._table.opened_by(inference_token)
        if live is None:
            raise CredentialError("unknown inference token: its session has ended or never existed")
        if live.state is SessionState.ABORTED and live.reason == DEADLINE_REASON:
            raise CredentialError("the inference token has expired: its session's deadline has passed")
        if live.state is not SessionState.OPEN:
            raise FencedError(f"the session of this inference token is {live.state}" + _reason_suffix(live.reason))
        if live.record.deadline_at <= time.time():
            raise CredentialError("the inference token has expired: its session's deadline has passed")
        return live

    def live(self, session_id: str) -> LiveSession[C]:
        """Return the session of an id. Raises `ContractError` for an unknown id."""
        return self._table.known(session_id)

    def state(self, session_id: str, control_token: str) -> dict[str, Any]:
        """``{session_id, state, reason, turns, usage, in_flight, opened_at, expires_at}``; times are Unix seconds."""
        live = self._table.controlled(session_id, control_token)
        return {
            **_summary(live),
            "state": live.state,
            "reason": live.reason,
            "in_flight": live.in_flight,
            "opened_at": live.record.opened_at,
            "expires_at": live.record.deadline_at,
        }

    def require_completable(self, session_id: str, token: str) -> None:
        """Raise the errors of `complete` for an unknown session, and for a token that is not its control or completion
        token."""
        self._table.completable(session_id, token)

    async def complete(
        self, session_id: str, control_token: str, reward_info: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """End inference, because the session's runner is done; calls in flight are ended. ``control_token`` may be the
        completion token instead. ``reward_info`` may hold ``reward``, and is accepted only if no environment gives
        one. A repeated call changes nothing."""
        live = self._table.completable(session_id, control_token)
        if reward_info and live.record.extra.get("reward_source") != "runner":
            raise ContractError(
                "reward_info is not accepted: this session's reward comes from its environment; open it with"
                " reward_source 'runner' where a run has none",
                session_id=session_id,
                param="reward_info",
            )
        reward_data = checked_reward(reward_info or {})
        async with live.ending:
            _refuse_aborted(live)
            if live.state is SessionState.OPEN:
                live.state = SessionState.COMPLETE  # at once, for calls that come while the journal is being written
                await live.answers.aclose()
                with self._rolled_back_if_full(live, SessionState.OPEN):
                    await self.journal.complete(session_id, orjson.dumps(reward_data))
                live.reward_info = reward_data
        return {**_summary(live), "state": live.state}

    async def finalize(
        self,
        session_id: str,
        control_token: str,
        *,
        reward: float | None = None,
        reward_info: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Close the session, end its calls in flight, and return ``{session_id, turns, usage, trajectories}``. A
        repeated call returns the same, with the first reward."""
        live = self._table.controlled(session_id, control_token)
        async with live.ending:
            _refuse_aborted(live)
            if live.closed_at is None:
                reward_data = {**live.reward_info, **(reward_info or {})}
                if reward is not None:
                    reward_data["reward"] = reward
                result = orjson.dumps(checked_reward(reward_data))
                before, live.state = live.state, SessionState.FINALIZED
                await live.answers.aclose()
                with self._rolled_back_if_full(live, before):
                    live.reward_info = orjson.loads(await self.journal.finalize(session_id, result))
                self._mark_closed(live)
        info = {key: value for key, value in live.reward_info.items() if key != "reward"}
        rows = live.conversations.rows(session_id, reward=live.reward_info.get("reward"), reward_info=info)
        return {**_summary(live), "trajectories": rows}

    async def abort(self, session_id: str, control_token: str) -> None:
        """Close the session and keep none of its data. A repeated call changes nothing."""
        await self._end(self._table.controlled(session_id, control_token), "aborted by its owner")

    # -- inside --------------------------------------------------------------------------------------------------

    def _new(self, record: SessionRecord) -> LiveSession[C]:
        # Not validated again: it was validated on opening, perhaps by a release with other bounds.
        rollout = RolloutIdentity.model_construct(**record.rollout)
        limit_values = record.extra.get("limits")
        limits = ChosenLimits(**limit_values) if limit_values else NONE_CHOSEN
        session = GatewaySession(record.session_id, rollout, record.sampling, record.deadline_at, limits)
        # A journal of a release that stored no openers has none; those sessions count as the pipeline's.
        key = (record.extra.get("opener", PIPELINE), rollout.run_id, rollout.rollout_id)
        conversations = self._backend.conversations(datetime.fromisoformat(record.extra["now"]))
        return LiveSession(session, key, record.inference_digest, record.control_digest, record, conversations)

    def _restored(self, replayed: ReplayedSession) -> LiveSession[C]:
        live = self._new(replayed.record)
        live.state, live.reason = replayed.state, replayed.reason
        if replayed.state is SessionState.ABORTED:
            self._mark_closed(live)
            return live
        records = []
        for turn in replayed.turns:
            committed, record = decode_committed(turn.body, turn.index)
            records.append(record)
            live.answers.restore(turn.fingerprint, turn.key, committed, sent=turn.sent)
            usage = committed.answer.usage
            live.session.count(Usage(usage.prompt_tokens, usage.completion_tokens))
        try:
            live.conversations.restore(records)
            for turn, record in zip(replayed.turns, records, strict=True):
                large = large_texts_of(record, turn.body)
                live.share.count_turn(record, len(turn.body) - sum(text.length for text in large))
                for text in large:
                    text.let_go(turn.journaled)
        except (KeyError, TypeError, ValueError) as error:
            raise JournalDamagedError(
                f"the journal's turns of session '{live.session_id}' cannot be read ({type(error).__name__}: {error});"
                " was it written by another version? Move the directory away to start without them"
            ) from error
        if replayed.result:
            live.reward_info = orjson.loads(replayed.result)
        if replayed.state is SessionState.FINALIZED:
            self._mark_closed(live)
        return live

    def _mark_closed(self, live: LiveSession[C]) -> None:
        live.closed_at = time.time()
        self._closed.append(live)
        self._closed_bytes += live.share.bytes
        live.forget_requests()
        self.memory_is_free = True
        self._backend.forget(live.session_id)

    async def _forget_closed(self) -> None:
        """Forget sessions that were closed long enough ago, and the oldest above the limits of closed sessions."""
        while self._closed and self._may_forget(self._closed[0]):
            # Taken out before any wait, because several calls forget at once; and to the end, because a session that
            # is neither here nor forgotten would keep its segment, and with it every later one, on the disk.
            if not await finish(self._forget(self._closed.popleft())):
                break

    async def _forget(self, live: LiveSession[C]) -> bool:
        """Forget a session that was taken out of the closed ones. Return whether the journal could."""
        self._closed_bytes -= live.share.bytes
        try:
            await self.journal.forget(live.session_id)
        except JournalError as error:  # the next sweep tries again
            log.warning("session not forgotten", session_id=live.session_id, error=str(error))
            self._closed.appendleft(live)
            self._closed_bytes += live.share.bytes
            return False
        self._table.drop(live)
        return True

    def _may_forget(self, oldest: LiveSession[C]) -> bool:
        if len(self._closed) > KEEP_CLOSED_SESSIONS:
            return True
        if len(self._closed) > KEEP_CLOSED_AT_LEAST and self._closed_bytes > KEEP_CLOSED_BYTES:
            return True
        return (oldest.closed_at or 0.0) + self._keep_closed_s < time.time()

    @contextlib.contextmanager
    def _rolled_back_if_full(self, live: LiveSession[C], before: SessionState) -> Iterator[None]:
        """Put the session back into the state ``before`` if the journal is full and could not store the change."""
        try:
            yield
        except JournalFullError:
            live.state = before
            raise

    async def _end(self, live: LiveSession[C], reason: str) -> None:
        async with live.ending:
            if live.state is SessionState.ABORTED and live.closed_at is not None:
                return
            if live.state is SessionState.FINALIZED:
                raise FencedError(
                    f"session '{live.session_id}' is finalized; it cannot be aborted", session_id=live.session_id
                )
            live.state, live.reason = SessionState.ABORTED, reason
            await live.answers.aclose()
            await self.journal.abort(live.session_id, reason)
            live.share.bytes = 0
            self._mark_closed(live)
            # Keep only a tombstone.
            live.conversations = self._backend.conversations(datetime.now().astimezone())
            live.answers = SessionAnswers()

    async def _sweep(self) -> None:
        """Until cancelled: abort sessions past their deadline, and forget those that closed long enough ago."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            if self.memory_is_free:
                self.memory_is_free = False
                await asyncio.to_thread(give_back_memory)
            await self._forget_closed()
            now = time.time()
            try:
                for live in self._table:
                    if live.closed_at is None and live.state is SessionState.ABORTED:
                        await self._end(live, live.reason or "")  # an earlier try failed at the journal
                    elif live.closed_at is None and live.record.deadline_at <= now:
                        await self._end(live, DEADLINE_REASON)
                        log.info("session aborted at its deadline", session_id=live.session_id)
            except (JournalError, FencedError) as error:
                # The sessions' callers get this error as well; the next sweep tries again.
                log.warning("sessions not swept", error=str(error))


def checked_reward(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return reward info that can be stored. Raises `InvalidBodyError` for a reward that is no finite number, and for
    data that is nested too deeply."""
    reward = info.get("reward")
    if reward is not None and (
        isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward)
    ):
        raise InvalidBodyError(f"'reward' must be a finite number or null, not {reward!r}", param="reward")
    checked_depth(info, "reward_info")
    return dict(info)


def checked_depth(value: Any, name: str) -> None:
    """Raise `InvalidBodyError` for parsed JSON that is nested too deeply to be written inside records and replies."""
    try:
        orjson.dumps([[[[[[[[[[value]]]]]]]]]])
    except TypeError:
        raise InvalidBodyError(f"'{name}' is nested too deeply: the limit is 240 levels", param=name) from None


def _summary(live: LiveSession[Any]) -> dict[str, Any]:
    session = live.session
    return {"session_id": session.session_id, "turns": session.turns, "usage": session.usage.as_dict()}


def _refuse_aborted(live: LiveSession[Any]) -> None:
    if live.state is SessionState.ABORTED:
        raise FencedError(
            f"session '{live.session_id}' was aborted{_reason_suffix(live.reason)}", session_id=live.session_id
        )


def _reason_suffix(reason: str | None) -> str:
    return f" ({reason})" if reason else ""
