"""NeMo Gym's name for `nemo_gym.environment.judge`: the same module, so that a patch of one applies to both."""

import sys
from typing import TYPE_CHECKING

from nemo_gym.environment import judge

if TYPE_CHECKING:
    from nemo_gym.environment.judge import *  # noqa: F403

sys.modules[__name__] = judge
