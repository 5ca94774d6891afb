"""An environment that a test writes into a folder of its own: it supports every topology, and knows no agent."""

APP = '''
"""A greeting to mend: in a repository, by a tool, or in a file of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from nemo_gym.base_resources_server import BaseResourcesServerConfig, ReverifyMode, SimpleResourcesServer
from nemo_gym.contract.session import (
    Artifact,
    FilesHarvest,
    GitDiffHarvest,
    McpServer,
    Placement,
    RolloutIdentity,
    SandboxClause,
    SandboxSpecModel,
    SessionDescriptor,
    Topology,
)
from nemo_gym.contract.verdict import Verdict


class GreetingConfig(BaseResourcesServerConfig):
    mcp_url: str
    image: str


class Greeting(SimpleResourcesServer):
    config: GreetingConfig
    REVERIFY_MODE = ReverifyMode.STATELESS
    topologies: ClassVar[tuple[Topology, ...]] = (
        Topology.AGENT_IN_ENV,
        Topology.NONE,
        Topology.ENV_SANDBOXED,
        Topology.WHOLE_INTERACTION,
    )
    tool_access: ClassVar[tuple[str, ...]] = ("mcp",)

    async def open_session(self, row: dict[str, Any], rollout: RolloutIdentity) -> SessionDescriptor:
        weather = McpServer(
            name="weather", url=f"{self.config.mcp_url}/mcp", headers={"Authorization": "Bearer mcp-of-this-attempt"}
        )
        patch, file = GitDiffHarvest(path="/repo"), FilesHarvest(paths=("/tmp/answer.txt",))
        return SessionDescriptor(
            environment=self.config.name,
            task_id=rollout.task_id,
            rollout=rollout,
            placement=Placement(topology=Topology.AGENT_IN_ENV, supported=self.topologies),
            sandbox=SandboxClause(spec=SandboxSpecModel(image=self.config.image, workdir="/repo")),
            mcp=(weather,),
            harvest=(patch,) if row["expected"] == "hello world" else (file,) if row["expected"] == "42" else (),
        )

    async def grade(
        self, row: dict[str, Any], response: dict[str, Any], artifacts: Sequence[Artifact], rollout: RolloutIdentity
    ) -> Verdict:
        left = b"".join(artifact.content() for artifact in artifacts if not artifact.error).decode()
        return Verdict.of(float(row["expected"] in left + str(response["output"])))


if __name__ == "__main__":
    Greeting.run_webserver()
'''

CONFIG = """
greeting:
  resources_servers:
    greeting:
      entrypoint: app.py
      mcp_url: http://127.0.0.1:9
      image: none
"""

ENTANGLED = '''
from typing import Any, ClassVar

from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer
from nemo_gym.contract.session import Topology


class ByExec(SimpleResourcesServer):
    """A world that can only be reached by commands in its box."""

    config: BaseResourcesServerConfig
    topologies: ClassVar[tuple[Topology, ...]] = (Topology.ENV_SANDBOXED,)
    tool_access: ClassVar[tuple[str, ...]] = ("exec",)


if __name__ == "__main__":
    ByExec.run_webserver()
'''
