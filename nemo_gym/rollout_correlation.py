"""NeMo Gym's name for `nemo_gym.http.telemetry`."""

from nemo_gym.http.middleware import RolloutMiddleware as RolloutContextMiddleware
from nemo_gym.http.telemetry import *  # noqa: F403
from nemo_gym.http.telemetry import __all__ as _correlation

__all__ = [*_correlation, "RolloutContextMiddleware"]  # noqa: PLE0604
