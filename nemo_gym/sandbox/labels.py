"""Names of the labels this suite writes on every box, so that its labels are enough to find and reap it."""

from __future__ import annotations

from collections.abc import Mapping

RUN = "nemo_gym.run"
ROLLOUT = "nemo_gym.rollout"
ATTEMPT = "nemo_gym.attempt"
ROLE = "nemo_gym.role"
EXPIRES_AT = "nemo_gym.lease_expires_at"
"""Unix seconds; written by providers whose backend has no lease of its own."""
MANAGED = "nemo_gym.managed"
"""``true`` on every box of ours."""


def box_labels(*, run: str, rollout: str, attempt: int, role: str) -> Mapping[str, str]:
    """The labels of one box of one attempt."""
    return {MANAGED: "true", RUN: run, ROLLOUT: rollout, ATTEMPT: str(attempt), ROLE: role}
