"""What the tests of NeMo Gym's plugins do that no server does: stubs for responses, servers without a constructor."""

from __future__ import annotations

import pstats
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, patch

import aiohttp
import omegaconf
import pytest
from pydantic import ValidationError

from nemo_gym import config_types, global_config, server_utils
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ResourcesServerRef
from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.profiling import Profiler
from nemo_gym.responses_converter import _usage_detail
from nemo_gym.reward_profile import compute_aggregate_metrics
from nemo_gym.sandbox import SandboxEndpoint
from nemo_gym.sandbox.agent_tools import restricted_network_policy, seed_mcp_servers
from nemo_gym.server_utils import ServerClient, raise_for_status
from nemo_gym.testing.environments import reply


async def test_a_stub_of_a_response_raises_what_it_raises() -> None:
    def refuse() -> None:
        raise RuntimeError("as the test says")

    stub = SimpleNamespace(ok=False, status=500, content=SimpleNamespace(read=AsyncMock()), raise_for_status=refuse)
    with pytest.raises(RuntimeError, match="as the test says"):
        await raise_for_status(stub)  # type: ignore[arg-type]


def test_a_server_whose_constructor_was_replaced_serves() -> None:
    class Agent(SimpleResponsesAPIAgent):
        async def responses(self, request: Any, body: Any) -> Any:
            return reply("hi")

    config = BaseResponsesAPIAgentConfig(name="agent", host="127.0.0.1", port=1, entrypoint="app.py")
    with patch.object(Agent, "model_post_init"):
        agent = Agent(config=config, server_client=MagicMock(spec=ServerClient))
    assert agent.setup_webserver() is not None
    assert not agent.secured
    with pytest.raises(AttributeError, match="no_such_name"):
        agent.no_such_name  # noqa: B018


def test_policy_of_a_box_names_hosts_and_refuses_what_it_cannot_hold() -> None:
    assert restricted_network_policy("opensandbox", ["http://a.example:1", "http://a.example:2/x"]) == {
        "defaultAction": "deny",
        "egress": [{"action": "allow", "target": "a.example"}],
    }
    with pytest.raises(ValueError, match="only 'opensandbox' has"):
        restricted_network_policy("docker", ["http://a.example"])
    for url in ("http://[::]:80", "nothing"):
        with pytest.raises(ValueError, match="reachable"):
            restricted_network_policy("opensandbox", [url])


async def test_tool_servers_are_seeded_and_only_those_with_a_token_are_taken() -> None:
    client = MagicMock(spec=ServerClient)
    offered: dict[str, Any] = {"mcp": {"url_path": "/mcp", "headers": {"X-Token": "t"}}}
    client.post = AsyncMock(return_value=MagicMock(ok=True, read=AsyncMock(side_effect=lambda: _json(offered))))
    body = NeMoGymResponseCreateParamsNonStreaming(input="x")
    servers = [ResourcesServerRef(type="resources_servers", name="search")]
    with patch("nemo_gym.sandbox.agent_tools.sandbox_server_url", return_value="http://h:1"):
        seeded = await seed_mcp_servers(client, servers, body, {}, timeout_s=2)
        assert seeded["search"]["url"] == "http://h:1/mcp"
        assert (seeded["search"]["headers"], seeded["search"]["timeout"]) == ({"X-Token": "t"}, 2000)
        offered["mcp"].pop("headers")
        with pytest.raises(ValueError, match="no authenticated MCP"):
            await seed_mcp_servers(client, servers, body, {}, timeout_s=2)


def _json(value: Any) -> bytes:
    import orjson

    return orjson.dumps(value)


def test_an_endpoint_is_its_url_and_has_parts() -> None:
    endpoint = SandboxEndpoint(endpoint="http://127.0.0.1:1", headers={"a": "b"})
    assert (endpoint, endpoint.endpoint, endpoint.headers) == ("http://127.0.0.1:1", "http://127.0.0.1:1", {"a": "b"})


def test_a_detail_of_usage_is_found_nested_or_flat() -> None:
    assert _usage_detail({"d": {"cached": 3}}, "d", "cached") == 3
    assert _usage_detail({"cache_read": 4}, "d", "cached", "cache_read") == 4
    assert _usage_detail({}, "d", "cached") is None


def test_metrics_of_each_repeat_and_their_mean() -> None:
    rows = [
        {"_ng_task_index": task, "_ng_rollout_index": repeat, "reward": float(repeat)}
        for task in range(2)
        for repeat in range(2)
    ]
    found = compute_aggregate_metrics(
        rows, compute_repeat_metrics_fn=lambda tasks: {"sum": sum(task[0]["reward"] for task in tasks), "none": None}
    )
    assert [repeat["sum"] for repeat in found.repeat_level_metrics] == [0.0, 2.0]
    assert found.agent_metrics["mean_across_repeats/sum"] == 1.0
    assert "mean_across_repeats/none" not in found.agent_metrics


def test_a_metric_that_one_repeat_does_not_know_is_said_of_none() -> None:
    rows = [{"_ng_task_index": 0, "_ng_rollout_index": repeat, "reward": float(repeat)} for repeat in range(2)]
    found = compute_aggregate_metrics(
        rows, compute_repeat_metrics_fn=lambda tasks: {"sum": 1, "some": tasks[0][0]["reward"] or None}
    )
    assert [set(repeat) for repeat in found.repeat_level_metrics] == [{"_ng_rollout_index", "sum"}] * 2
    assert "mean_across_repeats/some" not in found.agent_metrics


async def test_who_bounds_the_tries_of_a_request_gets_aiohttps_own_error() -> None:
    """Agents of NeMo Gym's that reach a service of their own try again, or not, by the kind of that error."""
    broken = aiohttp.ServerDisconnectedError()
    refused = aiohttp.ClientConnectorError(MagicMock(), OSError("connection refused"))
    for error, bound, tries in ((broken, 1, 1), (refused, 0, 1), (refused, 2, 2)):
        session = MagicMock(request=AsyncMock(side_effect=error))
        with patch.object(server_utils, "get_global_aiohttp_client", return_value=session):
            with pytest.raises(type(error)) as raised:
                await server_utils.request("POST", "http://a.example/run", _max_connection_retries=bound, data=b"{}")
        assert raised.value is error
        assert session.request.await_count == tries
        assert [*session.request.await_args.kwargs] == ["method", "url", "data"]


async def test_bounded_requests_that_are_answered_return_the_answer() -> None:
    session = MagicMock(request=AsyncMock(return_value="the answer"))
    with patch.object(server_utils, "get_global_aiohttp_client", return_value=session):
        for bound in (None, 0, 3):
            answer = await server_utils.request("GET", "http://a.example", _max_connection_retries=bound)
            assert answer == "the answer"  # type: ignore[comparison-overlap]


def test_a_profile_names_what_took_time(tmp_path: Path) -> None:
    profiler = Profiler(name="task-1", base_profile_dir=tmp_path / "profiles")
    profiler.stop()
    assert not (tmp_path / "profiles").exists()
    profiler.start()
    sorted([3, 1, 2])
    profiler.stop()
    profiler.stop()
    assert "sorted" in (tmp_path / "profiles" / "task-1.log").read_text()
    stats = pstats.Stats(str(tmp_path / "profiles" / "task-1.prof"))
    assert stats.total_calls >= 1  # type: ignore[attr-defined]
    with pytest.raises(ValidationError):
        Profiler(name="two words", base_profile_dir=tmp_path)


@pytest.mark.parametrize("module", [config_types, global_config])
def test_names_of_omegaconf_are_found_where_plugins_import_them(module: Any) -> None:
    assert (module.OmegaConf, module.DictConfig) == (omegaconf.OmegaConf, omegaconf.DictConfig)
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018
