"""What NeMo Gym's agents in boxes do on the host's side: find a server's address, and ask for the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel

from nemo_gym.config_types import ResourcesServerRef
from nemo_gym.contract.episodes import AGENT_RUN_ERROR
from nemo_gym.contract.errors import ConfigError
from nemo_gym.http.client import ServerClient, get_response_json, get_server_url, is_loopback, raise_for_status


def sandbox_server_url(name: str, *, require_reachable: bool = False) -> str:
    """Where the server ``name`` listens. ``require_reachable`` refuses loopback, which a remote box cannot reach."""
    url = get_server_url(name)
    if require_reachable and is_loopback(urlsplit(url).hostname or ""):
        raise ConfigError(
            f"server '{name}' listens on {url}, which no box of another host can reach; give it a 'host' that can be",
            key=f"{name}.host",
        )
    return url


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
