"""The loop over real servers: an environment with tools, a scripted policy, and what goes wrong between them."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fastapi import FastAPI, HTTPException, Response
from pydantic import BaseModel

from nemo_gym.agent.acts import PolicyClient
from nemo_gym.agent.harness.mcp_client import PostDispatcher, SharedSessionTransport
from nemo_gym.contract.credentials import Role
from nemo_gym.contract.session import (
    ActRequest,
    ActResponse,
    InferenceEndpoint,
    Limits,
    McpServer,
    RolloutIdentity,
    SessionDescriptor,
)
from nemo_gym.contract.verdict import failure_of_outcome
from resources_servers.example_mcp_weather import app
from resources_servers.example_mcp_weather.app import WeatherEnvironment
from responses_api_agents.simple_agent import loop
from responses_api_agents.simple_agent.app import SimpleAgent
from responses_api_models.scripted_model.app import ScriptedModel
from tests.harness.stage import patience_s
from tests.servers.stack import Stack, running_stack

WEATHER = Path(app.__file__).parent / "data"
ENV = "example_mcp_weather"
DONE = {"text": "All done."}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"name": name, "arguments": arguments}]}


DEEP = '{"city":' * 900 + "1" + "}" * 900
SCRIPT = {
    "model": "scripted",
    "tasks": [
        {"name": words, "when": {"user": words}, "turns": turns, **options}
        for words, turns, options in [
            ("ask Quito", [call("get_weather", city="Quito"), DONE], {}),
            ("ask wrongly", [call("get_weather", town="Quito"), call("get_wether"), DONE], {}),
            ("bad json", [{"tool_calls": [{"name": "get_weather", "arguments": "{"}]}, DONE], {}),
            ("nested", [{"tool_calls": [{"name": "get_weather", "arguments": DEEP}]}, DONE], {}),
            ("never stop", [call("list_cities")], {"repeat_last": True}),
            ("no tools", [DONE], {}),
            ("server error", [{**DONE, "fault": {"status": 500, "times": 99}}], {}),
            ("one hiccup", [{**DONE, "fault": {"status": 500, "times": 1}}], {}),
            ("silent model", [{**DONE, "fault": {"hang_s": 60}}], {}),
            ("silent later", [call("list_cities"), {**DONE, "fault": {"hang_s": 60}}], {}),
        ]
    ],
}
ROW = json.loads((WEATHER / "example.jsonl").read_text().splitlines()[3])
ROLLOUT = RolloutIdentity(rollout_id="r1", task_id=ROW["task_id"], group_id="g")


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    script = tmp_path / "script.json"
    script.write_text(json.dumps(SCRIPT))
    with running_stack() as running:
        running.add("policy", ScriptedModel, Role.MODEL, script=str(script))
        running.add(ENV, WeatherEnvironment, Role.ENVIRONMENT)
        running.add(
            "simple",
            SimpleAgent,
            Role.AGENT,
            ("policy", ENV),
            resources_server={"type": "resources_servers", "name": ENV},
            model_server={"type": "responses_api_models", "name": "policy"},
            model_max_tries=2,
        )
        yield running


class Attempt:
    environment = ENV
    agent = "simple"

    def __init__(self, stack: Stack) -> None:
        self.client = stack.client()

    async def seed(self, environment: str | None = None, rollout_id: str = "r1", **row: Any) -> SessionDescriptor:
        rollout = ROLLOUT.model_copy(update={"rollout_id": rollout_id})
        body = {**ROW, **row, "_ng_session": {"rollout": rollout.model_dump()}}
        reply = await self.client.post(environment or self.environment, "/seed_session", json=body)
        self.cookies = reply.cookies
        return SessionDescriptor.model_validate((await reply.json())["descriptor"])

    async def act(
        self,
        words: str,
        descriptor: SessionDescriptor | None = None,
        *,
        inference: InferenceEndpoint | None = None,
        **params: Any,
    ) -> ActResponse:
        descriptor = descriptor or await self.seed()
        if inference is None:
            opening = {"rollout": descriptor.rollout.model_dump()}
            opened = await (await self.client.post("policy", "/sessions", json=opening)).json()
            inference = InferenceEndpoint(
                base_url=opened["base_url"], token=opened["inference_token"], model=opened["model"]
            )
        request = ActRequest(
            responses_create_params={"input": words, **params}, descriptor=descriptor, inference=inference
        )
        reply = await self.client.post(
            self.agent, "/act", json=request.model_dump(mode="json"), cookies=getattr(self, "cookies", None)
        )
        body = await reply.json()
        assert reply.status == 200, body
        return ActResponse.model_validate(body)


@pytest.fixture
def attempt(stack: Stack) -> Attempt:
    return Attempt(stack)


def outputs(answer: ActResponse) -> list[str]:
    return [item["output"] for item in answer.response["output"] if item["type"] == "function_call_output"]


async def test_tool_is_called_over_mcp_when_the_policy_names_it(attempt: Attempt) -> None:
    answer = await attempt.act("ask Quito")
    assert (answer.outcome, answer.outcome_detail) == ("completed", None)
    assert [json.loads(output) for output in outputs(answer)] == [{"city": "Quito", **ROW["weather"]["Quito"]}]
    assert (answer.observations["turns"], answer.observations["tool_calls"]) == (2, 1)


async def test_tool_is_called_by_its_route_when_the_row_names_it_and_there_is_no_mcp(attempt: Attempt) -> None:
    descriptor = (await attempt.seed()).model_copy(update={"mcp": ()})
    tool = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False}
    answer = await attempt.act("ask Quito", descriptor, tools=[tool])
    assert [json.loads(output)["city"] for output in outputs(answer)] == ["Quito"]


async def test_policy_is_told_when_it_calls_a_tool_wrongly(attempt: Attempt) -> None:
    answer = await attempt.act("ask wrongly")
    assert answer.outcome == "completed"
    missing, unknown = outputs(answer)
    assert "city: Field required" in missing
    assert unknown == "there is no tool 'get_wether'; there are: list_cities, get_weather"
    assert outputs(await attempt.act("bad json")) == ["the arguments are not a JSON object"]
    nested = await attempt.act("nested")
    assert nested.outcome == "completed"
    assert "the arguments: a value is nested too deeply" in outputs(nested)[0]


async def test_attempt_ends_at_the_turn_limit_and_keeps_its_work(attempt: Attempt) -> None:
    descriptor = (await attempt.seed()).model_copy(update={"limits": Limits(max_turns=3)})
    answer = await attempt.act("never stop", descriptor)
    assert answer.outcome == "max_turns"
    assert len(outputs(answer)) == 3


async def test_attempt_ends_when_its_tools_said_all_they_may(attempt: Attempt) -> None:
    descriptor = (await attempt.seed()).model_copy(update={"limits": Limits(max_output_bytes=100, max_turns=40)})
    answer = await attempt.act("never stop", descriptor)
    assert (answer.outcome, answer.outcome_detail) == (
        "max_output",
        "the tool outputs exceed the limit of 100 bytes",
    )
    assert 1 <= len(outputs(answer)) < 40


async def test_output_beyond_every_limit_ends_the_attempt_and_is_not_in_the_response(
    odd: Attempt, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "MAX_OUTPUT_BYTES", 150_000)
    calls = [function_call("recite", f"c{number}") for number in range(4)]
    inference, _ = await policy(answered(*calls))
    answer = await odd.act("recite", inference=inference)
    assert (answer.outcome, len(outputs(answer))) == ("max_output", 2)
    assert failure_of_outcome(answer.outcome, None) is None, "it is graded"


async def test_attempt_ends_at_the_wall_clock_and_is_graded_only_if_the_model_answered(attempt: Attempt) -> None:
    patience = await patience_s(attempt.act("ask Quito"))
    descriptor = (await attempt.seed()).model_copy(update={"limits": Limits(wall_clock_s=patience)})
    slow = await attempt.act("silent later", descriptor)
    assert (slow.outcome, len(outputs(slow))) == ("timed_out", 1)
    silent = await attempt.act("silent model", descriptor)
    assert silent.outcome == "model_unreachable"
    assert "1 of 1 requests to the model were not answered" in (silent.outcome_detail or "")


async def test_outcome_names_the_model_when_it_fails_every_try_but_not_after_one(attempt: Attempt) -> None:
    answer = await attempt.act("server error")
    assert answer.outcome == "model_unreachable" and "500" in (answer.outcome_detail or "")
    assert (await attempt.act("one hiccup")).outcome == "completed"


@pytest.mark.parametrize("wrong", ["token", "address"])
async def test_outcome_names_mcp_when_its_server_cannot_be_used(attempt: Attempt, wrong: str) -> None:
    descriptor = await attempt.seed()
    (server,) = descriptor.mcp
    url = server.url if wrong == "token" else "http://127.0.0.1:9/mcp"
    broken = McpServer(name="weather", url=url, headers={"Authorization": "Bearer secret-of-a-test"})
    answer = await attempt.act("ask Quito", descriptor.model_copy(update={"mcp": (broken,)}))
    assert answer.outcome == "mcp_failed" and "'weather'" in (answer.outcome_detail or "")
    assert "secret-of-a-test" not in answer.model_dump_json()


async def test_agent_answers_without_tools_when_there_are_none(attempt: Attempt) -> None:
    descriptor = SessionDescriptor(environment="env", task_id=ROLLOUT.task_id, rollout=ROLLOUT)
    answer = await attempt.act("no tools", descriptor)
    assert answer.outcome == "completed" and not outputs(answer)


Policy = Callable[..., Awaitable[tuple[InferenceEndpoint, list[Any]]]]


@pytest.fixture
async def policy() -> AsyncIterator[Policy]:
    """Starts an endpoint that gives these answers in turn; how to reach it, and the inputs that it was sent."""
    runners: list[web.AppRunner] = []

    async def start(*answers: dict[str, Any]) -> tuple[InferenceEndpoint, list[Any]]:
        inputs: list[Any] = []

        async def answer(request: web.Request) -> web.Response:
            inputs.append((await request.json())["input"])
            return web.json_response(answers[len(inputs) - 1])

        app = web.Application()
        app.router.add_post("/v1/responses", answer)
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return InferenceEndpoint(base_url=base_url, token="token", model="m"), inputs

    yield start
    for runner in runners:
        await runner.cleanup()


async def test_policy_gets_the_metadata_that_model_servers_read_and_no_other(
    attempt: Attempt, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ask = [], PolicyClient.ask

    async def recorded(client: Any, path: Any, body: dict[str, Any]) -> dict[str, Any]:
        asked.append(body.get("metadata"))
        return await ask(client, path, body)

    monkeypatch.setattr(PolicyClient, "ask", recorded)
    kwargs = {"chat_template_kwargs": '{"enable_thinking": false}'}
    for metadata in ({**kwargs, "note": "x"}, {"note": "x"}, None):
        inference, _ = await policy(answered(said("done")))
        await attempt.act("weather", inference=inference, metadata=metadata)
    assert asked == [kwargs, None, None]


def answered(*items: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"status": "completed", "output": [*items], **fields}


def function_call(name: str, call_id: str = "call_1", **arguments: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": json.dumps(arguments)}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


async def test_calls_that_share_an_id_are_calls_of_their_own_in_the_response(attempt: Attempt, policy: Policy) -> None:
    calls = [function_call("get_weather", city="Quito"), function_call("list_cities")]
    inference, inputs = await policy(answered(*calls), answered(*calls), answered(said("Done.")))
    answer = await attempt.act("weather", inference=inference)
    assert (answer.outcome, answer.observations["tool_calls"]) == ("completed", 4)
    shown = [(item["type"], item.get("name") or item.get("output")) for item in answer.response["output"]]
    told = [(item["type"], item.get("name") or item.get("output")) for item in inputs[-1][1:]]
    assert shown == [*told, ("message", None)]
    assert len({item["id"] for item in answer.response["output"] if "id" in item}) == 5


@pytest.mark.parametrize("status", ["failed", "cancelled", "queued", "in_progress"])
@pytest.mark.parametrize("items", [[], [said("It is")], [function_call("list_cities")]])
async def test_answer_that_the_endpoint_did_not_finish_is_its_failure(
    attempt: Attempt, policy: Policy, items: list[dict[str, Any]], status: str
) -> None:
    inference, _ = await policy(answered(*items, status=status, error={"message": "engine died"}))
    answer = await attempt.act("weather", inference=inference)
    assert answer.outcome == "model_unreachable" and not outputs(answer)
    assert f"'{status}' (engine died)" in (answer.outcome_detail or "")


@pytest.mark.parametrize(
    ("items", "reason", "outcome"),
    [
        ([said("It is prob")], "max_output_tokens", "max_output"),
        ([function_call("list_cities")], "max_output_tokens", "max_output"),
        ([said("")], "content_filter", "refused"),
    ],
)
async def test_answer_that_is_incomplete_is_so_in_the_response(
    attempt: Attempt, policy: Policy, items: list[dict[str, Any]], reason: str, outcome: str
) -> None:
    inference, _ = await policy(answered(*items, status="incomplete", incomplete_details={"reason": reason}))
    answer = await attempt.act("weather", inference=inference)
    assert answer.outcome == outcome and not outputs(answer)
    assert (answer.response["status"], answer.response["incomplete_details"]) == ("incomplete", {"reason": reason})


class Number(BaseModel):
    n: int


class OddTools(WeatherEnvironment):
    """Tools that answer in ways of their own."""

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        for tool in (self.recite, self.scan, self.wait, self.divide, self.look_up, self.square):
            app.post(f"/{tool.__name__}")(tool)
        return app

    async def recite(self) -> str:
        """A long text."""
        return "la " * 20_000

    async def scan(self) -> Response:
        """Bytes that are no text."""
        return Response(b"caf\xe9", media_type="text/plain")

    async def divide(self) -> float:
        """Fails as by the policy's arguments."""
        raise ZeroDivisionError("secret of the environment")

    async def look_up(self) -> None:
        """Declares that it cannot work."""
        raise HTTPException(503, "the index is down")

    async def square(self, body: Number) -> str:
        """Of any size."""
        return str(body.n**2)

    async def wait(self) -> None:
        """Answers too late."""
        await asyncio.sleep(3)


@pytest.fixture
def odd(stack: Stack, attempt: Attempt) -> Attempt:
    """An attempt whose agent works in `OddTools`."""
    stack.add("odd", OddTools, Role.ENVIRONMENT)
    stack.add(
        "simple_odd",
        SimpleAgent,
        Role.AGENT,
        ("policy", "odd"),
        resources_server={"type": "resources_servers", "name": "odd"},
        model_server={"type": "responses_api_models", "name": "policy"},
        tool_timeout_s=1.0,
    )
    attempt.client, attempt.environment, attempt.agent = stack.client(), "odd", "simple_odd"
    return attempt


def route_tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": False, **fields}


@pytest.mark.parametrize("by_mcp", [True, False])
async def test_response_holds_every_output_as_the_policy_saw_it(odd: Attempt, policy: Policy, by_mcp: bool) -> None:
    inference, inputs = await policy(answered(function_call("recite")), answered(said("Done.")))
    descriptor = await odd.seed()
    if not by_mcp:
        descriptor = descriptor.model_copy(update={"mcp": ()})
    answer = await odd.act("recite", descriptor, inference=inference, tools=[route_tool("recite")])
    assert outputs(answer) == [inputs[-1][-1]["output"]]
    assert len(outputs(answer)[0]) > 60_000


@pytest.mark.parametrize(
    ("tool", "shown"), [("scan", "caf\N{REPLACEMENT CHARACTER}"), ("wait", "tool 'wait' did not answer within 1 s")]
)
async def test_policy_reads_what_a_route_gave_whatever_it_gave(
    odd: Attempt, policy: Policy, tool: str, shown: str
) -> None:
    inference, _ = await policy(answered(function_call(tool)), answered(said("Done.")))
    descriptor = (await odd.seed()).model_copy(update={"mcp": ()})
    answer = await odd.act("odd", descriptor, inference=inference, tools=[route_tool(tool)])
    assert (answer.outcome, outputs(answer)) == ("completed", [shown])


@pytest.mark.parametrize("by_mcp", [True, False])
async def test_tool_gets_the_integer_that_the_policy_wrote_however_long(
    odd: Attempt, policy: Policy, by_mcp: bool
) -> None:
    numbers = [2**64 + 1, -(10**40), 7]
    calls = [function_call("square", f"c{number}", n=number) for number in numbers]
    descriptor = await odd.seed()
    if not by_mcp:
        descriptor = descriptor.model_copy(update={"mcp": ()})
    for _ in range(2):  # the second attempt knows the MCP server
        inference, _ = await policy(answered(*calls), answered(said("Done.")))
        answer = await odd.act("square", descriptor, inference=inference, tools=[route_tool("square")])
        assert [json.loads(output) for output in outputs(answer)] == [str(number**2) for number in numbers]


@pytest.mark.parametrize("by_mcp", [True, False])
@pytest.mark.parametrize(("tool", "outcome"), [("divide", "completed"), ("look_up", "mcp_failed")])
async def test_only_an_environment_that_says_so_fails_the_attempt_by_a_tool(
    odd: Attempt, policy: Policy, tool: str, outcome: str, by_mcp: bool
) -> None:
    """The policy can cause any other error of a tool, and would escape a bad reward by it."""
    inference, _ = await policy(answered(function_call(tool)), answered(said("Done.")))
    descriptor = await odd.seed()
    if not by_mcp:
        descriptor = descriptor.model_copy(update={"mcp": ()})
    answer = await odd.act("odd", descriptor, inference=inference, tools=[route_tool(tool)])
    assert answer.outcome == outcome
    if outcome == "completed":
        (shown,) = outputs(answer)
        assert "secret" not in shown and ("failed" in shown or "ZeroDivisionError" in shown)
    else:
        assert "tool 'look_up' of" in (answer.outcome_detail or "") and "503" in (answer.outcome_detail or "")


@pytest.mark.parametrize(
    ("parallel", "returns", "said"), [(1, False, "was lost"), (2, False, "was lost"), (1, True, "lost the")]
)
async def test_environment_that_goes_away_is_lost_and_no_mcp_server(
    stack: Stack, odd: Attempt, policy: Policy, parallel: int, returns: bool, said: str
) -> None:
    calls = [function_call("get_weather", f"c{number}", city="Quito") for number in range(parallel)]
    inference, _ = await policy(answered(*calls))
    descriptor = (await odd.seed()).model_copy(update={"mcp": ()})
    stack.stop("odd")
    if returns:
        stack.add("odd", OddTools, Role.ENVIRONMENT)
    answer = await odd.act("odd", descriptor, inference=inference, tools=[route_tool("get_weather")])
    assert answer.outcome == "environment_lost" and f"'odd' {said}" in (answer.outcome_detail or "")
    failure = failure_of_outcome(answer.outcome, answer.outcome_detail)
    assert failure is not None and failure.kind == "environment_lost" and failure.retryable


@pytest.mark.parametrize(
    ("tool", "problem"),
    [
        ({"type": "function"}, "responses_create_params.tools[1].name must be the name of a tool, not None"),
        ({"type": "function", "name": 5}, "responses_create_params.tools[1].name must be the name of a tool, not 5"),
        (
            {"type": "function", "function": {"name": "get_weather"}},
            "responses_create_params.tools[1].function is the form of Chat Completions",
        ),
    ],
)
async def test_row_whose_tool_has_no_name_is_refused_and_the_field_named(
    attempt: Attempt, tool: dict[str, Any], problem: str
) -> None:
    descriptor = await attempt.seed()
    inference = InferenceEndpoint(base_url="http://127.0.0.1:9/v1", token="t", model="m")
    params = {"input": "ask Quito", "tools": [route_tool("list_cities"), tool]}
    request = ActRequest(responses_create_params=params, descriptor=descriptor, inference=inference)
    reply = await attempt.client.post("simple", "/act", json=request.model_dump(mode="json"))
    body = await reply.json()
    assert (reply.status, body["code"]) == (422, "row") and problem in body["detail"]


class ChoosyWeather(WeatherEnvironment):
    """Lets tasks say which tools they have."""

    def mcp_allowed_tools_for_session(self, seed_body: dict[str, Any]) -> list[str] | None:
        return seed_body.get("allowed_tools")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What MCP servers are asked, by either way."""
    methods: list[str] = []
    by_library, by_post = SharedSessionTransport.handle_async_request, PostDispatcher.send_raw_request

    async def sent(self: SharedSessionTransport, request: Any) -> Any:
        methods.append(json.loads(request.content)["method"])
        return await by_library(self, request)

    async def posted(self: PostDispatcher, method: str, *arguments: Any) -> Any:
        methods.append(method)
        return await by_post(self, method, *arguments)

    monkeypatch.setattr(SharedSessionTransport, "handle_async_request", sent)
    monkeypatch.setattr(PostDispatcher, "send_raw_request", posted)
    return methods


async def test_mcp_server_is_asked_once_what_it_speaks_and_has_and_again_after_a_failure(
    attempt: Attempt, asked: list[str]
) -> None:
    descriptor = await attempt.seed()
    for _ in range(2):
        assert (await attempt.act("ask Quito", descriptor)).outcome == "completed"
    assert asked == ["server/discover", "tools/list", "tools/call", "tools/call"]
    (server,) = descriptor.mcp
    broken = server.model_copy(update={"headers": {"Authorization": "Bearer wrong"}})
    assert (await attempt.act("ask Quito", descriptor.model_copy(update={"mcp": (broken,)}))).outcome == "mcp_failed"
    asked.clear()
    assert (await attempt.act("ask Quito", descriptor)).outcome == "completed"
    assert asked == ["server/discover", "tools/list", "tools/call"]


async def test_every_attempt_asks_for_its_tools_where_tasks_say_which_they_have(
    stack: Stack, asked: list[str]
) -> None:
    stack.add("choosy", ChoosyWeather, Role.ENVIRONMENT)
    attempt = Attempt(stack)
    for rollout_id, allowed, said in (
        ("r1", None, "temperature_c"),
        ("r2", ["list_cities"], "there is no tool 'get_weather'; there are: list_cities"),
        ("r3", ["get_weather"], "temperature_c"),
    ):
        descriptor = await attempt.seed("choosy", rollout_id, allowed_tools=allowed)
        (output,) = outputs(await attempt.act("ask Quito", descriptor))
        assert said in output
    assert asked == ["server/discover", "tools/list", "tools/call", "tools/list", "tools/list", "tools/call"]


async def test_attempts_share_the_servers_client_and_make_no_tls_context(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    ordinary = ssl.create_default_context

    def counted(*args: Any, **kwargs: Any) -> ssl.SSLContext:
        made.append("context")
        return ordinary(*args, **kwargs)

    monkeypatch.setattr(ssl, "create_default_context", counted)
    for _ in range(2):
        assert (await attempt.act("ask Quito")).outcome == "completed"
    assert made == []
