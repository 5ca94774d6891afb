"""All servers' structured log lines about one rollout, in order of time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from nemo_gym.rollouts.results import RunFiles
from nemo_gym.view import live
from nemo_gym.view.lines import mapping_of

MAX_LINES = 2000
_LEVELS = {"debug": 0, "info": 1, "warning": 2, "error": 3, "critical": 4, "exception": 3}
_OWN_FIELDS = frozenset({"event", "rollout_id", "level", "timestamp", "server", "run_id"})


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a server's log."""

    timestamp: str
    server: str
    level: str
    event: str
    rollout_id: str
    file: Path
    number: int
    more: dict[str, Any] = field(default_factory=dict)
    """The line's other fields; a traceback is ``exception``."""

    @property
    def is_trouble(self) -> bool:
        return _LEVELS.get(self.level, 1) >= 2


def lines_of(folders: Iterable[Path], rollout_id: str, row: Mapping[str, Any] | None = None) -> list[LogLine]:
    """Return all servers' lines of one rollout and its attempts, in order; the last `MAX_LINES` of them. A model
    server's lines are found by the session id in ``row``."""
    session_id = mapping_of((row or {}).get("ng_model_session")).get("session_id")
    of_rollout = re.compile(rf"{re.escape(rollout_id)}(-a\d+)?")
    matches = []
    for path in log_files(folders):
        matches += [line for line in _parsed(path, rollout_id.encode()) if of_rollout.fullmatch(line.rollout_id)]
        if isinstance(session_id, str) and len(session_id) > 8:
            session_lines = _parsed(path, session_id.encode())
            matches += [line for line in session_lines if not of_rollout.fullmatch(line.rollout_id)]
    matches.sort(key=lambda line: line.timestamp)
    return matches[-MAX_LINES:]


def trouble_of(folders: Iterable[Path], words: Sequence[str] = ()) -> list[LogLine]:
    """Return servers' warnings and errors that name no rollout; given ``words``, only those that hold one of them."""
    lowered = [word.lower() for word in words]
    matches = []
    for path in log_files(folders):
        for line in _parsed(path, b""):
            if line.is_trouble and not line.rollout_id:
                text = f"{line.event} {line.more}".lower()
                if not lowered or any(word in text for word in lowered):
                    matches.append(line)
    matches.sort(key=lambda line: line.timestamp)
    return matches[-MAX_LINES:]


def log_folders(files: RunFiles, row: Mapping[str, Any]) -> list[Path]:
    """Return the log folders of a rollout's servers: the one that its row names if the run has it, else all."""
    folders = live.server_logs(files)
    named = row.get("server_logs")
    if isinstance(named, str) and named and Path(named).is_dir() and Path(named) in folders:
        return [Path(named)]
    return folders


def log_files(folders: Iterable[Path]) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.glob("*.log"))]


def _parsed(path: Path, needle: bytes) -> Iterator[LogLine]:
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        for number, raw in enumerate(file, 1):
            if needle not in raw:
                continue
            try:
                record = orjson.loads(raw)
            except orjson.JSONDecodeError:
                continue
            if isinstance(record, dict):
                yield LogLine(
                    timestamp=str(record.get("timestamp", "")),
                    server=str(record.get("server", path.stem)),
                    level=str(record.get("level", "info")),
                    event=str(record.get("event", "")),
                    rollout_id=str(record.get("rollout_id") or ""),
                    file=path,
                    number=number,
                    more={key: value for key, value in record.items() if key not in _OWN_FIELDS},
                )
