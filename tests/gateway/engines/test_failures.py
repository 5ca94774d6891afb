"""Every way an engine can fail has one class, which says what may be done about it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from nemo_gym._util.tasks import RETRY_AFTER_AT_MOST_S, retry_after_s
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.session import AgentOutcome
from nemo_gym.contract.verdict import outcome_of_model_error
from nemo_gym.gateway.engines import (
    EngineAnswerError,
    EngineConnections,
    EngineCredentialError,
    EngineEndpoint,
    EngineError,
    EngineFailedError,
    EngineLacksModelError,
    EngineLostError,
    EngineRateLimitedError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
    Generation,
    Sampling,
    SglangEngine,
    TokenRequest,
    VllmEngine,
)
from nemo_gym_testing.gateway import CutOff, FakeVllmEngine, Fault, Hang, Status

REQUEST = TokenRequest("r", [1, 2], Sampling(8))


def vllm(fake: FakeVllmEngine, http: EngineConnections, **options: float) -> VllmEngine:
    return VllmEngine(EngineEndpoint("e0", fake.url, api_key="sk-secret", **options), http)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fault", "expected", "retryable"),
    [
        (Status(400), EngineRefusedError, False),
        (Status(404), EngineLacksModelError, False),
        (Status(422), EngineRefusedError, False),
        (Status(401), EngineCredentialError, False),
        (Status(403), EngineCredentialError, False),
        (Status(408), EngineTimeoutError, True),
        (Status(429), EngineRateLimitedError, True),
        (Status(500), EngineFailedError, True),
        (Status(503), EngineFailedError, True),
        (Status(301, headers={"Location": "/elsewhere"}), EngineAnswerError, False),
        (CutOff(), EngineLostError, True),
    ],
)
async def test_fault_becomes_its_class(
    fault: Fault, expected: type[EngineError], retryable: bool, http: EngineConnections
) -> None:
    async with FakeVllmEngine() as fake:
        fake.faults.append(fault)
        with pytest.raises(EngineError) as caught:
            await vllm(fake, http).generate(REQUEST)
    assert type(caught.value) is expected
    assert caught.value.retryable is retryable and caught.value.details["engine"] == "e0"
    assert len(fake.calls) == 1, "an adapter never retries by itself"


async def test_error_of_an_engine_without_the_model_names_the_setting_and_what_the_engine_said(
    http: EngineConnections,
) -> None:
    async with FakeVllmEngine() as fake:
        fake.faults.append(Status(404, b"The model `m` does not exist."))
        with pytest.raises(
            EngineLacksModelError, match=r"policy_model_name \(the .*The model `m` does not exist"
        ) as caught:
            await vllm(fake, http).generate(REQUEST)
    assert outcome_of_model_error(caught.value) is AgentOutcome.MODEL_REFUSED


async def test_engine_is_unreachable_when_nothing_listens(http: EngineConnections) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engine = SglangEngine(EngineEndpoint("e0", f"http://127.0.0.1:{port}"), http)
    with pytest.raises(EngineUnreachableError, match="is it running"):
        await engine.generate(REQUEST)
    with pytest.raises(EngineUnreachableError):
        await engine.probe()


async def test_call_ends_with_a_timeout_when_the_engine_is_silent(http: EngineConnections) -> None:
    async with FakeVllmEngine() as fake:
        fake.faults.append(Hang())
        with pytest.raises(EngineTimeoutError):
            await vllm(fake, http, request_timeout_s=0.2).generate(REQUEST)


@pytest.mark.parametrize("after_events", [0, 1, 5, 7])
async def test_stream_never_ends_quietly_when_the_engine_breaks_off(
    after_events: int, http: EngineConnections
) -> None:
    async with FakeVllmEngine() as fake:
        fake.faults.append(CutOff(after_events))
        with pytest.raises(EngineLostError):
            async for _ in vllm(fake, http).stream(REQUEST):
                pass


async def test_stream_is_complete_when_it_breaks_off_after_the_finish_reason(http: EngineConnections) -> None:
    async with FakeVllmEngine() as fake:
        fake.faults.append(CutOff(8))  # eight tokens, then the figures of usage, which never come
        *_, whole = [item async for item in vllm(fake, http).stream(REQUEST)]
    assert isinstance(whole, Generation) and whole.token_ids == fake.calls[0].token_ids


async def test_error_event_inside_a_stream_raises(http: EngineConnections) -> None:
    async with FakeVllmEngine() as fake:
        fake.answer = lambda call: _error_stream()  # type: ignore[method-assign,assignment]
        with pytest.raises(EngineFailedError, match="out of memory"):
            async for _ in vllm(fake, http).stream(REQUEST):
                pass


def _error_stream():  # type: ignore[no-untyped-def]
    from nemo_gym_testing.gateway.engine import Answer

    return Answer({}, [{"error": {"message": "out of memory", "code": 500}}])


async def test_retry_after_is_carried_to_the_caller(http: EngineConnections) -> None:
    async with FakeVllmEngine() as fake:
        fake.faults.append(Status(429, headers={"Retry-After": "7"}))
        with pytest.raises(EngineRateLimitedError) as caught:
            await vllm(fake, http).generate(REQUEST)
    assert caught.value.retry_after_s == 7.0
    assert caught.value.as_problem()["retry_after_s"] == 7.0 and caught.value.status == 429


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("2.5", 2.5),
        ("-3", 0.0),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", RETRY_AFTER_AT_MOST_S),
        ("Fri, 31 Dec 99999999999999999999 23:59:59 GMT", None),
        ("999999999", RETRY_AFTER_AT_MOST_S),
        ("9" * 400, RETRY_AFTER_AT_MOST_S),
        ("inf", RETRY_AFTER_AT_MOST_S),
        ("-inf", 0.0),
        ("nan", None),
        ("soon", None),
        ("", None),
        (None, None),
    ],
)
def test_retry_after_is_read_in_both_forms_and_kept_to_for_a_while_at_most(
    header: str | None, expected: float | None
) -> None:
    assert retry_after_s(header) == expected


@pytest.mark.parametrize("code", [400, 401, 429, 500])
async def test_key_never_appears_in_an_error(code: int, http: EngineConnections) -> None:
    async with FakeVllmEngine() as fake:
        fake.faults.append(Status(code, b'{"error": "key sk-secret is not known"}'))
        with pytest.raises(EngineError) as caught:
            await vllm(fake, http).generate(REQUEST)
    assert "sk-secret" not in str(caught.value) + str(caught.value.as_problem())
    assert "sk-secret" not in repr(vllm(fake, http)) + repr(vllm(fake, http).endpoint)


async def test_probe_samples_nothing_and_fails_when_the_engine_is_not_well(http: EngineConnections) -> None:
    async with FakeVllmEngine() as fake:
        await vllm(fake, http).probe()
        fake.healthy = False
        with pytest.raises(EngineFailedError):
            await vllm(fake, http).probe()
    assert fake.calls == [] and fake.probes == 2


def test_base_url_must_be_a_url() -> None:
    with pytest.raises(ConfigError, match="is not a URL"):
        EngineEndpoint("e0", "127.0.0.1:8000")


async def test_probe_is_one_request_when_its_connection_breaks(http: EngineConnections) -> None:
    asked = 0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        await reader.readuntil(b"\r\n\r\n")
        asked += 1
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(EngineLostError):
            await VllmEngine(EngineEndpoint("e0", f"http://127.0.0.1:{port}"), http).probe()
    assert asked == 1
