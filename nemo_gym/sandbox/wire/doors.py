"""Doors on the wire, and what went through them.

Headers hold credentials: they are hidden in ``repr`` and answered by no route.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field

from nemo_gym.contract.sandbox import Door
from nemo_gym.sandbox.door_statistics import DoorStatistics
from nemo_gym.sandbox.wire.fields import Text, WireModel, fields_of


class DoorModel(WireModel):
    """The wire form of `Door`."""

    name: str = Field(min_length=1, max_length=256)
    port: int = Field(ge=1, le=65535)
    target: Text
    allow: tuple[Text, ...]
    headers: dict[Text, Text] = Field(default_factory=dict, repr=False)
    counted: tuple[Text, ...] = ()
    kind: Literal["routes", "proxy"] = "routes"
    max_answers: int | None = Field(None, ge=1)

    @classmethod
    def of(cls, door: Door) -> Self:
        return cls(**fields_of(door))

    def to_door(self) -> Door:
        return Door(**{**self.__dict__, "headers": dict(self.headers)})


class DoorStatisticsModel(WireModel):
    """The wire form of `DoorStatistics`."""

    requests: int = 0
    answered: int = 0
    refused: int = 0
    failed: int = 0
    unreachable: int = 0
    broken: int = 0
    abandoned: int = 0
    forbidden: int = 0
    turns: int = 0
    over_limit: int = 0
    failures_since_answer: int = 0
    statuses: dict[int, int] = Field(default_factory=dict)
    last_error: str | None = None
    seconds: float = 0.0
    open: int = 0

    @classmethod
    def of(cls, statistics: DoorStatistics) -> Self:
        return cls(**fields_of(statistics))

    def to_statistics(self) -> DoorStatistics:
        return DoorStatistics(**{**self.__dict__, "statuses": dict(self.statuses)})


class DoorsView(WireModel):
    """What went through each open door of a box; ``None`` where the backend does not count."""

    doors: dict[str, DoorStatisticsModel | None]
