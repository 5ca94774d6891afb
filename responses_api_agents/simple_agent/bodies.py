"""Request and response bodies of NeMo Gym's simple agent, with every field of a row, for agents that subclass it."""

from __future__ import annotations

from pydantic import ConfigDict

from nemo_gym.http.environment_bodies import BaseRunRequest, BaseVerifyRequest, BaseVerifyResponse


class SimpleAgentRunRequest(BaseRunRequest):
    model_config = ConfigDict(extra="allow")


class SimpleAgentVerifyRequest(BaseVerifyRequest):
    model_config = ConfigDict(extra="allow")


class SimpleAgentVerifyResponse(BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")
