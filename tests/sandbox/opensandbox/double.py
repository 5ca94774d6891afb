"""The double of an OpenSandbox server in a process of its own, over local boxes."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator

API_KEY = "key-of-the-tests"


@contextlib.contextmanager
def double_server() -> Iterator[str]:
    """Its URL; it takes `API_KEY`. Boxes that are left are destroyed at the end."""
    argv = [sys.executable, "-m", "nemo_gym_testing.opensandbox", "--api-key", API_KEY]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert url, "the double did not start"
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
