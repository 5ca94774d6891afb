"""Per-call capture: a record of each inference call's request and response, for people and dashboards.

Best effort by design: it never delays or fails a call, and no training uses it. Data that must not be lost is in the
journal.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import orjson
import structlog
from pydantic import BaseModel, ConfigDict, Field

from nemo_gym._util.files import append_lines, open_lines, whole_lines
from nemo_gym._util.secrets import REDACTED, is_secret_name, redact_tokens
from nemo_gym.config_types import CommandPath
from nemo_gym.contract.errors import ConfigError

# Which data of calls is captured, and how much of it is kept.


class CaptureConfig(BaseModel):
    """Capture of a gateway's calls into ``<directory>/<session id>.jsonl``."""

    model_config = ConfigDict(extra="forbid")

    directory: CommandPath
    """Created if missing. Only one gateway at a time may write to it."""
    bodies: bool = True
    """Whether request and answer bodies are kept, redacted; otherwise only their sizes and digests."""
    max_record_bytes: int = Field(1 << 20, ge=4096)
    """Limit of one line. A longer line omits the request's body, then the answer's; their sizes and digests stay."""
    max_file_bytes: int = Field(64 << 20, ge=1 << 16)
    """Limit of one session's file. A full file becomes ``<session id>.1.jsonl`` and replaces an older one."""
    max_total_bytes: int = Field(4 << 30, ge=1 << 20)
    """Limit of the directory. Above it, the files that were written to longest ago are removed."""
    max_age_s: float = Field(7 * 24 * 3600.0, gt=0)
    """Files without a write for this long are removed."""
    max_waiting: int = Field(4096, gt=0)
    """Limit of records that wait for the disk; further records are dropped and counted."""
    max_waiting_bytes: int = Field(128 << 20, gt=0)
    """Limit of the request bodies of waiting records, in bytes on the wire."""


# One record per inference call.

Moment = Literal["queued", "sampled", "committed", "sent"]


@dataclass(slots=True)
class CallRecord:
    """The record of one call; its fields are the keys of its line. ``None``: not known, or the call ended earlier."""

    call_id: str
    dialect: str
    route: str
    """Without session id and tokens: ``/v1/messages``."""
    session_id: str | None = None
    rollout: Mapping[str, Any] | None = None
    """The `RolloutIdentity` as data."""
    received_at: float = field(default_factory=time.time)
    """Unix seconds."""
    milliseconds: dict[str, float] = field(default_factory=dict)
    """From receipt to: ``queued`` (an engine was found), ``sampled``, ``committed``, ``sent``."""
    stream: bool = False
    status: int | None = None
    """The HTTP status of the response."""
    code: str | None = None
    """The code of the error that ended the call."""
    error: str | None = None
    finish: str | None = None
    usage: Mapping[str, int] | None = None
    engines: tuple[str, ...] = ()
    """The engines that sampled it, in order; several if an answer was continued on another engine."""
    weights_version: str | None = None
    repeated: bool = False
    """Whether the answer had been sampled before, for an equal request."""
    retry_count: int | None = None
    """The caller's own count of retries (``x-stainless-retry-count``)."""
    user_agent: str | None = None
    turn: int | None = None
    """The token turn's id within its session."""
    split_reason: str | None = None
    client_gone: bool = False
    request_bytes: int = 0
    request: Any = None
    """The body as data, or its bytes."""
    answer: Any = None
    """The reply as data (also where it was streamed), or its bytes."""
    began: float = field(default_factory=time.monotonic, repr=False)
    """Monotonic; not written."""

    def mark(self, moment: Moment) -> None:
        """Set the time of ``moment`` to now; a later mark of the same moment replaces it."""
        self.milliseconds[moment] = round((time.monotonic() - self.began) * 1000, 3)


# Redacted bodies: without secrets, and without megabytes of base64.
#
# Patterns run over the JSON text, one pass each: a tree walk in Python would cost more than the call itself.

_BLOB = re.compile(rb"[A-Za-z0-9+/_-]{1024,}={0,2}")
"""A run of at least 1 KiB without a space is an image, an archive or a key, not text."""
_NAME = rb"([\w.-]*(?:key|token|secret|passw(?:or)?d|credential|authorization|bearer|cookie)s?)"
_MEMBER = re.compile(rb'(")' + _NAME + rb'("\s*:\s*")((?:[^"\\]|\\.)*)', re.IGNORECASE)
"""A JSON member whose name may be that of a secret."""
_NESTED_MEMBER = re.compile(
    rb'(\\")' + _NAME + rb'(\\"\s*:\s*\\")((?:[^"\\]|\\\\(?:\\.|[^"\\])|\\[^"\\])*)', re.IGNORECASE
)
"""The same in JSON text inside a string of the body, such as a tool call's arguments."""
_KEY = re.compile(
    rb"(?<![A-Za-z0-9])(?:(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
    rb"|AKIA[A-Z0-9]{16}|xox[abpr]-[A-Za-z0-9-]{10,}|AIza[A-Za-z0-9_-]{30,})"
)
"""API keys of well-known services, by their form."""
_BEARER = re.compile(rb"\b(Bearer|Basic)(\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_URL = re.compile(rb"([?&](?:api[_-]?key|key|token|access_token|sig|signature)=)[^&\s\"'\\]+", re.IGNORECASE)
_USER = re.compile(rb"(\w://[^\s/:@\"'\\]*:)[^\s/@\"'\\]+@")
_MASK = REDACTED.encode()


def redacted_json(body: Any, secrets: Collection[str] = ()) -> bytes:
    """Return ``body`` (data, or JSON as bytes) as redacted JSON text. ``secrets`` are further strings to hide."""
    if isinstance(body, bytes):
        try:
            body = orjson.loads(body)
        except orjson.JSONDecodeError:
            body = body.decode("utf-8", "replace")
    try:
        data = orjson.dumps(body, default=str, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # nested too deeply for orjson, or text that is not valid Unicode
        data = orjson.dumps({"omitted": "cannot be written as JSON"})
    data = _BLOB.sub(_digest_of, data)
    data = _NESTED_MEMBER.sub(_member, _MEMBER.sub(_member, data))
    data = _KEY.sub(_MASK, data)
    data = _BEARER.sub(rb"\1\2" + _MASK, data)
    data = _USER.sub(rb"\1" + _MASK + b"@", _URL.sub(rb"\1" + _MASK, data))
    for secret in sorted((secret for secret in secrets if secret), key=len, reverse=True):
        data = data.replace(orjson.dumps(secret)[1:-1], _MASK)
    return redact_tokens(data)


def _digest_of(match: re.Match[bytes]) -> bytes:
    blob = match[0]
    return b"(%d bytes, sha256 %s)" % (len(blob), hashlib.sha256(blob).hexdigest()[:32].encode())


def _member(match: re.Match[bytes]) -> bytes:
    name = match[2].decode("ascii", "replace").replace(".", "_")
    secret = is_secret_name(name) or name.lower().replace("-", "_").endswith(("cookie", "cookies"))
    return match[1] + match[2] + match[3] + _MASK if secret and match[4] else match[0]


# The directory of captured calls: whole lines, limited file sizes, limited total size.

_MAX_OPEN = 64
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", re.ASCII)


class CaptureDirectory:
    """Appends lines to files by name. For use by one thread; methods raise the disk's `OSError`."""

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
        """Append a whole line, or nothing if the disk does not take the whole line."""
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
        """Remove files above the age limit, and the oldest above the total size. Others may remove files meanwhile."""
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
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is not a session id")
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


# Records as JSON lines, one file per session, written by one thread.

NO_SESSION = "no-session"
"""The file of calls without a session."""
CLOSE_TIMEOUT_S = 5.0
COMPLAINT_INTERVAL_S = 30.0
_HOUSEKEEPING_INTERVAL_S = 60.0
_BATCH = 64
_BODIES = ("request", "answer")
_PLAIN = [each.name for each in fields(CallRecord) if each.name not in (*_BODIES, "began")]
log = structlog.get_logger(__name__)


class CallCapture:
    """Stores one record per inference call. `record`, `figures` and `close` never raise: a full, slow or
    missing disk loses records, but never fails a call."""

    def __init__(self, config: CaptureConfig, *, secrets: Collection[str] = ()) -> None:
        """``secrets`` are hidden wherever they appear, in addition to what is always hidden. Raises `ConfigError` for
        a directory that cannot be created."""
        self.bodies = config.bodies
        """Whether records should hold request and answer bodies."""
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
        """Queue a finished record, which the caller must not change afterwards. Does not block."""
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
        self._warn_sometimes("the disk is slower than the calls")

    def figures(self) -> dict[str, int]:
        """Return counts since the start."""
        with self._changed:
            return {"taken": self._taken, "written": self._written, "dropped": self._dropped}

    def close(self) -> None:
        """Write the waiting records, and stop. Blocks for a few seconds at most."""
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
            self._warn_sometimes(f"cannot tidy up: {error}")

    def _write(self, record: CallRecord) -> None:
        try:
            self._directory.append(record.session_id or NO_SESSION, self._line(record))
        except Exception as error:  # noqa: BLE001 - no record and no disk error may end the thread
            with self._changed:
                self._dropped += 1
            self._warn_sometimes(f"{type(error).__name__}: {error}")
        else:
            with self._changed:
                self._written += 1

    def _line(self, record: CallRecord) -> bytes:
        head = redacted_json({name: getattr(record, name) for name in _PLAIN}, self._secrets)
        room = self._config.max_record_bytes - len(head) - 2
        parts: dict[str, bytes] = {}
        # The answer takes space first: it is the smaller body, and earlier calls show most of the request.
        for name in reversed(_BODIES):
            body = getattr(record, name)
            if body is None:
                continue
            text = redacted_json(body, self._secrets) if self.bodies else b""
            if not self.bodies or len(text) + len(name) + 4 > room:
                text = _omitted(text if self.bodies else body)
            room -= len(text) + len(name) + 4
            parts[name] = text
        bodies = {name: orjson.Fragment(parts[name]) for name in _BODIES if name in parts}
        return orjson.dumps({**orjson.loads(head), **bodies}, option=orjson.OPT_APPEND_NEWLINE)

    def _warn_sometimes(self, reason: str) -> None:
        """Log lost records, at most every `COMPLAINT_INTERVAL_S`."""
        now = time.monotonic()
        if now - self._complained_at >= COMPLAINT_INTERVAL_S:
            self._complained_at = now
            log.warning("calls not captured", reason=reason, directory=str(self._config.directory), **self.figures())


def _omitted(body: Any) -> bytes:
    data = body if isinstance(body, bytes) else orjson.dumps(body, default=str, option=orjson.OPT_NON_STR_KEYS)
    return orjson.dumps({"omitted_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})


def read_calls(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the records of one file, oldest first. Skips a last line that is still being written."""
    for line in whole_lines(Path(path)):
        yield orjson.loads(line)
