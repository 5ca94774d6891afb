"""Uses an agent server of this suite as a runner: seed, act, harvest and verify with the servers of a running stack,
and with a session of the framework's own gateway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from nemo_gym._util.suggest import nearest
from nemo_gym.config.run import RolloutRunConfig
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.verdict import PARAMS_KEY, RESPONSE_KEY, SESSION_KEY, StageError, StageName
from nemo_gym.framework.batch import PromptSample
from nemo_gym.framework.gateways import OpenSession, SessionLostError
from nemo_gym.framework.samples import Score
from nemo_gym.http.client import ServerClient
from nemo_gym.http.peers import PeerError, Peers
from nemo_gym.rollout import Attempt, ModelSession, RolloutSteps, Servers, failure_of, reward_of
from nemo_gym.rollouts.routing import agent_instances, checked_servers
from nemo_gym.stack.endpoints import StackEntry, find_stack, running_stacks
from nemo_gym.stack.stack import pipeline_client

_NO_RUN = RolloutRunConfig(input=Path("unused.jsonl"), output=Path("unused.jsonl"))
"""A run configuration with default values, for checks that need one; nothing is run with it."""


class AgentServerRunner:
    """Runs samples with one agent server.

    A sample's row is its ``extra_info`` with the prompt as ``responses_create_params.input``. Only the environment
    receives the private part of the row.
    """

    def __init__(self, agent: str, *, client: ServerClient | None = None, run_dir: Path | None = None) -> None:
        self._agent = agent
        self._client = client or pipeline_client(_stack_of(agent, run_dir))
        self._peers = Peers(self._client)
        self._servers: Servers | None = None

    async def run(self, session: OpenSession, sample: PromptSample) -> Score:
        """Run one session's rollout, and return the environment's verdict. Raises `SessionLostError` for a retryable
        failure, and otherwise the original error, such as `StageError`."""
        servers = await self._checked()
        stage = StageName.INIT
        attempt = Attempt(
            servers=servers,
            rollout=session.rollout.model_dump(mode="json"),
            row=orjson.dumps(row_of(sample), default=str),
            session=ModelSession(
                session.session_id, session.base_url, session.inference_token, "", session.handle.model
            ),
        )
        steps = RolloutSteps(self._peers)
        try:
            await steps.prepare(attempt)
            stage = StageName.RUN
            await steps.work(attempt)
            stage = StageName.EVAL
            verified = await steps.verify(attempt)
        except (StageError, PeerError, TimeoutError) as error:
            failure = failure_of(stage, error)
            if failure.retryable:
                raise SessionLostError(f"{failure.kind}: {failure.reason}", retryable=True) from error
            raise
        finally:
            await attempt.close(30.0)
        reward_fields = reward_of(verified)
        return Score(float(reward_fields["reward"]), "environment", _extra(verified, reward_fields["reward_info"]))

    async def _checked(self) -> Servers:
        if self._servers is None:
            servers = await checked_servers(self._client, self._peers, self._agent, _NO_RUN)
            if servers.own_run:
                raise ConfigError(
                    f"agent '{self._agent}' overrides run(): it opens sessions of its own; name another agent server",
                    key="agent_server",
                )
            # The framework holds the model session, so the agent's own model server is not used.
            self._servers = replace(servers, model=None)
        return self._servers


def _stack_of(agent: str, run_dir: Path | None) -> StackEntry:
    """Return the stack of a run directory, or by default the only running one that has the agent server: the
    trainer's own gateways run as a stack, too. Raises `ConfigError`."""
    if run_dir is not None:
        return find_stack(str(run_dir))
    stacks = running_stacks()
    found = [stack for stack in stacks if agent in agent_instances(stack.config)]
    if len(found) == 1:
        return found[0]
    if found:
        choices = ", ".join(stack.run_dir for stack in found)
        raise ConfigError(
            f"{len(found)} running stacks have a server '{agent}'; choose one with stack_run_dir: {choices}",
            key="stack_run_dir",
        )
    names = {name for stack in stacks for name in agent_instances(stack.config)}
    raise ConfigError(
        f"no running stack has a server '{agent}'{nearest(agent, names)}; start it by ng_run, or set stack_run_dir",
        key="agent_server",
    )


def row_of(sample: PromptSample) -> dict[str, Any]:
    """Return the dataset row of a sample."""
    extra_info = sample.fields.get("extra_info")
    row = dict(extra_info) if isinstance(extra_info, Mapping) else {}
    params = row.get(PARAMS_KEY)
    row[PARAMS_KEY] = {"input": sample.raw_prompt, **(params if isinstance(params, Mapping) else {})}
    return row


def _extra(verified: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and flags of a verdict, which trainers log beside the reward."""
    left_out = {"reward", RESPONSE_KEY, PARAMS_KEY, SESSION_KEY}
    numbers = {
        name: value
        for name, value in verified.items()
        if name not in left_out and not name.startswith("_") and isinstance(value, bool | int | float)
    }
    return {**numbers, **info}
