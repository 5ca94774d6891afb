"""Rollout collection under the names that NeMo Gym's plugins and trainers import."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from nemo_gym.config.run import RolloutRunConfig
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.contract.verdict import NG_FAILURE_CLASS_KEY, NG_NO_PERSIST_KEY, NG_TERMINAL_KEY
from nemo_gym.http.client import ServerClient
from nemo_gym.rollouts.collection import CollectionResult, run_collection
from nemo_gym.rollouts.examples import Example, ExampleRun, MaskedReward
from nemo_gym.rollouts.trajectory_records import attach_trajectory_record as _attach_trajectory_record
from nemo_gym.rollouts.trajectory_records import build_trajectory_record as _build_trajectory_record
from nemo_gym.rollouts.trajectory_records import trajectory_identity as _trajectory_identity
from nemo_gym.stack.background import started_here

__all__ = [
    "NG_FAILURE_CLASS_KEY",
    "NG_NO_PERSIST_KEY",
    "NG_TERMINAL_KEY",
    "RolloutCollectionConfig",
    "RolloutCollectionHelper",
    "_attach_trajectory_record",
    "_build_trajectory_record",
    "_trajectory_identity",
    "run_examples",
    "run_from_config",
]

RolloutCollectionConfig = RolloutRunConfig


class RolloutCollectionHelper:
    """NeMo Gym's entry points for programs: a whole run from a configuration, or rows that a trainer holds.

    ``client`` reaches the servers; left out, the stack that this process started with a run helper, that runs on this
    machine, or that ``run_dir`` names. ``masked_reward``: see `MaskedReward`; with a run helper's stack
    ``group_mean``, which NeMo RL needs.
    """

    def __init__(
        self,
        client: ServerClient | None = None,
        *,
        run_dir: str | Path | None = None,
        masked_reward: MaskedReward | None = None,
    ) -> None:
        started = started_here()
        self._client = client
        self._run_dir = run_dir or (str(started) if started is not None and client is None else None)
        by_default: MaskedReward = "group_mean" if started is not None and client is None else "null"
        self._masked_reward: MaskedReward = masked_reward or by_default
        self._runs: list[ExampleRun] = []

    def setup_server_client(self, head_server_config: BaseServerConfig | None = None) -> ServerClient:
        """The client of a running stack. There is no head server here; its address is accepted and not used."""
        if self._client is None:
            from nemo_gym.stack.endpoints import find_stack
            from nemo_gym.stack.stack import pipeline_client

            self._client = pipeline_client(find_stack(str(self._run_dir) if self._run_dir else None))
        return self._client

    async def run_from_config(self, config: RolloutRunConfig | Mapping[str, Any]) -> CollectionResult:
        """A whole run with its files; see `run_collection`."""
        return await run_collection(self.setup_server_client(), config, console=Console())

    def run_examples(
        self,
        examples: list[dict[str, Any]],
        head_server_config: BaseServerConfig | None = None,
        **run_keys: Any,
    ) -> Iterator[asyncio.Future[Example]]:
        """Run rows now; yields awaitables of ``(row, result)`` in the order in which they end.

        Needs a running event loop. ``run_keys`` are those of `RolloutRunConfig` (``concurrency``, …). A rollout
        without a verdict has a result with ``mask_sample`` true and a masked response; its ``reward`` is as the
        helper's ``masked_reward`` says.
        """
        unused = {"input": Path("examples.jsonl"), "output": Path("examples.jsonl")}
        # A trainer masks samples without a verdict and goes on; a batch of them is no reason to stop it.
        defaults = {"concurrency": max(1, len(examples)), "stop_after_same_failure": 0}
        config = RolloutRunConfig.parse({**defaults, **run_keys, **unused})
        client = self.setup_server_client(head_server_config)
        run = ExampleRun(client, examples, config, self._masked_reward)
        self._runs.append(run)
        return run.as_completed()

    async def aclose(self) -> None:
        """Stop every run of examples that is under way. After the last result, waits until the rollouts have released
        their sessions and boxes: call it before the event loop or the HTTP client closes."""
        for run in self._runs:
            await run.aclose()
        self._runs.clear()


async def run_from_config(config: RolloutRunConfig | Mapping[str, Any]) -> CollectionResult:
    """A whole run against the stack on this machine."""
    return await RolloutCollectionHelper().run_from_config(config)


def run_examples(examples: list[dict[str, Any]], **run_keys: Any) -> Iterator[asyncio.Future[Example]]:
    """Rows against the stack on this machine; see `RolloutCollectionHelper.run_examples`."""
    return RolloutCollectionHelper().run_examples(examples, **run_keys)
