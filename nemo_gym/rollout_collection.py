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
    """NeMo Gym's entry points for programs: a whole run from a configuration, or the rows of a trainer.

    ``client`` reaches the servers. By default they are those of the stack in ``run_dir``, or else of the stack that
    this process started with a run helper, or else of the stack on this machine. ``masked_reward`` is described at
    `MaskedReward`; with a run helper's stack it is by default ``group_mean``, which NeMo RL needs.
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
        self._with_tokens: set[str] = set()

    def setup_server_client(self, head_server_config: BaseServerConfig | None = None) -> ServerClient:
        """Return the client of a running stack. There is no head server here; its address is accepted and not used."""
        if self._client is None:
            from nemo_gym.stack.endpoints import find_stack
            from nemo_gym.stack.stack import pipeline_client

            self._client = pipeline_client(find_stack(str(self._run_dir) if self._run_dir else None))
        return self._client

    async def run_from_config(self, config: RolloutRunConfig | Mapping[str, Any]) -> CollectionResult:
        """Run a whole configuration, with its result files; see `run_collection`."""
        return await run_collection(self.setup_server_client(), config, console=Console())

    def run_examples(
        self,
        examples: list[dict[str, Any]],
        head_server_config: BaseServerConfig | None = None,
        **run_keys: Any,
    ) -> Iterator[asyncio.Future[Example]]:
        """Run rows now; yields awaitables of ``(row, result)`` in the order in which they end.

        Needs a running event loop. ``run_keys`` are those of `RolloutRunConfig` (``concurrency``, …). A rollout
        without a verdict has a result with ``mask_sample`` true and a masked response; the helper's ``masked_reward``
        determines its ``reward``.
        """
        unused = {"input": Path("examples.jsonl"), "output": Path("examples.jsonl")}
        # A trainer masks samples without a verdict and continues, so a batch of them must not stop the run.
        defaults = {"concurrency": max(1, len(examples)), "stop_after_same_failure": 0}
        config = RolloutRunConfig.parse({**defaults, **run_keys, **unused})
        client = self.setup_server_client(head_server_config)
        run = ExampleRun(client, examples, config, self._masked_reward, self._with_tokens)
        self._runs.append(run)
        return run.as_completed()

    async def aclose(self) -> None:
        """Stop all running example runs, and wait until their rollouts have released their sessions and sandboxes.
        Call it before the event loop or the HTTP client closes, also after the last result."""
        for run in self._runs:
            await run.aclose()
        self._runs.clear()


async def run_from_config(config: RolloutRunConfig | Mapping[str, Any]) -> CollectionResult:
    """Run a whole configuration against the stack on this machine."""
    return await RolloutCollectionHelper().run_from_config(config)


def run_examples(examples: list[dict[str, Any]], **run_keys: Any) -> Iterator[asyncio.Future[Example]]:
    """Run rows against the stack on this machine; see `RolloutCollectionHelper.run_examples`."""
    return RolloutCollectionHelper().run_examples(examples, **run_keys)
