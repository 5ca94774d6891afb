"""Which answers of a policy endpoint are asked for again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from nemo_gym.agent.acts import ContextExceededError, PolicyClient, Route
from nemo_gym.contract.errors import ModelError
from nemo_gym.contract.session import InferenceEndpoint

Serve = Callable[[list[web.Response]], Awaitable[tuple[PolicyClient, list[str]]]]


@pytest.fixture
def connections() -> set[tuple[str, int]]:
    """Where the requests came from."""
    return set()


@pytest.fixture
async def serve(connections: set[tuple[str, int]]) -> AsyncIterator[Serve]:
    """Starts an endpoint that gives these answers in turn; the client of it, and the paths asked for so far."""
    runners: list[web.AppRunner] = []

    async def start(answers: list[web.Response]) -> tuple[PolicyClient, list[str]]:
        asked: list[str] = []

        async def answer(request: web.Request) -> web.Response:
            assert request.transport is not None
            connections.add(request.transport.get_extra_info("peername"))
            asked.append(request.path)
            return answers[len(asked) - 1]

        app = web.Application()
        for route in ("/v1/chat/completions", "/v1/responses"):
            app.router.add_post(route, answer)
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        endpoint = InferenceEndpoint(
            base_url=f"http://127.0.0.1:{runner.addresses[0][1]}/v1", token="token", model="policy"
        )
        return PolicyClient(endpoint, max_tries=3), asked

    yield start
    for runner in runners:
        await runner.cleanup()


def problem(status: int, *, retryable: bool) -> web.Response:
    body = {"error": {"message": "the model endpoint refused the API key", "type": "server_error", "code": "model"}}
    headers = {"Retry-After": "0", "x-should-retry": "true" if retryable else "false"}
    return web.json_response(body, status=status, headers=headers)


def completion(**message: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", **message}}]}


def response(*items: Any, **fields: Any) -> dict[str, Any]:
    return {"status": "completed", "output": [*items], **fields}


def message(content: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": content}


CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


async def test_conversation_that_the_model_server_finds_too_large_is_the_policys_doing(serve: Serve) -> None:
    said = {"error": {"message": "the body is larger than 33554432 bytes", "code": "body_too_large"}}
    client, asked = await serve([web.json_response(said, status=413)])
    with pytest.raises(ContextExceededError, match="larger than the endpoint takes"):
        await client.ask("/responses", {})
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("arguments", "is_own_doing"), [('{"a":', True), ("[1]", True), ('{"a": 1}', False), ("", False)]
)
@pytest.mark.parametrize("route", ["/responses", "/chat/completions"])
async def test_refusal_of_a_call_that_the_policy_wrote_is_its_doing_if_the_call_is_malformed(
    serve: Serve, route: Route, arguments: str, is_own_doing: bool
) -> None:
    refusal = {"error": {"message": "tool call arguments must be valid JSON"}}
    client, _ = await serve(
        [
            web.json_response(text, status=status)
            for text, status in ((refusal, 400), (response(), 200), (refusal, 400))
        ]
    )
    call = {"type": "function_call", "name": "f", "arguments": arguments}
    messages = [{"role": "user"}, {"role": "assistant", "tool_calls": [{"id": "1", "function": call}]}]
    body = {"input": [{"role": "user"}, call]} if route == "/responses" else {"messages": messages}
    with pytest.raises(ModelError, match="must be valid JSON") as given:
        await client.ask(route, body)
    assert not isinstance(given.value, ContextExceededError), "before an answer, a row holds the call, not the policy"
    await client.ask("/responses", {})
    with pytest.raises(ModelError, match="must be valid JSON") as caught:
        await client.ask(route, body)
    assert isinstance(caught.value, ContextExceededError) is is_own_doing


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        ({}, "output"),
        (response("x"), "output.0"),
        (response(message(["x"])), "output.0.content.0"),
        (response(message([{"type": "output_text", "text": 5}])), "output.0.content.0.text"),
        (response({"type": "reasoning", "summary": ["x"]}), "output.0.summary.0"),
        (response(CALL, {**CALL, "call_id": 5}), "output.1.call_id"),
        (response({key: CALL[key] for key in ("type", "name", "arguments")}), "output.0.call_id"),
        (response(status=1), "status"),
        (response(incomplete_details="max_output_tokens"), "incomplete_details"),
        (response(status="failed", error="engine died"), "error"),
        (response(usage=[1]), "usage"),
        (response(usage={"input_tokens": "3"}), "usage.input_tokens"),
        ({"choices": []}, "choices"),
        ({"choices": [{"message": None}]}, "choices.0.message"),
        (completion(content=["x"]), "choices.0.message.content.0"),
        (completion(tool_calls="bash"), "choices.0.message.tool_calls"),
        (completion(tool_calls=["bash"]), "choices.0.message.tool_calls.0"),
        (completion(tool_calls=[{"function": CHAT_CALL["function"]}]), "choices.0.message.tool_calls.0.id"),
        (completion(tool_calls=[{"id": "c1"}]), "choices.0.message.tool_calls.0.function"),
        ({**completion(), "usage": {"prompt_tokens": -5}}, "usage.prompt_tokens"),
    ],
)
async def test_malformed_answer_is_the_models_failure_and_names_the_field(
    serve: Serve, answer: dict[str, Any], field: str
) -> None:
    client, asked = await serve([web.json_response(answer)])
    route: Route = "/chat/completions" if "choices" in answer else "/responses"
    with pytest.raises(ModelError, match=rf"^the policy endpoint's answer is malformed: {field}: ") as told:
        await client.ask(route, {})
    assert json.dumps(answer)[:20] in str(told.value), "quotes the answer, which may hold the endpoint's own error"
    assert len(asked) == 1


@pytest.mark.parametrize(
    "answer",
    [
        response(message("plain text"), message(None), {"role": "assistant", "content": []}, usage=None),
        response({**CALL, "name": None, "arguments": {"a": 1}}, {"type": "reasoning", "summary": None}),
        response({"type": "web_search_call", "content": ["x"], "call_id": 5}),
        completion(content=[{"type": "text", "text": "hi"}], tool_calls=None),
        completion(tool_calls=[{"id": "c1", "function": {"name": None, "arguments": None}}]),
    ],
)
async def test_answer_that_can_be_read_is_returned_as_it_is(serve: Serve, answer: dict[str, Any]) -> None:
    client, _ = await serve([web.json_response(answer)])
    assert await client.ask("/chat/completions" if "choices" in answer else "/responses", {}) == answer


async def test_refusal_that_says_it_is_final_is_asked_once_and_quoted_alone(serve: Serve) -> None:
    client, asked = await serve([problem(502, retryable=False)])
    with pytest.raises(
        ModelError, match=r"^the policy endpoint answered 502: the model endpoint refused the API key$"
    ) as told:
        await client.ask("/chat/completions", {})
    assert not told.value.retryable
    assert len(asked) == 1


async def test_failure_is_asked_again_until_it_answers_when_it_may_pass(serve: Serve) -> None:
    done = web.json_response(completion(content="done"))
    client, asked = await serve(
        [problem(502, retryable=True), web.Response(status=503, headers={"Retry-After": "0"}), done]
    )
    assert (await client.ask("/chat/completions", {}))["choices"][0]["message"]["content"] == "done"
    assert len(asked) == 3


async def test_clients_of_several_attempts_share_their_connections(
    serve: Serve, connections: set[tuple[str, int]]
) -> None:
    client, asked = await serve([web.json_response(completion()) for _ in range(3)])
    for _ in range(3):
        again = PolicyClient(client.endpoint, max_tries=1)
        await again.ask("/chat/completions", {})
    assert len(asked) == 3
    assert len(connections) == 1, "one kept-alive connection served all three"
