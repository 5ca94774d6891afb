"""The base class of every environment.

A new environment implements ``open_session`` (what an agent may know), ``grade`` (the verdict) and perhaps
``gold_solution``. A NeMo Gym plugin implements ``verify`` and perhaps ``seed_session``, and has tools as plain POST
routes; it works unmodified. Either way the routes of `nemo_gym.environment.routes` enforce the session contract.
"""

from __future__ import annotations

import posixpath
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import PrivateAttr

from nemo_gym.config_types import AggregateMetrics, AggregateMetricsRequest
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.session import Artifact, RolloutIdentity, SessionDescriptor
from nemo_gym.environment.attempts import AttemptStore
from nemo_gym.environment.hooks import (
    BaseResourcesServer,
    BaseResourcesServerConfig,
    EnvironmentHooks,
    ReverifyMode,
)
from nemo_gym.environment.routes import EnvironmentRoutes
from nemo_gym.http.middleware import Application

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp

    from nemo_gym.http.environment_bodies import (
        BaseMultiRewardVerifyResponse,
        BaseRunRequest,
        BaseSeedSessionRequest,
        BaseSeedSessionResponse,
        BaseVerifyRequest,
        BaseVerifyResponse,
        MCPServerMetadata,
        NeMoGymResponse,
        NeMoGymResponseCreateParamsNonStreaming,
        ResourcesCloseSessionRequest,
        ResourcesCloseSessionResponse,
        ResourcesSeedSessionRequest,
        ResourcesSeedSessionResponse,
        ResourcesVerifyRequest,
    )
    from nemo_gym.sandbox.base import SandboxProvider
    from nemo_gym.sandbox.facade import AsyncSandbox, SandboxOwner

__all__ = [
    "NEMO_GYM_MCP_METADATA_KEY",
    "AggregateMetrics",
    "AggregateMetricsRequest",
    "BaseMultiRewardVerifyResponse",
    "BaseResourcesServer",
    "BaseResourcesServerConfig",
    "BaseRunRequest",
    "BaseSeedSessionRequest",
    "BaseSeedSessionResponse",
    "BaseVerifyRequest",
    "BaseVerifyResponse",
    "MCPServerMetadata",
    "NeMoGymResponse",
    "NeMoGymResponseCreateParamsNonStreaming",
    "ResourcesCloseSessionRequest",
    "ResourcesCloseSessionResponse",
    "ResourcesSeedSessionRequest",
    "ResourcesSeedSessionResponse",
    "ResourcesVerifyRequest",
    "ReverifyMode",
    "SimpleResourcesServer",
]

NEMO_GYM_MCP_METADATA_KEY = "mcp"
NEMO_GYM_MCP_SESSION_TOKEN_HEADER = "X-NeMo-Gym-Session-Token"
_COLLECTED = "collected"
"""The name of the harvest item of `SimpleResourcesServer.boxed_session`."""
GRADING_LEASE_S = 120.0
"""How long a box of `SimpleResourcesServer.grading_box` outlives a killed server."""


class SimpleResourcesServer(EnvironmentHooks):
    """An environment. Override hooks; the routes are fixed."""

    _environment: EnvironmentRoutes | None = PrivateAttr(default=None)
    _box_owner: SandboxOwner | None = PrivateAttr(default=None)

    def boxed_session(
        self, rollout: RolloutIdentity, *, collect: Sequence[str] = (), workdir: str = "/home/task", **spec: Any
    ) -> SessionDescriptor:
        """A descriptor for work in a box, for `open_session`. The class's ``topologies`` are supported, the first is
        the default.

        Args:
            rollout: the attempt.
            collect: files to harvest for `collected`; relative paths are below ``workdir``.
            workdir: the agent's working directory; relative paths of ``files`` (path → text) are below it too.
            spec: further fields of `SandboxSpecModel`: ``image``, ``files``, ``env``, ``resources``, …
        """
        from nemo_gym.contract.session import FilesHarvest, Placement, SandboxClause, SandboxSpecModel, Topology

        supported = tuple(getattr(type(self), "topologies", None) or (Topology.AGENT_IN_ENV,))
        files = {posixpath.join(workdir, path): text for path, text in spec.pop("files", {}).items()}
        paths = tuple(posixpath.join(workdir, path) for path in collect)
        return SessionDescriptor(
            environment=self.config.name,
            task_id=rollout.task_id,
            rollout=rollout,
            placement=Placement(topology=supported[0], supported=supported),
            sandbox=SandboxClause(spec=SandboxSpecModel(workdir=workdir, files=files, **spec)),
            harvest=(FilesHarvest(name=_COLLECTED, paths=paths),) if paths else (),
        )

    def collected(self, artifacts: Sequence[Artifact], path: str, *, workdir: str = "/home/task") -> str | None:
        """The text of a file that `boxed_session` collected; ``None`` if it does not exist. Untrusted."""
        from nemo_gym.sandbox.harvest import harvested_file

        content = harvested_file(artifacts, _COLLECTED, posixpath.join(workdir, path))
        return None if content is None else content.decode("utf-8", "replace")

    # -- boxes of this environment's own -------------------------------------------------------------------------

    def box_provider(self) -> SandboxProvider:
        """The provider that the configuration's ``sandbox_provider`` names, closed with this server.

        Raises:
            ConfigError: the configuration has no usable ``sandbox_provider``.
        """
        if self._box_owner is None:
            from nemo_gym.sandbox.facade import SandboxOwner

            configured = getattr(self.config, "sandbox_provider", None)
            if configured is None:
                raise ConfigError(
                    f"environment '{self.config.name}' makes boxes, but its configuration class has no"
                    " 'sandbox_provider'; add `sandbox_provider: str | dict[str, Any]`",
                    key="sandbox_provider",
                )
            self._box_owner = SandboxOwner(configured, self.server_client)
        return self._box_owner.provider()

    @asynccontextmanager
    async def grading_box(self, rollout: RolloutIdentity, **spec: Any) -> AsyncIterator[AsyncSandbox]:
        """A fresh box for `grade`, destroyed when the block ends. If this server is killed, the box's lease expires.

        Args:
            rollout: the attempt that is graded; the box is labelled with it.
            spec: fields of `SandboxSpec`. The network is ``none`` by default.

        Raises:
            ConfigError: see `box_provider`.
            SandboxError: the box could not be created. Raised out of `grade`, it makes the verdict invalid.
        """
        from nemo_gym.contract.sandbox import SandboxRole, SandboxSpec
        from nemo_gym.sandbox.base import box_labels
        from nemo_gym.sandbox.facade import AsyncSandbox, keep_renewed

        labels = box_labels(
            run=rollout.run_id, rollout=rollout.rollout_id, attempt=rollout.attempt, role=SandboxRole.EVAL
        )
        merged = SandboxSpec(**{"ttl_s": GRADING_LEASE_S, **spec, "metadata": {**spec.get("metadata", {}), **labels}})
        provider = self.box_provider()
        async with AsyncSandbox(provider, merged) as box:
            async with keep_renewed(provider, box.handle, merged.ttl_s or GRADING_LEASE_S):
                yield box

    # -- wiring --------------------------------------------------------------------------------------------------

    def contract_app(self) -> Application:
        environment = self._environment = EnvironmentRoutes(self, self._attempt_store())
        app = self.base_app(session_guard=environment.guard, authenticates_itself=environment.authenticates_itself)
        environment.install(app)
        return app

    def around(self, app: FastAPI) -> ASGIApp:
        assert self._environment is not None
        return self._environment.around(app)

    def facts(self) -> dict[str, Any]:
        return {
            "words_prompts": self.overrides("public_row"),
            **({} if self.owned_boxes() is None else {"owns_boxes": True}),
        }

    def _attempt_store(self) -> AttemptStore:
        directory = self.config.state_dir or (self._launch.state_dir if self._launch is not None else None)
        return AttemptStore(Path(directory) / f"{self.config.name}.attempts.sqlite" if directory else None)

    async def shutdown(self) -> None:
        if self._environment is not None:
            await self._environment.finish()
        if self._box_owner is not None:
            if (boxes := self.owned_boxes()) is not None:
                await boxes.aclose()
            await self._box_owner.aclose()


def __getattr__(name: str) -> Any:
    """Import the rest of ``__all__`` when a plugin uses it, because it needs OpenAI's types."""
    if name in __all__:
        from nemo_gym.http import environment_bodies as wire

        return getattr(wire, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
