"""The files of a run, beside its output, and how they stay whole.

A result row is first committed to the store, then appended to its file, and only then acknowledged. After a crash, the
next start appends missing rows and cuts off a torn line. So each rollout is in a file exactly once.

While a run works, one file lists its running attempts (stage, server, and for how long); it is removed when the run
ends. A service returns the same list over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import IO, Any, BinaryIO, Self, overload

import orjson

from nemo_gym._util.files import append_lines, open_lines, whole_lines
from nemo_gym.config.run import RolloutRunConfig
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.verdict import ROLLOUT_ID_KEY, ROLLOUT_INDEX_KEY, TASK_INDEX_KEY, StageName
from nemo_gym.http.client import ServerClient
from nemo_gym.rollouts.interfaces import JobAttempt, JobSelector, JobState
from nemo_gym.rollouts.pipeline import AsyncDispatcher
from nemo_gym.rollouts.store import SqliteJobStore, SqlJobStore
from nemo_gym.rollouts.store.sql import connect_read_only, store_error


class _Beside:
    """A path beside the output: its name with this ending instead of ``.jsonl``."""

    def __init__(self, ending: str) -> None:
        self._ending = ending

    @overload
    def __get__(self, files: None, _: type[RunFiles]) -> Self: ...

    @overload
    def __get__(self, files: RunFiles, _: type[RunFiles]) -> Path: ...

    def __get__(self, files: RunFiles | None, _: type[RunFiles]) -> Path | Self:
        if files is None:
            return self
        return files.output.with_name(f"{files.output.stem}{self._ending}")


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The paths of a run's files, named as NeMo Gym names them."""

    output: Path
    store_path: Path | None = None

    materialized_inputs = _Beside("_materialized_inputs.jsonl")
    failures = _Beside("_failures.jsonl")
    aggregate_metrics = _Beside("_aggregate_metrics.json")
    configuration = _Beside("_config.yaml")
    """The configuration of the servers that the run used, without secrets."""
    reverified = _Beside("_reverified.jsonl")
    index = _Beside("_index.sqlite")
    """The index of the result files for viewers; a cache."""
    running = _Beside("_running.json")
    """The running attempts, while a collector works on the run."""
    logs = _Beside("_logs")
    """The folder with the output of grading, one file per rollout."""
    lock = _Beside(".lock")
    _default_store = _Beside("_store.sqlite")

    @property
    def store(self) -> Path:
        return self.store_path or self._default_store

    @property
    def locks(self) -> list[tuple[str, Path, Path]]:
        """What a collector must have for itself: the key that names it, its path, and the path of its lock. A store
        beside the output is covered by the output's lock."""
        locks = [("output", self.output, self.lock)]
        if self.store_path is not None:
            lock = lock_of_store(self.store_path)
            if lock.resolve() != self.lock.resolve():  # this process cannot lock one file twice
                locks.append(("store", self.store_path, lock))
        return locks

    @property
    def sampler(self) -> Path:
        """The database in which a sampler for RL records its groups."""
        return self.store.with_name(f"{self.store.stem}_sampler.sqlite")

    @property
    def of_nemo_gym(self) -> tuple[Path, ...]:
        """The files beside the output that NeMo Gym writes, too."""
        return self.materialized_inputs, self.failures, self.aggregate_metrics

    @property
    def _beside(self) -> tuple[Path, ...]:
        """The files that a run writes and reads beside its output, without the databases."""
        return *self.of_nemo_gym, self.configuration, self.reverified, self.running

    @property
    def _databases(self) -> list[Path]:
        """The databases and SQLite's files beside them; the store is last."""
        return [
            path.with_name(path.name + suffix)
            for path in (self.index, self.sampler, self.store)
            for suffix in ("-wal", "-shm", "")
        ]

    @property
    def paths(self) -> list[Path]:
        """Every file of a run; others are in `logs`."""
        return [self.output, *self._beside, *self._databases, *(lock for _, _, lock in self.locks)]

    def own(self, path: Path) -> Path | None:
        """Return the file or folder of this run that ``path`` is, or is in."""
        resolved = path.resolve()
        for own in self.paths:
            if own.resolve() == resolved or (own.exists() and path.exists() and own.samefile(path)):
                return own
        return self.logs if resolved.is_relative_to(self.logs.resolve()) else None

    def holding(self, *, besides: Collection[Path] = ()) -> list[Path]:
        """Return the files, ``besides`` some, that hold something and that a run writes or `discard` removes. The
        index is not among them: its readers repair it, and leave a file of its name that is not an index alone."""
        candidates = (*self._beside, self.sampler, self.logs)
        return [path for path in candidates if path not in besides and _holds_something(path)]

    def discard(self) -> None:
        """Remove the files of an earlier run. The store goes last: while it is there, the others are a run's."""
        shutil.rmtree(self.logs, ignore_errors=True)
        for path in (self.output, *self._beside, *self._databases):
            path.unlink(missing_ok=True)

    def is_begun(self) -> bool:
        """Return whether the store holds a run. It does not if the start that made it was killed at once. Raises
        `ConfigError` for another program's database."""
        try:
            if not _holds_something(self.store):
                return False
            with contextlib.closing(connect_read_only(self.store)) as reading:
                tables = {name for (name,) in reading.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
                if not tables:
                    return False
                if "run" in tables:
                    return reading.execute("SELECT 1 FROM run").fetchone() is not None
        except (sqlite3.Error, OSError):  # opening it tells what is wrong
            return True
        raise _foreign_store(self.store)


def _foreign_store(store: Path) -> ConfigError:
    return ConfigError(f"store '{store}' is another program's database: choose another 'store'", key="store")


def _holds_something(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists() and path.stat().st_size > 0


def check_sources(
    config: RolloutRunConfig, files: RunFiles, configurations: Iterable[Path] = (), *, has_rows: bool = False
) -> None:
    """Raise `ConfigError` if the input or one of the ``configurations`` is a file that the run itself writes or
    removes. Only a run that goes on may have its own materialized inputs as its input; with ``has_rows``, NeMo Gym
    began it."""
    goes_on = not config.overwrite and (has_rows or _holds_something(files.output) or files.is_begun())
    for what, path in (("'input'", config.input), *(("the configuration", path) for path in configurations)):
        own = files.own(path)
        if own is None or (own == files.materialized_inputs and what == "'input'" and goes_on):
            continue
        if own == files.output:
            raise ConfigError(f"output '{own}' is the input itself: choose another 'output'", key="output")
        key = "store" if own not in RunFiles(files.output).paths and own != files.logs else "output"
        raise ConfigError(
            f"output '{files.output}': {what} '{path}' is a file that the run itself writes or removes ('{own.name}'):"
            f" choose another '{key}'",
            key=key,
        )


def check_unclaimed(files: RunFiles, *, besides: Collection[Path] = ()) -> None:
    """Raise `ConfigError` if a new run would replace files, ``besides`` some, that are not from a run here. A run
    makes its store before them."""
    if files.store.exists():
        return
    if held := files.holding(besides=besides):
        names = ", ".join(f"'{path.name}'" for path in held)
        raise ConfigError(
            f"output '{files.output}': the run would replace {names} beside it, and no run database"
            f" ('{files.store.name}') shows that they are an earlier run's: choose another 'output', move them away,"
            " or discard them with overwrite=true",
            key="output",
        )


def _differing_key(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the path of the first key whose values differ; empty if none do."""
    for key in {**one, **other}:
        values = one.get(key), other.get(key)
        if orjson.dumps(values[0]) != orjson.dumps(values[1]):
            if isinstance(values[0], dict) and isinstance(values[1], dict):
                inner = _differing_key(values[0], values[1])
                return f"{key}.{inner}" if inner else key
            return key
    return ""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The run that an output holds, and that the next command continues."""

    files: RunFiles
    run_id: str
    inputs_sha256: str | None
    validation: str | None
    counts: Mapping[JobState, int]
    sampling: Mapping[str, Any] | None = None
    """`PipelineConfig.sampling_beside_rows`; ``None`` for samplers and for runs that an earlier version began."""
    limits: Mapping[str, Any] | None = None

    @property
    def rollouts(self) -> int:
        return sum(self.counts.values())

    @property
    def left(self) -> int:
        """The number of unfinished rollouts."""
        return sum(count for state, count in self.counts.items() if not state.terminal)

    def require_same(self, config: RolloutRunConfig, inputs_sha256: str, lines: IO[bytes] | None = None) -> None:
        """Raise `ConfigError` if ``config`` and the inputs describe a different run. ``lines`` are the requested
        rollouts, for an error that names the first difference."""
        if self.inputs_sha256 != inputs_sha256:
            difference = "rows, repeats or parameters" + self._first_difference(lines)
        elif self.validation != config.validation:
            difference = "'validation'"
        elif self.sampling is not None and (key := _differing_key(self.sampling, config.sampling_beside_rows)):
            was, now = self.sampling.get(key), config.sampling_beside_rows.get(key)
            difference = f"'{key}' (it has {was!r}, this command {now!r})"
        else:
            return
        state = f"{self.left} of {self.rollouts} rollouts left" if self.left else "finished"
        raise ConfigError(
            f"output '{self.files.output}' holds run '{self.run_id}' ({state}) with other {difference}: choose"
            " another 'output', or discard that run with overwrite=true",
            key="output",
        )

    def changed_limits(self, config: RolloutRunConfig) -> list[str]:
        """Return the names of the limits that have other values in ``config`` than when the run began."""
        if self.limits is None:
            return []
        return [name for name, value in config.limits.model_dump().items() if self.limits.get(name) != value]

    def _first_difference(self, lines: IO[bytes] | None) -> str:
        """Return, in parentheses, how the run's materialized inputs differ from ``lines``; empty if that cannot be
        told."""
        if lines is None:
            return ""
        difference, recorded, requested = "", 0, 0
        lines.seek(0)
        with contextlib.suppress(OSError, ValueError), self.files.materialized_inputs.open("rb") as own:
            for was, now in zip_longest(own, lines):
                recorded += was is not None
                requested += now is not None
                if was and now and was != now and not difference:
                    row = orjson.loads(now)
                    where = f"task {row[TASK_INDEX_KEY]}, rollout {row[ROLLOUT_INDEX_KEY]}"
                    if key := _differing_key(orjson.loads(was), row):
                        difference = f" ({where} has another '{key}')"
        if recorded != requested:
            return f" (it has {recorded} rollouts, this command {requested})"
        return difference

    @classmethod
    async def of(cls, config: RolloutRunConfig, files: RunFiles) -> RecordedRun | None:
        """Return the run at the output, or ``None`` if a new run may begin there. Raises `ConfigError` for anything
        that must not be replaced: a run when ``resume`` is false, or files without a run database."""
        for path in files.paths:
            if path.is_dir():
                raise ConfigError(
                    f"output '{files.output}' cannot be written: '{path}' is a directory; choose another 'output'",
                    key="output",
                )
        begun = files.is_begun()
        if config.overwrite:
            return None
        if not begun:
            if _holds_something(files.output):
                raise ConfigError(
                    f"output '{files.output}' is not empty, but its run database '{files.store.name}' is"
                    " missing: restore the database to continue that run, choose another 'output', or discard the file"
                    " with overwrite=true",
                    key="output",
                )
            check_unclaimed(files)
            return None
        store = SqliteJobStore(files.store)
        try:
            info, counts = await store.run_info(), await store.counts()
        finally:
            await store.aclose()
        if info is None:
            raise _foreign_store(files.store)
        recorded = cls(
            files,
            str(info["run_id"]),
            info.get("inputs_sha256"),
            info.get("validation"),
            counts,
            sampling=info.get("sampling"),
            limits=info.get("limits"),
        )
        if not config.resume:
            state = (
                f"an unfinished run ({recorded.left} of {recorded.rollouts} rollouts left)"
                if recorded.left
                else f"a finished run ({recorded.rollouts} rollouts)"
            )
            raise ConfigError(
                f"output '{files.output}' holds {state}: leave resume=false out to go on with it, choose another"
                " 'output', or discard the run with overwrite=true",
                key="output",
            )
        return recorded


def existing_folder(path: Path) -> Path:
    """Return the nearest existing folder above ``path``."""
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    return folder


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """Give a new file to write, which replaces ``path`` if the block ends without an error. Until then it is hidden,
    because others list the folder's files."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def locked_file(path: Path) -> BinaryIO:
    """Open a file with an exclusive lock. The kernel holds the lock for this process until the file is closed, so the
    lock cannot outlive the process. Raises `BlockingIOError` if another process holds it, and other `OSError`s."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        file.close()
        raise
    return file


def lock_of_store(store: Path) -> Path:
    """Return the lock that runs and services take for a store named by its path. A store beside an output shares the
    lock of that output."""
    return store.with_name(f"{store.name.removesuffix('_store.sqlite')}.lock")


def check_output(files: RunFiles) -> None:
    """Raise the error that `output_lock` would raise now, without leaving a file behind."""
    folder = existing_folder(files.lock)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "cannot be written to" if folder.is_dir() else "is not a directory"
        raise ConfigError(f"output '{files.output}' cannot be written: '{folder}' {why}", key="output")
    for key, path, lock in files.locks:
        if lock.exists():
            with _held(key, path, lock):
                pass


@contextlib.contextmanager
def output_lock(files: RunFiles) -> Iterator[None]:
    """Ensure that an output and its store have one collector. Raises `ConfigError` if another one writes to them."""
    with contextlib.ExitStack() as held:
        for key, path, lock in files.locks:
            held.enter_context(_held(key, path, lock))
        yield


@contextlib.contextmanager
def _held(key: str, path: Path, lock: Path) -> Iterator[None]:
    try:
        file = locked_file(lock)
    except BlockingIOError:
        with lock.open("rb") as held:
            holder = held.read(32).decode(errors="replace").strip() or "unknown"
        raise ConfigError(
            f"another collector (process {holder}) is writing to '{path}'; wait for it, stop it, or choose"
            f" another '{key}'",
            key=key,
        ) from None
    except OSError as error:
        raise ConfigError(f"{key} '{path}' cannot be written: {error}", key=key) from error
    with file:
        file.truncate(0)
        with contextlib.suppress(OSError):  # the number only serves error messages; the lock also holds on a full disk
            file.write(f"{os.getpid()}\n".encode())
            file.flush()
        yield


class ResultFiles:
    """Appends result rows to the output and rows without a verdict to the failures file.

    The store calls it as its sink, on the writer's thread; `recover` runs before the first claim."""

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        self._open: dict[Path, int] = {}

    def __call__(self, rows: list[tuple[str, bytes]]) -> None:
        done = [row for state, row in rows if state == JobState.DONE.value]
        failed = [row for state, row in rows if state != JobState.DONE.value]
        self._append(self._files.output, done)
        self._append(self._files.failures, failed)

    def _append(self, path: Path, rows: list[bytes]) -> None:
        if not rows:
            return
        try:
            append_lines(self._file(path), b"\n".join(rows) + b"\n")
        except OSError as error:
            raise store_error(path, error) from error

    def _file(self, path: Path) -> int:
        if (fd := self._open.get(path)) is None:
            fd = self._open[path] = open_lines(path)
        return fd

    async def recover(self, store: SqlJobStore) -> None:
        """Make both files hold exactly what the store holds, each rollout once."""
        for path, states in (
            (self._files.output, frozenset({JobState.DONE})),
            (self._files.failures, frozenset({JobState.FAILED, JobState.CANCELLED})),
        ):
            try:
                await self._recover(path, store, JobSelector(states=states))
            except OSError as error:
                raise store_error(path, error) from error

    async def _recover(self, path: Path, store: SqlJobStore, selector: JobSelector) -> None:
        present, is_irregular = _scan(path)
        missing: list[bytes] = []
        async for record in store.iterate(selector):
            if record.job_id in present:
                present.discard(record.job_id)
            elif record.result is not None:
                missing.append(record.result)
        if is_irregular or present:  # lines that the store does not know: rewrite the file
            await self._rewrite(path, store, selector)
            return
        if path.exists():
            self._file(path)  # opening the file cuts off a torn last line
        self._append(path, missing)

    async def _rewrite(self, path: Path, store: SqlJobStore, selector: JobSelector) -> None:
        with replaced(path) as out:
            async for record in store.iterate(selector):
                if record.result is not None:
                    out.write(record.result + b"\n")
            out.flush()
            os.fsync(out.fileno())

    def close(self) -> None:
        for fd in self._open.values():
            with contextlib.suppress(OSError):  # the store holds every row; the next start repairs the file
                os.fsync(fd)
            os.close(fd)
        self._open.clear()


def _scan(path: Path) -> tuple[set[str], bool]:
    """Return the rollout ids in a result file, and whether a line repeats an id or has none."""
    ids: set[str] = set()
    is_irregular = False
    for line in whole_lines(path) if path.exists() else ():
        try:
            rollout_id = orjson.loads(line).get(ROLLOUT_ID_KEY)
        except (orjson.JSONDecodeError, AttributeError):
            rollout_id = None
        is_irregular = is_irregular or not isinstance(rollout_id, str) or rollout_id in ids
        ids.add(str(rollout_id))
    return ids, is_irregular


# -- The running attempts, for viewers of a run ----------------------------------------------------------------------

MAX_SHOWN = 200
"""How many of the oldest attempts are listed; for a run with thousands of attempts, its totals are more useful."""
WRITE_EVERY_S = 2.0
STALE_S = 30.0


def under_way(dispatcher: AsyncDispatcher, client: ServerClient) -> list[dict[str, Any]]:
    """Describe the `MAX_SHOWN` oldest attempts, oldest first."""
    now = time.monotonic()
    return [_described(attempt, dispatcher, client, now) for attempt in islice(list(dispatcher.held), MAX_SHOWN)]


def _described(attempt: JobAttempt, dispatcher: AsyncDispatcher, client: ServerClient, now: float) -> dict[str, Any]:
    spec, servers = attempt.job.spec, attempt.servers
    place = dispatcher.place_of(attempt)
    is_agents = place is not None and place.stage is StageName.RUN
    instance = servers.agent if is_agents or servers.environment is None else servers.environment
    number = attempt.replicas.get(instance, 0)
    urls = client.replica_urls(instance)
    return {
        "rollout_id": spec.job_id,
        "run_id": spec.run_id,
        "task_id": spec.task_id,
        "sample_index": spec.sample_index,
        "agent": spec.agent,
        "attempt": attempt.job.attempt,
        "stage": None if place is None else place.stage.value,
        "works": place is not None and place.since is not None,
        "stage_seconds": None if place is None or place.since is None else now - place.since,
        "seconds": now - attempt.claimed_at,
        "server": instance if len(urls) == 1 else f"{instance}.{number}",
        "url": urls[number] if number < len(urls) else None,
    }


@contextlib.asynccontextmanager
async def show_running(path: Path, dispatcher: AsyncDispatcher, client: ServerClient) -> AsyncIterator[None]:
    """Keep the list of running attempts in ``path`` up to date until the block ends, and then remove the file."""

    async def keep_writing() -> None:
        while True:
            content = {"at": time.time(), "running": under_way(dispatcher, client)}
            # A few kilobytes, without fsync. If the disk cannot be written, the store's error ends the run.
            with contextlib.suppress(OSError), replaced(path) as file:
                file.write(orjson.dumps(content))
            await asyncio.sleep(WRITE_EVERY_S)

    writer = asyncio.create_task(keep_writing(), name="tell what is under way")
    try:
        yield
    finally:
        writer.cancel()
        await asyncio.wait({writer})
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def read_running(path: Path) -> list[dict[str, Any]] | None:
    """Read the running attempts that a collection last wrote, with their ages brought up to now. Return ``None`` if it
    wrote none within `STALE_S`."""
    try:
        content = orjson.loads(path.read_bytes())
        age_s = max(0.0, time.time() - float(content["at"]))
        running = [
            {**each, **{key: each[key] and each[key] + age_s for key in ("seconds", "stage_seconds")}}
            for each in content["running"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return running if age_s < STALE_S else None
