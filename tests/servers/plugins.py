"""Plugins as authors write them: in NeMo Gym's style, and with the hooks of this suite."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import Body, FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseRunRequest,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
from nemo_gym.contract.errors import SandboxLostError
from nemo_gym.contract.session import ActRequest, ActResponse, Artifact, RolloutIdentity
from nemo_gym.contract.verdict import Finding, Verdict
from nemo_gym.judge import JudgeError
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server_utils import SESSION_ID_KEY, get_response_json, raise_for_status

CANARY = "CANARY-7f3a-private"


# -- an environment in NeMo Gym's style ------------------------------------------------------------------------------


class CounterConfig(BaseResourcesServerConfig):
    step: int = 1


class AddRequest(BaseModel):
    amount: int


class CountReply(BaseModel):
    count: int


class CounterSeedRequest(BaseSeedSessionRequest):
    start: int = 0


class CounterVerifyRequest(BaseVerifyRequest):
    expected: int
    secret: str = CANARY


class CounterVerifyResponse(BaseVerifyResponse):
    expected: int
    secret: str
    counted: int
    explanation: str


class CounterEnvironment(SimpleResourcesServer):
    """Counts in a session, and expects a number; its reply quotes private fields under other names."""

    config: CounterConfig
    counters: dict[str, int] = Field(default_factory=dict)
    seeds: int = 0

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/add")(self.add)
        app.post("/broken_tool")(self.broken_tool)
        return app

    async def seed_session(self, request: Request, body: CounterSeedRequest) -> BaseSeedSessionResponse:
        self.seeds += 1
        self.counters[request.session[SESSION_ID_KEY]] = body.start
        return BaseSeedSessionResponse()

    async def add(self, request: Request, body: AddRequest) -> CountReply:
        session_id = request.session[SESSION_ID_KEY]
        self.counters[session_id] = self.counters.get(session_id, 0) + body.amount * self.config.step
        return CountReply(count=self.counters[session_id])

    async def broken_tool(self, request: Request) -> CountReply:
        raise RuntimeError(f"the answer would have been {CANARY}")

    async def verify(self, request: Request, body: CounterVerifyRequest) -> CounterVerifyResponse:
        counted = self.counters.get(request.session[SESSION_ID_KEY], 0)
        return CounterVerifyResponse(
            **body.model_dump(),
            reward=float(counted == body.expected),
            counted=counted,
            explanation=f"expected {body.expected}, and {body.secret}",
        )


# -- an environment with the hooks of this suite ---------------------------------------------------------------------


class PhraseEnvironment(SimpleResourcesServer):
    """The response must hold the row's ``phrase``. What it says decides what goes wrong."""

    config: BaseResourcesServerConfig
    graded: int = 0
    ended: int = 0
    opened: int = 0
    closing: int = 0
    holds_closing: bool = False
    """Whether `close_session` waits."""
    closed: list[str] = Field(default_factory=list)
    public_metadata_keys = frozenset({"hint"})

    async def open_session(self, row: dict[str, Any], rollout: RolloutIdentity) -> Any:
        self.opened += 1
        await asyncio.sleep(row.get("open_delay_s", 0))
        if row.get("opens") == "nothing":
            return None
        return await super().open_session(row, rollout)

    async def grade(
        self, row: dict[str, Any], response: dict[str, Any], artifacts: Sequence[Artifact], rollout: RolloutIdentity
    ) -> Any:
        self.graded += 1
        try:
            await asyncio.sleep(row.get("grade_delay_s", 0))
        finally:
            self.ended += 1
        text = response["output"][0]["content"][0]["text"]
        if "bare number" in text:
            return 1.0
        if "lost box" in text and self.graded == 1:
            raise SandboxLostError("the eval box was lost", retryable=True)
        if "broken grader" in text:
            raise KeyError(row["phrase"])
        if "no judge" in text:
            raise JudgeError("503")
        findings = [Finding(kind="peeked", detail="it looked")] if "peek" in text else []
        return Verdict.of(float(row["phrase"] in text), findings=findings, official={"artifacts": len(artifacts)})

    async def gold_solution(self, row: dict[str, Any]) -> dict[str, Any] | None:
        return {"text": row["phrase"]}

    async def close_session(self, rollout: RolloutIdentity) -> None:
        self.closing += 1
        while self.holds_closing:  # noqa: ASYNC110 - the test runs in another loop
            await asyncio.sleep(0.01)
        self.closed.append(rollout.attempt_id)


class UnheldPhraseEnvironment(PhraseEnvironment):
    """The same with nothing to release."""

    close_session = SimpleResourcesServer.close_session


class FrankRequest(BaseVerifyRequest):
    model_config = ConfigDict(extra="allow")


class FrankReply(BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")
    reward: Any = None


class FrankEnvironment(SimpleResourcesServer):
    """In NeMo Gym's style; a test decides what its hooks return."""

    config: BaseResourcesServerConfig
    seeds_with: Callable[[], Any] = dict
    verifies_with: Callable[[dict[str, Any]], Any] = dict

    async def seed_session(self, body: BaseSeedSessionRequest) -> Any:
        return self.seeds_with()

    async def verify(self, body: FrankRequest) -> Any:
        return self.verifies_with(body.model_dump())


# -- agents ----------------------------------------------------------------------------------------------------------


class AgentConfig(BaseResponsesAPIAgentConfig):
    resources_server: ResourcesServerRef
    model_server: ModelServerRef | None = None


class ToolAgent(SimpleResponsesAPIAgent):
    """In NeMo Gym's style: only ``responses``; asks the model once, and calls a tool of its environment."""

    config: AgentConfig

    async def responses(
        self,
        request: Request,
        body: NeMoGymResponseCreateParamsNonStreaming = Body(),  # noqa: B008
    ) -> NeMoGymResponse:
        assert self.config.model_server is not None
        asked = await self.server_client.post(self.config.model_server.name, "/v1/responses", json=body)
        await raise_for_status(asked)
        answer = NeMoGymResponse.model_validate(await get_response_json(asked))
        tool = await self.server_client.post(
            self.config.resources_server.name, "/add", json={"amount": 5}, cookies=request.cookies
        )
        await raise_for_status(tool)
        return answer


class LegacyRunRequest(BaseRunRequest):
    model_config = ConfigDict(extra="allow")


class LegacyVerifyRequest(BaseVerifyRequest):
    model_config = ConfigDict(extra="allow")


class LegacyVerifyResponse(BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")


class LegacyAgent(SimpleResponsesAPIAgent):
    """In NeMo Gym's style: overrides ``run``, and keeps everything it was ever told."""

    config: AgentConfig
    heard: list[str] = Field(default_factory=list)
    keep_extras: bool = True

    async def responses(
        self,
        body: NeMoGymResponseCreateParamsNonStreaming = Body(),  # noqa: B008
    ) -> NeMoGymResponse:
        return NeMoGymResponse.model_validate(_reply("done"))

    async def run(self, request: Request, body: LegacyRunRequest) -> LegacyVerifyResponse:
        environment = self.config.resources_server.name
        row = body.model_dump() if self.keep_extras else {"responses_create_params": body.responses_create_params}
        self.heard.append(body.model_dump_json())
        seeded = await self.server_client.post(environment, "/seed_session", json=row, cookies=request.cookies)
        self.heard.append((await seeded.read()).decode())
        await raise_for_status(seeded)
        for tool in ("/add", "/broken_tool"):
            called = await self.server_client.post(environment, tool, json={"amount": 3}, cookies=seeded.cookies)
            self.heard.append((await called.read()).decode())
        verified = await self.server_client.post(
            environment, "/verify", json={**row, "response": _reply("done")}, cookies=seeded.cookies
        )
        self.heard.append((await verified.read()).decode())
        await raise_for_status(verified)
        return LegacyVerifyResponse.model_validate(await get_response_json(verified))


class WaitingAgent(SimpleResponsesAPIAgent):
    """Works until it is stopped, and takes its time to clean up."""

    config: AgentConfig
    started: list[str] = Field(default_factory=list)
    cleaned: list[str] = Field(default_factory=list)

    async def act(self, request: ActRequest) -> ActResponse:
        attempt_id = request.descriptor.rollout.attempt_id
        self.started.append(attempt_id)
        try:
            await asyncio.sleep(0 if "at once" in str(request.responses_create_params) else 3600)
        finally:
            await asyncio.shield(self._clean(attempt_id))
        return ActResponse(response=_reply("rested"))

    async def _clean(self, attempt_id: str) -> None:
        await asyncio.sleep(0.1)
        self.cleaned.append(attempt_id)


def _reply(text: str) -> dict[str, Any]:
    from tests.servers.stack import response

    return response(text)
