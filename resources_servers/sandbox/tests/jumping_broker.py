"""The broker's own program on a machine whose wall clock is wrong by the seconds in the file ``CLOCK_OFFSET``."""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path

from resources_servers.sandbox.tests.broker_process import APP

_true_time = time.time
_offset = Path(os.environ["CLOCK_OFFSET"])


def jumped() -> float:
    return _true_time() + float(_offset.read_text())


if __name__ == "__main__":
    time.time = jumped
    sys.argv = [str(APP)]
    runpy.run_path(str(APP), run_name="__main__")
