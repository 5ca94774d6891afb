"""Spans: what they say, how they are encoded, and that no collector can harm whoever makes them."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from typing import Any

import pytest
import structlog
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext as SdkContext
from opentelemetry.trace import SpanKind as SdkKind
from opentelemetry.trace import Status, StatusCode, TraceFlags

from nemo_gym.config.check import check_everything
from nemo_gym.config.compose import compose
from nemo_gym.config.launch import ServerLaunch
from nemo_gym.config.observability import ObservabilityConfig, TracesConfig
from nemo_gym.contract.errors import ConfigError
from nemo_gym.http import observability, telemetry
from nemo_gym.http.observability import ENCODINGS, SpanExporter, configure_server_logging
from nemo_gym.http.telemetry import MetricsUnavailableError, Span, SpanContext, SpanKind, attempt_context, render, step
from tests.telemetry.collector import collecting, spans_in

ATTEMPT = {"run_id": "r", "rollout_id": "r.3-0", "attempt": 2}
ATTRIBUTES: dict[str, Any] = {
    **{"rollout_id": "r.3-0", "attempt": 2, "reward": 0.5, "valid": True, "failed": False, "reasons": ("a", "b")},
    **{"empty": "", "none": 0, "negative": -7, "large": 1 << 40, "city": "Jyväskylä", "long": "x" * 300},
}
RESOURCE = {"service.name": "env", "run_id": "r"}
DEADLINE_S = 60.0


class Kept:
    """An exporter that keeps what it takes."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def take(self, span: Span) -> None:
        self.spans.append(span)

    def close(self) -> None: ...


@pytest.fixture
def kept() -> Any:
    exporter = Kept()
    telemetry.install(exporter)
    yield exporter
    telemetry.install(None)


def span(name: str = "verify", *, error: str | None = None) -> Span:
    context = SpanContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
    start_ns = 1_700_000_000_000_000_000
    return Span(name, context, "00f067aa0ba902b7", SpanKind.SERVER, start_ns, ATTRIBUTES, start_ns + 5, error)


def sdk_span(ours: Span) -> ReadableSpan:
    """The same as OpenTelemetry's own."""
    trace = int(ours.context.trace_id, 16)
    flags = TraceFlags(TraceFlags.SAMPLED)
    assert ours.parent_id is not None
    status = Status(StatusCode.UNSET) if ours.error is None else Status(StatusCode.ERROR, ours.error)
    return ReadableSpan(
        name=ours.name,
        context=SdkContext(trace, int(ours.context.span_id, 16), is_remote=False, trace_flags=flags),
        parent=SdkContext(trace, int(ours.parent_id, 16), is_remote=False, trace_flags=flags),
        resource=Resource(RESOURCE),
        attributes=ours.attributes,
        kind=SdkKind.SERVER,
        start_time=ours.start_ns,
        end_time=ours.end_ns,
        status=status,
        instrumentation_scope=InstrumentationScope("nemo_gym", observability.version("nemo-gym-suite")),
    )


@pytest.mark.parametrize("error", [None, "the grader hung"])
def test_spans_are_encoded_as_opentelemetrys_exporter_encodes_them(error: str | None) -> None:
    ours = ExportTraceServiceRequest()
    encoding = ENCODINGS["http/protobuf"]
    ours.ParseFromString(encoding.request(RESOURCE, [encoding.span(span(error=error))]))
    theirs = encode_spans([sdk_span(span(error=error))])
    assert ours == theirs


def test_json_says_what_protobuf_says() -> None:
    with collecting() as collector:
        for protocol in ("http/protobuf", "http/json"):
            config = TracesConfig(endpoint=collector.url, protocol=protocol, headers={"X-Key": "k"})  # type: ignore[arg-type]
            exporter = SpanExporter(config, RESOURCE)
            exporter.take(span(error="it hung"))
            exporter.close(DEADLINE_S)
        first, second = collector.spans
        assert first == second
        assert [headers["X-Key"] for headers in collector.headers] == ["k", "k"]
    assert (first.server, first.kind, first.failed) == ("env", 2, True)
    assert first.attributes == {**ATTRIBUTES, "reasons": ["a", "b"]}


def test_steps_of_an_attempt_are_one_trace_below_its_root(kept: Kept) -> None:
    root = attempt_context(ATTEMPT)
    with step("act", parent=root), step("model_call", title="chat m", **{"gen_ai.usage.input_tokens": 3}) as calling:
        calling.set(done=True)
        headers: dict[str, str] = {}
        telemetry.inject(headers)
    inner, outer = kept.spans
    assert root is not None
    assert inner.name == "chat m"
    assert inner.attributes == {"gen_ai.usage.input_tokens": 3, "done": True, "rollout_id": None}
    assert (outer.parent_id, inner.parent_id) == (root.span_id, outer.context.span_id)
    assert {inner.context.trace_id, outer.context.trace_id} == {root.trace_id}
    assert headers == {"traceparent": f"00-{root.trace_id}-{inner.context.span_id}-01"}


def test_a_header_counts_only_for_a_span_of_the_same_attempt(kept: Kept) -> None:
    root = attempt_context(ATTEMPT)
    assert root is not None
    own = f"00-{root.trace_id}-{'1' * 16}-01"
    assert attempt_context(ATTEMPT, own) == SpanContext(root.trace_id, "1" * 16)
    for forged in (f"00-{'2' * 32}-{'1' * 16}-01", "00-zz", "", f"00-{root.trace_id}-{'1' * 16}-00", None):
        assert attempt_context(ATTEMPT, forged) == root


def test_a_share_of_the_attempts_is_traced_and_servers_agree_which() -> None:
    telemetry.install(Kept(), sample=0.25)
    attempts = [{**ATTEMPT, "rollout_id": f"r.{number}-0"} for number in range(2000)]
    first = [attempt_context(each) is not None for each in attempts]
    again = [attempt_context(each) is not None for each in attempts]
    telemetry.install(None)
    assert first == again
    assert 400 < sum(first) < 600


def test_a_step_that_fails_says_so_in_its_span_and_its_count(kept: Kept) -> None:
    with pytest.raises(ZeroDivisionError), step("harvest", parent=attempt_context(ATTEMPT)):
        1 / 0  # noqa: B018
    assert kept.spans[0].error == "division by zero"
    assert b'nemo_gym_step_seconds_count{outcome="ZeroDivisionError",step="harvest"} 1.0' in render()


def test_log_lines_of_a_server_name_the_span(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    root, handlers, level = logging.getLogger(), logging.getLogger().handlers[:], logging.getLogger().level
    configuration = structlog.get_config()
    try:
        configure_server_logging(ServerLaunch(instance="env", config={}, run_id="r"))
        with step("verify", parent=attempt_context(ATTEMPT)):
            structlog.get_logger("inside").info("inside")
        structlog.get_logger("outside").info("outside")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        structlog.configure(**configuration)
    inside, outside = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    (made,) = kept.spans
    assert (inside["trace_id"], inside["span_id"]) == (made.context.trace_id, made.context.span_id)
    assert (inside["server"], inside["run_id"]) == ("env", "r")
    assert "trace_id" not in outside


def test_nothing_is_a_span_where_traces_are_off() -> None:
    assert attempt_context(ATTEMPT) is None
    headers: dict[str, str] = {}
    with telemetry.within(SpanContext("1" * 32, "1" * 16)), step("seed") as seeding:
        telemetry.inject(headers)
    assert (seeding.span, headers) == (None, {})


def lost(why: str) -> float:
    return observability.DROPPED.values.get((why,), 0.0)


def until(condition: Any) -> None:
    give_up = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_a_dead_collector_costs_spans_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observability, "FIRST_PAUSE_S", 0.01)
    before, full = lost("unreachable"), lost("queue_full")
    exporter = SpanExporter(TracesConfig(endpoint="http://127.0.0.1:9", interval_s=0.01, queue_spans=100), RESOURCE)
    start = time.perf_counter()
    for _ in range(1000):
        exporter.take(span())
    assert time.perf_counter() - start < DEADLINE_S / 2
    until(lambda: lost("unreachable") > before)
    exporter.close()
    assert lost("unreachable") - before + lost("queue_full") - full == 1000


def test_a_hanging_collector_keeps_nobody_and_no_more_than_the_queue_holds() -> None:
    full = lost("queue_full")
    with collecting() as collector:
        collector.hang = threading.Event()
        exporter = SpanExporter(TracesConfig(endpoint=collector.url, interval_s=0.01, queue_spans=50), RESOURCE)
        exporter.take(span())
        until(lambda: not exporter._queue)  # the thread hangs in a request now
        for _ in range(80):
            exporter.take(span())
        assert (len(exporter._queue), lost("queue_full") - full) == (50, 30)
        start = time.monotonic()
        exporter.close(0.2)
        assert time.monotonic() - start < DEADLINE_S / 2


def test_a_collector_that_refuses_is_not_asked_again_and_one_that_is_busy_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(observability, "FIRST_PAUSE_S", 0.01)
    refused = lost("refused")
    with collecting() as collector:
        collector.status = 400
        exporter = SpanExporter(TracesConfig(endpoint=collector.url, interval_s=0.01), RESOURCE)
        exporter.take(span())
        until(lambda: lost("refused") > refused)
        collector.status = 503
        exporter.take(span("late"))
        until(lambda: not exporter._queue)
        collector.status = 200
        until(lambda: collector.spans)
        exporter.close()
        assert [got.name for got in collector.spans] == ["late"]


def test_values_that_cannot_be_encoded_end_nothing() -> None:
    refused = lost("refused")
    with collecting() as collector:
        exporter = SpanExporter(TracesConfig(endpoint=collector.url, interval_s=0.01), RESOURCE)
        broken = span()
        broken.attributes = {"number": 1 << 80}
        exporter.take(broken)
        exporter.take(span("next"))
        exporter.close(DEADLINE_S)
        assert lost("refused") == refused + 1
        assert [got.name for got in collector.spans] == ["next"]


def test_json_of_a_root_has_no_parent() -> None:
    root = span()
    root.parent_id = None
    encoding = ENCODINGS["http/json"]
    (got,) = spans_in(json.loads(encoding.request(RESOURCE, [encoding.span(root)])))
    assert got.parent_id == ""


# ---------------------------------------------------------------------------------------------------- bad input

WORDS = ["agent=simple_agent", "environment=example_mcp_weather", "model=scripted"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("observability.trace.endpoint=x", "unknown key 'observability.trace' (did you mean 'traces'?)"),
        ("observability.traces.endpoint=127.0.0.1:4318", "observability.traces.endpoint: must be a URL"),
        ("observability.traces.endpint=http://h:1", "unknown key 'observability.traces.endpint'"),
        ("observability.metrics_port=99999", "observability.metrics_port"),
    ],
)
def test_a_wrong_block_is_refused_before_anything_starts(word: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_everything(compose([*WORDS, word]))
    assert said in refused.value.message


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("prometheus_client")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MetricsUnavailableError, match=r"pip install 'nemo-gym-suite\[metrics\]'"):
        render()


def test_an_endpoint_with_a_path_is_used_as_it_is() -> None:
    given = ("http://h:4318", "http://h:4318/", "https://h/otlp/v1/traces")
    urls = [ObservabilityConfig.of({"observability": {"traces": {"endpoint": each}}}).traces for each in given]
    assert [each and each.url for each in urls] == [
        "http://h:4318/v1/traces",
        "http://h:4318/v1/traces",
        "https://h/otlp/v1/traces",
    ]
