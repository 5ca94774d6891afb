"""Aggregate metrics of a run: asked of each agent's environment, which knows its own, over valid rollouts only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import structlog

from nemo_gym.rollouts.attempt import Route
from nemo_gym.rollouts.failures import PeerError
from nemo_gym.rollouts.peers import Peers
from nemo_gym.rollouts.tally import AgentTally

log = structlog.get_logger(__name__)


def for_aggregation(row: Mapping[str, Any]) -> dict[str, Any]:
    """A result row without what metrics do not read: the prompt, the conversation, artifacts and trajectories."""
    left_out = ("responses_create_params", "response", "artifacts", "ng_trajectory")
    kept = {key: value for key, value in row.items() if key not in left_out}
    response = row.get("response")
    if isinstance(response, Mapping) and response.get("usage") is not None:
        kept["response"] = {"usage": response["usage"]}
    return kept


async def aggregate(
    peers: Peers, route: Route, rows: list[dict[str, Any]], tally: AgentTally, total: int
) -> dict[str, Any]:
    """One entry of the aggregate file. An environment that cannot answer leaves its counts and says why."""
    metrics: dict[str, Any] = {"agent_metrics": {}, "key_metrics": {}, "group_level_metrics": []}
    server = route.environment or route.agent
    if rows:
        try:
            reply = await peers.post(server, "/aggregate_metrics", {"verify_responses": rows})
            answered = reply.json()
            metrics.update({key: answered[key] for key in metrics if key in answered})
        except (PeerError, ValueError, TypeError) as error:
            log.warning("no aggregate metrics", server=server, error=str(error))
            metrics["error"] = f"{server}/aggregate_metrics: {error}"
    metrics["agent_metrics"] = {
        **(metrics["agent_metrics"] or {}),
        "rollouts/total": total,
        "rollouts/valid": tally.valid,
        "rollouts/invalid": tally.invalid,
        **{f"rollouts/invalid/{kind}": count for kind, count in sorted(tally.failures.items())},
        "rollouts/with_findings": tally.findings,
    }
    if tally.invalid:
        metrics["key_metrics"] = {**(metrics["key_metrics"] or {}), "rollouts/invalid": tally.invalid}
    return {"agent_ref": {"type": "responses_api_agents", "name": route.agent}, **metrics}


def write_aggregates(path: Path, aggregates: list[dict[str, Any]]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(orjson.dumps(aggregates, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS))
    partial.replace(path)
