"""Plugins that build their own application, as NeMo Gym's gymnasium base does: what every server has is around it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field

from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer
from nemo_gym.base_responses_api_agent import SimpleResponsesAPIAgent
from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel
from nemo_gym.contract.credentials import CREDENTIAL_HEADER, ROW_REF_HEADER, Role
from nemo_gym.contract.errors import ContractError
from nemo_gym.http.server import SimpleServer
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.rollout_correlation import current_rollout_id
from nemo_gym.server_utils import SESSION_ID_KEY
from tests.servers.plugins import AgentConfig
from tests.servers.stack import Stack, response, rollout

LIMIT = 4096
REFS = {"resources_server": {"type": "resources_servers", "name": "env"}}


class Anything(BaseModel):
    model_config = ConfigDict(extra="allow")


class OwnRoutes:
    """Routes of an application that knows nothing of this suite."""

    sessions: dict[str, int]

    def own_app(self, **options: Any) -> FastAPI:
        app = FastAPI(**options)
        app.post("/reset")(self.reset)
        app.post("/step")(self.step)
        app.post("/refuse")(self.refuse)
        app.post("/break")(self.break_down)
        app.post("/health")(self.reset)
        return app

    async def reset(self, request: Request, body: Anything) -> dict[str, Any]:
        self.sessions[request.session[SESSION_ID_KEY]] = 0
        return {"rollout": current_rollout_id()}

    async def step(self, request: Request, body: Anything) -> dict[str, Any]:
        self.sessions[request.session[SESSION_ID_KEY]] += 1
        return {"steps": self.sessions[request.session[SESSION_ID_KEY]]}

    async def refuse(self, body: Anything) -> None:
        raise ContractError("not in this state")

    async def break_down(self, body: Anything) -> None:
        raise RuntimeError("the answer is 42")


class GymnasiumEnvironment(OwnRoutes, SimpleResourcesServer):
    config: BaseResourcesServerConfig
    sessions: dict[str, int] = Field(default_factory=dict)
    alive: list[str] = Field(default_factory=list)

    def setup_webserver(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            self.alive.append("own")
            yield
            self.alive.append("own ended")

        app = self.own_app(lifespan=lifespan)
        self.setup_session_middleware(app)
        app.post("/aggregate_metrics")(self.aggregate_metrics)
        return app

    async def startup(self) -> None:
        self.alive.append("startup")

    async def shutdown(self) -> None:
        await super().shutdown()
        self.alive.append("shutdown")


class MountedEnvironment(GymnasiumEnvironment):
    """Calls super, and puts what it returns into an application of its own."""

    def setup_webserver(self) -> FastAPI:
        app = self.own_app()
        app.mount("/", SimpleResourcesServer.setup_webserver(self))
        self.setup_session_middleware(app)
        return app


class OwnAgent(OwnRoutes, SimpleResponsesAPIAgent):
    config: AgentConfig
    sessions: dict[str, int] = Field(default_factory=dict)

    def setup_webserver(self) -> FastAPI:
        app = self.own_app()
        self.setup_session_middleware(app)
        app.post("/v1/responses")(self.responses)
        return app

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
        return NeMoGymResponse.model_validate(response())


class OwnModel(OwnRoutes, SimpleResponsesAPIModel):
    config: BaseResponsesAPIModelConfig
    sessions: dict[str, int] = Field(default_factory=dict)

    def setup_webserver(self) -> FastAPI:
        app = self.own_app()
        self.setup_session_middleware(app)
        app.post("/v1/responses")(self.responses)
        app.post("/v1/embeddings")(self.reset)
        return app

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
        return NeMoGymResponse.model_validate(response())


class ModelWithMoreRoutes(OwnModel):
    def setup_webserver(self) -> FastAPI:
        app = SimpleResponsesAPIModel.setup_webserver(self)
        app.post("/v1/embeddings")(self.reset)
        app.post("/reset")(self.reset)
        app.post("/")(self.reset)
        return app


SERVERS: dict[str, tuple[type[SimpleServer], Role]] = {
    "env": (GymnasiumEnvironment, Role.ENVIRONMENT),
    "mounted": (MountedEnvironment, Role.ENVIRONMENT),
    "agent": (OwnAgent, Role.AGENT),
    "model": (OwnModel, Role.MODEL),
}
PATHS = {
    "env": ["/reset", "/step", "/aggregate_metrics", "/seed_session", "/verify", "/close", "/openapi.json", "/docs"],
    "mounted": ["/reset", "/step", "/aggregate_metrics", "/seed_session", "/verify"],
    "agent": ["/reset", "/step", "/v1/responses", "/act", "/run"],
    "model": ["/reset", "/step", "/v1/responses", "/v1/embeddings", "/sessions"],
}


@pytest.fixture(params=SERVERS)
def served(request: pytest.FixtureRequest, stack: Stack) -> tuple[Stack, str]:
    name: str = request.param
    cls, role = SERVERS[name]
    more: dict[str, Any] = REFS if role is Role.AGENT else {}
    stack.add(name, cls, role, max_body_bytes=LIMIT, **more)
    return stack, name


async def post(stack: Stack, name: str, path: str, body: Any, **options: Any) -> tuple[int, Any]:
    reply = await stack.client().post(name, path, json=body, **options)
    return reply.status, await reply.json(content_type=None)


async def test_every_route_needs_a_credential(served: tuple[Stack, str]) -> None:
    stack, name = served
    async with aiohttp.ClientSession() as session:
        for path in PATHS[name]:
            async with session.post(stack.url(name) + path, json={}) as reply:
                assert (path, reply.status) == (path, 401)
            async with session.get(stack.url(name) + path) as reply:
                assert reply.status in (401, 405), path
            forged = {CREDENTIAL_HEADER: stack.keys.caller(Role.PIPELINE, "collector", "elsewhere")}
            async with session.post(stack.url(name) + path, json={}, headers=forged) as reply:
                assert (path, reply.status) == (path, 401)


async def test_health_and_readiness_are_answered_and_nothing_else_is_open(served: tuple[Stack, str]) -> None:
    stack, name = served
    async with aiohttp.ClientSession() as session:
        for path in ("/", "/health", "/ready"):
            async with session.get(stack.url(name) + path) as reply:
                assert (reply.status, (await reply.json())["status"]) == (200, "ready" if path == "/ready" else "ok")
            async with session.post(stack.url(name) + path, json={}) as reply:
                assert reply.status == 401


async def test_own_routes_serve_sessions_by_cookie_in_their_rollout(served: tuple[Stack, str]) -> None:
    stack, name = served
    client = stack.client()
    reply = await client.post(name, "/ng-rollout/r7/reset", json={})
    assert (reply.status, await reply.json()) == (200, {"rollout": "r7"})
    (cookie,) = reply.headers.getall("Set-Cookie")
    assert cookie
    for steps in (1, 2):
        status, said = await post(stack, name, "/step", {}, cookies=reply.cookies)
        assert (status, said) == (200, {"steps": steps})


async def test_errors_are_problems_that_quote_nothing(served: tuple[Stack, str]) -> None:
    stack, name = served
    status, problem = await post(stack, name, "/refuse", {})
    assert (status, problem["code"], problem["detail"]) == (409, "contract", "not in this state")
    status, problem = await post(stack, name, "/break", {})
    assert (status, problem["code"]) == (500, "internal") and "42" not in str(problem)
    status, _ = await post(stack, name, "/nothing_here", {})
    assert status == 404


async def test_body_beyond_the_bound_is_refused_with_413(served: tuple[Stack, str]) -> None:
    stack, name = served

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(8):
            yield b" " * (LIMIT // 4)

    for body in (b" " * (LIMIT + 1), pieces()):
        reply = await stack.client().post(
            name, "/reset", data=body, headers={"Content-Type": "application/json"}, idempotent=False
        )
        assert (reply.status, (await reply.json())["code"]) == (413, "body_too_large")


async def test_contract_routes_are_served_beside_the_plugins_own(served: tuple[Stack, str]) -> None:
    stack, name = served
    who = {"rollout": rollout().model_dump()}
    if name in ("env", "mounted"):
        status, seeded = await post(stack, name, "/seed_session", {"_ng_session": who})
        assert (status, seeded["descriptor"]["rollout"]) == (200, who["rollout"])
        status, problem = await post(stack, name, "/aggregate_metrics", {})
        assert status == 422 and "verify_responses" in problem["detail"]
    elif name == "agent":
        assert (await post(stack, name, "/cancel", who))[0] == 200
    else:
        status, opened = await post(stack, name, "/sessions", who)
        asked = {"input": "x", "model": "m"}
        for token, expected in (("ngi1_guess", 401), (opened["inference_token"], 200)):
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session:
                for path in ("responses", "embeddings"):
                    async with session.post(f"{opened['base_url']}/{path}", json=asked) as reply:
                        assert (status, path, reply.status) == (200, path, expected)
                async with session.post(f"{stack.url(name)}/reset", json=asked) as reply:
                    assert reply.status == 401


async def test_lifespans_of_server_and_plugin_run_once_each(stack: Stack) -> None:
    stack.add("env", GymnasiumEnvironment, Role.ENVIRONMENT)
    environment: Any = stack.servers["env"]
    assert environment.alive == ["startup", "own"]
    stack.stop("env")
    assert environment.alive == ["startup", "own", "own ended", "shutdown"]


async def test_route_that_a_plugin_adds_is_behind_the_credential_check_whatever_its_path(stack: Stack) -> None:
    stack.add("model", ModelWithMoreRoutes, Role.MODEL)
    async with aiohttp.ClientSession() as session:
        for path in ("/v1/embeddings", "/reset", "/"):
            async with session.post(stack.url("model") + path, json={}) as reply:
                assert (path, reply.status) == (path, 401)
    assert (await post(stack, "model", "/v1/embeddings", {}))[0] == 200


class Countdown(SimpleResourcesServer):
    """Three steps of which each earns what the row privately says."""

    config: BaseResourcesServerConfig
    left: int = 0

    def setup_webserver(self) -> FastAPI:
        app = FastAPI()
        self.setup_session_middleware(app)
        app.post("/reset")(self.reset)
        app.post("/step")(self.step)
        return app

    async def reset(self, body: Anything) -> dict[str, Any]:
        self.left = int((body.model_extra or {})["steps"])
        return {"observation": None, "info": {}}

    async def step(self, body: Anything) -> dict[str, Any]:
        self.left -= 1
        worth = (body.model_extra or {})["worth"]
        observation = "x" * (body.model_extra or {}).get("observed_bytes", 0)
        return {"observation": observation, "reward": worth, "terminated": self.left <= 0, "truncated": False}

    async def verify(self, body: Anything) -> None:
        raise NotImplementedError


async def test_an_attempt_is_worth_what_the_environments_own_steps_answered(stack: Stack) -> None:
    stack.add("env", Countdown, Role.ENVIRONMENT)
    row = {"responses_create_params": {"input": "go"}, "steps": 2, "worth": 0.25}
    who = rollout().model_dump()
    status, stored = await post(stack, "env", "/rows", {"row": row, "rollout": who})
    assert status == 200 and "worth" not in stored["public_row"]
    agent, of_attempt = stack.client(Role.AGENT, "agent"), {ROW_REF_HEADER: stored["row_ref"]}

    async def step(path: str) -> dict[str, Any]:
        reply = await agent.post("env", path, json={**stored["public_row"], "worth": 100}, headers=of_attempt)
        assert reply.status == 200
        answer: dict[str, Any] = await reply.json()
        return answer

    assert (await post(stack, "env", "/verdict", {"rollout": who}))[0] == 409
    await step("/reset")
    assert (await step("/step"))["reward"] == 0.25
    await step("/step")
    await step("/reset")  # another episode is no second try
    await step("/step")
    status, verdict = await post(stack, "env", "/verdict", {"rollout": who})
    assert (status, verdict["reward"], verdict["terminated"], verdict["valid"]) == (200, 0.5, True, True)


@pytest.mark.parametrize(
    ("fields", "status", "reward"),
    [
        ({"worth": 0.25, "observed_bytes": 20 << 20}, 200, 0.5),
        ({"worth": "much"}, 502, None),
        ({"worth": True}, 502, None),
    ],
)
async def test_no_reward_of_a_step_is_lost_without_an_error(
    stack: Stack, fields: dict[str, Any], status: int, reward: float | None
) -> None:
    stack.add("env", Countdown, Role.ENVIRONMENT)
    row = {"responses_create_params": {"input": "go"}, "steps": 2, **fields}
    who = rollout().model_dump()
    _, stored = await post(stack, "env", "/rows", {"row": row, "rollout": who})
    agent, of_attempt = stack.client(Role.AGENT, "agent"), {ROW_REF_HEADER: stored["row_ref"]}
    for path in ("/reset", "/step", "/step"):
        reply = await agent.post("env", path, json=stored["public_row"], headers=of_attempt)
        assert (reply.status, bool(await reply.read())) == (200, True)
    found, verdict = await post(stack, "env", "/verdict", {"rollout": who})
    assert (found, verdict.get("reward")) == (status, reward)
    assert status == 200 or "no number as its 'reward'" in verdict["detail"]


async def test_a_step_that_pays_is_not_paid_again_after_another_reset(stack: Stack) -> None:
    stack.add("env", Countdown, Role.ENVIRONMENT)
    row = {"responses_create_params": {"input": "go"}, "steps": 2, "worth": 0.25}
    who = rollout().model_dump()
    _, stored = await post(stack, "env", "/rows", {"row": row, "rollout": who})
    agent, of_attempt = stack.client(Role.AGENT, "agent"), {ROW_REF_HEADER: stored["row_ref"]}
    for _ in range(8):  # the first step of an episode that never ends
        for path in ("/reset", "/step"):
            reply = await agent.post("env", path, json=stored["public_row"], headers=of_attempt)
            assert reply.status == 200
    status, verdict = await post(stack, "env", "/verdict", {"rollout": who})
    assert (status, verdict["reward"], verdict["terminated"]) == (200, 0.25, False)
