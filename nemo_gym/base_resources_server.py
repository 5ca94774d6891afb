"""NeMo Gym's name for `nemo_gym.environment.server`: the same module, so that a patch of one applies to both."""

import sys
from typing import TYPE_CHECKING

from nemo_gym.environment import server

if TYPE_CHECKING:
    from nemo_gym.environment.server import *  # noqa: F403

sys.modules[__name__] = server
