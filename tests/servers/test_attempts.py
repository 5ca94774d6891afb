"""What an environment knows of attempts that it no longer has in memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request

from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.contract.credentials import CONTROL_TOKEN_HEADER, Role
from nemo_gym.contract.errors import CredentialError, FencedError, ServerError
from nemo_gym.contract.session import NO_SESSION
from nemo_gym.contract.verdict import RowAccess, StageName
from nemo_gym.environment import attempts
from nemo_gym.environment.attempts import AttemptStore, RowStore, Seed, StoredRow, StoredVerdict
from nemo_gym.environment.hooks import ReverifyMode
from nemo_gym.http.peers import PeerError, failure_of_peer
from nemo_gym.judge import JudgeError
from tests.servers.plugins import CounterEnvironment, CounterVerifyRequest, CounterVerifyResponse, FrankEnvironment
from tests.servers.stack import Stack, response, rollout, running_stack

ENV = "counter"
ROW = {"responses_create_params": {"input": "count"}, "expected": 0, "start": 0}


async def seed(stack: Stack, name: str, attempt: int = 1) -> tuple[int, str, Any]:
    body = {**ROW, "_ng_session": {"rollout": rollout(name, attempt).model_dump()}}
    reply = await stack.client().post(ENV, "/seed_session", json=body)
    return reply.status, (await reply.json()).get("control_token", ""), reply.cookies


async def verify(
    stack: Stack, name: str, control: str, cookies: Any, text: str = "done", attempt: int = 1
) -> tuple[int, dict[str, Any]]:
    session = {"rollout": rollout(name, attempt).model_dump()}
    body = {**ROW, "response": response(text), "_ng_session": session}
    headers = {CONTROL_TOKEN_HEADER: control}
    reply = await stack.client().post(ENV, "/verify", json=body, headers=headers, cookies=cookies)
    return reply.status, await reply.json()


async def close(stack: Stack, name: str, control: str, attempt: int = 1) -> None:
    body = {"rollout": rollout(name, attempt).model_dump()}
    reply = await stack.client().post(ENV, "/close", json=body, headers={CONTROL_TOKEN_HEADER: control})
    assert reply.status == 200


async def finished(stack: Stack, name: str, attempt: int = 1) -> tuple[str, Any]:
    """A rollout from its seed to its close."""
    status, control, cookies = await seed(stack, name, attempt)
    assert status == 200
    assert (await verify(stack, name, control, cookies, attempt=attempt))[0] == 200
    await close(stack, name, control, attempt)
    return control, cookies


@pytest.mark.parametrize("restarted", [False, True])
async def test_contract_holds_for_an_attempt_that_is_no_longer_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    monkeypatch.setattr(attempts, "MAX_KNOWN", 2)
    with running_stack(str(tmp_path)) as stack:
        stack.add(ENV, CounterEnvironment, Role.ENVIRONMENT)
        old_control, old_cookies = await finished(stack, "r0")
        control, cookies = await finished(stack, "r0", 2)
        for n in range(1, 5):
            await finished(stack, f"r{n}")
        if restarted:
            stack.stop(ENV)
            stack.add(ENV, CounterEnvironment, Role.ENVIRONMENT)
        else:
            known = stack.servers[ENV]._environment.attempts._known  # type: ignore[attr-defined]
            assert len(known) <= 2 and (rollout().run_id, "r0") not in known
        again = await verify(stack, "r0", control, cookies, attempt=2)
        assert again[0] == 200 and again[1]["valid"], again
        other, said = await verify(stack, "r0", control, cookies, "something else", attempt=2)
        assert (other, said["code"]) == (409, "fenced") and "first verdict is final" in said["detail"]
        older, said = await verify(stack, "r0", old_control, old_cookies)
        assert (older, said["code"]) == (409, "fenced") and "replaced by attempt 2" in said["detail"]
        assert (await seed(stack, "r0"))[0] == 409
        assert (await seed(stack, "r0", 2))[0] == 409
        for session in (old_cookies, cookies):
            tool = await stack.client().post(ENV, "/add", json={"amount": 1}, cookies=session)
            assert tool.status == 409, await tool.text()


class StatelessCounter(CounterEnvironment):
    """Counts in its memory, and declares that it grades without it."""

    REVERIFY_MODE = ReverifyMode.STATELESS


class UnseededCounter(CounterEnvironment):
    """Has nothing to do when an attempt is seeded; its tools count all the same."""

    seed_session = SimpleResourcesServer.seed_session


class VerifyOnly(FrankEnvironment):
    """Neither a hook for sessions nor tools."""

    seed_session = SimpleResourcesServer.seed_session
    verifies_with: Any = staticmethod(lambda body: {**body, "reward": 1.0})


class JudgelessCounter(CounterEnvironment):
    """Its judge is down."""

    async def verify(self, request: Request, body: CounterVerifyRequest) -> CounterVerifyResponse:
        raise JudgeError("503")


def restart(stack: Stack, cls: type[SimpleResourcesServer]) -> None:
    stack.stop(ENV)
    stack.add(ENV, cls, Role.ENVIRONMENT)


@pytest.mark.parametrize(
    ("cls", "asked", "status"),
    [
        (CounterEnvironment, False, 409),
        (UnseededCounter, False, 409),
        (StatelessCounter, False, 200),
        (StatelessCounter, True, 409),
        (VerifyOnly, False, 200),
    ],
)
async def test_attempt_whose_session_ended_with_a_process_is_graded_only_if_that_changed_nothing(
    tmp_path: Path, cls: type[SimpleResourcesServer], asked: bool, status: int
) -> None:
    with running_stack(str(tmp_path)) as stack:
        stack.add(ENV, cls, Role.ENVIRONMENT)
        _, control, cookies = await seed(stack, "r1")
        restart(stack, cls)
        if asked:
            tool = await stack.client().post(ENV, "/add", json={"amount": 1}, cookies=cookies)
            said = await tool.json()
            assert (tool.status, said["code"], said["code_hint"]) == (409, "contract", NO_SESSION)
        replies = await asyncio.gather(*(verify(stack, "r1", control, cookies) for _ in range(3)))
        assert {reply_status for reply_status, _ in replies} == {status}
        if status == 409:
            said = replies[0][1]
            assert said["code"] == "fenced" and "restarted" in said["detail"]
            failure = failure_of_peer(StageName.EVAL, PeerError(ENV, "/verify", 409, said))
            assert (failure.kind, failure.retryable, failure.new_attempt) == ("environment_lost", True, True)
            _, control, cookies = await seed(stack, "r1", 2)
            assert (await verify(stack, "r1", control, cookies, attempt=2))[1]["valid"]


async def test_work_without_a_final_verdict_is_not_graded_again_by_a_process_that_lost_its_session(
    tmp_path: Path,
) -> None:
    with running_stack(str(tmp_path)) as stack:
        stack.add(ENV, JudgelessCounter, Role.ENVIRONMENT)
        _, control, cookies = await seed(stack, "r1")
        assert (await verify(stack, "r1", control, cookies))[1]["valid"] is False
        restart(stack, CounterEnvironment)
        assert (await verify(stack, "r1", control, cookies))[0] == 409


async def test_work_that_nobody_seeded_is_judged_again_by_the_process_that_could_not_judge_it() -> None:
    store = AttemptStore()
    try:
        for _ in range(2):
            assert await store.admit_verdict(rollout("r1"), "row", "work", needs_session=lambda: True) is None
            await store.keep_verdict(rollout("r1"), StoredVerdict("work", False, {"valid": False}))
    finally:
        await store.aclose()


async def test_seed_runs_once_when_many_ask_at_the_same_time() -> None:
    with running_stack() as stack:
        stack.add(ENV, CounterEnvironment, Role.ENVIRONMENT)
        answers = await asyncio.gather(*(seed(stack, "r1") for _ in range(30)))
        assert {status for status, _, _ in answers} == {200}
        assert stack.servers[ENV].seeds == 1  # type: ignore[attr-defined]


async def test_row_is_read_until_its_attempt_is_replaced_or_closed() -> None:
    store = AttemptStore()
    rows = RowStore(store)
    ref = await rows.put(StoredRow({"question": "r0"}, rollout("r0")))
    first = await rows.get(ref)
    assert first.row == {"question": "r0"} and first.rollout == rollout("r0")
    assert await rows.put(first) == ref
    again = await rows.put(StoredRow(first.row, rollout("r0", attempt=2), RowAccess.FULL))
    assert (await rows.get(again)).access is RowAccess.FULL
    with pytest.raises(CredentialError):
        await rows.get(ref)
    with pytest.raises(FencedError):
        await rows.put(first)
    await store.close(rollout("r0"))
    assert (await rows.get(again)).row == first.row, "an older attempt's end leaves it"
    await store.close(rollout("r0", attempt=2))
    with pytest.raises(CredentialError):
        await rows.get(again)
    await store.aclose()


async def test_attempts_are_kept_again_once_the_database_can_be_written(tmp_path: Path) -> None:
    store = AttemptStore(tmp_path / "a.sqlite")
    await store.enter(rollout("r1"))
    store._db.execute("PRAGMA query_only=ON")
    verdict = StoredVerdict("d", True, {"reward": 1.0})
    with pytest.raises(ServerError, match=r"a\.sqlite.*free disk space") as raised:
        await store.keep_verdict(rollout("r1"), verdict)
    assert raised.value.retryable
    store._db.execute("PRAGMA query_only=OFF")
    await store.keep_verdict(rollout("r1"), verdict)
    assert await store.verdict_of(rollout("r1")) == verdict
    await store.aclose()


async def test_what_comes_after_the_end_or_the_first_verdict_of_an_attempt_is_refused() -> None:
    store = AttemptStore()
    await store.enter(rollout("r1"))
    works = ("a", 1.0), ("a", 0.5), ("b", 0.0)
    first, same, other = (StoredVerdict(work, True, {"reward": reward}) for work, reward in works)
    kept = await asyncio.gather(*(store.keep_verdict(rollout("r1"), one) for one in (first, same)))
    assert kept == [first, first]
    with pytest.raises(FencedError, match="first verdict is final"):
        await store.keep_verdict(rollout("r1"), other)
    await store.close(rollout("r1"))
    with pytest.raises(FencedError, match="was closed"):
        await store.keep_seed(rollout("r1"), Seed("d", {}, {}))
    await store.aclose()


async def test_a_question_is_answered_after_those_asked_before_it() -> None:
    store = AttemptStore()
    await store.enter(rollout("r1"))
    seed, verdict = Seed("d", {"a": 1}, {}), StoredVerdict("w", True, {"reward": 1.0})
    await store.keep_seed(rollout("r1"), seed)

    waiting = [
        asyncio.ensure_future(asked)
        for asked in (store.keep_verdict(rollout("r1"), verdict), store.admit_verdict(rollout("r1"), "d", "w"))
    ]
    assert await asyncio.gather(*waiting) == [verdict, verdict]

    entered, asked = (
        asyncio.ensure_future(each)
        for each in (store.enter(rollout("r1", attempt=2)), store.seed_of(rollout("r1"), "d"))
    )
    await entered
    with pytest.raises(FencedError, match="replaced by attempt 2"):
        await asked
    await store.aclose()
