"""An agent in NeMo Gym's own style: its ``run`` seeds, asks, takes a hint and verifies by itself."""

from __future__ import annotations

from fastapi import Body, Request, Response
from pydantic import ConfigDict

from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server_utils import get_response_json, raise_for_status


class RunsItselfConfig(BaseResponsesAPIAgentConfig):
    resources_server: ResourcesServerRef
    model_server: ModelServerRef


class RunsItselfRunRequest(BaseRunRequest):
    model_config = ConfigDict(extra="allow")


class RunsItselfVerifyResponse(BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")


class RunsItself(SimpleResponsesAPIAgent):
    config: RunsItselfConfig

    async def responses(
        self,
        request: Request,
        response: Response,
        body: NeMoGymResponseCreateParamsNonStreaming = Body(),  # noqa: B008 (FastAPI's way, and NeMo Gym's)
    ) -> NeMoGymResponse:
        answered = await self.server_client.post(self.config.model_server.name, "/v1/responses", json=body)
        await raise_for_status(answered)
        return NeMoGymResponse.model_validate(await get_response_json(answered))

    async def run(self, request: Request, body: RunsItselfRunRequest) -> RunsItselfVerifyResponse:
        assert "expected_answer" not in (body.model_extra or {}), "private data reached the agent"
        environment, row = self.config.resources_server.name, body.model_dump()
        seeded = await self.server_client.post(environment, "/seed_session", json=row, cookies=request.cookies)
        await raise_for_status(seeded)
        hint = await self.server_client.post(environment, "/hint", json={}, cookies=seeded.cookies)
        await raise_for_status(hint)
        answered = await self.server_client.post(self.config.name, "/v1/responses", json=body.responses_create_params)
        await raise_for_status(answered)
        verified = await self.server_client.post(
            environment,
            "/verify",
            json={**row, "response": await get_response_json(answered)},
            cookies=seeded.cookies,
        )
        await raise_for_status(verified)
        return RunsItselfVerifyResponse.model_validate(await get_response_json(verified))


if __name__ == "__main__":
    RunsItself.run_webserver()
