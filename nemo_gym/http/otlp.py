"""Spans as OTLP, and a thread that posts them to a collector. Imported where traces are on, and nowhere else.

OpenTelemetry's own SDK makes, keeps and encodes a span in 33 µs of CPU, this in 10: a rollout without work has about
fifteen, and may become 3 % slower at most (`campaigns.bench.telemetry`). The messages are OpenTelemetry's
(``opentelemetry-proto``), and tests hold them to what the SDK's exporter sends.

A collector that is slow, gone or refuses harms no rollout: `take` only appends to a bounded queue, requests are made
by a thread of their own, and what does not fit is dropped and counted.
"""

from __future__ import annotations

import atexit
import http.client
import ssl
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Literal
from urllib.parse import urlsplit

import orjson
import structlog

from nemo_gym._util.backoff import pause_after
from nemo_gym.config.observability import TracesConfig
from nemo_gym.http.metrics import Counter
from nemo_gym.http.tracing import Span

log = structlog.get_logger(__name__)

SCOPE = "nemo_gym"
BATCH_SPANS = 512
TRIES = 4
"""Of one batch; by then others wait behind it."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 15.0
AT_EXIT_S = 2.0
"""How long a process that ends waits for its last spans to be taken."""
_LATER = frozenset({408, 429, 502, 503, 504})
"""Statuses after which the same may be sent again."""

EXPORTED = Counter("nemo_gym_trace_spans_exported", "Spans that the collector took")
DROPPED = Counter(
    "nemo_gym_trace_spans_dropped", "Spans that were lost, by why: queue_full, refused, unreachable", ("why",)
)

_FLAGS = 0x100
"""Whether a span's parent is another process's is told, and is not so; as the SDK does."""

Resource = Mapping[str, Any]
Encode = Literal["http/protobuf", "http/json"]


def as_json(resource: Resource, spans: Sequence[Span]) -> dict[str, Any]:
    """An OTLP/JSON export request as plain data: ids in hexadecimal, 64-bit integers as strings."""
    scope = {"name": SCOPE, "version": version("nemo-gym-suite")}
    found = [_span_json(span) for span in spans]
    return {
        "resourceSpans": [
            {"resource": {"attributes": _pairs(resource)}, "scopeSpans": [{"scope": scope, "spans": found}]}
        ]
    }


def _span_json(span: Span) -> dict[str, Any]:
    encoded: dict[str, Any] = {
        "traceId": span.context.trace_id,
        "spanId": span.context.span_id,
        "name": span.name,
        "kind": int(span.kind),
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _pairs(span.attributes),
        "flags": _FLAGS,
        "status": {} if span.error is None else {"code": 2, "message": span.error},
    }
    if span.parent_id is not None:
        encoded["parentSpanId"] = span.parent_id
    return encoded


def _pairs(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, tuple | list):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": str(value)}


def as_protobuf(resource: Resource, spans: Sequence[Span]) -> bytes:
    """The same as a serialized ``ExportTraceServiceRequest``. Needs the package ``opentelemetry-proto``."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
    from opentelemetry.proto.resource.v1 import resource_pb2
    from opentelemetry.proto.trace.v1 import trace_pb2

    def value(given: Any) -> Any:
        if isinstance(given, str):
            return AnyValue(string_value=given)
        if isinstance(given, bool):
            return AnyValue(bool_value=given)
        if isinstance(given, int):
            return AnyValue(int_value=given)
        if isinstance(given, float):
            return AnyValue(double_value=given)
        if isinstance(given, tuple | list):
            return AnyValue(array_value=ArrayValue(values=[value(item) for item in given]))
        return AnyValue(string_value=str(given))

    def pairs(attributes: Mapping[str, Any]) -> list[Any]:
        return [KeyValue(key=key, value=value(given)) for key, given in attributes.items() if given is not None]

    failed = trace_pb2.Status.STATUS_CODE_ERROR
    encoded = [
        trace_pb2.Span(
            trace_id=bytes.fromhex(span.context.trace_id),
            span_id=bytes.fromhex(span.context.span_id),
            parent_span_id=bytes.fromhex(span.parent_id) if span.parent_id else b"",
            name=span.name,
            kind=int(span.kind),  # type: ignore[arg-type]  # the generated enum's numbers are these
            start_time_unix_nano=span.start_ns,
            end_time_unix_nano=span.end_ns,
            attributes=pairs(span.attributes),
            flags=_FLAGS,
            status=trace_pb2.Status() if span.error is None else trace_pb2.Status(code=failed, message=span.error),
        )
        for span in spans
    ]
    scope = InstrumentationScope(name=SCOPE, version=version("nemo-gym-suite"))
    request = ExportTraceServiceRequest(
        resource_spans=[
            trace_pb2.ResourceSpans(
                resource=resource_pb2.Resource(attributes=pairs(resource)),
                scope_spans=[trace_pb2.ScopeSpans(scope=scope, spans=encoded)],
            )
        ]
    )
    return bytes(request.SerializeToString())


class RefusedError(Exception):
    """The collector answered, and will not take this."""


class Collector:
    """Posts spans to one endpoint, on one connection that is made again when it broke. Not for several threads."""

    def __init__(self, url: str, *, headers: Mapping[str, str], protocol: Encode, timeout_s: float) -> None:
        self.url, self._timeout_s = url, timeout_s
        self._protocol = protocol
        kind = "application/x-protobuf" if protocol == "http/protobuf" else "application/json"
        self._headers = {**headers, "Content-Type": kind}
        self._connection: http.client.HTTPConnection | None = None

    def post(self, resource: Resource, spans: Sequence[Span], timeout_s: float | None = None) -> None:
        """Raises `RefusedError`, and `OSError` or `http.client.HTTPException` where another try may help."""
        encode = as_protobuf if self._protocol == "http/protobuf" else lambda *given: orjson.dumps(as_json(*given))
        body = encode(resource, spans)
        parts = urlsplit(self.url)
        connection = self._connection
        if connection is None:
            assert parts.hostname is not None
            if parts.scheme == "https":
                context = ssl.create_default_context()
                connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=10, context=context)
            else:
                connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
        self._connection = None  # kept only after a whole answer
        connection.timeout = min(self._timeout_s, timeout_s or self._timeout_s)
        if connection.sock is not None:
            connection.sock.settimeout(connection.timeout)
        try:
            path = parts.path + (f"?{parts.query}" if parts.query else "")
            connection.request("POST", path, body, self._headers)
            response = connection.getresponse()
            said = response.read(2000)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        if response.status >= 300:
            what = f"answered {response.status}: {said[:200].decode('utf-8', 'replace')}"
            raise ConnectionError(what) if response.status in _LATER else RefusedError(what)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class SpanExporter:
    """See `nemo_gym.http.tracing.Exporter`. `close` ends it, at the latest with the process."""

    def __init__(self, config: TracesConfig, resource: Resource) -> None:
        self._config, self._resource = config, resource
        self._collector = Collector(
            config.url, headers=config.headers, protocol=config.protocol, timeout_s=config.timeout_s
        )
        self._queue: deque[Span] = deque()
        self._limit = config.queue_spans
        self._wake = threading.Event()
        self._closing = False
        self._until: float | None = None
        """When the process wants to end, by the monotonic clock."""
        self._is_out = False
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
        """Send what is left, for at most ``timeout_s`` seconds. Idempotent."""
        atexit.unregister(self.close)
        self._until = time.monotonic() + timeout_s
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
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), BATCH_SPANS))]
            self._send(batch)

    def _send(self, batch: Sequence[Span]) -> None:
        for failures in range(1, TRIES + 1):
            try:
                self._collector.post(self._resource, batch, self._left_s())
            except RefusedError as error:
                self._lost(batch, "refused", error)
                return
            except (OSError, http.client.HTTPException) as error:
                if failures == TRIES or self._closing:
                    self._lost(batch, "unreachable", error)
                    return
                self._wake.wait(pause_after(failures, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S))
            except Exception as error:  # noqa: BLE001 - a span that cannot be encoded ends neither thread nor run
                self._lost(batch, "refused", error)
                return
            else:
                EXPORTED.add(amount=len(batch))
                if self._is_out:
                    self._is_out = False
                    log.info("traces are taken again", endpoint=self._collector.url)
                return

    def _lost(self, batch: Sequence[Span], why: str, error: Exception) -> None:
        DROPPED.add(why, amount=len(batch))
        if not self._is_out:  # said once, not with every batch
            self._is_out = True
            said = f"{type(error).__name__}: {error}"[:300]
            log.warning("traces are not taken, and dropped", endpoint=self._collector.url, error=said)

    def _left_s(self) -> float | None:
        return None if self._until is None else max(self._until - time.monotonic(), 0.1)

    def _is_late(self) -> bool:
        return self._until is not None and time.monotonic() > self._until
