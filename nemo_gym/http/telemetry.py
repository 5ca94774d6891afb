"""How the suite observes a rollout: `step` around anything that takes time, counters, and the current rollout's id.

    with step("verify", server=name) as verifying:
        ...
        verifying.set(reward=1.0)

``/metrics`` counts every step. With traces on, a step is also a span, and calls made inside it pass its context to
other servers as W3C ``traceparent``. With traces off, nothing of OpenTelemetry is imported, and a step costs only two
clock reads.

All spans of an attempt belong to one trace, whose id is derived from a digest of the attempt's identity. A server that
knows its attempt (from a session or a token) therefore finds the trace without a header, even after a restart. It also
means that an agent in a box, which sends no header and could forge one, cannot choose where its calls appear.

Counters and histograms are plain numbers, changed on the event loop; the first scrape imports ``prometheus-client``,
which formats them. Values that can be read at any time (jobs in a queue, engines that are up) come from sources, which
each scrape calls. Counting one step takes about 1 µs this way, and 3 µs with the package's own objects, which take a
lock for each bucket. fern/pages/metrics.md lists every name.

A request also names its rollout and the replicas that serve it. All requests of a rollout to one server go to the same
replica, which holds its session. The pipeline chooses the least busy replica and names it in a header
(``X-NeMo-Gym-Replicas: math=1``) by its number in the configuration, so a header cannot name a replica that is not
configured. For callers outside a pipeline, the rollout's id decides which replica is tried first. A replica that
refused a connection is tried last for a while.
"""

from __future__ import annotations

import asyncio
import collections
import hashlib
import random
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self, TypeVar
from urllib.parse import quote, unquote

from pydantic import BaseModel

from nemo_gym.config_types import ROLLOUT_PATH_PREFIX
from nemo_gym.contract.errors import NemoGymError
from nemo_gym.contract.verdict import ATTEMPT_INDEX_KEY, ROLLOUT_ID_KEY, ROLLOUT_INDEX_KEY, TASK_INDEX_KEY

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = [
    "ROLLOUT_ID_HEADER",
    "ROLLOUT_ID_PATTERN",
    "ROLLOUT_PATH_PREFIX",
    "TOKEN_CAPTURE_PATH_SEGMENT",
    "apply_rollout_prefix",
    "current_rollout_id",
    "maybe_rollout_id_from_run_body",
    "rollout_context",
    "rollout_path_prefix",
]

TOKEN_CAPTURE_PATH_SEGMENT = "training-token-capture"
ROLLOUT_ID_PATTERN = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
ROLLOUT_ID_HEADER = "X-NeMo-Gym-Rollout-Id"

T = TypeVar("T")
_rollout_id: ContextVar[str | None] = ContextVar("nemo_gym_rollout_id", default=None)


@contextmanager
def bound(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set ``variable`` to ``value`` until the block ends."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


def current_rollout_id() -> str | None:
    return _rollout_id.get()


def rollout_context(rollout_id: str | None) -> AbstractContextManager[None]:
    """Attribute everything called and logged inside the block to ``rollout_id``."""
    return bound(_rollout_id, rollout_id)


def name_rollout(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add the current rollout's id to a log line; a structlog processor.

    Binding the id to structlog's own context instead costs every request 8 µs, whether it logs or not.
    """
    if (rollout_id := _rollout_id.get()) is not None:
        event.setdefault("rollout_id", rollout_id)
    return event


def maybe_rollout_id_from_run_body(body: BaseModel | Mapping[str, Any] | None) -> str | None:
    """The rollout id in a body: ``_ng_rollout_id``, else ``<task index>-<rollout index>``; ``None`` without either. A
    retry has ``-a<n>`` appended. Raises ``ValueError`` for an explicit id with characters unsafe in a URL path.
    """
    if body is None or not isinstance(body, BaseModel | Mapping):
        return None

    def read(key: str) -> Any:
        return body.get(key) if isinstance(body, Mapping) else getattr(body, key, None)

    rollout_id = read(ROLLOUT_ID_KEY)
    if rollout_id is None and isinstance(body, BaseModel):
        rollout_id = read("capture_rollout_id")  # of a `BaseRunRequest`
    if rollout_id is None:
        task, sample = read(TASK_INDEX_KEY), read(ROLLOUT_INDEX_KEY)
        if task is None or sample is None:
            return None
        rollout_id = f"{task}-{sample}"
    elif not isinstance(rollout_id, str) or not ROLLOUT_ID_PATTERN.match(rollout_id):
        raise ValueError(
            f"{ROLLOUT_ID_KEY} is {rollout_id!r}; it must start with a letter or digit and hold only letters, digits,"
            " '.', '_' and '-'"
        )
    attempt = read(ATTEMPT_INDEX_KEY)
    return f"{rollout_id}-a{int(attempt)}" if attempt is not None and int(attempt) > 0 else rollout_id


def rollout_path_prefix(rollout_id: str | None, *, token_capture: bool = False) -> str:
    """The path prefix that names ``rollout_id``, or an empty string."""
    if not rollout_id:
        return ""
    prefix = f"/{ROLLOUT_PATH_PREFIX}/{rollout_id}"
    return f"{prefix}/{TOKEN_CAPTURE_PATH_SEGMENT}" if token_capture else prefix


def apply_rollout_prefix(base_url: str, rollout_id: str | None, *, token_capture: bool = False) -> str:
    """Return ``base_url`` with the rollout's path prefix appended."""
    return base_url.rstrip("/") + rollout_path_prefix(rollout_id, token_capture=token_capture)


REPLICAS_HEADER = "X-NeMo-Gym-Replicas"
LEFT_OUT_S = 15.0
"""How long a replica that could not be connected to is tried last."""
MAX_HEADER_CHARS = 4096
_ENTRY = re.compile(r"^([A-Za-z0-9_.~%-]+)=(\d{1,4})$")

_current_replicas: ContextVar[Mapping[str, int]] = ContextVar("nemo_gym_replicas", default={})  # noqa: B039 - never changed


def current_replicas() -> Mapping[str, int]:
    """Server instance → replica number, as chosen by the sender of the current request."""
    return _current_replicas.get()


def replica_context(replicas: Mapping[str, int]) -> AbstractContextManager[None]:
    """Send requests made inside the block to these replicas, and name the replicas in their headers."""
    return bound(_current_replicas, {**_current_replicas.get(), **replicas})


def encode_replicas(replicas: Mapping[str, int]) -> str:
    return ",".join(f"{quote(name, safe='')}={number}" for name, number in replicas.items())


def decode_replicas(header: str) -> dict[str, int]:
    """Parse the replicas header. Unreadable entries are skipped: the header only tells where sessions are."""
    replicas: dict[str, int] = {}
    for entry in header[:MAX_HEADER_CHARS].split(","):
        if match := _ENTRY.match(entry.strip()):
            replicas[unquote(match[1])] = int(match[2])
    return replicas


class Chooser:
    """One process's view of the replicas it calls: its open requests to each, and which are unreachable."""

    def __init__(self) -> None:
        self._busy: collections.Counter[str] = collections.Counter()
        self._left_out_until: dict[str, float] = {}
        self._turn = count()

    def order(self, urls: Sequence[str], key: str | None = None) -> list[int]:
        """The replicas' numbers, best first. With a ``key`` the order depends on it alone; without one, the least busy
        come first. Unreachable replicas come last either way."""
        if key is None:
            turn = next(self._turn)
            ranked = sorted(range(len(urls)), key=lambda i: (self._busy[urls[i]], (i - turn) % len(urls)))
        else:
            ranked = sorted(range(len(urls)), key=lambda i: hashlib.sha256(f"{key}\n{urls[i]}".encode()).digest())
        return sorted(ranked, key=lambda i: self.is_left_out(urls[i]))

    def is_left_out(self, url: str) -> bool:
        return self._left_out_until.get(url, 0.0) > time.monotonic()

    def unreachable(self, url: str) -> None:
        """Record that the replica at ``url`` refused a connection."""
        self._left_out_until[url] = time.monotonic() + LEFT_OUT_S

    @contextmanager
    def busy(self, url: str) -> Iterator[None]:
        """Count a request to ``url`` as open during the block."""
        self._busy[url] += 1
        try:
            yield
        finally:
            self._busy[url] -= 1


METRICS_PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)
"""Histogram bounds: from a response served from memory to an agent that runs for hours."""


class MetricsUnavailableError(NemoGymError):
    """The package that formats metrics is not installed."""

    code = "metrics_unavailable"
    status = 501


Labels = tuple[str, ...]


class Counter:
    """A number that only grows. Without labels it is exported from the start, else from each label value's first
    count."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str] = ()) -> None:
        self.name, self.documentation, self.labels = name, documentation, tuple(labels)
        self.values: dict[Labels, float] = {} if labels else {(): 0.0}
        _METRICS.append(self)

    def add(self, *labels: str, amount: float = 1.0) -> None:
        self.values[labels] = self.values.get(labels, 0.0) + amount


class Histogram:
    """Durations in seconds."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str] = ()) -> None:
        self.name, self.documentation, self.labels = name, documentation, tuple(labels)
        self.values: dict[Labels, list[float]] = {}
        """By labels: the count of each bucket, the count beyond the last bound, and the sum of all seconds."""
        _METRICS.append(self)

    def observe(self, seconds: float, *labels: str) -> None:
        counts = self.values.get(labels)
        if counts is None:
            counts = self.values[labels] = [0.0] * (len(BUCKETS_S) + 2)
        counts[bisect_left(BUCKETS_S, seconds)] += 1
        counts[-1] += seconds


@dataclass(frozen=True, slots=True)
class Reading:
    """A metric whose value is looked up at each scrape."""

    name: str
    documentation: str
    samples: Sequence[tuple[dict[str, str], float]]
    kind: Literal["gauge", "counter"] = "gauge"


Source = Callable[[], Iterable[Reading]]

_METRICS: list[Counter | Histogram] = []
_SOURCES: dict[object, Source] = {}


def add_source(owner: object, source: Source) -> None:
    """Call ``source`` at each scrape of this process, until `remove_source`."""
    _SOURCES[owner] = source


def remove_source(owner: object) -> None:
    _SOURCES.pop(owner, None)


def render(readings: Iterable[Reading] = ()) -> bytes:
    """Return this process's metrics and ``readings`` as text. Raises `MetricsUnavailableError`."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.registry import Collector
    except ImportError as error:
        raise MetricsUnavailableError(
            f"{METRICS_PATH} needs the package prometheus-client: pip install 'nemo-gym-suite[metrics]'"
        ) from error

    class All(Collector):
        def collect(self) -> Iterator[Metric]:
            yield from _families(readings)

    registry = CollectorRegistry()
    registry.register(All())
    return generate_latest(registry)


def _families(readings: Iterable[Reading]) -> Iterator[Metric]:
    from prometheus_client import ProcessCollector
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    for metric in _METRICS:
        if not metric.values:
            continue
        if isinstance(metric, Counter):
            counter = CounterMetricFamily(metric.name, metric.documentation, labels=metric.labels)
            for labels, value in metric.values.items():
                counter.add_metric(labels, value)
            yield counter
            continue
        histogram = HistogramMetricFamily(metric.name, metric.documentation, labels=metric.labels)
        for labels, (*counts, total) in metric.values.items():
            histogram.add_metric(labels, [*_cumulative(counts)], total)
        yield histogram
    kinds: dict[str, Any] = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
    for reading in [*readings, *(item for source in [*_SOURCES.values()] for item in source())]:
        if not reading.samples:
            continue
        names = [*reading.samples[0][0]]
        family = kinds[reading.kind](reading.name, reading.documentation, labels=names)
        for sample_labels, value in reading.samples:
            family.add_metric([sample_labels[name] for name in names], value)
        yield family
    yield from ProcessCollector(registry=None).collect()


def _cumulative(counts: Sequence[float]) -> Iterator[tuple[str, float]]:
    """Return cumulative counts: a Prometheus bucket counts every value up to its bound."""
    so_far = 0.0
    for bound, counted in zip((*map(str, BUCKETS_S), "+Inf"), counts, strict=True):
        so_far += counted
        yield bound, so_far


TRACEPARENT = "traceparent"
_TRACEPARENT = re.compile(r"^00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})$")

STEP_SECONDS = Histogram(
    "nemo_gym_step_seconds",
    "Steps of rollouts in this process, by how they ended: ok, or the type of the error",
    ("step", "outcome"),
)

Value = str | int | float | bool | tuple[str, ...]


class SpanKind(IntEnum):
    """Span kinds, with OTLP's numbers."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


class SpanContext(NamedTuple):
    """A span's identity, which its child spans refer to."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-01"


@dataclass(slots=True)
class Span:
    """One step as it is exported. Times are Unix nanoseconds."""

    name: str
    context: SpanContext
    parent_id: str | None
    kind: SpanKind
    start_ns: int
    attributes: dict[str, Any] = field(default_factory=dict)
    end_ns: int = 0
    error: str | None = None
    """Why the step failed; ``None`` if it did not."""


class Exporter(Protocol):
    """Takes finished spans."""

    def take(self, span: Span) -> None:
        """Queue ``span``; must neither block nor raise."""

    def close(self) -> None:
        """Send the remaining spans, within seconds."""


_exporter: Exporter | None = None
_sample = 1.0
_current: ContextVar[SpanContext | None] = ContextVar("nemo_gym_span", default=None)


def install(exporter: Exporter | None, sample: float = 1.0) -> None:
    """Export the spans of this process from now on; ``None`` turns traces off. ``sample`` is the fraction of attempts
    to trace; every server picks the same attempts."""
    global _exporter, _sample
    _exporter, _sample = exporter, sample


async def shut_down() -> None:
    """Send the remaining spans, and turn traces off."""
    if (exporter := _exporter) is not None:
        install(None)
        await asyncio.to_thread(exporter.close)


def is_on() -> bool:
    return _exporter is not None


def current() -> SpanContext | None:
    """The context of the open span, or ``None``."""
    return _current.get()


def inject(headers: MutableMapping[str, str]) -> None:
    """Add ``traceparent`` if a span is open."""
    if _exporter is not None and (context := _current.get()) is not None:
        headers.setdefault(TRACEPARENT, context.traceparent)


def extract(header: str | None) -> SpanContext | None:
    """Parse a ``traceparent``. Returns ``None`` if the header is missing, unreadable or not sampled."""
    if header is None or (match := _TRACEPARENT.match(header)) is None or not int(match[3], 16) & 1:
        return None
    return SpanContext(match[1], match[2])


def context_of_attempt(run_id: str, rollout_id: str, attempt: int) -> SpanContext:
    """The context of an attempt's root span."""
    digest = hashlib.sha256(f"{run_id}\n{rollout_id}\n{attempt}".encode()).hexdigest()
    return SpanContext(digest[:32], digest[32:48])


def attempt_context(rollout: Any, header: str | None = None) -> SpanContext | None:
    """The parent for a span of ``rollout``: the span that ``header`` names if it belongs to the same attempt, else the
    attempt's root. ``None`` if traces are off or the attempt is not sampled.

    Args:
        rollout: `RolloutIdentity`, an attempt's key, or their plain data.
    """
    if _exporter is None:
        return None
    if isinstance(rollout, Mapping):
        run_id, rollout_id, attempt = rollout.get("run_id", "run"), rollout["rollout_id"], rollout.get("attempt", 1)
    else:
        run_id, rollout_id, attempt = rollout.run_id, rollout.rollout_id, rollout.attempt
    root = context_of_attempt(run_id, rollout_id, attempt)
    if int(root.trace_id[:8], 16) >= _sample * 0x100000000:
        return None
    parent = extract(header)
    return parent if parent is not None and parent.trace_id == root.trace_id else root


def enter(context: SpanContext) -> None:
    """Make ``context`` the parent of every step in the running task from now on."""
    _current.set(context)


def within(context: SpanContext | None) -> AbstractContextManager[None]:
    """Make ``context`` the parent of steps inside the block; with ``None`` they have no parent."""
    return bound(_current, context)


class step:  # noqa: N801 - reads as a verb: `with step("seed")`
    """A timed piece of a rollout's work.

    Args:
        name: a label of metrics, so it must come from a small fixed set.
        title: the span's name, if it should be more specific than ``name``.
        parent: replaces the open span as the parent; see `attempt_context`.
        has_span: whether the step may become a span; otherwise it is only counted.
        attributes: the span's attributes.
    """

    __slots__ = (
        "_attributes",
        "_has_span",
        "_kind",
        "_parent",
        "_reset",
        "_start",
        "_title",
        "name",
        "outcome",
        "span",
    )

    def __init__(
        self,
        name: str,
        *,
        title: str | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: SpanContext | None = None,
        has_span: bool = True,
        **attributes: Any,
    ) -> None:
        self.name = name
        self.outcome = "ok"
        """Set this if the step fails without raising."""
        self.span: Span | None = None
        self._title, self._kind, self._parent, self._has_span = title, kind, parent, has_span
        self._attributes = attributes
        self._reset: Token[SpanContext | None] | None = None
        self._start = 0.0

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        if _exporter is not None and self._has_span and (parent := self._parent or _current.get()) is not None:
            self.span = begin(self._title or self.name, parent, self._kind, **self._attributes)
            self._reset = _current.set(self.span.context)
        return self

    def set(self, **attributes: Any) -> None:
        """Add attributes to the span, if there is one."""
        if self.span is not None:
            self.span.attributes.update(attributes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and self.outcome == "ok":
            self.outcome = kind.__name__
        STEP_SECONDS.observe(time.perf_counter() - self._start, self.name, self.outcome)
        if self._reset is not None:
            _current.reset(self._reset)
        if self.span is not None:
            end(self.span, None if self.outcome == "ok" else str(error) or self.outcome)


def tool_call(name: str, **options: Any) -> step:
    """Return the step to put around a tool call."""
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name,
        "gen_ai.tool.type": "function",
    }
    return step("tool_call", title=f"execute_tool {name}", **attributes, **options)


def begin(
    name: str,
    parent: SpanContext,
    kind: SpanKind = SpanKind.INTERNAL,
    *,
    is_root: bool = False,
    **attributes: Any,
) -> Span:
    """Start a span that ends elsewhere; pass it to `end`."""
    context = parent if is_root else SpanContext(parent.trace_id, f"{random.getrandbits(64) or 1:016x}")
    if "rollout_id" not in attributes:
        attributes["rollout_id"] = current_rollout_id()
    return Span(name, context, None if is_root else parent.span_id, kind, time.time_ns(), attributes)


def end(span: Span, error: str | None = None) -> None:
    """Hand ``span`` over for export."""
    span.end_ns = time.time_ns()
    span.error = error
    if _exporter is not None:
        _exporter.take(span)
