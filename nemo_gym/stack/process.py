"""What the supervisor knows of one server, and how patient it is with all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_gym.config.servers import ServerBlock
from nemo_gym.stack.ports import Listener

STARTUP_TIMEOUT_S = 120.0
SHUTDOWN_TIMEOUT_S = 30.0
MAX_RESTARTS = 5


@dataclass
class Settings:
    """How patient the supervisor is; keys of the configuration of the same names."""

    startup_timeout_s: float = STARTUP_TIMEOUT_S
    shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S
    max_restarts: int = MAX_RESTARTS

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Settings:
        result = cls()
        for key in ("startup_timeout_s", "shutdown_timeout_s", "max_restarts"):
            if values.get(key) is not None:
                setattr(result, key, values[key])
        return result


@dataclass
class Server:
    """One server's life."""

    number: int
    block: ServerBlock
    listener: Listener
    app: Path
    python: str | None
    log: Path
    pid: int | None = None
    restarts: int = 0
    """Over the whole life."""
    crashes: int = 0
    """Since it was last healthy for a while."""
    ready_at: float | None = None
    error: str | None = None
    not_ready: str | None = None
    """What ``/ready`` said last, while it said no."""
    """What the starting server said about its failure."""
    is_permanent: bool = False
    """Whether that failure is one of configuration, which no restart mends."""
    was_ready: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no process of it runs."""

    @property
    def instance(self) -> str:
        return self.block.instance
