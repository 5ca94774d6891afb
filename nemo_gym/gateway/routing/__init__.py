"""One fair door to many engines: choice, reservations, health."""

from nemo_gym.gateway.routing.health import Health, HealthState, Replica, ReplicaStatus
from nemo_gym.gateway.routing.prober import PROBE_INTERVAL_S, Prober
from nemo_gym.gateway.routing.router import NoEngineError, Reservation, Router, RouterOptions

__all__ = [
    "PROBE_INTERVAL_S",
    "Health",
    "HealthState",
    "NoEngineError",
    "Prober",
    "Replica",
    "ReplicaStatus",
    "Reservation",
    "Router",
    "RouterOptions",
]
