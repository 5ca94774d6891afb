"""An OpenTelemetry collector on loopback, which reads what it gets with OpenTelemetry's own messages."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Got:
    """One span that came, with its process's resource."""

    server: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    attributes: Mapping[str, Any]
    failed: bool
    start_ns: int
    end_ns: int


@dataclass
class CollectorDouble:
    url: str = ""
    status: int = 200
    """What requests are answered with."""
    hang: threading.Event | None = None
    """Answers wait for it."""
    spans: list[Got] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)

    def take(self, body: bytes, headers: Mapping[str, str]) -> None:
        self.headers.append(headers)
        if headers["Content-Type"] == "application/json":
            request = json.loads(body)
        else:
            message = ExportTraceServiceRequest()
            message.ParseFromString(body)
            request = _hexadecimal(MessageToDict(message))
        self.spans += spans_in(request)


def spans_in(request: Mapping[str, Any]) -> Iterator[Got]:
    """The spans of an OTLP/JSON export request."""
    for of_process in request["resourceSpans"]:
        resource = _plain(of_process["resource"]["attributes"])
        for scope in of_process["scopeSpans"]:
            for span in scope["spans"]:
                kind = span["kind"]
                names = ("UNSPECIFIED", "INTERNAL", "SERVER", "CLIENT")
                yield Got(
                    resource["service.name"],
                    span["name"],
                    span["traceId"],
                    span["spanId"],
                    span.get("parentSpanId", ""),
                    kind if isinstance(kind, int) else names.index(kind.removeprefix("SPAN_KIND_")),
                    _plain(span.get("attributes", ())),
                    span.get("status", {}).get("code") in (2, "STATUS_CODE_ERROR"),
                    int(span["startTimeUnixNano"]),
                    int(span["endTimeUnixNano"]),
                )


def _plain(pairs: Any) -> dict[str, Any]:
    def plain(value: Mapping[str, Any]) -> Any:
        ((kind, content),) = value.items()
        if kind == "intValue":
            return int(content)
        return [plain(item) for item in content["values"]] if kind == "arrayValue" else content

    return {pair["key"]: plain(pair["value"]) for pair in pairs}


def _hexadecimal(request: dict[str, Any]) -> dict[str, Any]:
    """Protobuf's JSON has bytes as base64; OTLP's has ids as hexadecimal digits."""
    import base64

    for of_process in request["resourceSpans"]:
        for scope in of_process["scopeSpans"]:
            for span in scope["spans"]:
                for key in ("traceId", "spanId", "parentSpanId"):
                    if key in span:
                        span[key] = base64.b64decode(span[key]).hex()
    return request


@contextmanager
def collecting() -> Iterator[CollectorDouble]:
    double = CollectorDouble()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if double.hang is not None:
                double.hang.wait(60)
            if double.status == 200:
                double.take(body, dict(self.headers))
            self.send_response(double.status)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    double.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield double
    finally:
        if double.hang is not None:
            double.hang.set()
        server.shutdown()
        server.server_close()
        thread.join()
