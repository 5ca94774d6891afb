"""Serves a trainer's inference client as an engine of the gateway: SGLang's ``/generate`` calls `generate` of verl's
``LLMServerClient``, which takes and returns token ids and chooses among its servers by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import orjson
from aiohttp import web

from nemo_gym._util.loop_thread import LoopThread
from nemo_gym.contract.errors import ServerError

START_TIMEOUT_S = 30.0
MAX_BODY_BYTES = 256 << 20
_PASSED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos")


class TokenClient(Protocol):
    """The part of verl's client that is used here."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> Any: ...


class EngineBridge:
    """Serves on loopback from a thread with its own loop, so that a runner that blocks the framework's loop does not
    block the engine it waits for."""

    def __init__(self, client: TokenClient) -> None:
        self._client = client
        self._thread: LoopThread | None = None
        self._runner: web.AppRunner | None = None
        self.url = ""

    def start(self) -> str:
        """Start serving. Return the address, for gateways to use as an engine of type ``sglang``."""
        self._thread = LoopThread("engine-bridge")
        try:
            self._thread.run(self._start(), timeout_s=START_TIMEOUT_S)
        except TimeoutError:
            raise ServerError(f"the engine bridge did not start within {START_TIMEOUT_S:g} s") from None
        return self.url

    def stop(self) -> None:
        if self._thread is not None:
            self._thread.run(self._stop(), timeout_s=START_TIMEOUT_S)
            self._thread.close()
            self._thread = None

    async def _start(self) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def _stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _generate(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        params = body["sampling_params"]
        max_tokens = int(params["max_new_tokens"])
        sampling = {name: params[name] for name in _PASSED if params.get(name) is not None}
        kwargs = {"image_data": body["image_data"]} if body.get("image_data") else {}
        try:
            output = await self._client.generate(
                body["rid"],
                prompt_ids=body["input_ids"],
                sampling_params={**sampling, "logprobs": True, "max_tokens": max_tokens},
                **kwargs,
            )
            reply = _reply(output, max_tokens)
        except ValueError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        if not body.get("stream"):
            return web.Response(body=orjson.dumps(reply), content_type="application/json")
        events = b"data: " + orjson.dumps(reply) + b"\n\ndata: [DONE]\n\n"
        return web.Response(body=events, content_type="text/event-stream")


def _reply(output: Any, max_tokens: int) -> Mapping[str, Any]:
    """Convert verl's ``TokenOutput`` to SGLang's response. Raises `ValueError` if it has no logprobs."""
    ids, logprobs = list(output.token_ids), output.log_probs
    if logprobs is None or len(logprobs) != len(ids):
        count = "no" if logprobs is None else str(len(logprobs))
        raise ValueError(f"the inference client gave {count} logprobs for {len(ids)} tokens; the gateway keeps both")
    reason = "abort" if output.stop_reason in ("aborted", "abort") else "stop"
    if reason == "stop" and (output.stop_reason == "length" or len(ids) >= max_tokens):
        reason = "length"
    extra = getattr(output, "extra_fields", None) or {}
    version = extra.get("max_global_steps", extra.get("global_steps"))
    return {
        "output_ids": ids,
        "meta_info": {
            "completion_tokens": len(ids),
            "finish_reason": {"type": reason},
            "output_token_logprobs": [
                [float(logprob), int(token), None] for token, logprob in zip(ids, logprobs, strict=True)
            ],
            **({"weight_version": str(version)} if version is not None else {}),
        },
    }
