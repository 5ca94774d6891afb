"""Errors reach each SDK as the exception its users handle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import openai
import orjson
import pytest

from nemo_gym.contract.errors import (
    ContractError,
    CredentialError,
    FencedError,
    InvalidBodyError,
    ModelError,
    NemoGymError,
)
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.adapters import ADAPTERS
from nemo_gym.gateway.dialects.errors import ContextOverflowError, error_body, overflow_of, relayed_error
from nemo_gym.gateway.engines.types import EngineRateLimitedError, EngineRefusedError, EngineTimeoutError
from nemo_gym.gateway.inference import failure_event
from tests.gateway.dialects.conftest import Served

USER: Any = [{"role": "user", "content": "q"}]


class ForbiddenError(ContractError):
    status = 403


class UnknownError(ContractError):
    status = 404


class OverloadedError(ModelError):
    status = 529


CASES = [
    (InvalidBodyError("bad", param="x"), 400, "invalid_request_error", "invalid_request_error"),
    (EngineRefusedError("bad"), 400, "invalid_request_error", "invalid_request_error"),
    (CredentialError("who"), 401, "invalid_request_error", "authentication_error"),
    (ForbiddenError("no"), 403, "permission_error", "permission_error"),
    (UnknownError("none"), 404, "invalid_request_error", "not_found_error"),
    (FencedError("over"), 409, "conflict_error", "invalid_request_error"),
    (EngineRateLimitedError("later", retry_after_s=2.0), 429, "rate_limit_error", "rate_limit_error"),
    (ModelError("broken"), 502, "server_error", "api_error"),
    (EngineTimeoutError("slow"), 504, "server_error", "timeout_error"),
    (OverloadedError("busy"), 529, "server_error", "overloaded_error"),
]


@pytest.mark.parametrize(("error", "status", "openai_type", "anthropic_type"), CASES)
async def test_sdks_raise_their_own_exception(
    served: Served, error: NemoGymError, status: int, openai_type: str, anthropic_type: str
) -> None:
    import anthropic  # here, because it takes a second, and every test process imports this file

    served.fail = error
    async with openai.AsyncOpenAI(api_key="k", base_url=f"{served.url}/v1", max_retries=0) as one:
        with pytest.raises(openai.APIStatusError) as caught:
            await one.chat.completions.create(model="m", messages=USER)
        assert (caught.value.status_code, caught.value.type) == (status, openai_type)
        assert error.message in str(caught.value) and isinstance(caught.value.code, str)
        with pytest.raises(openai.APIStatusError) as caught:
            await one.responses.create(model="m", input="q")
        assert caught.value.status_code == status
    async with anthropic.AsyncAnthropic(api_key="k", base_url=served.url, max_retries=0) as two:
        with pytest.raises(anthropic.APIStatusError) as raised:
            await two.messages.create(model="m", max_tokens=9, messages=USER)
    body = raised.value.body
    assert raised.value.status_code == status and isinstance(body, Mapping)
    assert body["type"] == "error" and body["error"] == {"type": anthropic_type, "message": error.message}


def test_refused_field_is_the_param() -> None:
    with pytest.raises(InvalidBodyError) as caught:
        ADAPTERS[Dialect.CHAT].lower({"messages": USER, "n": 2})
    status, body = error_body(Dialect.CHAT, caught.value)
    assert status == 400 and body["error"]["param"] == "n"


def test_overflow_is_worded_as_harnesses_recognise_it() -> None:
    error = ContextOverflowError(prompt_tokens=9000, limit=8192)
    for dialect in (Dialect.CHAT, Dialect.RESPONSES):
        status, body = error_body(dialect, error)
        assert status == 400 and body["error"]["code"] == "context_length_exceeded"
        assert "maximum context length is 8192 tokens" in body["error"]["message"]
    status, body = error_body(Dialect.MESSAGES, error)
    assert (status, body["error"]) == (
        400,
        {"type": "invalid_request_error", "message": "prompt is too long: 9000 tokens > 8192 maximum"},
    )
    assert error.details == {"prompt_tokens": 9000, "limit": 8192}


@pytest.mark.parametrize(
    "said",
    [
        "request (9000 tokens) exceeds the available context size (8192 tokens), try increasing it",
        "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens.",
        "This model's maximum context length is 8192 tokens. However, you requested 0 output tokens and your prompt"
        " contains at least 9000 input tokens, for a total of at least 9000 tokens.",
        "The input (9000 tokens) is longer than the model's context length (8192 tokens).",
        "This model's maximum context length is 8192 tokens. However, you requested 9500 tokens (9000 in the messages,"
        " 500 in the completion). Please reduce the length of the messages or completion.",
        "This model's maximum context length is 8192 tokens. However, you requested 9500 tokens (8000 in the messages,"
        " 1000 in the functions, and 500 in the completion).",
        "This endpoint's maximum context length is 8192 tokens. However, you requested about 18000 tokens (8000 of"
        " text input, 1000 of tool input, 9000 in the output).",
        "Requested token count exceeds the model's maximum context length of 8192 tokens. You requested a total of"
        " 18500 tokens: 9000 tokens from the input messages and 9500 tokens for the completion.",
        "This model's maximum context length is 8192 tokens. However, your prompt contains 9000 input tokens, which"
        " exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
        "Input tokens exceed the configured limit of 8192 tokens. Your messages resulted in 9000 tokens. Please reduce"
        " the length of the messages.",
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 8192. Given: 9000 `inputs` tokens and"
        " 60 `max_new_tokens`",
        "Input validation error: `inputs` must have less than 8192 tokens. Given: 9000",
        "prompt is too long: 9000 tokens > 8192 maximum",
        "The input token count (9000) exceeds the maximum number of tokens allowed (8192).",
        "This model's maximum prompt length is 8192 but the request contains 9000 tokens.",
    ],
)
def test_overflow_is_recognised_in_the_words_of_each_engine(said: str) -> None:
    body = orjson.dumps({"error": {"code": 400, "message": said}})
    found = overflow_of(body)
    assert found is not None and (found.prompt_tokens, found.limit) == (9000, 8192)
    for status in (400, 413, 422):
        reply = relayed_error(Dialect.MESSAGES, status, body)
        assert reply.status_code == 400
        assert b"prompt is too long: 9000 tokens > 8192 maximum" in bytes(reply.body)


@pytest.mark.parametrize(
    "said",
    [
        "max_tokens is too large: 9000. This model's maximum context length is 8192 tokens and your request has 20"
        " input tokens",
        "This model's maximum context length is 8192 tokens. However, you requested 9000 output tokens and your prompt"
        " contains at least 20 input tokens, for a total of at least 9020 tokens.",
        "This model's maximum context length is 8192 tokens. However, you requested 9500 tokens (500 in the messages,"
        " 9000 in the completion). Please reduce the length of the messages or completion.",
        "This model's maximum context length is 8192 tokens. However, you requested 9500 tokens (400 in the messages,"
        " 100 in the functions, and 9000 in the completion).",
        "This model's maximum context length is 8192 tokens, however you requested 9500 tokens (500 in your prompt;"
        " 9000 for the completion).",
        "This endpoint's maximum context length is 8192 tokens. However, you requested about 9500 tokens (500 of text"
        " input, 9000 in the output).",
        "Requested token count exceeds the model's maximum context length of 8192 tokens. You requested a total of"
        " 9500 tokens: 500 tokens from the input messages and 9000 tokens for the completion.",
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 8192. Given: 500 `inputs` tokens and"
        " 9000 `max_new_tokens`",
        "input length and `max_tokens` exceed context limit: 500 + 9000 > 8192, decrease input length or `max_tokens`",
        "context length",
        "temperature must be at most 2",
    ],
)
def test_what_an_answer_may_have_is_no_overflow_of_the_prompt(said: str) -> None:
    assert overflow_of(orjson.dumps({"error": {"message": said}})) is None


def test_overflow_inside_a_stream_is_recognised_as_well() -> None:
    error = ContextOverflowError(prompt_tokens=9000, limit=8192)
    assert b'"code":"context_length_exceeded"' in failure_event(Dialect.CHAT, error)
    assert b'"code":"context_length_exceeded"' in failure_event(Dialect.RESPONSES, error, response={"id": "r"})
    assert b"prompt is too long: 9000 tokens > 8192 maximum" in failure_event(Dialect.MESSAGES, error)


def test_details_stay_inside() -> None:
    error = ModelError("broken", secret_path="/private")
    for dialect in Dialect:
        assert "/private" not in str(error_body(dialect, error))
