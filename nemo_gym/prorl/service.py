"""Serves `OpenHandsServer` over HTTP, with ProRL's routes.

| route | body | answer |
|---|---|---|
| ``POST /start``, ``POST /stop`` | | ``{status}`` |
| ``POST /process`` | ``{instance, sampling_params?, job_id?, timeout?}`` | the result, when the job is complete |
| ``POST /cancel`` | ``{job_id}`` | ``{job_id, cancelled, seconds}`` |
| ``POST /add_llm_server`` | ``{address, weight?}`` | ``{status, address, new}`` |
| ``POST /clear_llm_server`` | | ``{status}`` |
| ``GET /status`` | | `OpenHandsServer.status`, with ``running``, workers, ``data_sources`` and ``llm_servers`` |

Errors are problem documents, with ``detail`` as in the original. When a client disconnects, its job is cancelled.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nemo_gym._util.exact_json import loads_exactly
from nemo_gym.contract.credentials import require_loopback
from nemo_gym.contract.errors import ConfigError, CredentialError
from nemo_gym.http.client import encode_as_text, url_host
from nemo_gym.http.delivery import CLIENT_CLOSED_REQUEST, CallerGoneError, while_connected
from nemo_gym.http.middleware import BodyLimitMiddleware, BodyLimits, UnknownErrorMiddleware
from nemo_gym.http.problems import install_problem_handlers
from nemo_gym.http.requests import JsonResponse, parse_json_object, validated
from nemo_gym.http.webserver import LISTEN_BACKLOG, SERVER_KEEPALIVE_S, WebServer, raise_file_limit
from nemo_gym.prorl.async_server import OpenHandsServer
from nemo_gym.prorl.client import TOKEN_ENV
from nemo_gym.prorl.registry import registered_handlers
from nemo_gym.rollouts.results import replaced

STOP_GRACE_S = 30


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ProcessBody(_Body):
    instance: dict[str, Any]
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    job_id: str | None = None
    timeout: float | None = Field(None, gt=0)


class CancelBody(_Body):
    job_id: str


class LlmServerBody(_Body):
    address: str
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)


MAX_BODY_MIB = 256
MAX_BODY_VALUES = 10_000_000
"""JSON values of one body, of which a list or an object counts as 4."""


def application(
    server: OpenHandsServer,
    token: str | None = None,
    *,
    max_body_mib: int = MAX_BODY_MIB,
    max_body_values: int = MAX_BODY_VALUES,
) -> FastAPI:
    """Return the application. Clients must send ``token`` as bearer token; ``None`` requires none."""
    app = FastAPI(title="prorl", openapi_url=None, docs_url=None, redoc_url=None)
    install_problem_handlers(app)
    limits = BodyLimits(max_body_mib << 20, "max_body_mib", max_body_values, "max_body_values")
    app.add_middleware(BodyLimitMiddleware, limits=limits, agent_limits=limits)
    app.add_middleware(UnknownErrorMiddleware)

    def checked(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            bearer_token = request.headers.get("authorization", "").removeprefix("Bearer ")
            if token is not None and not hmac.compare_digest(bearer_token.encode(), token.encode()):
                raise CredentialError(f"this server wants its token as 'Authorization: Bearer …'; see {TOKEN_ENV}")
            return await handler(request)

        return endpoint

    async def start(request: Request) -> Response:
        await asyncio.to_thread(server.start)
        return JsonResponse({"status": "Server started successfully"})

    async def stop(request: Request) -> Response:
        await asyncio.to_thread(server.stop)
        return JsonResponse({"status": "Server stopped successfully"})

    async def process(request: Request) -> Response:
        body = validated(ProcessBody, await parse_json_object(request, loads_exactly), "/process")
        work = server.aprocess(body.instance, body.sampling_params, body.job_id, body.timeout)
        try:
            result = await while_connected(request, work)
        except CallerGoneError:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return Response(encode_as_text(result), media_type="application/json")

    async def cancel(request: Request) -> Response:
        body = validated(CancelBody, await parse_json_object(request), "/cancel")
        seconds = await asyncio.to_thread(server.cancel_job, body.job_id)
        return JsonResponse({"job_id": body.job_id, "cancelled": True, "seconds": round(seconds, 6)})

    async def add_llm_server(request: Request) -> Response:
        body = validated(LlmServerBody, await parse_json_object(request), "/add_llm_server")
        new = server.add_llm_server_address((body.address, body.weight))
        return JsonResponse({"status": "LLM server added successfully", "address": body.address, "new": new})

    async def clear_llm_server(request: Request) -> Response:
        server.clear_llm_server_addresses()
        return JsonResponse({"status": "LLM servers cleared successfully"})

    async def status(request: Request) -> Response:
        counts = await asyncio.to_thread(server.status)
        workers = {name: getattr(server, name) for name in ("max_init_workers", "max_run_workers", "max_eval_workers")}
        details = {"data_sources": registered_handlers(), "llm_servers": server.llm_server_addresses}
        return JsonResponse({**counts, "running": server.running, **workers, **details})

    async def health(request: Request) -> Response:
        return JsonResponse({"status": "ok"})

    for handler in (start, stop, process, cancel, add_llm_server, clear_llm_server):
        app.router.routes.append(Route(f"/{handler.__name__}", checked(handler), methods=["POST"]))
    app.router.routes.append(Route("/status", checked(status), methods=["GET"]))
    app.router.routes.append(Route("/health", health, methods=["GET"]))
    return app


class Listening:
    """The service's listening socket, and the URL under which other machines reach it."""

    def __init__(self, listener: socket.socket, url: str) -> None:
        self.listener, self.url = listener, url

    @classmethod
    def on(cls, host: str, port: int, *, secured: bool) -> Self:
        """Listen on an address. Raises `ConfigError` if it cannot be used, or if it is reachable from other machines
        and not ``secured`` by a token."""
        consequence = (
            f"whoever reaches it can run jobs: export {TOKEN_ENV} here and for the clients, or accept it with"
            " insecure=true"
        )
        require_loopback(host, consequence, unless=secured)
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(LISTEN_BACKLOG)
        except (OSError, OverflowError) as error:
            listener.close()
            raise ConfigError(f"host={host} port={port} cannot be used: {error}", key="port") from error
        listener.setblocking(False)
        host_name = socket.gethostname() if host in ("0.0.0.0", "::") else host
        return cls(listener, f"http://{url_host(host_name)}:{listener.getsockname()[1]}")

    def announce(self, file: Path | None) -> None:
        """Write the service's URL to ``file``, if given, atomically: for a launcher of servers on many nodes."""
        if file is None:
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with replaced(file) as out:
                out.write(f"{self.url}\n".encode())
        except OSError as error:
            raise ConfigError(f"url_file={file} cannot be written: {error}", key="url_file") from error


def serve(
    server: OpenHandsServer, listening: Listening, token: str | None, on_ready: Callable[[], None], **limits: int
) -> None:
    """Serve until SIGINT or SIGTERM, and then end the running jobs. ``on_ready`` is called when requests are accepted
    and signals are handled; ``limits`` are those of `application`."""
    raise_file_limit()
    config = uvicorn.Config(
        application(server, token, **limits),
        access_log=False,
        log_level="warning",
        server_header=False,
        ws="none",
        timeout_keep_alive=SERVER_KEEPALIVE_S,
        timeout_graceful_shutdown=STOP_GRACE_S,
    )

    async def stop() -> None:
        await asyncio.to_thread(server.stop)

    WebServer(config, on_ready=on_ready, on_stop=stop).run(sockets=[listening.listener])
