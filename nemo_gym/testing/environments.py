"""Helpers for unit tests of environments: an environment without a server, a response, an attempt, artifacts."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from nemo_gym.contract.session import Artifact, RolloutIdentity
from nemo_gym.environment.server import SimpleResourcesServer
from nemo_gym.http.client import ServerClient

EnvironmentT = TypeVar("EnvironmentT", bound=SimpleResourcesServer)


def make_environment(kind: type[EnvironmentT], **settings: Any) -> EnvironmentT:
    """Create an environment with these settings in its configuration block. Nothing is started."""
    block = {"host": "127.0.0.1", "port": 0, "entrypoint": "app.py", "name": kind.__name__.lower(), **settings}
    return kind(config=kind.config_class().model_validate(block), server_client=ServerClient())


def reply(text: str) -> dict[str, Any]:
    """A response whose only message is ``text``."""
    part = {"type": "output_text", "text": text, "annotations": []}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    fields = {"id": "resp_1", "object": "response", "created_at": 0, "model": "policy", "status": "completed"}
    return {**fields, "output": [message], "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}


def attempt(task_id: str = "task") -> RolloutIdentity:
    """An attempt's identity."""
    return RolloutIdentity(rollout_id="rollout", task_id=task_id, group_id=task_id)


def collected(files: Mapping[str, str], *, workdir: str = "/home/task") -> Sequence[Artifact]:
    """Artifacts for `SimpleResourcesServer.collected`: the files that an agent left in ``workdir``."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for path, text in files.items():
            member = tarfile.TarInfo(f"{workdir}/{path}".lstrip("/"))
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return [Artifact.of("collected", "files", stream.getvalue())]
