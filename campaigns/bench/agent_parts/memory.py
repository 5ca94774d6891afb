"""Memory of boxes while they run, as the kernel counts it."""

from __future__ import annotations

import json
import os
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

INTERVAL_S = 0.25


@dataclass
class Peaks:
    """The largest values of one box; memory is in KiB."""

    pss: int = 0
    """Each shared page counts in part, because every box maps the CLI's program."""
    private: int = 0
    processes: int = 0


@dataclass
class BoxMemory:
    """Samples every box of a state directory again and again, in a separate thread."""

    state_dir: Path
    peaks: dict[str, Peaks] = field(default_factory=lambda: defaultdict(Peaks))
    """By mount namespace; each box has one."""
    most_boxes: int = 0
    most_pss: int = 0
    """The largest sum over all boxes at one moment, in KiB."""
    _stopped: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> BoxMemory:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        assert self._thread is not None
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            self._look()

    def _look(self) -> None:
        now: dict[str, Peaks] = defaultdict(Peaks)
        for process in box_processes(self.state_dir):
            try:
                namespace = str((process / "ns/mnt").readlink())
                rollup = (process / "smaps_rollup").read_text()
            except OSError:
                continue  # the process ended meanwhile
            fields = {line.split(":")[0]: int(line.split()[1]) for line in rollup.splitlines()[1:]}
            now[namespace].pss += fields["Pss"]
            now[namespace].private += fields["Private_Clean"] + fields["Private_Dirty"]
            now[namespace].processes += 1
        for namespace, current in now.items():
            peak = self.peaks[namespace]
            peak.pss = max(peak.pss, current.pss)
            peak.private = max(peak.private, current.private)
            peak.processes = max(peak.processes, current.processes)
        self.most_boxes = max(self.most_boxes, len(now))
        self.most_pss = max(self.most_pss, sum(current.pss for current in now.values()))


def box_processes(state_dir: Path) -> list[Path]:
    """``/proc`` directories of processes in the cgroups of a local provider's boxes."""
    pids: set[str] = set()
    for record in state_dir.glob("*/supervisor.json"):
        for base in json.loads(record.read_bytes())["cgroups"]:
            # `os.walk` tolerates groups that come and go meanwhile.
            for group, _, _ in os.walk(base):
                pids.update(_members(Path(group, "cgroup.procs")) if group != base else ())
    return [Path("/proc", pid) for pid in pids]


def _members(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
