"""NeMo Gym's name of `nemo_gym.http.correlation`."""

from nemo_gym.http.correlation import *  # noqa: F403
from nemo_gym.http.correlation import __all__ as _correlation
from nemo_gym.http.middleware import RolloutMiddleware as RolloutContextMiddleware

__all__ = [*_correlation, "RolloutContextMiddleware"]  # noqa: PLE0604
