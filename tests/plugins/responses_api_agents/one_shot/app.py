"""Asks the policy once and hands in what it says."""

from __future__ import annotations

from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
from nemo_gym.contract.errors import ModelError
from nemo_gym.contract.session import ActRequest, ActResponse
from nemo_gym.http.client import get_response_json, request


class OneShotConfig(BaseResponsesAPIAgentConfig):
    resources_server: ResourcesServerRef
    model_server: ModelServerRef


class OneShot(SimpleResponsesAPIAgent):
    config: OneShotConfig

    async def act(self, request_: ActRequest) -> ActResponse:
        inference = request_.inference
        reply = await request(
            "POST",
            f"{inference.base_url}/responses",
            json=request_.responses_create_params,
            headers={"Authorization": f"Bearer {inference.token}"},
        )
        answer = await get_response_json(reply)
        if not reply.ok:
            raise ModelError(f"the policy endpoint answered {reply.status}", retryable=True)
        return ActResponse(response=answer, observations={"turns": 1})


if __name__ == "__main__":
    OneShot.run_webserver()
