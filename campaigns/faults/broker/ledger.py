"""Broken promises, collected while clients and backend are compared. A campaign's bars are their counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from campaigns.bench.report import Bar
from campaigns.faults.broker.stage import BackendBox

_MEANINGS = {
    "leaked": "boxes leaked",
    "unrecorded": "boxes without a record after one reconcile",
    "boxless": "records without a box after one reconcile",
    "doubled": "creates that made two boxes",
    "reran": "execs run twice",
    "unrun": "execs that ended and never ran",
    "lost_output": "acknowledged outputs lost",
    "wrong_output": "outputs that are not the command's",
    "revived": "borrowers that a fence did not keep out",
    "unexpected": "answers that no promise allows",
}


@dataclass
class Ledger:
    """Each list holds the violations of one promise, as lines for a human reader."""

    leaked: list[str] = field(default_factory=list)
    unrecorded: list[str] = field(default_factory=list)
    boxless: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    reran: list[str] = field(default_factory=list)
    unrun: list[str] = field(default_factory=list)
    lost_output: list[str] = field(default_factory=list)
    wrong_output: list[str] = field(default_factory=list)
    revived: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    def compare(self, boxes: list[BackendBox], physical: set[str], recorded: set[str], closed: set[str]) -> None:
        """Compare the backend's boxes with the broker's records. Call it when no request is in flight.

        Args:
            physical: backend ids of the boxes that exist, whether the provider lists them or not.
            closed: ids of the boxes that are gone according to the broker's responses.
        """
        have = {box.sandbox_id for box in boxes}
        self.unrecorded += sorted(have - recorded)
        self.boxless += sorted(recorded - have)
        self.leaked += sorted(have & closed) + sorted(physical - {box.backend_id for box in boxes})
        keys: dict[str, str] = {}
        for box in boxes:
            if box.key in keys:
                self.doubled.append(f"{box.key}: {keys[box.key]} and {box.backend_id}")
            keys[box.key] = box.backend_id

    def agree(self, boxes: list[BackendBox], physical: set[str], recorded: set[str], closed: set[str]) -> bool:
        """Whether `compare` would find nothing."""
        tried = Ledger()
        tried.compare(boxes, physical, recorded, closed)
        return not tried.wrong

    def count_runs(self, ran: Mapping[str, int], ended: Mapping[str, str]) -> None:
        """Compare how often commands ran, by their own count, with the outcomes that their clients received."""
        self.reran += [f"{mark}: {times} times" for mark, times in ran.items() if times > 1]
        self.unrun += [mark for mark, outcome in ended.items() if outcome == "exited" and not ran.get(mark)]

    @property
    def named(self) -> set[str]:
        """Ids of boxes that break a promise."""
        return {name for name in (*self.leaked, *self.unrecorded, *self.boxless) if name.startswith("sb-")}

    @property
    def wrong(self) -> dict[str, list[str]]:
        """Up to five violations of each broken promise."""
        return {item.name: getattr(self, item.name)[:5] for item in fields(self) if getattr(self, item.name)}

    def bars(self, mode: str) -> list[Bar]:
        return [Bar.at_most(f"{mode}: {meaning}", len(getattr(self, name)), 0) for name, meaning in _MEANINGS.items()]
