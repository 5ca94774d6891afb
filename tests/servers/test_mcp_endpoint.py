"""An environment's tools over MCP, called by the MCP library's own client over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import MagicMock

import httpx2
import pytest
from fastapi import FastAPI
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from nemo_gym.base_resources_server import BaseVerifyRequest, BaseVerifyResponse, normalize_tool_name
from nemo_gym.contract.credentials import CONTROL_TOKEN_HEADER, Role
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.session import McpServer
from nemo_gym.environment.hooks import CatchAll, RouteTool, catch_all_of
from nemo_gym.environment.mcp.endpoint import TOOLS_TTL_MS, issue_mcp_token
from nemo_gym.server_utils import ServerClient
from tests.servers.notes import PARAMS, Note, Notes, NotesEnvironment
from tests.servers.plugins import CounterConfig, CounterEnvironment
from tests.servers.stack import Stack, response, rollout

INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}
ACCEPT = {"Accept": "application/json, text/event-stream"}


@pytest.fixture
def notes(stack: Stack) -> Stack:
    stack.add("notes", NotesEnvironment, Role.ENVIRONMENT)
    return stack


async def seed(stack: Stack, name: str = "notes", **identity: Any) -> dict[str, Any]:
    body = {"responses_create_params": PARAMS, "_ng_session": {"rollout": rollout(**identity).model_dump()}}
    reply = await stack.client().post(name, "/seed_session", json=body)
    answer: dict[str, Any] = await reply.json()
    assert reply.status == 200, answer
    return answer


def endpoint(seeded: dict[str, Any]) -> McpServer:
    (server,) = seeded["descriptor"]["mcp"]
    return McpServer.model_validate(server)


@asynccontextmanager
async def connected(server: McpServer, **options: Any) -> AsyncIterator[Client]:
    async with httpx2.AsyncClient(headers=server.headers, trust_env=False) as http:
        async with Client(streamable_http_client(server.url, http_client=http), **options) as client:
            yield client


async def status_of(url: str, headers: dict[str, str], method: str = "POST") -> int:
    async with httpx2.AsyncClient(trust_env=False) as http:
        reply = await http.request(method, url, json=INITIALIZE, headers={**ACCEPT, **headers})
        return int(reply.status_code)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_tools_are_listed_and_called_as_their_routes_declare_them(notes: Stack, mode: str) -> None:
    async with connected(endpoint(await seed(notes)), mode=mode) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert [*tools] == ["add_note", "list_notes", "explode"]
        assert tools["add_note"].description == "Write a note down."
        assert tools["add_note"].input_schema["properties"]["text"] == {
            "type": "string",
            "minLength": 1,
            "title": "Text",
        }
        assert tools["add_note"].output_schema is not None
        written = await client.call_tool("add_note", {"text": "milk"})
        assert written.structured_content == {"notes": ["milk"]}
        assert written.content[0].text == '{"notes":["milk"]}'  # type: ignore[union-attr]


async def test_calls_of_an_attempt_share_its_session_and_no_other(notes: Stack) -> None:
    mine, other = endpoint(await seed(notes)), endpoint(await seed(notes, rollout_id="r2"))
    async with connected(mine) as client, connected(other) as stranger:
        await client.call_tool("add_note", {"text": "milk"})
        await stranger.call_tool("add_note", {"text": "bread"})
        await client.call_tool("add_note", {"text": "eggs"})
    async with connected(mine) as client, connected(other) as stranger:
        assert (await client.call_tool("list_notes")).structured_content == {"notes": ["milk", "eggs"]}
        assert (await stranger.call_tool("list_notes")).structured_content == {"notes": ["bread"]}


async def test_wrong_arguments_are_told_to_the_model(notes: Stack) -> None:
    async with connected(endpoint(await seed(notes))) as client:
        missing = await client.call_tool("add_note", {})
        unknown = await client.call_tool("drop_note", {})
    assert missing.is_error and missing.content[0].text == "text: Field required"  # type: ignore[union-attr]
    assert unknown.is_error and "add_note, list_notes" in unknown.content[0].text  # type: ignore[union-attr]


async def test_a_failing_tool_is_an_error_result_without_the_server_s_own_words(notes: Stack) -> None:
    async with connected(endpoint(await seed(notes))) as client:
        failed = await client.call_tool("explode", {})
        assert failed.is_error and "secret" not in failed.model_dump_json()
        assert not (await client.call_tool("list_notes")).is_error


async def test_requests_are_refused_with_401_when_the_token_is_not_the_attempt_s(notes: Stack) -> None:
    mine, other = endpoint(await seed(notes)), endpoint(await seed(notes, rollout_id="r2"))
    key = notes.servers["notes"].derive_key("mcp-token")
    bearer = mine.headers["Authorization"]
    wrong = {
        "none": {},
        "made up": {"Authorization": "Bearer ngm1.abc.def"},
        "another kind": {"Authorization": "Basic eDp5"},
        "of another rollout": other.headers,
        "altered": {"Authorization": bearer[:-2] + ("AA" if bearer[-2:] != "AA" else "BB")},
        "expired": {"Authorization": f"Bearer {issue_mcp_token(key, rollout(), ttl_s=-5)}"},
        "of another server": {"Authorization": f"Bearer {issue_mcp_token(b'k' * 32, rollout())}"},
        "other claims, same signature": {"Authorization": ".".join([*bearer.split(".")[:1], "W10", bearer[-43:]])},
    }
    assert {name: await status_of(mine.url, headers) for name, headers in wrong.items()} == dict.fromkeys(wrong, 401)
    assert await status_of(mine.url, mine.headers) == 200


async def test_a_token_opens_nothing_but_mcp(notes: Stack) -> None:
    mine = endpoint(await seed(notes))
    base = notes.url("notes")
    for path in ("/verify", "/seed_session", "/add_note", "/close", "/rows"):
        assert await status_of(base + path, mine.headers) == 401
    assert await status_of(base + "/mcp", {"X-NeMo-Gym-Credential": "forged", **mine.headers}) == 401
    assert await status_of(mine.url, mine.headers, "GET") == 405


async def test_token_is_useless_after_its_attempt_was_replaced_or_closed(notes: Stack) -> None:
    first = endpoint(await seed(notes))
    second_seed = await seed(notes, attempt=2)
    second = endpoint(second_seed)
    assert await status_of(first.url, first.headers) == 409
    assert await status_of(second.url, second.headers) == 200
    closing = {"rollout": rollout(attempt=2).model_dump()}
    headers = {"X-NeMo-Gym-Control-Token": second_seed["control_token"]}
    reply = await notes.client().post("notes", "/close", json=closing, headers=headers)
    assert reply.status == 200, await reply.text()
    assert await status_of(second.url, second.headers) == 409


async def test_a_seed_that_is_asked_again_gives_the_same_endpoint(notes: Stack) -> None:
    assert endpoint(await seed(notes)) == endpoint(await seed(notes))


async def test_nemo_gym_plugin_is_served_when_its_block_says_so(stack: Stack) -> None:
    stack.add("counter", CounterEnvironment, Role.ENVIRONMENT, expose_tools_over_mcp=True)
    answer = await seed(stack, "counter")
    async with connected(endpoint(answer)) as client:
        assert (await client.call_tool("add", {"amount": 3})).structured_content == {"count": 3}
        assert (await client.call_tool("add", {"amount": 4})).structured_content == {"count": 7}
    metadata = answer["mcp"]
    assert metadata["server_name"] == "counter"
    assert await status_of(stack.url("counter") + metadata["url_path"], metadata["headers"]) == 200


class CallsExpected(CounterEnvironment):
    """Expects a call of its tool by the tool's own name."""

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        names = [item.name for item in body.response.output if item.type == "function_call"]
        return BaseVerifyResponse(**body.model_dump(), reward=float(names == ["add", "mcp__other__add", "bash"]))


@pytest.mark.parametrize("spelled", ["mcp__counter__add", "counter_add", "add"])
async def test_verify_sees_a_tools_own_name_and_the_row_keeps_the_harnesss(stack: Stack, spelled: str) -> None:
    stack.add("counter", CallsExpected, Role.ENVIRONMENT, expose_tools_over_mcp=True)
    control = (await seed(stack, "counter"))["control_token"]
    calls = [
        {"type": "function_call", "call_id": str(number), "name": name, "arguments": "{}"}
        for number, name in enumerate((spelled, "mcp__other__add", "bash"))
    ]
    body = {"responses_create_params": PARAMS, "response": {**response(), "output": calls}}
    session = {"_ng_session": {"rollout": rollout().model_dump()}}
    headers = {CONTROL_TOKEN_HEADER: control}
    reply = await (await stack.client().post("counter", "/verify", json={**body, **session}, headers=headers)).json()
    assert (reply["reward"], reply["response"]["output"][0]["name"]) == (1.0, spelled)


async def test_names_of_tools_stay_where_none_are_served_over_mcp(stack: Stack) -> None:
    stack.add("counter", CallsExpected, Role.ENVIRONMENT)
    given = {"output": [{"type": "function_call", "name": "mcp__counter__add"}]}
    environment: Any = stack.servers["counter"]
    assert environment.with_own_tool_names(given) == given


@pytest.mark.parametrize(
    ("name", "server", "own"),
    [
        ("mcp__counter__add", None, "add"),
        ("mcp__counter__add", "counter", "add"),
        ("mcp__other__add", "counter", "mcp__other__add"),
        ("mcp__add", None, "mcp__add"),
        ("add__it", None, "add__it"),
    ],
)
def test_plugins_strip_the_prefix_of_a_tools_name_themselves(name: str, server: str | None, own: str) -> None:
    assert normalize_tool_name(name, server) == own
    plugin = CounterEnvironment(
        config=CounterConfig(host="0.0.0.0", port=8080, entrypoint="", name="counter"),
        server_client=MagicMock(spec=ServerClient),
    )
    assert plugin.normalize_tool_name("mcp__counter__add") == "add"


async def test_environment_offers_no_mcp_when_it_does_not_say_so(counter: Stack) -> None:
    assert (await seed(counter, "counter"))["descriptor"]["mcp"] == []
    assert await status_of(counter.url("counter") + "/mcp", {}) == 401


class DispatchingEnvironment(NotesEnvironment):
    """Serves most of its tools by one route, and says per task which of them may be used."""

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/{path}")(self.dispatch)
        return app

    def mcp_tools(self, harvested: list[RouteTool], catchall: CatchAll | None) -> list[RouteTool]:
        assert catchall is not None
        kept = [tool for tool in harvested if tool.name != "explode"]
        return [*kept, catchall.tool("shout", Note.model_json_schema(), "Say it loudly.")]

    def mcp_allowed_tools_for_session(self, seed_body: dict[str, Any]) -> list[str] | None:
        return seed_body.get("allowed_tools")

    async def dispatch(self, path: str, body: Note) -> Notes:
        return Notes(notes=[f"{path}: {body.text.upper()}"])


async def test_environment_says_itself_which_tools_are_served(stack: Stack) -> None:
    stack.add("notes", DispatchingEnvironment, Role.ENVIRONMENT)
    async with connected(endpoint(await seed(stack))) as client:
        tools = {tool.name: tool.description for tool in (await client.list_tools()).tools}
        assert tools == {"add_note": "Write a note down.", "list_notes": "", "shout": "Say it loudly."}
        answer = await client.call_tool("shout", {"text": "hi"})
        assert answer.structured_content == {"notes": ["shout: HI"]}
        assert (await client.call_tool("explode", {})).is_error


async def test_list_may_be_used_again_for_other_attempts_unless_tasks_have_lists_of_their_own(
    notes: Stack, stack: Stack
) -> None:
    async with connected(endpoint(await seed(notes))) as client:
        listed = await client.list_tools()
        assert (listed.cache_scope, listed.ttl_ms) == ("public", TOOLS_TTL_MS)
    stack.add("choosy", DispatchingEnvironment, Role.ENVIRONMENT)
    async with connected(endpoint(await seed(stack, "choosy"))) as client:
        listed = await client.list_tools()
        assert (listed.cache_scope, listed.ttl_ms) == ("private", 0)


async def test_attempt_has_the_tools_that_its_task_allows(stack: Stack) -> None:
    stack.add("notes", DispatchingEnvironment, Role.ENVIRONMENT)
    body = {
        "responses_create_params": PARAMS,
        "allowed_tools": ["shout", "unknown"],
        "_ng_session": {"rollout": rollout().model_dump()},
    }
    seeded = await (await stack.client().post("notes", "/seed_session", json=body)).json()
    async with connected(endpoint(seeded)) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["shout"]
        refused = await client.call_tool("add_note", {"text": "x"})
        assert refused.is_error and "there is no tool 'add_note'; there are: shout" in str(refused.content)
    async with connected(endpoint(await seed(stack, attempt=2))) as client:
        assert len((await client.list_tools()).tools) == 3


@pytest.mark.parametrize("filters", [False, True], ids=["all routes", "a plugin that chooses"])
def test_a_tool_with_loose_parameters_is_refused_before_any_attempt_lacks_it(stack: Stack, filters: bool) -> None:
    class Loose(NotesEnvironment):
        def setup_webserver(self) -> FastAPI:
            app = super().setup_webserver()
            app.post("/search")(self.search)
            app.post("/reload", include_in_schema=False)(self.search)
            return app

        async def search(self, query: str, limit: int = 3) -> str:
            return query * limit

    class Choosing(Loose):
        def mcp_tools(self, harvested: Any, catchall: Any) -> Any:
            return harvested

    if filters:
        stack.add("notes", Choosing, Role.ENVIRONMENT)
        return
    with pytest.raises(
        ConfigError, match=r"POST /search \(search\) cannot be a tool: .* one pydantic model or dict as its body"
    ):
        stack.add("notes", Loose, Role.ENVIRONMENT)


async def test_a_route_in_place_of_one_of_the_contract_is_no_tool(stack: Stack) -> None:
    class Reaping(NotesEnvironment):
        def setup_webserver(self) -> FastAPI:
            app = super().setup_webserver()
            app.router.routes = [each for each in app.router.routes if getattr(each, "path", None) != "/verify"]
            app.post("/verify")(self.verify_and_reap)
            app.post("/seed_session")(self.seed_session)
            return app

        async def verify_and_reap(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
            return BaseVerifyResponse(**body.model_dump(), reward=1.0)

    stack.add("notes", Reaping, Role.ENVIRONMENT)
    async with connected(endpoint(await seed(stack))) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["add_note", "list_notes", "explode"]


async def test_a_tool_that_takes_a_dict_takes_any_arguments(stack: Stack) -> None:
    class Dispatching(NotesEnvironment):
        def setup_webserver(self) -> FastAPI:
            app = super().setup_webserver()
            app.post("/search")(self.search)
            return app

        async def search(self, body: dict[str, Any]) -> dict[str, Any]:
            return {"found": body}

    stack.add("notes", Dispatching, Role.ENVIRONMENT)
    async with connected(endpoint(await seed(stack))) as client:
        (tool,) = [tool for tool in (await client.list_tools()).tools if tool.name == "search"]
        assert tool.input_schema == {"type": "object", "additionalProperties": True}
        answer = await client.call_tool("search", {"query": "x"})
        assert answer.structured_content == {"found": {"query": "x"}}


def test_catch_all_is_none_where_there_is_none_or_several() -> None:
    app = FastAPI()
    assert catch_all_of(app.routes) is None

    async def tool(name: str) -> None: ...

    app.post("/{name}")(tool)
    found = catch_all_of(app.routes)
    assert found is not None
    with pytest.raises(ConfigError, match="cannot be the name of a tool"):
        found.tool("../verify", {})
    app.post("/{name:path}")(tool)
    assert catch_all_of(app.routes) is None
