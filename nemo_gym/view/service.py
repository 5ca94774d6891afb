"""A running rollout service as the viewer shows it: its results, copied as they arrive, and its status.

Results go into files of a temporary folder, one for each of the service's runs, which are indexed as any others are.
The viewer only reads from the service.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import tempfile
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from nemo_gym._util.tasks import LoopThread
from nemo_gym.contract.errors import ConfigError
from nemo_gym.rollouts.results import RunFiles
from nemo_gym.service.client import TOKEN_VARIABLE, Address, AsyncRolloutClient, JobView, ServiceError

POLL_S = 1.5
FOLLOWED_S = 30.0
"""How long the service's status is polled after it was last viewed."""
PATIENCE_S = 10.0
FIRST_ANSWER_S = 30.0
_URL = re.compile(r"https?://[^/?#@\s]+(/[^?#@\s]*)?")
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,80}")


class WatchedService:
    """One service, by its URL; `start` sends the first request."""

    def __init__(self, url: str, token_file: Path | None = None) -> None:
        """Raises `ConfigError` for a text that is no address, and for a token that cannot be read."""
        if not _URL.fullmatch(url):
            raise ConfigError(
                f"'{_without_secrets(url)}' is not the address of a rollout service, such as"
                f" http://127.0.0.1:8210; its token belongs in {TOKEN_VARIABLE} or --token-file FILE, never in the"
                " address"
            )
        self.url = url.rstrip("/")
        self._token_file = token_file
        token, self.logs = _token_of(token_file)
        self._client = AsyncRolloutClient(self.url, token, patience_s=PATIENCE_S)
        self._folder = tempfile.TemporaryDirectory(prefix="nemo-gym-view-", ignore_cleanup_errors=True)
        self._thread: LoopThread | None = None
        self._tasks: list[Future[None]] = []
        self._viewed_at = 0.0
        self._runs: dict[str, dict[str, Any]] = {}
        self._running: list[dict[str, Any]] = []
        self._status: dict[str, Any] = {}
        self._unreachable: str | None = None
        self._not_followed: str | None = None

    def start(self) -> None:
        """Begin to follow the service. Raises `ConfigError` if it cannot be reached or refuses the token."""
        self._thread = LoopThread("view-service")
        self._thread.run(self._client.__aenter__())
        try:
            self._thread.run(self._refresh(), timeout_s=FIRST_ANSWER_S)
        except (ServiceError, TimeoutError) as error:
            self.stop()
            raise ConfigError(self._refusal(error)) from None
        self._viewed_at = time.monotonic()
        self._tasks = [self._thread.start(self._watch()), self._thread.start(self._follow())]

    def stop(self) -> None:
        if self._thread is not None:
            for task in self._tasks:
                task.cancel()
            self._thread.run(self._client.__aexit__(None, None, None))
            self._thread.close()
        self._folder.cleanup()

    def _refusal(self, error: Exception) -> str:
        status = error.details.get("status") if isinstance(error, ServiceError) else None
        match status:
            case 401 | 403:
                return (
                    f"the service at {self.url} refuses the token ({error}): give one of role read in {TOKEN_VARIABLE}"
                    " or --token-file FILE; the service's own service.json will do"
                )
            case None:
                message = str(error) or f"the service at {self.url} does not answer within {FIRST_ANSWER_S:g} s"
                return f"{message}; ng_serve_rollouts starts one"
            case _:
                return f"{self.url} is not a rollout service of this release (it answered {status} to /v1/runs)"

    # What the viewer reads

    def outputs(self) -> dict[str, Path]:
        """Return the copied result file of each run, by run id; the latest run first. The file may not exist yet."""
        self._viewed_at = time.monotonic()
        return {run_id: self._output(run_id) for run_id in self._runs}

    def progress(self, run_id: str) -> dict[str, Any] | None:
        """Return the progress of a run, in the form of `live.progress`."""
        self._viewed_at = time.monotonic()
        if (run := self._runs.get(run_id)) is None:
            return None
        jobs = run["jobs"]
        total, ended = sum(jobs.values()), sum(jobs[state] for state in ("done", "failed", "cancelled"))
        goes_on = self._unreachable is None and self._status.get("state") != "stopped"
        return {
            "collecting": goes_on and ended < total,
            "note": self._unreachable,
            "total": total,
            "ended": ended,
            "running_count": jobs["claimed"],
            "queued": jobs["queued"],
            "retried": run["retried"],
            "waiting_for_retry": run["waiting_for_retry"],
            "per_minute": run["per_minute"],
            "seconds_left": run["seconds_left"],
            "running": [each for each in self._running if each["run_id"] == run_id],
        }

    def described(self) -> dict[str, Any]:
        """Return the service's entry in the list of runs."""
        return {
            "url": self.url,
            "problem": self._unreachable or self._not_followed,
            **{key: self._status.get(key) for key in ("state", "failure", "under_way", "stages", "servers")},
        }

    def changed_at(self, run_id: str) -> float | None:
        found = self._runs.get(run_id, {}).get("finished_at")
        return None if found is None else float(found)

    def _output(self, run_id: str) -> Path:
        digest = hashlib.blake2b(run_id.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
        return Path(self._folder.name, digest, f"{run_id if _SAFE_NAME.fullmatch(run_id) else 'run'}.jsonl")

    # On the loop's thread

    async def _refresh(self) -> None:
        listing, status = await self._client.runs(), await self._client.status()
        self._runs = {str(run["run_id"]): run for run in listing["runs"]}
        for run_id in self._runs:  # the index of a run without results is kept there, too
            self._output(run_id).parent.mkdir(mode=0o700, exist_ok=True)
        self._running, self._status, self._unreachable = listing["running"], status, None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            if time.monotonic() - self._viewed_at > FOLLOWED_S:
                continue
            try:
                await self._refresh()
            except ServiceError as error:
                self._unreachable = f"{error}; what was read until then is shown."
                if error.details.get("status") == 401 and self._token_file is not None:
                    with suppress(ConfigError):  # a service makes new tokens at each start
                        self._client.address = Address(self.url, _token_of(self._token_file)[0])

    async def _follow(self) -> None:
        after: str | None = None
        while True:
            try:
                async for view in self._client.results(after=after):
                    self._append_result(view)
                    after = view.cursor
            except ServiceError as error:
                if error.details.get("problem", {}).get("code") == "cursor":
                    self._not_followed = "The service has another store by now; start ng_view again to see it."
                    return
            except OSError as error:
                self._not_followed = (
                    f"Results cannot be copied to '{self._folder.name}' ({error.strerror}); free space there, or set"
                    " TMPDIR to another folder, and start ng_view again."
                )
                return
            await asyncio.sleep(POLL_S)

    def _append_result(self, view: JobView) -> None:
        if view.result is None:
            return
        files = RunFiles(self._output(view.run_id))
        files.output.parent.mkdir(mode=0o700, exist_ok=True)
        path = files.output if view.state == "done" else files.failures
        with path.open("ab") as file:
            file.write(orjson.dumps(view.result) + b"\n")


def _token_of(path: Path | None) -> tuple[str | None, Path | None]:
    """Return the token, and the folder with the servers' logs if the file is the ``service.json`` of a service on this
    machine. Without a file, the client reads the environment variable."""
    if path is None:
        return None, None
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file: cannot read '{path}': {getattr(error, 'strerror', None) or error}") from None
    if text.startswith("{"):
        with suppress(orjson.JSONDecodeError, KeyError, TypeError, StopIteration):
            tokens = orjson.loads(text)["tokens"]
            token = next(tokens[role] for role in ("read", "submit", "operate") if tokens.get(role))
            logs = path.resolve().parent / "logs"
            return str(token), logs if logs.is_dir() and os.access(logs, os.R_OK) else None
        raise ConfigError(f"--token-file: '{path}' is JSON and names no 'tokens' by role, as service.json does")
    if not text or len(text.split()) != 1:
        raise ConfigError(f"--token-file: '{path}' must hold one token, or be a service's service.json")
    return text, None


def _without_secrets(url: str) -> str:
    return re.sub(r"//[^/]*@", "//…@", url.partition("?")[0])[:200]
