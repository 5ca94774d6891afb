"""What a client asks its supervisor for, checked and made from the contract's types."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from nemo_gym.contract.errors import ConfigError, SandboxCreateError, SandboxError
from nemo_gym.contract.sandbox import DEFAULT_TTL_S, NetworkPolicy, SandboxSpec
from nemo_gym.sandbox.providers.local.options import SupervisedOptions, hidden_paths
from nemo_gym.sandbox.providers.local.protocol import Message, memory_file
from nemo_gym.sandbox.transfer import absolute

BASE_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}


def create_request(spec: SandboxSpec, options: SupervisedOptions) -> Message:
    """The request that makes a box. Raises `ConfigError` or `SandboxError` naming what is wrong with the spec."""
    box_id = uuid.uuid4().hex[:12]
    for path in (*spec.files, *([spec.workdir] if spec.workdir else []), *(m.target for m in spec.mounts)):
        absolute(path)
    for mount in spec.mounts:
        if not Path(mount.source).exists():
            raise SandboxCreateError(f"mounts: there is no '{mount.source}' on this host", provider=options.provider)
    ttl_s = spec.ttl_s if spec.ttl_s is not None else DEFAULT_TTL_S
    if ttl_s <= 0:
        raise ConfigError(f"ttl_s must be positive, not {ttl_s}")
    disk_gib = spec.resources.disk_gib
    entrypoint = None
    if spec.entrypoint is not None:
        entrypoint = {
            "argv": list(spec.entrypoint),
            "base_env": BASE_ENV,
            "env": dict(spec.env),
            "cwd": spec.workdir or "/",
            "user": spec.user,
        }
    return {
        "op": "create",
        "spec": {
            "box": box_id,
            "idempotency_key": spec.idempotency_key,
            "image": spec.image or options.default_image,
            "image_dir": str(options.image_dir),
            "program": options.program(),
            "hostname": f"box-{box_id}",
            "open_network": spec.network is NetworkPolicy.OPEN,
            "mounts": [[os.path.abspath(m.source), m.target] for m in spec.mounts],  # noqa: PTH100
            "hidden": [*hidden_paths(), *options.hide],
            "limits": {
                "memory_mib": spec.resources.memory_mib,
                "pids": spec.resources.pids,
                "cpu": spec.resources.cpu,
                "disk_bytes": None if disk_gib is None else int(disk_gib * 1024**3),
            },
            "labels": dict(spec.metadata),
            "ttl_s": ttl_s,
            "files": dict(spec.files),
            "workdir": spec.workdir,
            "entrypoint": entrypoint,
        },
    }


def argv(command: str | Sequence[str]) -> list[str]:
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else [str(word) for word in command]
    if not argv or any("\0" in word for word in argv):
        raise SandboxError("a command must have at least one word, and no word may contain a zero byte")
    return argv


def stdin_file(data: bytes | None) -> int:
    if not data:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    return memory_file(data, "stdin")
