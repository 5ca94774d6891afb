"""The server side's common names, as NeMo Gym plugins import them. Implemented in `nemo_gym.http`."""

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
"""NeMo Gym's switch for measuring its connection pool, which tests of its agents set; nothing here reads it."""


async def request(
    method: str,
    url: str,
    _internal: bool = False,
    _max_connection_retries: int | None = None,
    _server_name: str | None = None,
    **options: Any,
) -> ClientResponse:
    """`nemo_gym.http.client.request`, by this module's session, so that tests of NeMo Gym's plugins can replace it.

    ``_server_name`` says to whom the request goes (`nemo_gym.telemetry.connection_pool`). Who bounds the tries with
    ``_max_connection_retries`` decides itself what comes after them, by the kind of aiohttp's own error: that one is
    raised then in place of `ServerUnreachableError`.
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
    """Whether a worker process should build the module-level ``app`` of ``file``. Servers of this suite are single
    processes, so only an outside starter that sets the variable gets ``True``."""
    entrypoint = os.environ.get(FASTAPI_ENTRYPOINT_ENV)
    return entrypoint is not None and Path(entrypoint).absolute() == Path(file).absolute()


def is_global_aiohttp_client_request_debug_enabled() -> bool:
    """NeMo Gym's switch for printing requests: off here, where logs say what was sent."""
    return False


def is_nemo_gym_fastapi_worker() -> bool:
    """Whether this process is one of several workers of one server: never, in this suite."""
    return False


def setup_server_client(head_server_config: BaseServerConfig | None = None) -> ServerClient:
    """A `ServerClient` over this process's configuration."""
    return ServerClient.load_from_global_config(head_server_config)


def __getattr__(name: str) -> Any:
    if name == "ClientResponse":
        from aiohttp import ClientResponse

        return ClientResponse
    if name in ("HEAD_SERVER_KEY_NAME", "get_first_server_config_dict", "get_global_config_dict"):
        from nemo_gym import global_config

        return getattr(global_config, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
