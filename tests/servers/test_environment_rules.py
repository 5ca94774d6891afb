"""The rules every environment's routes enforce: seeds, attempts, verdicts."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException, Request
from pydantic import AliasChoices, Field
from starlette.responses import JSONResponse, PlainTextResponse, Response
from structlog.testing import capture_logs

from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer
from nemo_gym.contract.credentials import CONTROL_TOKEN_HEADER, Role
from nemo_gym.contract.session import Limits, SessionDescriptor
from nemo_gym.contract.verdict import Verdict
from nemo_gym.environment.routes import VERDICTS
from nemo_gym.http.plugin_call import plain
from nemo_gym.judge import judge_failsafe
from nemo_gym.testing.environments import make_environment
from tests.servers.plugins import (
    CounterEnvironment,
    FrankEnvironment,
    FrankReply,
    FrankRequest,
    PhraseEnvironment,
    UnheldPhraseEnvironment,
)
from tests.servers.stack import Stack, response, rollout, running_stack


class LogicRequest(FrankRequest):
    valid: bool


class AliasedRequest(FrankRequest):
    holds: bool = Field(validation_alias="valid")


class ChoosingRequest(FrankRequest):
    holds: bool = Field(validation_alias=AliasChoices("is_valid", "valid"))


class AliasedReply(FrankReply):
    failed_by: str | None = Field(None, alias="_ng_failure_class")
    share: float = Field(0.5, serialization_alias="portion")


ROW = {"responses_create_params": {"input": "say it"}, "phrase": "swordfish"}


async def call(
    stack: Stack,
    server: str,
    path: str,
    body: dict[str, Any],
    *,
    role: Role = Role.PIPELINE,
    control: str | None = None,
    cookies: Any = None,
) -> tuple[int, Any]:
    headers = {CONTROL_TOKEN_HEADER: control} if control else {}
    reply = await stack.client(role).post(server, path, json=body, headers=headers, cookies=cookies, idempotent=True)
    return reply.status, await reply.json(content_type=None)


async def seed(stack: Stack, server: str = "phrase", row: dict[str, Any] = ROW, **identity: Any) -> dict[str, Any]:
    body = {**row, "_ng_session": {"rollout": rollout(**identity).model_dump()}}
    status, reply = await call(stack, server, "/seed_session", body)
    assert status == 200, reply
    return reply


async def verify(
    stack: Stack,
    text: str,
    control: str | None,
    server: str = "phrase",
    row: dict[str, Any] = ROW,
    role: Role = Role.PIPELINE,
    reverify: bool | None = None,
    closes: bool = False,
    **identity: Any,
) -> tuple[int, Any]:
    session: dict[str, Any] = {"rollout": rollout(**identity).model_dump(), **({"close": True} if closes else {})}
    if reverify if reverify is not None else role is Role.OPERATOR:
        session["reverify"] = True
    body = {**row, "response": response(text), "_ng_session": session}
    return await call(stack, server, "/verify", body, control=control, role=role)


def environment(stack: Stack, name: str = "phrase") -> Any:
    return stack.servers[name]


async def frank_verdict(
    stack: Stack, verifies_with: Callable[[dict[str, Any]], Any], **row: Any
) -> tuple[bool, float | None, str | None, str]:
    """What becomes of a ``verify`` reply: ``valid``, reward, kind of failure and its reason."""
    reply = await frank_reply(stack, verifies_with, **row)
    return reply["valid"], reply["reward"], reply["failure_kind"], reply["failure_reason"] or ""


async def frank_reply(stack: Stack, verifies_with: Callable[[dict[str, Any]], Any], **row: Any) -> dict[str, Any]:
    environment(stack, "frank").verifies_with = verifies_with
    row = {"responses_create_params": {"input": "say it"}, **row}
    control = (await seed(stack, "frank", row))["control_token"]
    status, reply = await verify(stack, "x", control, "frank", row)
    assert status == 200, reply
    return dict(reply)


async def test_seed_answers_the_same_session_when_it_is_repeated(counter: Stack) -> None:
    client = counter.client()
    row = {"responses_create_params": {"input": "count"}, "expected": 12, "start": 7}
    body = {**row, "_ng_session": {"rollout": rollout().model_dump()}}
    first = await client.post("counter", "/seed_session", json=body)
    again = await client.post("counter", "/seed_session", json=body)
    added = await client.post("counter", "/add", json={"amount": 5}, cookies=again.cookies)
    assert first.status == again.status == 200
    assert (await first.json())["descriptor"] == (await again.json())["descriptor"]
    assert await added.json() == {"count": 12}
    assert environment(counter, "counter").seeds == 1
    control = (await again.json())["control_token"]
    verified = await client.post(
        "counter",
        "/verify",
        json={**row, "response": response(), "_ng_session": {"rollout": rollout().model_dump()}},
        headers={CONTROL_TOKEN_HEADER: control},
        cookies=first.cookies,
    )
    reply = await verified.json()
    assert (reply["reward"], reply["valid"], reply["mask_sample"], reply["counted"]) == (1.0, True, False, 12)


async def test_seed_opens_once_when_two_ask_at_the_same_time(phrase: Stack) -> None:
    row = {**ROW, "open_delay_s": 0.2}
    replies = await asyncio.gather(*(seed(phrase, row=row) for _ in range(5)))
    assert environment(phrase).opened == 1
    assert all(reply["descriptor"] == replies[0]["descriptor"] for reply in replies)


async def test_seed_is_refused_when_the_same_attempt_names_another_row(phrase: Stack) -> None:
    await seed(phrase)
    body = {**ROW, "phrase": "other", "_ng_session": {"rollout": rollout().model_dump()}}
    status, problem = await call(phrase, "phrase", "/seed_session", body)
    assert (status, problem["code"]) == (409, "contract")


async def test_verify_is_refused_when_its_row_is_not_the_one_that_was_seeded(phrase: Stack) -> None:
    control = (await seed(phrase))["control_token"]
    status, problem = await verify(phrase, "hello", control, row={**ROW, "phrase": "hello"})
    assert (status, problem["code"]) == (409, "contract") and "another row" in problem["detail"]
    status, verdict = await verify(phrase, "hello", control)
    assert (status, verdict["reward"], environment(phrase).graded) == (200, 0.0, 1)


async def test_older_attempt_is_refused_everywhere_when_a_newer_one_was_seeded(counter: Stack) -> None:
    client = counter.client()
    row = {"responses_create_params": {"input": "count"}, "expected": 1}
    body = {**row, "_ng_session": {"rollout": rollout().model_dump()}}
    old = await client.post("counter", "/seed_session", json=body)
    control = (await old.json())["control_token"]
    await seed(counter, "counter", row, attempt=2)
    again = await client.post("counter", "/seed_session", json=body)
    tool = await client.post("counter", "/add", json={"amount": 1}, cookies=old.cookies)
    status, verdict = await verify(counter, "x", control, "counter", row)
    closed, close = await call(counter, "counter", "/close", {"rollout": rollout().model_dump()}, control=control)
    assert [again.status, tool.status, status, closed] == [409] * 4
    assert verdict["code"] == close["code"] == "fenced"


async def test_replaced_attempt_is_released_once_when_a_newer_one_is_seeded(phrase: Stack) -> None:
    await seed(phrase)
    second = await seed(phrase, attempt=2)
    for _ in range(2):
        status, reply = await call(
            phrase, "phrase", "/close", {"rollout": rollout(attempt=2).model_dump()}, control=second["control_token"]
        )
        assert status == 200
    assert reply == {"closed": True, "already_closed": True}
    assert environment(phrase).closed == ["r1-a1", "r1-a2"]


async def test_seed_is_refused_when_its_attempt_was_closed(phrase: Stack) -> None:
    first = await seed(phrase)
    await call(phrase, "phrase", "/close", {"rollout": rollout().model_dump()}, control=first["control_token"])
    body = {**ROW, "_ng_session": {"rollout": rollout().model_dump()}}
    status, problem = await call(phrase, "phrase", "/seed_session", body)
    assert (status, problem["code"]) == (409, "fenced")


async def test_verdict_is_replayed_when_the_same_work_is_judged_again(phrase: Stack) -> None:
    control = (await seed(phrase))["control_token"]
    first = await verify(phrase, "swordfish", control)
    again = await verify(phrase, "swordfish", control)
    assert first == again
    assert first[1]["reward"] == 1.0 and environment(phrase).graded == 1


async def test_verdict_is_final_when_other_work_is_judged(phrase: Stack) -> None:
    control = (await seed(phrase))["control_token"]
    await verify(phrase, "wrong", control)
    status, problem = await verify(phrase, "swordfish", control)
    assert (status, problem["code"]) == (409, "fenced")
    assert environment(phrase).graded == 1


async def test_work_is_graded_once_when_two_ask_at_the_same_time(phrase: Stack) -> None:
    row = {**ROW, "grade_delay_s": 0.2}
    control = (await seed(phrase, row=row))["control_token"]
    replies = await asyncio.gather(*(verify(phrase, "swordfish", control, row=row) for _ in range(5)))
    assert {status for status, _ in replies} == {200} and environment(phrase).graded == 1


@pytest.mark.parametrize("path", ["/close", "/seed_session"])
async def test_grading_that_never_ends_is_ended_with_its_attempt(phrase: Stack, path: str) -> None:
    row = {**ROW, "grade_delay_s": 600}
    control = (await seed(phrase, row=row))["control_token"]
    grading = asyncio.create_task(verify(phrase, "swordfish", control, row=row))
    while environment(phrase).graded == 0:  # noqa: ASYNC110 - the server runs in a loop of its own
        await asyncio.sleep(0.01)
    if path == "/close":
        await call(phrase, "phrase", path, {"rollout": rollout().model_dump()}, control=control)
    else:
        await seed(phrase, row=row, attempt=2)
    status, problem = await grading
    assert (status, problem["code"]) == (409, "fenced")
    assert environment(phrase).ended == 1


async def test_attempt_is_closed_to_the_end_when_its_successor_is_replaced_meanwhile(phrase: Stack) -> None:
    await seed(phrase)
    environment(phrase).holds_closing = True
    seeding = []
    for attempt in (2, 3):
        body = {**ROW, "_ng_session": {"rollout": rollout(attempt=attempt).model_dump()}}
        seeding.append(asyncio.create_task(call(phrase, "phrase", "/seed_session", body)))
        while environment(phrase).closing < attempt - 1:  # noqa: ASYNC110 - the server runs in a loop of its own
            await asyncio.sleep(0.01)
    environment(phrase).holds_closing = False
    assert [status for status, _ in await asyncio.gather(*seeding)] == [409, 200]
    while len(environment(phrase).closed) < 2:  # noqa: ASYNC110 - the third attempt waits for the second's end alone
        await asyncio.sleep(0.01)
    assert sorted(environment(phrase).closed) == [rollout(attempt=attempt).attempt_id for attempt in (1, 2)]


@pytest.mark.parametrize(
    ("text", "kind"),
    [("broken grader", "verifier_failed"), ("no judge", "verifier_failed"), ("lost box", "sandbox_lost")],
)
async def test_verdict_is_invalid_without_reward_when_grading_fails(phrase: Stack, text: str, kind: str) -> None:
    control = (await seed(phrase))["control_token"]
    status, reply = await verify(phrase, text, control)
    assert (status, reply["valid"], reply["reward"], reply["mask_sample"]) == (200, False, None, True)
    assert reply["failure_kind"] == kind and reply["failure_reason"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("broken grader", "grade raised KeyError; the environment's log has the traceback"),
        ("bare number", "grade of 'phrase' returned float, not a Verdict; return Verdict.of(reward)"),
    ],
)
async def test_failed_grading_names_the_hook_that_failed(phrase: Stack, text: str, reason: str) -> None:
    _, reply = await verify(phrase, text, (await seed(phrase))["control_token"])
    assert (reply["failure_kind"], reply["failure_reason"]) == ("verifier_failed", reason)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (JSONResponse({"reward": 1.0, "detail": "the judge is down"}, 503), "status 503: the judge is down"),
        (JSONResponse({"reward": 1.0, "error": "no quota"}, 429), "status 429: no quota"),
        (PlainTextResponse("upstream broke", 500), "status 500: upstream broke"),
        (Response(status_code=502), "status 502: Bad Gateway"),
    ],
)
async def test_error_that_verify_returns_is_no_reward(frank: Stack, answer: Response, told: str) -> None:
    verdict = await frank_verdict(frank, lambda _: answer)
    assert verdict == (False, None, "verifier_failed", f"verify answered {told}")


@pytest.mark.parametrize(
    ("detail", "told"),
    [
        ("the judge is down", "the judge is down"),
        ("not UTF-8: \ud800", "not UTF-8: ?"),
        ({1: 10**30, "log": "\ud800"}, f'{{"1":"{10**30}","log":"?"}}'),
    ],
)
async def test_error_that_verify_raises_keeps_its_status_and_text(frank: Stack, detail: Any, told: str) -> None:
    def verifies_with(_: dict[str, Any]) -> None:
        raise HTTPException(503, detail)

    verdict = await frank_verdict(frank, verifies_with)
    assert verdict == (False, None, "verifier_failed", f"verify answered status 503: {told}")


@pytest.mark.parametrize("answer", [1.0, True, [1.0], "yes", FrankReply])
async def test_hook_that_returns_no_reply_is_named_with_what_it_returned(frank: Stack, answer: Any) -> None:
    wrong = f"returned {type(answer).__name__}; it must return a model or a dict"
    verdict = await frank_verdict(frank, lambda _: answer)
    assert verdict == (False, None, "verifier_failed", f"verify {wrong}")
    environment(frank, "frank").seeds_with = lambda: answer
    body = {**ROW, "_ng_session": {"rollout": rollout(rollout_id="another").model_dump()}}
    _, problem = await call(frank, "frank", "/seed_session", body)
    assert problem["detail"] == f"seed_session {wrong}"


class LeavingEnvironment(FrankEnvironment):
    """Its tool ends the program, as the main function of a command does."""

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/leave")(lambda: sys.exit(2))
        return app


async def test_plugin_that_ends_the_program_fails_its_own_request_alone(stack: Stack) -> None:
    stack.add("frank", LeavingEnvironment, Role.ENVIRONMENT)
    frank: Any = environment(stack, "frank")
    body = {**ROW, "_ng_session": {"rollout": rollout().model_dump()}}
    frank.seeds_with = lambda: sys.exit(2)
    status, problem = await call(stack, "frank", "/seed_session", body)
    assert (status, problem["code"]) == (500, "internal")
    frank.seeds_with = dict
    status, problem = await call(stack, "frank", "/leave", {})
    assert (status, problem["detail"]) == (500, "SystemExit in /leave; the server's log has the traceback")
    verdict = await frank_verdict(stack, lambda _: sys.exit(2))
    reason = "verify raised SystemExit; the environment's log has the traceback"
    assert verdict == (False, None, "verifier_failed", reason)


@pytest.mark.parametrize("status", [404, 422, 500, 503])
async def test_error_that_seed_session_returns_is_answered_as_if_it_was_raised(frank: Stack, status: int) -> None:
    def raises() -> None:
        raise HTTPException(status, "no such world")

    def returns() -> Response:
        return JSONResponse({"detail": "no such world"}, status)

    body = {**ROW, "_ng_session": {"rollout": rollout().model_dump()}}
    answers = []
    for environment(frank, "frank").seeds_with in (raises, returns):
        answers.append(await call(frank, "frank", "/seed_session", body))
    assert answers == [(status, {"detail": "no such world"})] * 2


async def test_error_status_that_verify_sets_on_its_response_is_no_reward(stack: Stack) -> None:
    class Setting(FrankEnvironment):
        async def verify(self, response: Response, body: dict[str, Any]) -> dict[str, Any]:
            response.status_code = 503
            return {"reward": 1.0, "detail": "the judge is down"}

    stack.add("frank", Setting, Role.ENVIRONMENT)
    verdict = await frank_verdict(stack, dict)
    assert verdict == (False, None, "verifier_failed", "verify answered status 503: the judge is down")


async def test_a_route_that_a_plugin_puts_in_place_of_verify_grades_within_the_contract(stack: Stack) -> None:
    class Reaping(FrankEnvironment):
        reaped: list[str] = Field(default_factory=list)

        def setup_webserver(self) -> FastAPI:
            app = super().setup_webserver()
            app.router.routes = [each for each in app.router.routes if getattr(each, "path", None) != "/verify"]
            app.post("/verify")(judge_failsafe(self.verify_and_reap))
            return app

        async def verify_and_reap(self, request: Request, body: FrankRequest) -> Any:
            try:
                return await self.verify(body)
            finally:
                self.reaped.append(request.session["session_id"])

    stack.add("frank", Reaping, Role.ENVIRONMENT)
    verdict = await frank_verdict(stack, lambda body: {**body, "reward": 0.5}, expected="x")
    assert verdict == (True, 0.5, None, "")
    assert len(environment(stack, "frank").reaped) == 1


@pytest.mark.parametrize("extra", [{}, {"note": object()}], ids=["plain", "not JSON"])
async def test_reply_names_its_fields_by_their_aliases(frank: Stack, extra: dict[str, Any]) -> None:
    told = await frank_verdict(
        frank, lambda body: AliasedReply(**body, **extra, reward=0.0, _ng_failure_class="judge_failed")
    )
    assert told == (False, None, "verifier_failed", "reported as 'judge_failed'")


async def test_remark_beside_a_reward_that_counts_stays(frank: Stack) -> None:
    said = {"failure_kind": "judge_unparseable", "failure_reason": "no JSON"}
    told = await frank_verdict(frank, lambda body: FrankReply(**body, **said, reward=0.5))
    assert told == (True, 0.5, "judge_unparseable", "no JSON")


@pytest.mark.parametrize("share", [0.25, math.inf])
def test_number_of_a_reply_is_kept_under_its_alias_alone(share: float) -> None:
    said = plain(AliasedReply.model_construct(reward=1.0, share=share))
    assert said["portion"] == share and "share" not in said


async def test_heartbeat_in_a_plugins_own_seed_reply_is_none_that_the_pipeline_has_to_send(frank: Stack) -> None:
    environment(frank, "frank").seeds_with = lambda: {"heartbeat_s": 0.001, "world": "w"}
    seeded = await seed(frank, "frank")
    assert seeded["world"] == "w" and "heartbeat_s" not in seeded


async def test_seed_that_opens_nothing_names_the_hook(phrase: Stack) -> None:
    body = {**ROW, "opens": "nothing", "_ng_session": {"rollout": rollout().model_dump()}}
    status, reply = await call(phrase, "phrase", "/seed_session", body)
    assert (status, reply["detail"]) == (
        409,
        "open_session of 'phrase' returned NoneType, not a SessionDescriptor",
    )


async def test_environment_that_cannot_grade_is_told_so(stack: Stack) -> None:
    class Ungraded(SimpleResourcesServer):
        config: BaseResourcesServerConfig

    stack.add("phrase", Ungraded, Role.ENVIRONMENT)
    _, reply = await verify(stack, "x", (await seed(stack))["control_token"])
    assert (reply["valid"], reply["failure_kind"]) == (False, "verifier_failed")
    assert reply["failure_reason"].startswith("Ungraded implements neither grade() nor verify()")


async def test_valid_verdict_ends_the_attempt_when_asked_and_nothing_is_to_be_released(stack: Stack) -> None:
    stack.add("phrase", UnheldPhraseEnvironment, Role.ENVIRONMENT)
    seeded = await seed(stack)
    control = seeded["control_token"]
    assert seeded["closes_with_verdict"] is True
    _, invalid = await verify(stack, "broken grader", control, closes=True)
    again = await call(stack, "phrase", "/seed_session", {**ROW, "_ng_session": {"rollout": rollout().model_dump()}})
    assert (invalid["valid"], again[0]) == (False, 200), "an invalid verdict is not the end"
    await seed(stack, rollout_id="r2")
    control = (await seed(stack, rollout_id="r2"))["control_token"]
    first = await verify(stack, "swordfish", control, closes=True, rollout_id="r2")
    late = {**ROW, "_ng_session": {"rollout": rollout(rollout_id="r2").model_dump()}}
    assert (await call(stack, "phrase", "/seed_session", late))[0] == 409
    assert await verify(stack, "swordfish", control, closes=True, rollout_id="r2") == first
    assert (await verify(stack, "other", control, closes=True, rollout_id="r2"))[0] == 409
    body = {"rollout": rollout(rollout_id="r2").model_dump()}
    assert (await call(stack, "phrase", "/close", body, control=control))[1] == {
        "closed": True,
        "already_closed": True,
    }
    assert environment(stack).graded == 2


async def test_repeated_verdict_ends_the_attempt_that_its_first_one_left_open(stack: Stack) -> None:
    stack.add("phrase", UnheldPhraseEnvironment, Role.ENVIRONMENT)
    control = (await seed(stack))["control_token"]
    await verify(stack, "swordfish", control)
    await verify(stack, "swordfish", control, closes=True)
    body = {"rollout": rollout().model_dump()}
    assert (await call(stack, "phrase", "/close", body, control=control))[1]["already_closed"] is True


async def test_verdict_is_not_the_end_when_the_environment_has_something_to_release(phrase: Stack) -> None:
    seeded = await seed(phrase)
    assert seeded["closes_with_verdict"] is False
    assert (await verify(phrase, "swordfish", seeded["control_token"], closes=True))[0] == 200
    assert environment(phrase).closed == []
    await call(phrase, "phrase", "/close", {"rollout": rollout().model_dump()}, control=seeded["control_token"])
    assert environment(phrase).closed == ["r1-a1"]


async def test_work_is_graded_again_when_its_first_verdict_was_invalid(phrase: Stack) -> None:
    control = (await seed(phrase))["control_token"]
    _, lost = await verify(phrase, "lost box, swordfish", control)
    other, _ = await verify(phrase, "something else, swordfish", control)
    _, graded = await verify(phrase, "lost box, swordfish", control)
    assert (lost["valid"], other, graded["reward"]) == (False, 409, 1.0)


async def test_finding_stands_beside_the_verdict(phrase: Stack) -> None:
    control = (await seed(phrase))["control_token"]
    _, reply = await verify(phrase, "peek swordfish", control)
    assert reply["reward"] == 0.0 and reply["findings"][0]["kind"] == "peeked"
    assert reply["official"] == {"artifacts": 0}


async def grade_verdict(stack: Stack, grade: Callable[[], Any]) -> dict[str, Any]:
    class Grading(PhraseEnvironment):
        async def grade(self, *_: Any) -> Any:
            return grade()

    stack.add("phrase", Grading, Role.ENVIRONMENT)
    status, reply = await verify(stack, "x", (await seed(stack))["control_token"])
    assert status == 200, reply
    return dict(reply)


async def test_verdict_stands_when_it_holds_what_json_cannot_carry(stack: Stack) -> None:
    details = {"count": 10**30, "text": "a\ud800b", "kind": SimpleResourcesServer, "share": 0.5}
    reply = await grade_verdict(stack, lambda: Verdict.of(1.0, evaluation_log="a\udcffb", details=details))
    assert (reply["valid"], reply["reward"], reply["evaluation_log"]) == (True, 1.0, "a?b")
    told = {"count": str(10**30), "text": "a?b", "kind": str(SimpleResourcesServer), "share": 0.5}
    assert reply["details"] == told


@pytest.mark.parametrize(
    "returned",
    [
        lambda reply: reply,
        lambda reply: reply.model_dump(),
        lambda reply: Response(json.dumps({**reply.model_dump(), "log": "a?b", "kind": str(SimpleResourcesServer)})),
    ],
    ids=["model", "dict", "response"],
)
async def test_reply_of_verify_stands_when_it_holds_what_json_cannot_carry(
    frank: Stack, returned: Callable[[FrankReply], Any]
) -> None:
    said = {"count": 10**30, "log": "a\ud800b", "kind": SimpleResourcesServer}
    reply = await frank_reply(frank, lambda body: returned(FrankReply(**body, reward=1.0, **said)))
    assert (reply["valid"], reply["reward"], reply["count"]) == (True, 1.0, str(10**30))
    assert (reply["log"], reply["kind"]) == ("a?b", str(SimpleResourcesServer))


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
async def test_reward_that_is_not_finite_is_named_and_counts_as_a_failure(stack: Stack, reward: float) -> None:
    stack.add("frank", FrankEnvironment, Role.ENVIRONMENT)
    counted = verdicts_counted()
    reply = await grade_verdict(stack, lambda: Verdict.of(reward))
    assert (reply["valid"], reply["reward"], reply["failure_kind"]) == (False, None, "verifier_failed")
    assert reply["failure_reason"] == f"grade made no Verdict: reward: the reward is {reward}, not a finite number"
    verdict = await frank_verdict(stack, lambda body: FrankReply(**body, reward=reward))
    said = f"verify returned the reward {reward!r}, not a finite number"
    assert verdict == (False, None, "verifier_failed", said)
    assert verdicts_counted() == [counted[0], counted[1] + 2]


def verdicts_counted() -> list[float]:
    return [VERDICTS.values.get((outcome,), 0.0) for outcome in ("valid", "verifier_failed")]


async def test_verdict_that_was_made_invalid_by_hand_is_no_reward(stack: Stack) -> None:
    reply = await grade_verdict(stack, lambda: Verdict.model_construct(valid=True, reward=None))
    reason = "grade made no Verdict: a valid verdict has a reward and no failure_kind"
    assert (reply["valid"], reply["failure_reason"]) == (False, reason)


FINDING = {"kind": "peeked", "detail": "it looked"}


@pytest.mark.parametrize("row", [{}, {"mask_sample": False, "findings": [{**FINDING, "evidence": {}}]}])
async def test_findings_of_verify_are_kept_and_leave_no_reward(frank: Stack, row: dict[str, Any]) -> None:
    def finds(body: dict[str, Any]) -> FrankReply:
        return FrankReply(**{**body, "reward": 1.0, "findings": [FINDING]})

    reply = await frank_reply(frank, finds, **row)
    assert (reply["valid"], reply["reward"], reply["findings"]) == (True, 0.0, [{**FINDING, "evidence": {}}])


@pytest.mark.parametrize(
    ("findings", "problem"),
    [
        (["cheated"], "0: Input should be a valid dictionary or instance of Finding"),
        ([FINDING, {"kind": "peeked"}], "1.detail: Field required"),
        ("cheated", "value: Input should be a valid list"),
    ],
)
async def test_findings_that_cannot_be_read_are_named_and_give_no_reward(
    frank: Stack, findings: Any, problem: str
) -> None:
    verdict = await frank_verdict(frank, lambda body: FrankReply(**body, reward=1.0, findings=findings))
    reason = f"'findings' must be a list of objects with 'kind', 'detail' and perhaps 'evidence': {problem}"
    assert verdict == (False, None, "verifier_failed", reason)


async def test_finding_stands_beside_a_failure_too(frank: Stack) -> None:
    said = {"valid": False, "failure_reason": "judge down", "findings": [FINDING]}
    reply = await frank_reply(frank, lambda body: FrankReply(**body, reward=1.0, **said))
    assert (reply["failure_reason"], reply["findings"][0]["kind"]) == ("judge down", "peeked")


async def test_first_verdict_stands_after_the_server_was_restarted(tmp_path: Path) -> None:
    with running_stack(str(tmp_path)) as stack:
        stack.add("phrase", PhraseEnvironment, Role.ENVIRONMENT)
        control = (await seed(stack))["control_token"]
        _, first = await verify(stack, "wrong", control)
        await seed(stack, rollout_id="r2", attempt=3)
        port = int(stack.url("phrase").rpartition(":")[2])
        stack.stop("phrase")
        stack.add("phrase", PhraseEnvironment, Role.ENVIRONMENT, port=port)
        status, again = await verify(stack, "wrong", control)
        refused, _ = await verify(stack, "swordfish", control)
        body = {**ROW, "_ng_session": {"rollout": rollout("r2", 2).model_dump()}}
        fenced, _ = await call(stack, "phrase", "/seed_session", body)
        assert (status, again) == (200, first)
        assert (refused, fenced) == (409, 409)
        assert environment(stack).graded == 0


async def test_verdict_has_the_rows_own_fields_and_none_that_only_a_verdict_sets(phrase: Stack) -> None:
    row = {**ROW, "task_id": "t", "note": "kept", "details": {"a": 1}, "evaluation_log": "/etc/passwd", "reward": 1.0}
    row |= {"_ng_failure_class": "agent_crashed", "ng_trajectory": [], "reward_info": {"a": 1}, "reward_reason": "x"}
    control = (await seed(phrase, row=row))["control_token"]
    _, reply = await verify(phrase, "wrong", control, row=row)
    assert (reply["task_id"], reply["note"], reply["reward"], reply["official"]) == (
        "t",
        "kept",
        0.0,
        {"artifacts": 0},
    )
    assert not {"_ng_failure_class", "details", "evaluation_log", "ng_trajectory", "reward_info", "reward_reason"} & {
        *reply
    }


async def test_reward_counts_also_if_the_row_has_the_same_one_of_an_earlier_run(counter: Stack) -> None:
    row = {"responses_create_params": {"input": "count"}, "expected": 0, "reward": 1.0, "valid": False}
    seeded = await seed(counter, "counter", row)
    status, reply = await verify(counter, "x", seeded["control_token"], "counter", row)
    assert (status, reply["valid"], reply["reward"], reply["failure_kind"]) == (200, True, 1.0, None)


async def test_reply_that_names_a_failure_has_no_reward_whatever_it_says_beside(frank: Stack) -> None:
    said = {"failure_kind": "sandbox_lost", "failure_reason": "the host is gone"}
    verdict = await frank_verdict(frank, lambda body: FrankReply(**body, reward=0.0, **said))
    assert verdict == (False, None, "sandbox_lost", "the host is gone")


async def test_reason_beside_a_reward_is_kept(frank: Stack) -> None:
    verdict = await frank_verdict(frank, lambda body: FrankReply(**body, reward=0.0, failure_reason="judge down"))
    assert verdict == (True, 0.0, None, "judge down")


EARLIER_FAILURE = {"valid": False, "failure_kind": "verifier_failed", "failure_reason": "judge down"}


@pytest.mark.parametrize("row", [{}, {"valid": False}, EARLIER_FAILURE, {**EARLIER_FAILURE, "mask_sample": True}])
async def test_failure_counts_also_if_the_row_has_the_same_one_of_an_earlier_run(
    frank: Stack, row: dict[str, Any]
) -> None:
    def fails(body: dict[str, Any]) -> FrankReply:
        return FrankReply(**{**body, **EARLIER_FAILURE, "reward": 0.0})

    assert await frank_verdict(frank, fails, **row) == (False, None, "verifier_failed", "judge down")


async def test_failure_of_an_earlier_run_in_the_row_says_nothing_about_this_one(frank: Stack) -> None:
    row = {**EARLIER_FAILURE, "mask_sample": True, "_ng_failure_class": "verifier_failed"}
    verdict = await frank_verdict(frank, lambda body: FrankReply(**body, reward=1.0), **row)
    assert verdict == (True, 1.0, None, "")


@pytest.mark.parametrize("model", [LogicRequest, AliasedRequest, ChoosingRequest])
async def test_field_that_the_dataset_and_the_plugin_call_valid_is_the_plugins_to_read(
    stack: Stack, model: type[FrankRequest]
) -> None:
    class Logic(FrankEnvironment):
        async def verify(self, body: FrankRequest) -> Any:
            said = body.model_dump()
            return FrankReply(**said, reward=float(not said.get("valid", said.get("holds"))))

        verify.__annotations__["body"] = model

    stack.add("frank", Logic, Role.ENVIRONMENT)
    assert await frank_verdict(stack, dict, valid=False) == (True, 1.0, None, "")


async def test_default_grade_reads_a_reply_as_the_route_does() -> None:
    environment = make_environment(FrankEnvironment)
    environment.verifies_with = lambda body: FrankReply(**body, reward=1.0)
    row = {"responses_create_params": {"input": "say it"}, "valid": False, "mask_sample": True}
    assert (await environment.grade(row, response(), (), rollout())).reward == 1.0


async def test_operator_verifies_again_without_touching_the_first_verdict(phrase: Stack) -> None:
    control = (await seed(phrase))["control_token"]
    await verify(phrase, "wrong", control)
    status, again = await verify(phrase, "swordfish", None, role=Role.OPERATOR)
    _, stored = await call(phrase, "phrase", "/verdict", {"rollout": rollout().model_dump()})
    assert (status, again["reward"], again["reverified"]) == (200, 1.0, True)
    assert stored["reward"] == 0.0


@pytest.mark.parametrize(
    ("role", "reverify"), [(Role.OPERATOR, False), (Role.PIPELINE, True), (Role.AGENT, True), (Role.ENVIRONMENT, True)]
)
async def test_only_an_operator_verifies_again_and_nothing_else(phrase: Stack, role: Role, reverify: bool) -> None:
    control = (await seed(phrase))["control_token"]
    stored = {"row": ROW, "rollout": rollout().model_dump()}
    _, kept = await call(phrase, "phrase", "/rows", stored)
    session = {"rollout": rollout().model_dump(), "reverify": reverify, "row_ref": kept["row_ref"]}
    body = {**ROW, "response": response("swordfish"), "_ng_session": session}
    status, problem = await call(phrase, "phrase", "/verify", body, role=role, control=control)
    assert (status, problem["code"], environment(phrase).graded) == (403, "role", 0)


async def test_solution_is_given_to_a_pipeline_in_validation_mode_only(phrase: Stack) -> None:
    session = {"rollout": rollout().model_dump(), "validation": "gold"}
    status, reply = await call(phrase, "phrase", "/seed_session", {**ROW, "_ng_session": session})
    plain = await seed(phrase, rollout_id="r2")
    assert (status, reply["validation"]) == (200, {"text": "swordfish"})
    assert "validation" not in plain and "swordfish" not in str(plain)


async def test_topology_is_refused_with_the_choices_when_the_environment_cannot_serve_it(phrase: Stack) -> None:
    session = {"rollout": rollout().model_dump(), "topology": "agent_in_env"}
    status, problem = await call(phrase, "phrase", "/seed_session", {**ROW, "_ng_session": session})
    assert status == 400 and "none" in problem["detail"]


async def test_limits_of_the_run_win_over_the_environments_and_leave_it_the_others(phrase: Stack) -> None:
    session = {"rollout": rollout().model_dump(), "limits": {"max_turns": 7, "memory_mib": 512}}
    with_limits = Limits(max_turns=3, wall_clock_s=60.0)
    environment: Any = phrase.servers["phrase"]
    opened = type(environment).open_session

    async def open_session(self: Any, row: dict[str, Any], who: Any) -> SessionDescriptor:
        descriptor: SessionDescriptor = await opened(self, row, who)
        return descriptor.model_copy(update={"limits": with_limits})

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(environment), "open_session", open_session)
        status, seeded = await call(phrase, "phrase", "/seed_session", {**ROW, "_ng_session": session})
    assert status == 200, seeded
    limits = Limits.model_validate(seeded["descriptor"]["limits"])
    assert limits == Limits(max_turns=7, memory_mib=512, wall_clock_s=60.0)


async def test_body_error_names_the_field_and_not_its_value(counter: Stack) -> None:
    row = {"responses_create_params": {"input": "count"}, "expected": "CANARY-not-a-number"}
    control = (await seed(counter, "counter", row))["control_token"]
    with capture_logs() as logs:
        status, problem = await verify(counter, "x", control, "counter", row)
    assert status == 422 and "expected" in problem["detail"] and "CANARY" not in str(problem)
    # An agent that verifies by itself fails with nothing but the status; `ng_why` shows warnings of the attempt.
    (warned,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert "expected" in warned["error"] and "CANARY" not in str(warned) and warned["rollout_id"]


async def test_metrics_leave_out_and_count_samples_without_a_verdict(counter: Stack) -> None:
    rows = [
        {"_ng_task_index": 0, "_ng_rollout_index": 0, "reward": 1.0, "valid": True, "mask_sample": False},
        {"_ng_task_index": 0, "_ng_rollout_index": 1, "reward": None, "valid": False, "mask_sample": True},
        {"_ng_task_index": 1, "_ng_rollout_index": 0, "reward": 0.0, "valid": True, "mask_sample": False},
    ]
    status, metrics = await call(counter, "counter", "/aggregate_metrics", {"verify_responses": rows})
    assert status == 200
    assert metrics["key_metrics"] == {"mean/reward": 0.5, "invalid/count": 1}
    assert metrics["group_level_metrics"][0]["mean/reward"] == 1.0


def test_environment_class_says_what_it_overrides() -> None:
    assert CounterEnvironment.overrides("verify") and not CounterEnvironment.overrides("grade")
