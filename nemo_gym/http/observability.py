"""What a process shows of itself: its spans as OTLP from a thread of its own, its log lines, and its metrics to those
who may read them.

The exporter is created only if traces are on. Its thread encodes spans in batches, at 3 µs per span; OpenTelemetry's
SDK takes 33. The five spans of a no-op rollout took 6 % more CPU when each was encoded as it ended, among other work;
in batches they take 1 % (`campaigns.bench.telemetry`). Tests compare the bytes with those of the SDK's exporter.

A collector that is slow, gone or refusing harms no rollout: `SpanExporter.take` only appends to a bounded queue, a
thread makes the requests, and spans that do not fit are dropped and counted.

A server's log lines are one JSON object each on stderr, which is its log file. Every line names the server's instance,
the run and the current rollout, has the values bound in the logging context, and with traces on the open span's ids.
Other libraries' lines get the same format. Known secrets are redacted.
"""

from __future__ import annotations

import atexit
import functools
import hmac
import http.client
import logging
import ssl
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, Protocol
from urllib.parse import urlsplit

import orjson
import structlog
from starlette.requests import Request

from nemo_gym._util.secrets import redact_tokens, scrub, secret_values
from nemo_gym._util.tasks import pause_after
from nemo_gym.config.launch import ServerLaunch
from nemo_gym.config.observability import ObservabilityConfig, TracesConfig
from nemo_gym.contract.credentials import CREDENTIAL_HEADER, Caller, Role
from nemo_gym.contract.errors import CredentialError
from nemo_gym.http import telemetry
from nemo_gym.http.telemetry import METRICS_PATH, Counter, Span, current, is_on, name_rollout

log = structlog.get_logger(__name__)

SCOPE, SCOPE_VERSION = "nemo_gym", version("nemo-gym-suite")
BATCH_SPANS = 2048
TRIES = 4
"""Tries per batch; by then other batches are waiting."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 15.0
AT_EXIT_S = 2.0
"""How long an ending process waits for the collector to accept its last spans."""
_RETRYABLE_STATUSES = frozenset({408, 429, 502, 503, 504})
"""Statuses after which the same request may be sent again."""
_FLAGS = 0x100
"""Span flags: "is the parent remote" is known, and the answer is no. The SDK sends the same."""
_STATUS_ERROR = 2
"""OTLP's status code of an error."""

EXPORTED = Counter("nemo_gym_trace_spans_exported", "Spans that the collector took")
DROPPED = Counter(
    "nemo_gym_trace_spans_dropped", "Spans that were lost, by why: queue_full, refused, unreachable", ("why",)
)

Resource = Mapping[str, Any]


class Encoding(Protocol):
    """One of OTLP's two encodings over HTTP."""

    content_type: str

    def span(self, span: Span) -> bytes:
        """Encode one span for a request. Raises for a value that the encoding cannot represent."""

    def request(self, resource: Resource, spans: Sequence[bytes]) -> bytes: ...


# -- JSON ----------------------------------------------------------------------------------------------------------


class JsonEncoding:
    """OTLP/JSON: ids in hexadecimal, 64-bit integers as strings."""

    content_type = "application/json"

    def span(self, span: Span) -> bytes:
        encoded: dict[str, Any] = {
            "traceId": span.context.trace_id,
            "spanId": span.context.span_id,
            "name": span.name,
            "kind": int(span.kind),
            "startTimeUnixNano": str(span.start_ns),
            "endTimeUnixNano": str(span.end_ns),
            "attributes": _json_pairs(span.attributes),
            "flags": _FLAGS,
            "status": {} if span.error is None else {"code": _STATUS_ERROR, "message": span.error},
        }
        if span.parent_id is not None:
            encoded["parentSpanId"] = span.parent_id
        return orjson.dumps(encoded)

    def request(self, resource: Resource, spans: Sequence[bytes]) -> bytes:
        scope_spans = {
            "scope": {"name": SCOPE, "version": SCOPE_VERSION},
            "spans": [orjson.Fragment(span) for span in spans],
        }
        encoded_resource = {"attributes": _json_pairs(resource)}
        return orjson.dumps({"resourceSpans": [{"resource": encoded_resource, "scopeSpans": [scope_spans]}]})


def _json_pairs(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _json_value(value)} for key, value in attributes.items() if value is not None]


def _json_value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, tuple | list):
        return {"arrayValue": {"values": [_json_value(item) for item in value]}}
    return {"stringValue": str(value)}


# -- Protobuf ------------------------------------------------------------------------------------------------------
# The messages of opentelemetry/proto/trace/v1/trace.proto. A field is a tag (number << 3 | wire type) and a value;
# strings, bytes and messages are prefixed with their length.

_TIMES = struct.Struct("<BQBQ")
_DOUBLE = struct.Struct("<Bd")
_SPAN_FLAGS = b"\x85\x01" + struct.pack("<I", _FLAGS)
_INT64 = 1 << 63


def _varint(number: int) -> bytes:
    if number < 0x80:
        return bytes((number,))
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _field(tag: int, content: bytes) -> bytes:
    return bytes((tag,)) + _varint(len(content)) + content


def _any_value(value: Any) -> bytes:
    if isinstance(value, str):
        return _field(0x0A, value.encode("utf-8", "replace"))
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        if not -_INT64 <= value < _INT64:
            raise ValueError(f"{value} has more than 64 bits")
        return b"\x18" + _varint(value % (1 << 64))
    if isinstance(value, float):
        return _DOUBLE.pack(0x21, value)
    if isinstance(value, tuple | list):
        return _field(0x2A, b"".join(_field(0x0A, _any_value(item)) for item in value))
    return _any_value(str(value))


@functools.lru_cache(maxsize=8192, typed=True)
def _attribute(key: str, value: Any) -> bytes:
    """An encoded attribute of a span or a resource; cached, because most attributes recur."""
    pair = _field(0x0A, key.encode()) + _field(0x12, _any_value(value))
    return _varint(len(pair)) + pair


@functools.lru_cache(maxsize=1024)
def _name_and_kind(name: str, kind: int) -> bytes:
    return _field(0x2A, name.encode("utf-8", "replace")) + bytes((0x30, kind))


class ProtobufEncoding:
    """OTLP's binary encoding."""

    content_type = "application/x-protobuf"

    def span(self, span: Span) -> bytes:
        context = span.context
        parts = [b"\x0a\x10", bytes.fromhex(context.trace_id), b"\x12\x08", bytes.fromhex(context.span_id)]
        if span.parent_id is not None:
            parts += (b"\x22\x08", bytes.fromhex(span.parent_id))
        parts += (_name_and_kind(span.name, span.kind), _TIMES.pack(0x39, span.start_ns, 0x41, span.end_ns))
        for key, value in span.attributes.items():
            if value is not None:
                parts += (b"\x4a", _attribute(key, tuple(value) if type(value) is list else value))
        status = b""
        if span.error is not None:
            status = _field(0x12, span.error.encode("utf-8", "replace")) + bytes((0x18, _STATUS_ERROR))
        parts += (_field(0x7A, status), _SPAN_FLAGS)
        return b"".join(parts)

    def request(self, resource: Resource, spans: Sequence[bytes]) -> bytes:
        resource_attributes = b"".join(b"\x0a" + _attribute(key, value) for key, value in resource.items())
        scope = _field(0x0A, SCOPE.encode()) + _field(0x12, SCOPE_VERSION.encode())
        scope_spans = _field(0x0A, scope) + b"".join(_field(0x12, span) for span in spans)
        return _field(0x0A, _field(0x0A, resource_attributes) + _field(0x12, scope_spans))


ENCODINGS: Mapping[str, Encoding] = {"http/protobuf": ProtobufEncoding(), "http/json": JsonEncoding()}


# -- Sending -------------------------------------------------------------------------------------------------------


class RefusedError(Exception):
    """The collector refused the spans for good."""


class Collector:
    """Posts spans to one endpoint over one connection, which is reopened when it breaks. Not thread-safe."""

    def __init__(self, url: str, *, headers: Mapping[str, str], encoding: Encoding, timeout_s: float) -> None:
        self.url, self._timeout_s, self._encoding = url, timeout_s, encoding
        self._headers = {**headers, "Content-Type": encoding.content_type}
        self._connection: http.client.HTTPConnection | None = None

    def post(self, resource: Resource, spans: Sequence[bytes], timeout_s: float | None = None) -> None:
        """Send ``spans``. Raises `RefusedError`, or `OSError` or `http.client.HTTPException` if a retry may help."""
        body = self._encoding.request(resource, spans)
        parts = urlsplit(self.url)
        connection = self._connection
        if connection is None:
            assert parts.hostname is not None
            if parts.scheme == "https":
                context = ssl.create_default_context()
                connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=10, context=context)
            else:
                connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
        self._connection = None  # set again only after a complete response
        connection.timeout = min(self._timeout_s, timeout_s or self._timeout_s)
        if connection.sock is not None:
            connection.sock.settimeout(connection.timeout)
        try:
            path = parts.path + (f"?{parts.query}" if parts.query else "")
            connection.request("POST", path, body, self._headers)
            response = connection.getresponse()
            body_start = response.read(2000)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        if response.status >= 300:
            problem = f"answered {response.status}: {body_start[:200].decode('utf-8', 'replace')}"
            raise ConnectionError(problem) if response.status in _RETRYABLE_STATUSES else RefusedError(problem)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class SpanExporter:
    """Implements `nemo_gym.http.telemetry.Exporter` with a thread. `close` ends it, at the latest at process exit."""

    def __init__(self, config: TracesConfig, resource: Resource) -> None:
        self._config, self._resource = config, resource
        self._encoding = ENCODINGS[config.protocol]
        self._collector = Collector(
            config.url, headers=config.headers, encoding=self._encoding, timeout_s=config.timeout_s
        )
        self._queue: deque[Span] = deque()
        self._limit = config.queue_spans
        self._wake = threading.Event()
        self._closing = False
        self._close_deadline: float | None = None
        """The deadline for the last spans once `close` was called, by the monotonic clock."""
        self._is_failing = False
        self._thread = threading.Thread(target=self._work, name="otlp", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def take(self, span: Span) -> None:
        queue = self._queue
        if len(queue) >= self._limit:
            DROPPED.add("queue_full")
            return
        queue.append(span)
        if len(queue) == BATCH_SPANS:
            self._wake.set()

    def close(self, timeout_s: float = AT_EXIT_S) -> None:
        """Send the remaining spans, for at most ``timeout_s`` seconds. Idempotent."""
        atexit.unregister(self.close)
        self._close_deadline = time.monotonic() + timeout_s
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while not self._closing:
            self._wake.wait(self._config.interval_s)
            self._wake.clear()
            self._send_all()
        self._send_all()
        self._collector.close()

    def _send_all(self) -> None:
        while self._queue and not self._is_late():
            if batch := [*self._encode(min(len(self._queue), BATCH_SPANS))]:
                self._send(batch)

    def _encode(self, count: int) -> Iterator[bytes]:
        for _ in range(count):
            try:
                yield self._encoding.span(self._queue.popleft())
            except Exception:  # noqa: BLE001 - a bad span must not stop the exporter
                DROPPED.add("refused")

    def _send(self, batch: Sequence[bytes]) -> None:
        for failures in range(1, TRIES + 1):
            try:
                self._collector.post(self._resource, batch, self._remaining_s())
            except RefusedError as error:
                self._drop(batch, "refused", error)
                return
            except (OSError, http.client.HTTPException) as error:
                if failures == TRIES or self._closing:
                    self._drop(batch, "unreachable", error)
                    return
                self._wake.wait(pause_after(failures, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S))
            else:
                EXPORTED.add(amount=len(batch))
                if self._is_failing:
                    self._is_failing = False
                    log.info("the trace collector accepts spans again", endpoint=self._collector.url)
                return

    def _drop(self, batch: Sequence[bytes], why: str, error: Exception) -> None:
        DROPPED.add(why, amount=len(batch))
        if not self._is_failing:  # log once, not for every batch
            self._is_failing = True
            error_text = f"{type(error).__name__}: {error}"[:300]
            log.warning(
                "the trace collector does not accept spans; dropping them",
                endpoint=self._collector.url,
                error=error_text,
            )

    def _remaining_s(self) -> float | None:
        return None if self._close_deadline is None else max(self._close_deadline - time.monotonic(), 0.1)

    def _is_late(self) -> bool:
        return self._close_deadline is not None and time.monotonic() > self._close_deadline


_ROLES = (Role.PIPELINE, Role.ENVIRONMENT, Role.MODEL, Role.OPERATOR)
"""The roles that may read a server's metrics. Agents may not, because metrics cover other agents' rollouts."""


def require_scraper(request: Request, caller: Caller | None, token: str | None, *, secured: bool) -> None:
    """Raise `CredentialError` or `RoleError` unless the sender may read metrics: it needs the run's token as bearer,
    or a credential of any role but ``agent``."""
    bearer_token = request.headers.get("authorization", "").removeprefix("Bearer ")
    if token is not None and hmac.compare_digest(bearer_token.encode(), token.encode()):
        return
    if caller is not None:
        caller.require(*_ROLES, route=METRICS_PATH)
    elif secured:
        raise CredentialError(
            f"{METRICS_PATH} needs the run's metrics token as bearer (run_dir/metrics.token), or the header"
            f" {CREDENTIAL_HEADER}"
        )


def start_traces(config: ObservabilityConfig, *, server: str, run_id: str, **resource: str) -> None:
    """Export the spans of this process from now on, if the configuration turns traces on."""
    if config.traces is None:
        return
    from importlib.metadata import version

    attributes = {
        "service.name": server,
        "service.namespace": "nemo_gym",
        "service.version": version("nemo-gym-suite"),
        "run_id": run_id,
        **resource,
    }
    telemetry.install(SpanExporter(config.traces, attributes), config.traces.sample)


def start_server_telemetry(launch: ServerLaunch) -> None:
    """Start telemetry for a server process. Call it before the server accepts requests."""
    start_traces(ObservabilityConfig.of(launch.config), server=launch.instance, run_id=launch.run_id)


# -- Log lines -----------------------------------------------------------------------------------------------------


def configure_server_logging(launch: ServerLaunch) -> None:
    """Set up structlog and the standard library's logging for this process."""
    secrets = secret_values(launch.config)
    if launch.credentials is not None:
        secrets |= {launch.credentials.audience_key.hex(), *launch.credentials.outgoing.values()}
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        name_rollout,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _ScrubbingFormatter(
            secrets,
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[
                partial(_identify, launch),
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(default=str),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)


def configure_plain_logging() -> None:
    """Set up logging for a server started by hand: readable lines, and tracebacks without the values of local
    variables, which may be credentials and whose formatting can block a server for seconds."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            name_rollout,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S"),
            structlog.dev.ConsoleRenderer(
                colors=sys.stdout.isatty(), exception_formatter=structlog.dev.plain_traceback
            ),
        ]
    )


def _identify(launch: ServerLaunch, logger: Any, name: str, event: Any) -> Any:
    event.setdefault("server", launch.instance)
    event.setdefault("run_id", launch.run_id)
    if is_on() and (span := current()) is not None:
        event.setdefault("trace_id", span.trace_id)
        event.setdefault("span_id", span.span_id)
    return event


class _ScrubbingFormatter(structlog.stdlib.ProcessorFormatter):
    def __init__(self, secrets: Collection[str], **options: Any) -> None:
        super().__init__(**options)
        self._secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        return redact_tokens(scrub(super().format(record), self._secrets))
