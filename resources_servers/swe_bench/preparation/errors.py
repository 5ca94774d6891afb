"""The error of a preparation that cannot go on."""

from __future__ import annotations

from nemo_gym.contract.errors import NemoGymError


class PreparationError(NemoGymError):
    """An image could not be prepared; nothing of it is left behind. The message says which step failed and why."""

    code = "prepare"
