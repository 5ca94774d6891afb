"""Host-side helpers for NeMo Gym's agents in boxes: find server addresses, open MCP sessions, request the reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel

from nemo_gym.config_types import ResourcesServerRef
from nemo_gym.contract.credentials import is_loopback
from nemo_gym.contract.episodes import AGENT_RUN_ERROR
from nemo_gym.contract.errors import ConfigError
from nemo_gym.http.client import ServerClient, get_response_json, get_server_url, raise_for_status

MCP_METADATA_KEY = "mcp"
"""Key of a ``/seed_session`` response that says where the environment serves its tools over MCP."""


def sandbox_server_url(name: str, *, require_reachable: bool = False) -> str:
    """Return the base URL of the server ``name``. With ``require_reachable``, raise `ConfigError` for a loopback
    address, which a remote box cannot reach."""
    url = get_server_url(name)
    if require_reachable and is_loopback(urlsplit(url).hostname or ""):
        raise ConfigError(
            f"server '{name}' listens on {url}, which boxes on other hosts cannot reach; set its 'host' to a reachable"
            " address",
            key=f"{name}.host",
        )
    return url


def restricted_network_policy(provider: str, urls: Sequence[str]) -> dict[str, Any]:
    """Return OpenSandbox's network policy that lets a box reach only the hosts of ``urls``. Raises ``ValueError`` for
    any other provider (use doors there, see `Door`) and for a host that a box on another machine cannot reach."""
    if provider != "opensandbox":
        raise ValueError(
            f"provider '{provider}' has no network policy by host (only 'opensandbox' has); add doors to the spec"
        )
    hosts = [urlsplit(url).hostname or "" for url in urls]
    for host in hosts:
        if not host or is_loopback(host) or host in ("0.0.0.0", "::"):
            raise ValueError(f"a box cannot reach host '{host}'; set the server's 'host' to a reachable address")
    rules = [{"action": "allow", "target": host} for host in dict.fromkeys(hosts)]
    return {"defaultAction": "deny", "egress": rules}


async def seed_mcp_servers(
    client: ServerClient,
    servers: Sequence[ResourcesServerRef],
    body: BaseModel,
    cookies: Mapping[str, str],
    *,
    timeout_s: float,
    require_reachable: bool = False,
) -> dict[str, dict[str, Any]]:
    """Open a session at each of ``servers``; return server name → URL, headers and timeout of its MCP tools for this
    attempt. Raises ``ValueError`` for a server whose seed response offers no MCP headers with a session token."""
    entries = {}
    for server in servers:
        reply = await client.post(
            server_name=server.name, url_path="/seed_session", json=body.model_dump(mode="json"), cookies=cookies
        )
        await raise_for_status(reply)
        mcp_metadata = (await get_response_json(reply)).get(MCP_METADATA_KEY)
        if not isinstance(mcp_metadata, Mapping) or not mcp_metadata.get("headers"):
            raise ValueError(f"the seed of '{server.name}' offers no authenticated MCP: it serves no tools over MCP")
        url = sandbox_server_url(server.name, require_reachable=require_reachable)
        path = str(mcp_metadata.get("url_path") or "/mcp").lstrip("/")
        entries[server.name] = {
            "enabled": True,
            "url": f"{url.rstrip('/')}/{path}",
            "timeout": int(timeout_s * 1000),
            "headers": dict(mcp_metadata["headers"]),
        }
    return entries


async def verify_agent_response(
    client: ServerClient,
    server: ResourcesServerRef,
    body: BaseModel,
    response: BaseModel,
    cookies: Mapping[str, str],
    *,
    force_zero_reward: bool,
) -> dict[str, Any]:
    """Return the result of the environment's ``/verify``. With ``force_zero_reward`` (the agent failed), the
    environment judges an empty output, and the result still contains the agent's actual response."""
    response_json = response.model_dump(mode="json")
    judged_response = {**response_json, "output": []} if force_zero_reward else response_json
    verify_request = {**body.model_dump(mode="json"), "response": judged_response}
    reply = await client.post(server_name=server.name, url_path="/verify", json=verify_request, cookies=cookies)
    await raise_for_status(reply)
    result: dict[str, Any] = await get_response_json(reply)
    result["response"] = response_json
    if force_zero_reward:
        result["failure_kind"] = AGENT_RUN_ERROR
    return result
