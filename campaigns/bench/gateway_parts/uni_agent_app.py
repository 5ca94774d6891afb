"""uni-agent's gateway actor in one process, in front of our engine; runs in a separate environment (see `peers`).

    python uni_agent_app.py SOURCE POLICY ENGINE_URL ADDRESS_FILE

The actor's class is created directly, without a Ray cluster, and its backend is one aiohttp call to the engine where
production has a Ray call to a vLLM actor: both are in uni-agent's favour. Only the modules of verl that it imports are
loaded, from verl's own files; their parent packages, which would import torch, are empty here.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace

SOURCE, POLICY, ENGINE, ADDRESS = sys.argv[1:5]


def _bare_packages() -> None:
    root = Path(next(iter(importlib.util.find_spec("verl").submodule_search_locations)))
    for name in ("verl", "verl.utils", "verl.workers", "verl.workers.rollout", "verl.workers.config"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    configs = types.ModuleType("verl.workers.config.rollout")
    configs.PrometheusConfig = object  # named in annotations only
    sys.modules[configs.__name__] = configs
    servers = types.ModuleType("verl.workers.rollout.llm_server")
    servers.LLMServerClient = object
    sys.modules[servers.__name__] = servers


def _tokenizer():
    import json

    from transformers import PreTrainedTokenizerFast

    folder = Path(POLICY)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    # Its template says {% generation %}, which only renderings for training masks know.
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        chat_template=(folder / "chat_template.jinja").read_text(),
        eos_token=config["eos_token"],
        bos_token=config["bos_token"],
    )


class Backend:
    """The actor's backend, in place of verl's client."""

    def __init__(self, http, stops) -> None:
        self._http = http
        self._stops = stops

    async def generate(self, *, request_id, prompt_ids, sampling_params, image_data=None, video_data=None):
        import orjson

        body = {
            "prompt": prompt_ids,
            "max_tokens": sampling_params.get("max_tokens", 4096),
            "temperature": sampling_params.get("temperature", 1.0),
            "logprobs": 0,
            "return_token_ids": True,
            "add_special_tokens": False,
            "stop_token_ids": self._stops,
            "request_id": request_id,
            "model": "policy",
        }
        headers = {"Content-Type": "application/json"}
        async with self._http.post("/v1/completions", data=orjson.dumps(body), headers=headers) as reply:
            answer = orjson.loads(await reply.read())
        choice = answer["choices"][0]
        return SimpleNamespace(
            token_ids=choice["token_ids"],
            log_probs=choice["logprobs"]["token_logprobs"],
            stop_reason="completed",
            routed_experts=None,
            extra_fields={},
        )


async def main() -> None:
    import aiohttp
    from fastapi.responses import JSONResponse
    from uni_agent.gateway.config import GatewayActorConfig
    from uni_agent.gateway.gateway import _GatewayActor

    tokenizer = _tokenizer()
    http = aiohttp.ClientSession(ENGINE, connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar())
    actor = _GatewayActor(GatewayActorConfig(tokenizer=tokenizer), Backend(http, [tokenizer.eos_token_id]))
    actor._server_address = "127.0.0.1"

    @actor._app.post("/bench/sessions/{session_id}")
    async def _open(session_id: str):
        await actor.create_session(session_id, sampling_params={"logprobs": True})
        return JSONResponse({})

    @actor._app.post("/bench/sessions/{session_id}/finalize")
    async def _finalize(session_id: str):
        found = await actor.finalize_session(session_id)
        return JSONResponse({"trajectories": len(found), "tokens": sum(len(one.response_ids) for one in found)})

    await actor.start()
    partial = Path(f"{ADDRESS}.partial")
    partial.write_text(actor._server_base_url)
    partial.rename(ADDRESS)
    await asyncio.Event().wait()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.path.insert(0, SOURCE)
    _bare_packages()
    import uvloop

    uvloop.run(main())
