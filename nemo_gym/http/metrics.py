"""What this process counts, in Prometheus' text form.

Counters and histograms are plain numbers, changed on the event loop; ``prometheus-client`` is imported by the first
scrape and words them. What can be read at any time (jobs in a queue, engines that are up) comes from sources, which a
scrape asks.

Counting one step takes about 1 µs with these, 3 µs with the package's own objects, which take a lock for each bucket.
fern/pages/metrics.md lists every name.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nemo_gym.contract.errors import NemoGymError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

METRICS_PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)
"""From an answer out of memory to an agent's day."""


class MetricsUnavailableError(NemoGymError):
    """The package that words metrics is not installed."""

    code = "metrics_unavailable"
    status = 501


Labels = tuple[str, ...]


class Counter:
    """Only grows. Without labels it is shown from the start, with labels from the first count of each value."""

    kind: Literal["counter", "histogram"] = "counter"

    def __init__(self, name: str, documentation: str, labels: Sequence[str] = ()) -> None:
        self.name, self.documentation, self.labels = name, documentation, tuple(labels)
        self.values: dict[Labels, float] = {} if labels else {(): 0.0}
        _OWN.append(self)

    def add(self, *labels: str, amount: float = 1.0) -> None:
        self.values[labels] = self.values.get(labels, 0.0) + amount


class Histogram:
    """Durations in seconds."""

    kind: Literal["counter", "histogram"] = "histogram"

    def __init__(self, name: str, documentation: str, labels: Sequence[str] = ()) -> None:
        self.name, self.documentation, self.labels = name, documentation, tuple(labels)
        self.values: dict[Labels, list[float]] = {}
        """Counts of each bucket, the one without an end, and the sum of all."""
        _OWN.append(self)

    def observe(self, seconds: float, *labels: str) -> None:
        counts = self.values.get(labels)
        if counts is None:
            counts = self.values[labels] = [0.0] * (len(BUCKETS_S) + 2)
        counts[bisect_left(BUCKETS_S, seconds)] += 1
        counts[-1] += seconds


@dataclass(frozen=True, slots=True)
class Reading:
    """A value that is looked up when somebody asks."""

    name: str
    documentation: str
    samples: Sequence[tuple[dict[str, str], float]]
    kind: Literal["gauge", "counter"] = "gauge"


Source = Callable[[], Iterable[Reading]]

_OWN: list[Counter | Histogram] = []
_SOURCES: dict[object, Source] = {}


def add_source(owner: object, source: Source) -> None:
    """Ask ``source`` with each scrape of this process, until `remove_source`."""
    _SOURCES[owner] = source


def remove_source(owner: object) -> None:
    _SOURCES.pop(owner, None)


def render(readings: Iterable[Reading] = ()) -> bytes:
    """All that this process counts, and ``readings``. Raises `MetricsUnavailableError`."""
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

    for own in _OWN:
        if not own.values:
            continue
        if isinstance(own, Counter):
            counter = CounterMetricFamily(own.name, own.documentation, labels=own.labels)
            for labels, value in own.values.items():
                counter.add_metric(labels, value)
            yield counter
            continue
        histogram = HistogramMetricFamily(own.name, own.documentation, labels=own.labels)
        for labels, (*counts, total) in own.values.items():
            histogram.add_metric(labels, [*_cumulated(counts)], total)
        yield histogram
    kinds: dict[str, Any] = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
    for reading in [*readings, *(one for source in [*_SOURCES.values()] for one in source())]:
        if not reading.samples:
            continue
        names = [*reading.samples[0][0]]
        family = kinds[reading.kind](reading.name, reading.documentation, labels=names)
        for given, value in reading.samples:
            family.add_metric([given[name] for name in names], value)
        yield family
    yield from ProcessCollector(registry=None).collect()


def _cumulated(counts: Sequence[float]) -> Iterator[tuple[str, float]]:
    """Prometheus' buckets hold all that is at most their bound."""
    so_far = 0.0
    for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), counts, strict=True):
        so_far += count
        yield bound, so_far
