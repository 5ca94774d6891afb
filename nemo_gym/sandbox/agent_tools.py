"""What NeMo Gym's agents in boxes do on the host's side: find a server's address, and ask for the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel

from nemo_gym.config_types import ResourcesServerRef
from nemo_gym.contract.episodes import AGENT_RUN_ERROR
from nemo_gym.contract.errors import ConfigError
from nemo_gym.http.client import ServerClient, get_response_json, get_server_url, is_loopback, raise_for_status

MCP_METADATA_KEY = "mcp"
"""Of a seed's reply: where an environment's tools are over MCP."""


def sandbox_server_url(name: str, *, require_reachable: bool = False) -> str:
    """Where the server ``name`` listens. ``require_reachable`` refuses loopback, which a remote box cannot reach."""
    url = get_server_url(name)
    if require_reachable and is_loopback(urlsplit(url).hostname or ""):
        raise ConfigError(
            f"server '{name}' listens on {url}, which no box of another host can reach; give it a 'host' that can be",
            key=f"{name}.host",
        )
    return url


def restricted_network_policy(provider: str, urls: Sequence[str]) -> dict[str, Any]:
    """OpenSandbox's network policy that lets a box reach the hosts of ``urls`` alone. Raises ``ValueError`` for
    another provider (doors do this here, see `Door`) and for a host that no box of another machine can reach."""
    if provider != "opensandbox":
        raise ValueError(f"a network policy by host is OpenSandbox's, not that of '{provider}'; give the spec doors")
    hosts = [urlsplit(url).hostname or "" for url in urls]
    for host in hosts:
        if not host or is_loopback(host) or host in ("0.0.0.0", "::"):
            raise ValueError(f"'{host}' is no host that is reachable from a box; give its server a 'host' that is")
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
    """Open a session at each of ``servers``: name → where its MCP tools are for this attempt, and with which headers.
    Raises ``ValueError`` for one whose seed offers no MCP with a token of the session's own."""
    entries = {}
    for server in servers:
        reply = await client.post(
            server_name=server.name, url_path="/seed_session", json=body.model_dump(mode="json"), cookies=cookies
        )
        await raise_for_status(reply)
        offered = (await get_response_json(reply)).get(MCP_METADATA_KEY)
        if not isinstance(offered, Mapping) or not offered.get("headers"):
            raise ValueError(f"the seed of '{server.name}' offers no authenticated MCP: it serves no tools over MCP")
        url = sandbox_server_url(server.name, require_reachable=require_reachable)
        path = str(offered.get("url_path") or "/mcp").lstrip("/")
        entries[server.name] = {
            "enabled": True,
            "url": f"{url.rstrip('/')}/{path}",
            "timeout": int(timeout_s * 1000),
            "headers": dict(offered["headers"]),
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
    """What the environment's ``/verify`` says. ``force_zero_reward``: the agent failed, so an empty answer is judged,
    and what the agent did say stays in the result."""
    said = response.model_dump(mode="json")
    judged = {**said, "output": []} if force_zero_reward else said
    asked = {**body.model_dump(mode="json"), "response": judged}
    reply = await client.post(server_name=server.name, url_path="/verify", json=asked, cookies=cookies)
    await raise_for_status(reply)
    result: dict[str, Any] = await get_response_json(reply)
    result["response"] = said
    if force_zero_reward:
        result["failure_kind"] = AGENT_RUN_ERROR
    return result
