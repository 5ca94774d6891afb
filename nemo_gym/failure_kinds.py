"""NeMo Gym's module name for the kinds of failure; see `nemo_gym.contract.episodes`."""

from nemo_gym.contract.episodes import *  # noqa: F403
