"""What the broker counts, in Prometheus' format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from nemo_gym.broker.boxes import Boxes
    from nemo_gym.broker.reconcile import Reconciler
    from nemo_gym.broker.spool import SpoolSpace

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """One broker's metrics, in a registry of their own."""

    def __init__(self, boxes: Boxes, reconciler: Reconciler, space: SpoolSpace) -> None:
        self.registry = CollectorRegistry()
        self.creates = Counter(
            "sandbox_broker_creates", "Creates by how they ended", ["outcome"], registry=self.registry
        )
        self.create_seconds = Histogram(
            "sandbox_broker_create_seconds", "From the request to the box", buckets=_SECONDS, registry=self.registry
        )
        self.execs = Counter("sandbox_broker_execs", "Commands started", registry=self.registry)
        self.renewals = Counter("sandbox_broker_renewals", "Leases renewed", registry=self.registry)
        self.registry.register(_State(boxes, reconciler, space))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _State(Collector):
    """What is so now, read when it is asked for."""

    def __init__(self, boxes: Boxes, reconciler: Reconciler, space: SpoolSpace) -> None:
        self._boxes, self._reconciler, self._space = boxes, reconciler, space

    def collect(self) -> Iterator[Metric]:
        states = GaugeMetricFamily("sandbox_broker_boxes", "Boxes that are not gone, by state", labels=["state"])
        counts: dict[str, int] = {}
        running = 0
        for box in self._boxes.live.values():
            counts[box.state.value] = counts.get(box.state.value, 0) + 1
            running += sum(run.phase == "running" for run in box.execs.values())
        for state, count in counts.items():
            states.add_metric([state], count)
        yield states
        owners = GaugeMetricFamily("sandbox_broker_owner_boxes", "Places that an owner holds", labels=["owner"])
        for owner, held in self._boxes.admission.held.items():
            owners.add_metric([owner], held)
        yield owners
        waiting = self._boxes.admission.waiting
        yield GaugeMetricFamily("sandbox_broker_waiting", "Creates that wait for a place", waiting)
        yield GaugeMetricFamily("sandbox_broker_execs_running", "Commands that run", running)
        yield GaugeMetricFamily("sandbox_broker_spool_bytes", "Output that is kept", self._space.used)
        yield GaugeMetricFamily(
            "sandbox_broker_boxes_without_record", "Boxes without a record that were reaped", self._reconciler.reaped
        )
