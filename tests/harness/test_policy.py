"""Which answers of a policy endpoint are asked for again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from nemo_gym.agent.acts import PolicyClient
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
        app.router.add_post("/v1/chat/completions", answer)
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


async def test_refusal_that_says_it_is_final_is_asked_once_and_quoted_alone(serve: Serve) -> None:
    client, asked = await serve([problem(502, retryable=False)])
    with pytest.raises(
        ModelError, match=r"^the policy endpoint answered 502: the model endpoint refused the API key$"
    ) as told:
        await client.ask("/chat/completions", {})
    assert not told.value.retryable
    assert len(asked) == 1


async def test_failure_is_asked_again_until_it_answers_when_it_may_pass(serve: Serve) -> None:
    done = web.json_response({"choices": [{"message": {"role": "assistant", "content": "done"}}]})
    client, asked = await serve(
        [problem(502, retryable=True), web.Response(status=503, headers={"Retry-After": "0"}), done]
    )
    assert (await client.ask("/chat/completions", {}))["choices"][0]["message"]["content"] == "done"
    assert len(asked) == 3


async def test_clients_of_several_attempts_share_their_connections(
    serve: Serve, connections: set[tuple[str, int]]
) -> None:
    done = [web.json_response({"choices": []}) for _ in range(3)]
    client, asked = await serve(done)
    for _ in range(3):
        again = PolicyClient(client.endpoint, max_tries=1)
        await again.ask("/chat/completions", {})
    assert len(asked) == 3
    assert len(connections) == 1, "one kept-alive connection served all three"
