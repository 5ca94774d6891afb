"""NeMo Gym's name for `nemo_gym.gateway.model_server`: the same module, so that a patch of one applies to both."""

import sys
from typing import TYPE_CHECKING

from nemo_gym.gateway import model_server

if TYPE_CHECKING:
    from nemo_gym.gateway.model_server import *  # noqa: F403

sys.modules[__name__] = model_server
