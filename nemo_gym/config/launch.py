"""The launch data that a server process reads at its start from an inherited file descriptor.

The data is neither in the environment nor on the command line: ``NEMO_GYM_LAUNCH_FD`` holds the number of a descriptor
(pipe or memfd) from which the child reads one JSON object. The parent writes it with `write_launch`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from nemo_gym._util.files import write_all
from nemo_gym.contract.credentials import ServerCredentials
from nemo_gym.contract.errors import ConfigError

LAUNCH_FD_ENV = "NEMO_GYM_LAUNCH_FD"
READY_LINE = b"ready\n"
GC_THRESHOLDS = (50_000, 20, 20)
"""Garbage collector thresholds of servers and clients. Parsing one large body makes far more objects than the default
threshold of 700, none of them garbage; with the default the collector takes longer than the parser."""


@dataclass(frozen=True, slots=True)
class ServerLaunch:
    """One server's start: its identity, the configuration it may see, what it inherits, and its credentials."""

    instance: str
    config: Mapping[str, Any] = field(repr=False)
    """The part of the global configuration that this server may see."""
    socket_fd: int | None = None
    """A listening socket; without one the server binds its configured host and port."""
    credentials: ServerCredentials | None = None
    ready_fd: int | None = None
    """Gets ``ready\\n`` once, after startup."""
    run_id: str = "run"
    parent_pid: int | None = None
    """The child ends when this process does."""
    state_dir: str | None = None
    """Where the server may keep what must survive its restart; ``None`` keeps it in memory."""
    url: str | None = None
    """The URL at which the server is reached, in a composition on several hosts."""
    endpoints: tuple[str, ...] = ()
    """Base URLs of the run's model servers and environments: what boxes may reach."""
    certificate_file: str | None = None
    key_file: str | None = None
    """The TLS key; without key and certificate the server speaks plain HTTP."""
    metrics_token: str | None = field(default=None, repr=False)
    """Grants reading every server's metrics, and nothing else."""

    def to_json(self) -> bytes:
        data = {each.name: getattr(self, each.name) for each in fields(self)}
        data["credentials"] = self.credentials and self.credentials.to_dict()
        # Not with orjson: it writes `.inf` and `.nan` of YAML as null. Keys may be numbers; the reader converts them.
        return json.dumps(data).encode()

    @classmethod
    def from_json(cls, data: bytes) -> ServerLaunch:
        raw = json.loads(data)
        credentials = raw.pop("credentials")
        raw["endpoints"] = tuple(raw["endpoints"])
        return cls(credentials=ServerCredentials.from_dict(credentials) if credentials else None, **raw)


_current: ServerLaunch | None = None


def set_current_launch(launch: ServerLaunch | None) -> None:
    """Set the launch of this process (a forked server process serves exactly one instance)."""
    global _current
    _current = launch


def current_launch() -> ServerLaunch | None:
    """The launch of this process: set by a forking parent, or read once from ``NEMO_GYM_LAUNCH_FD``. ``None`` when
    the process was started by hand."""
    global _current
    if _current is None and (number := os.environ.pop(LAUNCH_FD_ENV, None)) is not None:
        try:
            _current = load_launch_from_fd(int(number))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{LAUNCH_FD_ENV}={number} is not a readable launch descriptor ({error}); unset it, or start the"
                " server through ng_run",
                key=LAUNCH_FD_ENV,
            ) from error
    return _current


def load_launch_from_fd(fd: int) -> ServerLaunch:
    """Read a launch from an inherited pipe or memfd, and close it."""
    with contextlib.suppress(OSError):  # a pipe cannot seek
        os.lseek(fd, 0, os.SEEK_SET)
    with os.fdopen(fd, "rb") as stream:
        return ServerLaunch.from_json(stream.read())


def write_launch(launch: ServerLaunch) -> int:
    """Return an inheritable memfd holding ``launch``, for a child's ``NEMO_GYM_LAUNCH_FD``; the caller closes it."""
    fd = os.memfd_create("nemo-gym-launch", 0)
    os.set_inheritable(fd, True)
    write_all(fd, launch.to_json())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def announce_ready(launch: ServerLaunch) -> None:
    """Tell the parent, once, that this server accepts requests."""
    if launch.ready_fd is None:
        return
    with contextlib.suppress(OSError):  # the parent is gone: its death signal ends this process
        os.write(launch.ready_fd, READY_LINE)
        os.close(launch.ready_fd)


def die_with_parent(parent_pid: int | None) -> None:
    """Ask the kernel to end this process when its parent dies; exits at once when it already has."""
    import ctypes
    import signal

    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if parent_pid is not None and os.getppid() != parent_pid:
        raise SystemExit("the process that started this server has ended")
