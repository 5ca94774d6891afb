"""NeMo Gym's name of `nemo_gym.environment.server`: the same module, so that whoever patches one patches both."""

import sys
from typing import TYPE_CHECKING

from nemo_gym.environment import server

if TYPE_CHECKING:
    from nemo_gym.environment.server import *  # noqa: F403

sys.modules[__name__] = server
