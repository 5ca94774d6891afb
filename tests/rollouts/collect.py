"""A collector in a process of its own, for tests that kill it: ``python collect.py <configuration as JSON>``."""

from __future__ import annotations

import asyncio
import json
import signal
import sys

from rich.console import Console

from nemo_gym.contract.errors import NemoGymError
from nemo_gym.http.client import ServerClient
from nemo_gym.rollouts.collection import run_collection


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what is in its background without it
    given = json.loads(sys.argv[1])
    client = ServerClient(global_config_dict=given["stack"])
    try:
        result = asyncio.run(run_collection(client, given["run"], console=Console(force_terminal=False, width=200)))
    except NemoGymError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(3 if result.invalid else 0)


if __name__ == "__main__":
    main()
