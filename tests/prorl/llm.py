"""LLM servers for jobs: scripted models as OpenAI-compatible servers of their own, which count who asks them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import PrivateAttr
from starlette.responses import Response

from nemo_gym.base_responses_api_model import InferenceCall
from nemo_gym.http.client import ServerClient
from responses_api_models.scripted_model.app import ScriptedModel
from tests.servers.stack import Served


class CountingModel(ScriptedModel):
    """Notes the body of every call."""

    _asked: list[dict[str, Any]] = PrivateAttr(default_factory=list)

    async def infer(self, call: InferenceCall) -> Response:
        self._asked.append(call.body)
        return await super().infer(call)

    @property
    def asked(self) -> list[dict[str, Any]]:
        return self._asked


@contextmanager
def llm_server(script: str, tools: str | None = None) -> Iterator[tuple[str, CountingModel]]:
    """A URL without ``/v1``, as ProRL's users give it, and the model behind it."""
    block = {"entrypoint": "app.py", "host": "127.0.0.1", "port": 0, "script": script, "tools": tools}
    config = {"policy": {"responses_api_models": {"scripted_model": block}}}
    model = CountingModel(
        config=CountingModel.config_from("policy", config), server_client=ServerClient(global_config_dict=config)
    )
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(256)
    served = Served(model, listener)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", model
    finally:
        served.stop()
        listener.close()
