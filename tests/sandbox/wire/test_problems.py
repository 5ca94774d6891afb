"""An error means the same on both sides of the wire."""

from __future__ import annotations

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.testclient import TestClient

from nemo_gym.contract import errors
from nemo_gym.contract.errors import NemoGymError
from nemo_gym.sandbox import wire
from nemo_gym.sandbox.wire.problems import CODES, BrokerError, Problem, error_of, parse_problem, problem_of

SANDBOX_ERRORS = [
    errors.SandboxError,
    errors.SandboxCreateError,
    errors.SandboxImageMissingError,
    errors.SandboxCreateVerificationError,
    errors.SandboxCapabilityError,
    errors.SandboxLostError,
    errors.SandboxArchiveError,
    errors.ConfigError,
    errors.CredentialError,
    errors.FencedError,
]


def across(error: NemoGymError) -> NemoGymError:
    body = problem_of(error, request_id="r-1").model_dump_json().encode()
    return error_of(parse_problem(error.status, body))


@pytest.mark.parametrize("kind", SANDBOX_ERRORS)
@pytest.mark.parametrize("retryable", [True, False])
def test_error_of_the_suite_arrives_as_itself(kind: type[NemoGymError], retryable: bool) -> None:
    there = across(kind("the disk is full", retryable=retryable, provider="x", missing=["gpu"]))
    assert type(there) is kind
    assert (str(there), there.retryable) == ("the disk is full", retryable)
    assert (there.details["provider"], there.details["missing"]) == ("x", ["gpu"])
    assert there.details["request_id"] == "r-1"


@pytest.mark.parametrize("code", CODES)
def test_error_of_the_broker_arrives_as_what_a_client_handles(code: str) -> None:
    sent = BrokerError(code, "why", sandbox_id="b")
    problem = problem_of(sent, request_id="r-1")
    assert (problem.status, problem.code, problem.started) == (CODES[code].status, code, CODES[code].started)
    there = across(sent)
    assert type(there) is CODES[code].raises
    assert (there.details["started"], there.details["sandbox_id"]) == (CODES[code].started, "b")
    assert code in (there.code, there.details.get("problem"))
    assert there.retryable is CODES[code].retryable


def test_gone_box_is_lost_to_its_user() -> None:
    for code in ("sandbox_gone", "sandbox_not_found", "lease_expired", "output_gone"):
        assert isinstance(across(BrokerError(code, "x")), errors.SandboxLostError)


@pytest.mark.parametrize("body", [b"", b"<html>Bad Gateway</html>", b'{"detail": []}', b"\xff\xfe"])
def test_answer_of_something_else_is_a_problem_of_unknown_start(body: bytes) -> None:
    problem = parse_problem(502, body)
    assert (problem.status, problem.code, problem.started, problem.retryable) == (
        502,
        "not_a_problem",
        "unknown",
        True,
    )
    assert type(error_of(problem)) is errors.SandboxError


def test_details_cannot_replace_what_the_problem_says() -> None:
    error = errors.SandboxError("real", detail="fake", status=200, code="fake", title="fake", request_id="fake")
    problem = problem_of(error, request_id="r-2")
    assert (problem.detail, problem.status, problem.code, problem.request_id) == ("real", 502, "sandbox", "r-2")


def test_retry_after_and_started_can_be_told() -> None:
    error = BrokerError("no_room", "full", retry_after_s=2.5, started="unknown")
    assert error.retry_after_s == 2.5
    assert problem_of(error, request_id="r").started == "unknown"


@pytest.mark.parametrize("name", ["plain", "with/slash:tag", "a b?c#d", "..", ".", "50%", "ünï"])
def test_names_pass_through_paths_unchanged(name: str) -> None:
    app = FastAPI()

    @app.get("/v1/images/{name:path}")
    async def image(name: str) -> Response:
        return Response(name)

    @app.get("/v1/sandboxes/{box}/doors/{name}")
    async def door(box: str, name: str, request: Request) -> Response:
        return Response(f"{box}|{name}")

    client = TestClient(app)
    assert client.get(wire.image(name)).text == name
    if "/" not in name:  # servers decode before they route; ids and door names hold no slash
        assert client.get(wire.sandbox("box", "doors", name)).text == f"box|{name}"


def test_problem_is_immutable_and_keeps_its_details() -> None:
    problem = Problem.model_validate_json('{"title":"t","status":404,"detail":"d","code":"c","limit":5}')
    assert (problem.model_extra or {})["limit"] == 5
