"""What an environment knows of attempts that it no longer has in memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.contract.credentials import CONTROL_TOKEN_HEADER, Role
from nemo_gym.contract.errors import CredentialError, FencedError, ServerError
from nemo_gym.contract.verdict import RowAccess
from nemo_gym.environment import attempts
from nemo_gym.environment.attempts import AttemptStore, RowStore, Seed, StoredRow, StoredVerdict
from tests.servers.plugins import CounterEnvironment
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
