"""The directory of captured calls: whole lines, bounded files, bounded total."""

from __future__ import annotations

import os
import re
import time
from collections import OrderedDict
from pathlib import Path

from nemo_gym.contract.errors import ConfigError
from nemo_gym.gateway.capture.config import CaptureConfig
from nemo_gym.storage.jsonl import append_lines, open_lines

_MAX_OPEN = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", re.ASCII)


class CaptureDirectory:
    """Appends lines to files by name. Used by one thread; methods raise `OSError` where the disk does."""

    def __init__(self, config: CaptureConfig) -> None:
        self._config = config
        self._open: OrderedDict[str, int] = OrderedDict()
        try:
            config.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(
                f"capture.directory: '{config.directory}' cannot be made ({error.strerror}); choose another",
                key="capture.directory",
            ) from error

    def append(self, name: str, line: bytes) -> None:
        """Append a whole line or, where the disk takes no whole line, nothing."""
        fd = self._file(name)
        before = os.fstat(fd).st_size
        if before and before + len(line) > self._config.max_file_bytes:
            self._rotate(name)
            fd = self._file(name)
        try:
            append_lines(fd, line)
        except OSError:
            self._close(name)
            raise

    def tidy(self) -> None:
        """Remove what is too old, and the oldest of what is too much. Files that others remove meanwhile are fine."""
        found = []
        for path in self._config.directory.glob("*.jsonl"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            found.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in found)
        too_old = time.time() - self._config.max_age_s
        for modified_at, size, path in sorted(found, key=lambda each: each[0]):
            if modified_at >= too_old and total <= self._config.max_total_bytes:
                break
            self._close(path.name.removesuffix(".jsonl"))
            path.unlink(missing_ok=True)
            total -= size

    def close(self) -> None:
        for name in [*self._open]:
            self._close(name)

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is no session id")
        return self._config.directory / f"{name}.jsonl"

    def _file(self, name: str) -> int:
        fd = self._open.get(name)
        if fd is None:
            fd = self._open[name] = open_lines(self._path(name), 0o600)
            if len(self._open) > _MAX_OPEN:
                self._close(next(iter(self._open)))
        self._open.move_to_end(name)
        return fd

    def _rotate(self, name: str) -> None:
        self._close(name)
        self._path(name).replace(self._path(f"{name}.1"))

    def _close(self, name: str) -> None:
        if (fd := self._open.pop(name, None)) is not None:
            os.close(fd)
