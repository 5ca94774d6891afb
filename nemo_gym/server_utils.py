"""Common names for servers, as NeMo Gym plugins import them. Implemented in `nemo_gym.http`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_gym.config_types import BaseServerConfig
from nemo_gym.http.client import (
    MAX_NUM_TRIES,
    ServerClient,
    ServerStatus,
    ServerUnreachableError,
    close_global_aiohttp_client,
    get_global_aiohttp_client,
    get_response_json,
    get_server_url,
    inference_context,
    raise_for_status,
)
from nemo_gym.http.client import request as _request
from nemo_gym.http.requests import SESSION_ID_KEY
from nemo_gym.http.server import BaseServer, SimpleServer
from nemo_gym.http.telemetry import apply_rollout_prefix, rollout_path_prefix
from nemo_gym.telemetry.connection_pool import EXTERNAL, destination

if TYPE_CHECKING:
    from aiohttp import ClientResponse

    from nemo_gym.global_config import HEAD_SERVER_KEY_NAME, get_first_server_config_dict, get_global_config_dict

__all__ = [
    "HEAD_SERVER_KEY_NAME",
    "MAX_NUM_TRIES",
    "SESSION_ID_KEY",
    "BaseServer",
    "BaseServerConfig",
    "ClientResponse",
    "ServerClient",
    "ServerStatus",
    "ServerUnreachableError",
    "SimpleServer",
    "apply_rollout_prefix",
    "close_global_aiohttp_client",
    "get_first_server_config_dict",
    "get_global_aiohttp_client",
    "get_global_config_dict",
    "get_response_json",
    "get_server_url",
    "inference_context",
    "is_global_aiohttp_client_request_debug_enabled",
    "is_nemo_gym_fastapi_entrypoint",
    "is_nemo_gym_fastapi_worker",
    "raise_for_status",
    "request",
    "rollout_path_prefix",
    "setup_server_client",
]

_GLOBAL_AIOHTTP_CLIENT_QUEUE_TELEMETRY = False
"""NeMo Gym's switch for measuring its connection pool. Tests of its agents set it; nothing here reads it."""


async def request(
    method: str,
    url: str,
    _internal: bool = False,
    _max_connection_retries: int | None = None,
    _server_name: str | None = None,
    **options: Any,
) -> ClientResponse:
    """Call `nemo_gym.http.client.request` with this module's session, which tests of NeMo Gym's plugins can replace.

    ``_server_name`` names the destination for `nemo_gym.telemetry.connection_pool`. A caller that limits the tries
    with ``_max_connection_retries`` handles the failure itself, by the type of aiohttp's error; so that error is then
    raised in place of `ServerUnreachableError`.
    """
    with destination(_server_name or EXTERNAL):
        session = get_global_aiohttp_client()
        if _max_connection_retries is None:
            return await _request(method, url, _internal, session=session, **options)
        tries = max(1, _max_connection_retries)
        try:
            return await _request(method, url, _internal, session=session, max_tries=tries, **options)
        except ServerUnreachableError as error:
            raise (error.__cause__ or error) from None


FASTAPI_ENTRYPOINT_ENV = "IS_NEMO_GYM_FASTAPI_ENTRYPOINT"


def is_nemo_gym_fastapi_entrypoint(file: str) -> bool:
    """Return whether a worker process should build the module-level ``app`` of ``file``. Servers of this suite are
    single processes, so this is true only if an external launcher sets ``IS_NEMO_GYM_FASTAPI_ENTRYPOINT``."""
    entrypoint = os.environ.get(FASTAPI_ENTRYPOINT_ENV)
    return entrypoint is not None and Path(entrypoint).absolute() == Path(file).absolute()


def is_global_aiohttp_client_request_debug_enabled() -> bool:
    """NeMo Gym's switch for printing requests. It is always off here, because the logs record requests."""
    return False


def is_nemo_gym_fastapi_worker() -> bool:
    """Return whether this process is one of several workers of one server; always false in this suite."""
    return False


def setup_server_client(head_server_config: BaseServerConfig | None = None) -> ServerClient:
    """Return a `ServerClient` for this process's configuration."""
    return ServerClient.load_from_global_config(head_server_config)


def __getattr__(name: str) -> Any:
    if name == "ClientResponse":
        from aiohttp import ClientResponse

        return ClientResponse
    if name in ("HEAD_SERVER_KEY_NAME", "get_first_server_config_dict", "get_global_config_dict"):
        from nemo_gym import global_config

        return getattr(global_config, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
