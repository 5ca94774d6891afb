"""NeMo Gym's name of `nemo_gym.environment.judge`: the same module, so that whoever patches one patches both."""

import sys
from typing import TYPE_CHECKING

from nemo_gym.environment import judge

if TYPE_CHECKING:
    from nemo_gym.environment.judge import *  # noqa: F403

sys.modules[__name__] = judge
