"""Ways in which a real OpenSandbox server and its network are seen to fail, to be had on request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

CommandFault = Literal["refuse", "answer_lost", "cut", "cut_politely"]
"""What happens to one command. ``refuse``: 502, and it surely never started. ``answer_lost``: it runs, and the answer
is another 502. ``cut``: the connection breaks before the end. ``cut_politely``: the answer ends as if all were well,
as a proxy ends it whose other side died."""


@dataclass
class Faults:
    """What goes wrong from now on; empty at first."""

    commands: list[CommandFault] = field(default_factory=list)
    """For the next runs of a helper's ``run``, in order; others are left alone."""
    lose_creates: int = 0
    """So many creates are carried out, and their clients never hear of it."""
    create_takes_s: float = 0.0
    open_sidecars: bool = False
    """Egress sidecars say that they let everything out, whatever they were asked for."""
    dns_sidecars: bool = False
    """Egress sidecars refuse names alone."""
    hold_commands: asyncio.Event | None = None
    """Commands wait for it without a word, as in a paused box."""
    commands_seen: int = 0
    """How many submissions of commands came in, refused ones included."""


@dataclass(frozen=True)
class Seen:
    """A request as it came in."""

    method: str
    path: str
    has_key: bool
    connection: int
    """The client's port."""
