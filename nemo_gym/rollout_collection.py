"""Rollout collection under the names that NeMo Gym's plugins and trainers import."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from nemo_gym.config.run import RolloutRunConfig
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.contract.rows import NG_FAILURE_CLASS_KEY, NG_NO_PERSIST_KEY, NG_TERMINAL_KEY
from nemo_gym.http.client import ServerClient
from nemo_gym.rollouts.collection import CollectionResult, run_collection
from nemo_gym.rollouts.examples import Example, ExampleRun

__all__ = [
    "NG_FAILURE_CLASS_KEY",
    "NG_NO_PERSIST_KEY",
    "NG_TERMINAL_KEY",
    "RolloutCollectionConfig",
    "RolloutCollectionHelper",
    "run_examples",
    "run_from_config",
]

RolloutCollectionConfig = RolloutRunConfig


class RolloutCollectionHelper:
    """NeMo Gym's entry points for programs: a whole run from a configuration, or rows that a trainer holds.

    ``client`` reaches the servers; left out, the stack that runs on this machine (or that ``run_dir`` names) is used.
    """

    def __init__(self, client: ServerClient | None = None, *, run_dir: str | Path | None = None) -> None:
        self._client = client
        self._run_dir = run_dir
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
        without a verdict has a result with ``reward`` null and ``mask_sample`` true.
        """
        unused = {"input": Path("examples.jsonl"), "output": Path("examples.jsonl")}
        # A trainer masks samples without a verdict and goes on; a batch of them is no reason to stop it.
        defaults = {"concurrency": max(1, len(examples)), "stop_after_same_failure": 0}
        config = RolloutRunConfig.parse({**defaults, **run_keys, **unused})
        run = ExampleRun(self.setup_server_client(head_server_config), examples, config)
        self._runs.append(run)
        return run.as_completed()

    async def aclose(self) -> None:
        """Stop every run of examples that is under way."""
        for run in self._runs:
            await run.aclose()
        self._runs.clear()


async def run_from_config(config: RolloutRunConfig | Mapping[str, Any]) -> CollectionResult:
    """A whole run against the stack on this machine."""
    return await RolloutCollectionHelper().run_from_config(config)


def run_examples(examples: list[dict[str, Any]], **run_keys: Any) -> Iterator[asyncio.Future[Example]]:
    """Rows against the stack on this machine; see `RolloutCollectionHelper.run_examples`."""
    return RolloutCollectionHelper().run_examples(examples, **run_keys)
