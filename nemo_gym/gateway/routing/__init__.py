"""Fair routing of calls to many engines: choice, reservations, health."""

from nemo_gym.gateway.routing.router import (
    Health,
    HealthState,
    NoEngineError,
    Replica,
    ReplicaStatus,
    Reservation,
    Router,
    RouterOptions,
)

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
