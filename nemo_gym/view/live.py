"""The progress of a run, read from its database while a collector works on it, without disturbing the collector."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from nemo_gym.rollouts.interfaces import JobState
from nemo_gym.rollouts.results import RunFiles, read_running
from nemo_gym.rollouts.store.schema import SCHEMA_VERSION
from nemo_gym.rollouts.store.sql import LOGS_KEY, connect_read_only

RATE_WINDOW_S = 300.0
RATE_RESULTS = 500
MAX_RUNNING = 200
MAX_BEGUN = 20
_UNFINISHED = "state IN ('queued', 'claimed')"


def is_collecting(files: RunFiles) -> bool:
    """Whether a collector holds the output's lock, by the kernel's list of locks. Trying the lock instead would hold
    it for a moment, in which a collector could not start."""
    try:
        locks = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
        inode = str(files.lock.stat().st_ino)
    except OSError:
        return False
    return any(
        len(fields := line.split()) > 5 and fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == inode
        for line in locks.splitlines()
    )


def progress(files: RunFiles) -> dict[str, Any] | None:
    """Return counts by state, the running rollouts and their times, the rate of the last minutes and the time left. If
    the database cannot be read, return a ``note`` in their place; if there is none, ``None``."""
    if not files.store.exists():
        return None
    collecting = is_collecting(files)
    try:
        with _reading(files.store) as connection:
            return {"collecting": collecting, "note": None, **_progress(connection, files, collecting)}
    except sqlite3.Error as error:
        return {
            "collecting": collecting,
            "note": f"The run's database {files.store.name} cannot be read ({error}); what its files hold is shown.",
        }


def _progress(connection: sqlite3.Connection, files: RunFiles, collecting: bool) -> dict[str, Any]:
    now = time.time()
    counts = {state.value: 0 for state in JobState}
    counts.update(connection.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall())
    total = sum(counts.values())
    ended = sum(counts[state.value] for state in JobState if state.terminal)
    retried, waiting = connection.execute(
        "SELECT coalesce(sum(failures IS NOT NULL), 0), coalesce(sum(not_before > ?), 0) FROM jobs"
        " WHERE state IN ('queued', 'claimed')",
        (now,),
    ).fetchone()
    timed = _has_times(connection)
    rate = None
    if timed:
        # Only of the latest jobs: the column follows the result blob, so reading it reads the blob's pages, too.
        times = [
            finished_at
            for (finished_at,) in connection.execute(
                "SELECT finished_at FROM jobs WHERE result_seq > (SELECT value FROM counters WHERE name = 'results')"
                " - ? AND finished_at IS NOT NULL",
                (RATE_RESULTS,),
            ).fetchall()
        ]
        recent = [each for each in times if each > max(times) - RATE_WINDOW_S]
        if len(recent) > 1:
            # The store's clock stays ahead of the system's if that one is set back.
            end = max(now, max(recent)) if collecting else max(recent)
            seconds = max(end - min(recent), 1e-3)
            rate = len(recent) / seconds
    running = read_running(files.running) if collecting else []
    if running is None:
        since = "claimed_at" if timed else "NULL"
        running = [
            {**dict(row), "works": True, "stage_seconds": None, "server": None, "url": None}
            for row in connection.execute(
                "SELECT job_id AS rollout_id, task_id, sample_index, agent, attempt,"
                " iif(run_result IS NULL, 'init or run', 'eval') AS stage,"
                f" max(0.0, ? - {since}) AS seconds FROM jobs WHERE state = 'claimed' ORDER BY {since}, seq LIMIT ?",
                (now, MAX_RUNNING),
            )
        ]
    left = total - ended
    return {
        "total": total,
        "ended": ended,
        "running_count": counts["claimed"] if collecting else 0,
        "queued": counts["queued"] + (0 if collecting else counts["claimed"]),
        "retried": retried,
        "waiting_for_retry": waiting,
        "per_minute": None if rate is None else rate * 60,
        "seconds_left": left / rate if rate and left and collecting else None,
        "running": running,
    }


def left_over(files: RunFiles) -> tuple[int, list[dict[str, Any]]] | None:
    """Return how many rollouts a stopped run has left, and the first few of them that had begun; ``None`` if the run
    goes on or has ended, or if its database cannot be read."""
    if not files.store.exists() or is_collecting(files):
        return None
    try:
        with _reading(files.store) as connection:
            (count,) = connection.execute(f"SELECT count(*) FROM jobs WHERE {_UNFINISHED}").fetchone()
            begun = connection.execute(
                "SELECT job_id AS rollout_id, task_id, sample_index, attempt FROM jobs"
                f" WHERE {_UNFINISHED} AND attempt > 0 ORDER BY seq LIMIT ?",
                (MAX_BEGUN,),
            ).fetchall()
    except sqlite3.Error:
        return None
    return (count, [dict(each) for each in begun]) if count else None


def run_info(files: RunFiles) -> dict[str, Any]:
    """Return the run's record of itself; empty if it cannot be read."""
    try:
        with _reading(files.store) as connection:
            found = connection.execute("SELECT info FROM run").fetchone()
            return dict(orjson.loads(found[0])) if found else {}
    except (sqlite3.Error, OSError, ValueError):
        return {}


def server_logs(files: RunFiles) -> list[Path]:
    """Return the existing folders with logs of the servers that a run used."""
    return [path for each in run_info(files).get(LOGS_KEY) or () if (path := Path(str(each))).is_dir()]


def stored_job(files: RunFiles, rollout_id: str) -> dict[str, Any] | None:
    """Return what the database holds of a rollout beyond its result row: its dataset row, and its earlier failures."""
    if not files.store.exists():
        return None
    try:
        with _reading(files.store) as connection:
            timed = "finished_at" if _has_times(connection) else "NULL"
            job = connection.execute(
                f"SELECT failures, data AS row, {timed} FROM jobs JOIN rows USING (digest) WHERE job_id = ?",
                (rollout_id,),
            ).fetchone()
            if job is None:
                return None
            failures, row, finished_at = job
            return {
                "failures": orjson.loads(failures) if failures else [],
                "row": orjson.loads(row),
                "finished_at": finished_at,
            }
    except (sqlite3.Error, OSError, ValueError):
        return None


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    connection = connect_read_only(path)
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        connection.row_factory = sqlite3.Row
        if version != SCHEMA_VERSION:
            raise sqlite3.DatabaseError(f"its tables have version {version}, this release reads {SCHEMA_VERSION}")
        yield connection
    finally:
        connection.close()


def _has_times(connection: sqlite3.Connection) -> bool:
    return "finished_at" in {column[1] for column in connection.execute("PRAGMA table_info(jobs)")}
