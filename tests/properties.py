"""Hypothesis profiles: how many examples a property test tries.

`make test` and the fast lane try a fifth of them, the same ones in every run, so that a failure comes from the change
and not from the draw. `make test-full` tries all of them, and draws new ones in each run.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

SLOW_STRATEGIES = (HealthCheck.too_slow, HealthCheck.filter_too_much)

settings.register_profile(
    "quick", max_examples=20, derandomize=True, deadline=None, suppress_health_check=SLOW_STRATEGIES
)
settings.register_profile("search", max_examples=100, deadline=None, suppress_health_check=SLOW_STRATEGIES)
settings.load_profile("quick")


def examples(count: int) -> settings:
    """Return settings for ``count`` examples in the profile ``search``, and for a fifth of them in ``quick``."""
    return settings(max_examples=max(1, count * settings().max_examples // 100))
