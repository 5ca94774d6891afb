"""Records as JSON lines, one file per session, written by one thread."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import fields
from typing import Any

import orjson
import structlog

from nemo_gym.gateway.capture.base import CallCapture, NoCapture
from nemo_gym.gateway.capture.config import CaptureConfig
from nemo_gym.gateway.capture.records import CallRecord
from nemo_gym.gateway.capture.redaction import redacted_json
from nemo_gym.gateway.capture.retention import CaptureDirectory

NO_SESSION = "no-session"
"""The file of calls without a session."""
CLOSE_TIMEOUT_S = 5.0
COMPLAINT_INTERVAL_S = 30.0
_HOUSEKEEPING_INTERVAL_S = 60.0
_BATCH = 64
_BODIES = ("request", "answer")
_PLAIN = [each.name for each in fields(CallRecord) if each.name not in (*_BODIES, "began")]
log = structlog.get_logger(__name__)


def make_capture(config: CaptureConfig | None, *, secrets: Collection[str] = ()) -> CallCapture:
    """The capture that ``config`` asks for. ``secrets`` are hidden wherever they appear, beside what is always
    hidden. Raises `ConfigError` for a directory that cannot be made."""
    return NoCapture() if config is None else FileCapture(config, secrets=secrets)


class FileCapture:
    """See `CallCapture`. A disk that is full, slow or gone costs records, never calls."""

    def __init__(self, config: CaptureConfig, *, secrets: Collection[str] = ()) -> None:
        self.bodies = config.bodies
        self._config = config
        self._secrets = tuple(secrets)
        self._directory = CaptureDirectory(config)
        self._waiting: deque[CallRecord] = deque()
        self._waiting_bytes = 0
        self._taken = self._written = self._dropped = 0
        self._complained_at = float("-inf")
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="call-capture", daemon=True)
        self._thread.start()

    def record(self, record: CallRecord) -> None:
        with self._changed:
            self._taken += 1
            full = len(self._waiting) >= self._config.max_waiting
            heavy = self._waiting and self._waiting_bytes + record.request_bytes > self._config.max_waiting_bytes
            if not (full or heavy or self._closing):
                self._waiting.append(record)
                self._waiting_bytes += record.request_bytes
                self._changed.notify()
                return
            self._dropped += 1
        self._complain("the disk is slower than the calls")

    def figures(self) -> dict[str, int]:
        with self._changed:
            return {"taken": self._taken, "written": self._written, "dropped": self._dropped}

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_TIMEOUT_S)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        tidied_at = float("-inf")
        while True:
            if time.monotonic() - tidied_at > _HOUSEKEEPING_INTERVAL_S:
                tidied_at = time.monotonic()
                self._tidy()
            with self._changed:
                if not self._waiting and not self._closing:
                    self._changed.wait(_HOUSEKEEPING_INTERVAL_S)
                batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
                self._waiting_bytes = sum(each.request_bytes for each in self._waiting) if self._waiting else 0
                if not batch and self._closing:
                    break
            for record in batch:
                self._write(record)
        self._directory.close()

    def _tidy(self) -> None:
        try:
            self._directory.tidy()
        except OSError as error:
            self._complain(f"cannot tidy up: {error}")

    def _write(self, record: CallRecord) -> None:
        try:
            self._directory.append(record.session_id or NO_SESSION, self._line(record))
        except Exception as error:  # noqa: BLE001 - observability must not end, whatever a record or a disk is like
            with self._changed:
                self._dropped += 1
            self._complain(f"{type(error).__name__}: {error}")
        else:
            with self._changed:
                self._written += 1

    def _line(self, record: CallRecord) -> bytes:
        head = redacted_json({name: getattr(record, name) for name in _PLAIN}, self._secrets)
        room = self._config.max_record_bytes - len(head) - 2
        parts: dict[str, bytes] = {}
        # The answer first: it is the smaller one, and what is asked can be told from the calls before.
        for name in reversed(_BODIES):
            body = getattr(record, name)
            if body is None:
                continue
            text = redacted_json(body, self._secrets) if self.bodies else b""
            if not self.bodies or len(text) + len(name) + 4 > room:
                text = _left_out(text if self.bodies else body)
            room -= len(text) + len(name) + 4
            parts[name] = text
        bodies = {name: orjson.Fragment(parts[name]) for name in _BODIES if name in parts}
        return orjson.dumps({**orjson.loads(head), **bodies}, option=orjson.OPT_APPEND_NEWLINE)

    def _complain(self, reason: str) -> None:
        """Say what is lost, now and then."""
        now = time.monotonic()
        if now - self._complained_at >= COMPLAINT_INTERVAL_S:
            self._complained_at = now
            log.warning("calls not captured", reason=reason, directory=str(self._config.directory), **self.figures())


def _left_out(body: Any) -> bytes:
    data = body if isinstance(body, bytes) else orjson.dumps(body, default=str, option=orjson.OPT_NON_STR_KEYS)
    return orjson.dumps({"omitted_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
