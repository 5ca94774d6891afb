"""A stack in the background: ``ng_run`` in a separate process, for trainers that start their servers themselves."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from nemo_gym._util.files import write_private
from nemo_gym.config.compose import compose, run_directory_root
from nemo_gym.config.overrides import word_of
from nemo_gym.contract.errors import ConfigError, ServerError
from nemo_gym.contract.session import IDENTIFIER
from nemo_gym.contract.verdict import new_run_id
from nemo_gym.stack.endpoints import StackEntry, read_stack, require_free

STOP_TIMEOUT_S = 60.0
_READY = "servers ready!"
_PROGRAM = (
    "import json, sys\n"
    "from nemo_gym.config.launch import die_with_parent\n"
    "die_with_parent(int(sys.argv.pop(1)))\n"
    "from nemo_gym.cli import command, run\n"
    "command.run(run.NAME, run.start_command, json.load(sys.stdin))\n"
)
"""Reads its settings from standard input, because they may contain keys, which must not appear in an argv."""
_TAIL_CHARS = 3000
_started: list[Path] = []


def started_here() -> Path | None:
    """Return the run directory of the last stack that this process started and has not stopped, if any."""
    return _started[-1] if _started else None


class BackgroundStack:
    """Servers that run until ``stop``, or until this process ends. They are started once. ``stop`` may be called while
    another thread is in ``start``, which then raises.

    Args:
        words: settings as on ng_run's command line.
        values: a configuration that overrides ``config_paths``.
        config_paths: configuration files.
        run_dir: directory of the stack's state; by default that of the settings, ``env.yaml`` or ``values``, else that
            of the run's id among the run directories, as for ng_run.
    """

    def __init__(
        self,
        words: Sequence[str] = (),
        values: Mapping[str, Any] | None = None,
        *,
        config_paths: Sequence[str] = (),
        run_dir: Path | None = None,
    ) -> None:
        self._settings = list(words)
        self._config_paths = list(config_paths)
        self._values = dict(values or {})
        composed: Mapping[str, Any] = {}
        with contextlib.suppress(ConfigError):  # ng_run says what is wrong
            composed = compose(self._settings).values
        known = {**self._values, **composed}
        directory = run_dir or known.get("run_dir")
        if directory is None:
            self.run_dir = run_directory_root() / self._run_id(known.get("run_id"))
        else:
            self.run_dir = Path(str(directory)).expanduser().resolve()
        self._given = self.run_dir / "given.yaml"
        self._process: subprocess.Popen[bytes] | None = None
        self._changing = threading.RLock()
        self._stopped = False

    @property
    def log(self) -> Path:
        return self.run_dir / "ng_run.log"

    def start(self, *, timeout_s: float = 300.0) -> StackEntry:
        """Start the servers and wait until all are ready. Raises `ConfigError` for a configuration that ng_run
        refuses, and `ServerError` for servers that do not become ready; both quote the end of ng_run's log."""
        import yaml

        try:
            self.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"run_dir {self.run_dir} cannot be made: {error.strerror}", key="run_dir") from error
        require_free(self.run_dir)
        command = [sys.executable, "-c", _PROGRAM, str(os.getpid())]
        paths = [*self._config_paths, *([str(self._given)] if self._values else [])]
        settings = [*self._settings, *([word_of("+config_paths", paths)] if paths else [])]
        try:
            with self._changing, self.log.open("wb") as log:
                self._check_not_stopped()
                if self._values:
                    # Private, and removed when the servers stop, because the configuration may contain keys.
                    write_private(self._given, yaml.safe_dump(self._values, sort_keys=False, allow_unicode=True))
                process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.PIPE)
                self._process = process
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # ng_run has already ended, and its log shows why
                process.stdin.write(json.dumps([*settings, word_of("run_dir", str(self.run_dir))]).encode())
                process.stdin.close()
            give_up = time.monotonic() + timeout_s
            while _READY not in self._log_end():
                if (code := process.poll()) is not None:
                    error_type = ConfigError if code == 2 else ServerError
                    raise error_type(
                        f"ng_run ended with {code} before its servers were ready; it said: {self._log_end()}"
                    )
                if time.monotonic() >= give_up:
                    raise ServerError(
                        f"the servers were not ready within {timeout_s:g} s; ng_run said: {self._log_end()}"
                    )
                time.sleep(0.1)
            with self._changing:
                self._check_not_stopped()
                _started.append(self.run_dir)
            return read_stack(self.run_dir)
        except BaseException:  # also an interrupt: whoever catches it must not be left with servers
            self.stop()
            raise

    def check(self) -> None:
        """Raise `ServerError` if the servers have ended by themselves or were never started."""
        if self._process is None:
            raise ServerError("the servers are not running; start them first")
        if (code := self._process.poll()) is not None:
            raise ServerError(f"ng_run ended with {code}, and its servers with it; it said: {self._log_end()}")

    def stop(self) -> None:
        """Stop the servers; idempotent."""
        with self._changing:
            self._stopped = True
            process, self._process = self._process, None
            if process is None:
                return
            with contextlib.suppress(ValueError):
                _started.remove(self.run_dir)
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._given.unlink(missing_ok=True)

    def _check_not_stopped(self) -> None:
        if self._stopped:
            raise ServerError("the servers were stopped; they start once")

    def _run_id(self, run_id: Any) -> str:
        """Return the id that is given, else a new one, which the settings then give."""
        if run_id is None and not self._config_paths:  # a configuration file may have its own
            self._settings.append(f"run_id={(run_id := new_run_id())}")
        return str(run_id) if IDENTIFIER.match(str(run_id or "")) else new_run_id()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _log_end(self) -> str:
        return self.log.read_text(errors="replace")[-_TAIL_CHARS:]
