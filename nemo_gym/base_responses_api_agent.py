"""NeMo Gym's name for `nemo_gym.agent.server`: the same module, so that a patch of one applies to both."""

import sys
from typing import TYPE_CHECKING

from nemo_gym.agent import server

if TYPE_CHECKING:
    from nemo_gym.agent.server import *  # noqa: F403

sys.modules[__name__] = server
