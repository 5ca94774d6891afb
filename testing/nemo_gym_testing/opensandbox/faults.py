"""Failures observed on real OpenSandbox servers and their networks, which the double makes on request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

CommandFault = Literal["refuse", "answer_lost", "cut", "cut_politely"]
"""The fault of one command. ``refuse``: a 502, and the command certainly never started. ``answer_lost``: the command
runs, and the response is another 502. ``cut``: the connection breaks before the end. ``cut_politely``: the response
ends as if all were well, as from a proxy whose backend died."""


@dataclass
class Faults:
    """The faults from now on; none at first."""

    commands: list[CommandFault] = field(default_factory=list)
    """The faults of the next ``run`` commands of a helper, in order; other commands are not affected."""
    lose_creates: int = 0
    """This many creates succeed, but their clients get no response."""
    refuse_creates: int = 0
    """This many creates are refused with 429, as by a pool that is full."""
    create_takes_s: float = 0.0
    end_after_page: list[str] = field(default_factory=list)
    """These boxes end right after the next page of a listing was composed."""
    status_reason: str = "CONTAINER"
    """The reason that every box's status gives."""
    open_sidecars: bool = False
    """Egress sidecars report that they allow everything, whatever policy was requested."""
    dns_sidecars: bool = False
    """Egress sidecars enforce their policy for DNS names only."""
    hold_commands: asyncio.Event | None = None
    """``run`` commands wait for this event without a response, as in a paused box."""
    commands_seen: int = 0
    """How many ``run`` commands were submitted, including refused ones."""


@dataclass(frozen=True)
class Seen:
    """A request that was received."""

    method: str
    path: str
    has_key: bool
    connection: int
    """The client's port."""
