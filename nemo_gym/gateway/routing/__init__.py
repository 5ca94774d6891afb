"""One fair door to many engines: choice, reservations, health."""

from nemo_gym.gateway.routing.health import Health, HealthState, Replica, ReplicaStatus
from nemo_gym.gateway.routing.router import NoEngineError, Reservation, Router, RouterOptions

__all__ = [
    "Health",
    "HealthState",
    "NoEngineError",
    "Replica",
    "ReplicaStatus",
    "Reservation",
    "Router",
    "RouterOptions",
]
