"""The runs that a viewer shows: found below paths, indexed in the background, and followed while they are viewed."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_gym.contract.errors import ConfigError
from nemo_gym.rollouts.results import RunFiles
from nemo_gym.view import live, logs
from nemo_gym.view.index import Reading, ResultIndex, ViewError
from nemo_gym.view.lines import NoResultRow, index_line
from nemo_gym.view.queries import Prices, summary
from nemo_gym.view.rollout import TokenTexts
from nemo_gym.view.service import WatchedService

MAX_DEPTH = 4
MAX_RUNS = 500
FOLLOWED_S = 30.0
"""How long a run is followed after it was last viewed."""
POLL_S = 1.0
_FIRST_LINE_BYTES = 1 << 20
_NOT_OUTPUTS = ("_materialized_inputs", "_failures", "_reverified")


def find_outputs(paths: Sequence[Path]) -> list[Path]:
    """Return the named result files and those below the named folders; the latest first."""
    found: dict[Path, float] = {}
    for path in paths:
        for output in _outputs_below(path) if path.is_dir() else (path,):
            with suppress(OSError):
                files = RunFiles(output)
                existing = [each for each in (output, files.failures, files.store) if each.exists()]
                found.setdefault(output.resolve(), max((each.stat().st_mtime for each in existing), default=0.0))
    return sorted(found, key=lambda output: -found[output])[:MAX_RUNS]


def _outputs_below(folder: Path, depth: int = 0) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    names = {entry.name for entry in entries}
    for entry in entries:
        if entry.name.endswith("_store.sqlite"):
            yield entry.with_name(f"{entry.name.removesuffix('_store.sqlite')}.jsonl")
        elif entry.suffix == ".jsonl" and not entry.stem.endswith(_NOT_OUTPUTS):
            if f"{entry.stem}_store.sqlite" not in names and _holds_results(entry):
                yield entry
        elif depth < MAX_DEPTH and not entry.name.startswith(".") and _is_folder(entry):
            yield from _outputs_below(entry, depth + 1)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir() and not path.is_symlink()
    except PermissionError:
        return False


def _holds_results(path: Path) -> bool:
    try:
        if not path.is_file():  # a pipe would wait for its writer
            return False
        with path.open("rb") as file:
            line = file.readline(_FIRST_LINE_BYTES)
    except OSError:
        return False
    if not line.endswith(b"\n"):
        return len(line) == _FIRST_LINE_BYTES  # too long to check here; indexing the file checks it
    try:
        index_line(line)
    except NoResultRow:
        return False
    return True


@dataclass(slots=True)
class Run:
    """One output, and the state of its indexing."""

    key: str
    name: str
    output: Path
    service: WatchedService | None = None
    """The service that this run belongs to, if any; its results are copied to ``output``."""
    index: ResultIndex | None = None
    reading: Reading | None = None
    problem: str | None = None
    asked: float = 0.0
    texts: TokenTexts | None = None
    seen: tuple[int, dict[str, Any]] | None = field(default=None, repr=False)
    """The index's version, and its summary at that version."""

    def ready(self) -> ResultIndex:
        """Return the index. Raises `ViewError` while there is none."""
        if self.index is None:
            raise ViewError(self.problem or f"'{self.output}' is being read; ask again in a moment")
        return self.index

    def progress(self) -> dict[str, Any] | None:
        if self.service is not None:
            return self.service.progress(self.name)
        return live.progress(RunFiles(self.output))

    def log_folders(self, row: Mapping[str, Any]) -> list[Path]:
        """Return the folders with the logs of a rollout's servers."""
        if self.service is not None:
            return [] if self.service.logs is None else [self.service.logs]
        return logs.log_folders(RunFiles(self.output), row)


class Runs:
    """All runs of a viewer. A separate thread indexes what is new."""

    def __init__(
        self, paths: Sequence[Path], prices: Prices | None = None, services: Sequence[WatchedService] = ()
    ) -> None:
        for path in paths:
            files = RunFiles(path)
            if not (path.exists() or files.failures.exists() or files.store.exists()):
                raise ConfigError(f"there is no result file or folder '{path}'")
        self._paths = [path.resolve() for path in paths]
        self._prices = prices
        self.services = services
        self._runs: dict[str, Run] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopped = False
        self._scanned = 0.0
        self._thread = threading.Thread(target=self._follow, name="view-index", daemon=True)

    def start(self) -> None:
        """Start services and indexing. Raises `ConfigError` if a service cannot be read."""
        for service in self.services:
            service.start()
        self.all()
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()
        self._thread.join(10.0)
        for run in self._runs.values():
            if run.index is not None:
                run.index.close()
        for service in self.services:
            service.stop()

    def all(self) -> list[Run]:
        """Return every run that exists now; the latest first."""
        with self._lock:
            if time.monotonic() - self._scanned > 2.0 or not self._scanned:
                runs = {}
                for service in self.services:
                    for run_id, output in [*service.outputs().items()][:MAX_RUNS]:
                        key = _key(f"{service.url} {run_id}")
                        runs[key] = self._runs.get(key) or Run(key, run_id, output, service)
                for output in find_outputs(self._paths):
                    key = _key(str(output))
                    runs[key] = self._runs.get(key) or Run(key, self._name(output), output)
                self._runs = runs
                self._scanned = time.monotonic()
            found = [*self._runs.values()]
        for run in found:
            run.asked = time.monotonic()
        self._wake.set()
        return found

    def get(self, key: str) -> Run:
        run = self._runs.get(key)
        if run is None:
            raise ViewError("there is no such run; it may have been moved or discarded")
        run.asked = time.monotonic()
        self._wake.set()
        return run

    def _name(self, output: Path) -> str:
        for path in self._paths:
            if path != output and output.is_relative_to(path):
                name = output.relative_to(path).with_suffix("")
                return str(name if len(self._paths) == 1 else Path(path.name, name))
        return str(Path(output.parent.name, output.stem))

    def describe(self, run: Run) -> dict[str, Any]:
        """Return a run's entry in the list of runs."""
        files = RunFiles(run.output)
        reading = run.reading
        return {
            "key": run.key,
            "name": run.name,
            "path": str(run.output) if run.service is None else f"{run.service.url}, run {run.name}",
            "version": run.index.version if run.index is not None else 0,
            "reading": reading
            and {"done": reading.done_bytes, "total": reading.total_bytes, "mb_per_s": reading.mb_per_s},
            "problem": run.problem,
            "changed_at": _changed_at(files) if run.service is None else run.service.changed_at(run.name),
            "progress": run.progress(),
            "summary": self.summary(run) if run.index is not None else None,
        }

    def summary(self, run: Run) -> dict[str, Any]:
        index = run.ready()
        version = index.version
        if run.seen is None or run.seen[0] != version:
            run.seen = (version, summary(index, self._prices))
        return run.seen[1]

    def token_texts(self, run: Run) -> TokenTexts:
        if run.texts is None:
            run.texts = TokenTexts(RunFiles(run.output))
        return run.texts

    # The thread

    def _follow(self) -> None:
        while not self._stopped:
            self._wake.wait(POLL_S)
            self._wake.clear()
            # New runs first, small files before large ones, so that the list is useful before a large file is read.
            for run in sorted(self._runs.values(), key=lambda run: (run.index is not None, _size(run.output))):
                if self._stopped:
                    return
                if run.index is None or time.monotonic() - run.asked < FOLLOWED_S:
                    self._read(run)

    def _read(self, run: Run) -> None:
        def listen(reading: Reading) -> None:
            run.reading = reading
            if self._stopped:
                raise _Stopped

        try:
            index = run.index or ResultIndex(run.output)
            index.update(listen)
            run.index, run.problem = index, None
        except _Stopped:
            pass
        except Exception as error:  # noqa: BLE001 - a run's page shows its error; the others go on
            run.problem = str(error)
        run.reading = None


class _Stopped(Exception):
    """The viewer stops while a file is read; what was read is kept."""


def _key(of: str) -> str:
    return hashlib.blake2b(of.encode("utf-8", "surrogateescape"), digest_size=5).hexdigest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _changed_at(files: RunFiles) -> float | None:
    times: list[float] = []
    for path in (files.output, files.failures, files.store):
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times, default=None)
