"""A gateway over a tiny engine, both real servers, and what comes out of its sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from nemo_gym.contract.credentials import CONTROL_TOKEN_HEADER, Role
from nemo_gym.server_utils import close_global_aiohttp_client
from nemo_gym_testing.gateway.tiny.engine import ENGINES, TinyEngine, Wire
from nemo_gym_testing.gateway.tiny.policies import make_policy
from nemo_gym_testing.gateway.tiny.script import Script
from responses_api_models.gateway.app import Gateway
from tests.servers.stack import Stack, rollout, running_stack

MODEL = "policy-7b"


@dataclass(frozen=True)
class OpenSession:
    session_id: str
    base_url: str
    """Ends in ``/v1``."""
    token: str
    control_token: str


class Stage:
    """``open``, point a harness at it, ``finalize``."""

    def __init__(self, stack: Stack, engine: TinyEngine, policy: Path) -> None:
        self.engine, self.policy = engine, policy
        self._stack = stack
        self._numbers = count(1)

    @property
    def url(self) -> str:
        """The gateway's."""
        return self._stack.url("gateway")

    @property
    def port(self) -> int:
        """The gateway's."""
        return int(self.url.rpartition(":")[2])

    async def open(self, sampling: Mapping[str, Any] | None = None) -> OpenSession:
        body = {"rollout": rollout(f"r{next(self._numbers)}").model_dump(), "sampling": dict(sampling or {})}
        reply = await self._stack.client().post("gateway", "/sessions", json=body)
        opened = await reply.json()
        assert reply.status == 200, opened
        return OpenSession(
            opened["session_id"], opened["base_url"], opened["inference_token"], opened["control_token"]
        )

    async def finalize(self, session: OpenSession) -> dict[str, Any]:
        """``turns``, ``usage`` and ``trajectories``, as a pipeline gets them."""
        headers = {CONTROL_TOKEN_HEADER: session.control_token}
        path = f"/sessions/{session.session_id}/finalize"
        reply = await self._stack.client().post("gateway", path, json={}, headers=headers)
        finished: dict[str, Any] = await reply.json()
        assert reply.status == 200, finished
        return finished


@asynccontextmanager
async def staged(
    directory: Path,
    family: str,
    script: Script,
    *,
    wire: Wire = "vllm",
    tokens_per_second: float | None = None,
    engine: Mapping[str, Any] | None = None,
    **gateway: Any,
) -> AsyncIterator[Stage]:
    """``tokens_per_second``: of the engine, which else goes as fast as it can; ``gateway``: more of its configuration;
    ``engine``: more of its engine's. Everything is written below ``directory``."""
    policy = make_policy(directory / "policy", family)
    log = directory / "engine.jsonl"
    async with ENGINES[wire](policy, script, log=log, tokens_per_second=tokens_per_second) as tiny:
        with running_stack() as stack:
            stack.add(
                "gateway",
                Gateway,
                Role.MODEL,
                **{
                    "model": MODEL,
                    "engines": [{"type": wire, "base_url": tiny.url, **(engine or {})}],
                    "policy": {"path": str(policy), "max_context_tokens": 131_072},
                    "journal_dir": str(directory / "journal"),
                    **gateway,
                },
            )
            try:
                yield Stage(stack, tiny, policy)
            finally:
                await close_global_aiohttp_client()


def split_reasons(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many trajectories there are of each reason."""
    found: dict[str, int] = {}
    for row in rows:
        found[row["split_reason"]] = found.get(row["split_reason"], 0) + 1
    return found
