"""The index of a result file, kept beside it: each rollout's table columns, and the position of its line.

A file of any size is read once, in pieces; lines that are appended later are then read alone. The index is rebuilt
when the file is replaced. It is a cache: deleting it costs only the time of one more reading.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from nemo_gym.contract.errors import ConfigError, NemoGymError
from nemo_gym.rollouts.results import RunFiles
from nemo_gym.view.lines import COLUMNS, NoResultRow, index_line

INDEX_VERSION = 2
BATCH_BYTES = 16 << 20
MAX_LINE_BYTES = 256 << 20
OUTPUT, FAILURES = 0, 1
_CHECKED_BYTES = 4096

_SCHEMA = f"""
CREATE TABLE files (source INTEGER PRIMARY KEY, inode INTEGER, read_to INTEGER NOT NULL, lines INTEGER NOT NULL,
    head BLOB, tail BLOB, foreign_rows INTEGER NOT NULL DEFAULT 0);
CREATE TABLE rollouts (id INTEGER PRIMARY KEY, source INTEGER NOT NULL, offset INTEGER NOT NULL,
    length INTEGER NOT NULL, line INTEGER NOT NULL, {", ".join(COLUMNS)});
CREATE INDEX rollouts_by_id ON rollouts (rollout_id, task_index, sample_index);
CREATE INDEX rollouts_worst_first ON rollouts (rank, task_index, sample_index);
CREATE INDEX rollouts_by_task ON rollouts (task_index, sample_index, reward);
CREATE INDEX failures_by_rollout ON rollouts (task_index, sample_index, agent, rollout_id) WHERE source = {FAILURES};
CREATE TABLE odd_lines (source INTEGER NOT NULL, line INTEGER NOT NULL, offset INTEGER NOT NULL,
    length INTEGER NOT NULL, why TEXT NOT NULL);
"""
_TEXTS = "CREATE VIRTUAL TABLE texts_{} USING fts5(text, content='', detail=none, columnsize=0)"
_INSERT = (
    f"INSERT INTO rollouts (id, source, offset, length, line, {', '.join(COLUMNS)})"
    f" VALUES (?, ?, ?, ?, ?{', ?' * len(COLUMNS)})"
)
_KEY = [COLUMNS.index(name) for name in ("task_index", "sample_index", "agent", "rollout_id")]
_DROP_EARLIER_FAILURES = f"""
DELETE FROM rollouts WHERE source = {FAILURES} AND {{0}} AND id < (
    SELECT max(CASE source WHEN {OUTPUT} THEN 1 << 62 ELSE id END) FROM rollouts WHERE {{0}})
"""
"""NeMo Gym writes a line for each attempt that failed, which stays when a later one succeeds; what counts is the
result, or else the last failure."""
_SAME_TASK = "task_index = ?1 AND sample_index = ?2 AND agent = ?3"
_DROP_BY_ID = _DROP_EARLIER_FAILURES.format(f"rollout_id IN (?4, ?1||'-'||?2) AND {_SAME_TASK}")
_DROP_BY_TASK = _DROP_EARLIER_FAILURES.format(f"?4 = ?4 AND {_SAME_TASK}")
"""For a row without an id (see `index_line`): NeMo Gym goes on with runs whose rows have ids."""


class ViewError(NemoGymError):
    """The requested item cannot be shown; the message gives the reason in one sentence."""

    code = "view"
    status = 404


@dataclass(frozen=True, slots=True)
class Reading:
    """The progress of reading a file."""

    path: Path
    done_bytes: int
    total_bytes: int
    seconds: float

    @property
    def mb_per_s(self) -> float:
        return self.done_bytes / 1e6 / self.seconds if self.seconds else 0.0


ReadingListener = Callable[[Reading], None]


@dataclass(slots=True)
class _State:
    """What the index records about a file."""

    inode: int = 0
    read_to: int = 0
    lines: int = 0
    head: bytes = b""
    tail: bytes = b""
    foreign_rows: int = 0


class ResultIndex:
    """The index of one output and its failures file. Each thread has its own connection, so that a table can be shown
    while a file is read. Safe to use from several threads, and from several processes at once."""

    def __init__(self, output: Path, *, place: Path | None = None) -> None:
        """``place`` is the index's path, by default beside the output; if it cannot be written, a temporary folder."""
        self.files = RunFiles(output)
        self.paths = (self.files.output, self.files.failures)
        self._updating = threading.Lock()
        self._local = threading.local()
        self._connections: dict[threading.Thread, sqlite3.Connection] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.version = 0
        """Increases when there is something new to show."""
        self.path = self._prepared_path(place or self.files.index)

    def _prepared_path(self, path: Path) -> Path:
        try:
            self._prepare(path)
            return path
        except (sqlite3.Error, OSError) as error:
            first = error
        self._folder = tempfile.TemporaryDirectory(prefix="nemo-gym-index-", ignore_cleanup_errors=True)
        elsewhere = Path(self._folder.name, path.name)
        try:
            self._prepare(elsewhere)
        except (sqlite3.Error, OSError) as error:
            raise ViewError(f"cannot keep an index at '{path}' ({first}), nor at '{elsewhere}' ({error})") from error
        return elsewhere

    def _prepare(self, path: Path) -> None:
        connection = sqlite3.connect(path, isolation_level=None, timeout=30.0)
        try:
            version = _version(connection)
            if version != INDEX_VERSION:
                if version is None:  # not an index: another program's file is not touched
                    raise sqlite3.DatabaseError("another file has its name")
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("BEGIN EXCLUSIVE")
                for name, kind in connection.execute(
                    "SELECT name, type FROM sqlite_master WHERE type IN ('table', 'index') AND sql IS NOT NULL"
                    " AND name NOT GLOB 'texts_?_*' ORDER BY type"
                ).fetchall():
                    connection.execute(f'DROP {kind} IF EXISTS "{name}"')
                for statement in _SCHEMA.split(";"):
                    connection.execute(statement)
                for source in (OUTPUT, FAILURES):
                    connection.execute(_TEXTS.format(source))
                connection.execute(f"PRAGMA user_version={INDEX_VERSION}")
                connection.execute("COMMIT")
        finally:
            connection.close()

    # Reading

    def connection(self) -> sqlite3.Connection:
        """Return this thread's connection."""
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = sqlite3.connect(self.path, isolation_level=None, timeout=30.0, check_same_thread=False)
            connection.execute("PRAGMA synchronous=OFF")  # a crash costs one reading
            connection.execute("PRAGMA cache_size=-16000")
            connection.execute("PRAGMA temp_store=MEMORY")
            connection.row_factory = sqlite3.Row
            self._local.connection = connection
            self._connections[threading.current_thread()] = connection
            for thread in [*self._connections]:
                if not thread.is_alive() and (unused := self._connections.pop(thread, None)) is not None:
                    unused.close()  # a server's worker threads come and go
        return connection

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Return a query's rows, each by column name."""
        return [dict(row) for row in self.connection().execute(query, values)]

    def update(self, listener: ReadingListener | None = None) -> bool:
        """Read what is new in the files; return whether anything was. Raises `ViewError` if a file cannot be read."""
        with self._updating:
            changed = False
            for source, path in enumerate(self.paths):
                changed |= self._update(source, path, listener)
            self.version += changed
            return changed

    def _update(self, source: int, path: Path, listener: ReadingListener | None) -> bool:
        connection = self.connection()
        state = self._state(connection, source)
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return self._forget(connection, source) if state.read_to else False
        except OSError as error:
            raise ViewError(f"cannot read '{path}': {error.strerror}") from error
        with file:
            changed = False
            if state.read_to and not _is_same_file(file, state):
                changed = self._forget(connection, source)
                state = _State()
            size = os.fstat(file.fileno()).st_size
            start, began = state.read_to, time.monotonic()
            while state.read_to < size:
                more = self._read_batch(connection, file, source, size)
                if more is None:
                    break
                state, changed = more, True
                if listener is not None:
                    listener(Reading(path, state.read_to - start, size - start, time.monotonic() - began))
            return changed

    def _read_batch(self, connection: sqlite3.Connection, file: BinaryIO, source: int, size: int) -> _State | None:
        """Index the next lines; return the new state, or ``None`` if only a line without an end is left."""
        with _transaction(connection):
            state = self._state(connection, source)  # another process may have read on
            start, rows, texts, odd = state.read_to, [], [], []
            with_id: list[list[Any]] = []
            without_id: list[list[Any]] = []
            for offset, line, length in _lines(file, start, size):
                state.lines += 1
                state.read_to = offset + length
                if not state.head:
                    state.head = _digest(file, 0, min(length, _CHECKED_BYTES))
                if line is None:
                    odd.append((source, state.lines, offset, length, f"it is longer than {MAX_LINE_BYTES >> 20} MiB"))
                elif line.strip():
                    try:
                        found = index_line(line)
                    except NoResultRow as error:
                        odd.append((source, state.lines, offset, length, str(error)))
                        continue
                    row_id = 2 * state.lines + source  # never given again: the text of a dropped row stays
                    rows.append((row_id, source, offset, length, state.lines, *found.values))
                    key = [found.values[place] for place in _KEY]
                    (without_id if key[3] == f"{key[0]}-{key[1]}" else with_id).append(key)
                    texts.append((row_id, found.text))
                    state.foreign_rows += found.is_foreign
                if state.read_to - start >= BATCH_BYTES:
                    break
            if state.read_to == start:
                return None
            connection.executemany(_INSERT, rows)
            if connection.execute(f"SELECT 1 FROM rollouts WHERE source = {FAILURES} LIMIT 1").fetchone():
                connection.executemany(_DROP_BY_ID, with_id)
                connection.executemany(_DROP_BY_TASK, without_id)
            connection.executemany(f"INSERT INTO texts_{source} (rowid, text) VALUES (?, ?)", texts)
            connection.executemany("INSERT INTO odd_lines VALUES (?, ?, ?, ?, ?)", odd)
            state.inode = os.fstat(file.fileno()).st_ino
            state.tail = _digest(file, max(0, state.read_to - _CHECKED_BYTES), min(state.read_to, _CHECKED_BYTES))
            connection.execute(
                "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)",
                (source, state.inode, state.read_to, state.lines, state.head, state.tail, state.foreign_rows),
            )
            return state

    def _state(self, connection: sqlite3.Connection, source: int) -> _State:
        found = connection.execute(
            "SELECT inode, read_to, lines, head, tail, foreign_rows FROM files WHERE source = ?", (source,)
        ).fetchone()
        return _State() if found is None else _State(*found)

    def _forget(self, connection: sqlite3.Connection, source: int) -> bool:
        with _transaction(connection):
            # With a result goes the reason why its rollout's failures were dropped: they are read again.
            for each in (OUTPUT, FAILURES)[source:]:
                for table in ("rollouts", "odd_lines", "files"):
                    connection.execute(f"DELETE FROM {table} WHERE source = ?", (each,))
                connection.execute(f"DROP TABLE texts_{each}")
                connection.execute(_TEXTS.format(each))
        return True

    def line(self, source: int, offset: int, length: int) -> bytes:
        """Return one line of a file. Raises `ViewError` if the file cannot be read or has become shorter."""
        try:
            with self.paths[source].open("rb") as file:
                file.seek(offset)
                line = file.read(length)
        except OSError as error:
            raise ViewError(f"cannot read '{self.paths[source]}': {error.strerror}") from error
        if len(line) != length:
            raise ViewError(f"'{self.paths[source]}' changed while it was read; ask again")
        return line

    @property
    def torn_bytes(self) -> int:
        """Bytes of last lines without an end, which are left out: a writer is still writing them, or was killed."""
        torn = 0
        for source, path in enumerate(self.paths):
            with suppress(OSError), path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                # New complete lines may follow what was read; they do not count, because the next update reads them.
                start = max(self._state(self.connection(), source).read_to, size - BATCH_BYTES)
                torn += len(os.pread(file.fileno(), max(0, size - start), start).rpartition(b"\n")[2])
        return torn

    def close(self) -> None:
        for connection in [*self._connections.values()]:
            connection.close()
        self._connections.clear()
        self._local = threading.local()
        if self._folder is not None:
            self._folder.cleanup()


def open_result(output: Path, listener: ReadingListener | None = None) -> ResultIndex:
    """Open the index of an existing result file, read to its end. Raises `ConfigError` if it is no result file."""
    files = RunFiles(output)
    if output.is_dir():
        raise ConfigError(f"'{output}' is a directory; name its result file, such as '{output / 'rollouts.jsonl'}'")
    if not output.exists() and not files.failures.exists() and not files.store.exists():
        raise ConfigError(f"there is no result file '{output}'")
    index = ResultIndex(output)
    index.update(listener)
    connection = index.connection()
    (rows,) = connection.execute("SELECT count(*) FROM rollouts").fetchone()
    if not rows and not files.store.exists():
        odd = connection.execute("SELECT line, why FROM odd_lines ORDER BY line LIMIT 1").fetchone()
        index.close()
        why = f"line {odd['line']}: {odd['why']}" if odd else "it holds no whole line"
        raise ConfigError(f"'{output}' is not a result file: {why}")
    return index


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _version(connection: sqlite3.Connection) -> int | None:
    """Return the version of an index: 0 for a new file, ``None`` for a file that is not an index."""
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.DatabaseError:
        return None
    if version == INDEX_VERSION and not {"files", "rollouts", "odd_lines"} <= names:
        return None
    return int(version)


def _lines(file: BinaryIO, start: int, end: int) -> Iterator[tuple[int, bytes | None, int]]:
    """Yield ``(offset, line, length)`` of each complete line; ``line`` is ``None`` beyond `MAX_LINE_BYTES`."""
    file.seek(start)
    offset = start
    while offset < end:
        line = file.readline(MAX_LINE_BYTES)
        length = len(line)
        if not line.endswith(b"\n") and length == MAX_LINE_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES)
                length += len(line)
            if line:
                yield offset, None, length
        elif line.endswith(b"\n"):
            yield offset, line, length
        if not line.endswith(b"\n"):
            return
        offset += length


def _digest(file: BinaryIO, start: int, length: int) -> bytes:
    return hashlib.blake2b(os.pread(file.fileno(), length, start), digest_size=16).digest()


def _is_same_file(file: BinaryIO, state: _State) -> bool:
    """Whether a file is the one that was read before, perhaps with more lines."""
    status = os.fstat(file.fileno())
    if status.st_ino != state.inode or status.st_size < state.read_to:
        return False
    start = max(0, state.read_to - _CHECKED_BYTES)
    return _digest(file, start, state.read_to - start) == state.tail
