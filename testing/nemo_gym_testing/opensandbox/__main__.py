"""``python -m nemo_gym_testing.opensandbox``: serve the double over local boxes until it is stopped."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys

from nemo_gym.sandbox.facade import create_provider
from nemo_gym_testing.opensandbox.server import FakeOpenSandbox, serving


async def run(port: int, api_key: str, backend: dict[str, dict[str, object]]) -> None:
    provider = create_provider(backend)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    try:
        async with serving(FakeOpenSandbox(provider, api_key), port=port) as url:
            sys.stdout.write(f"{url}\n")
            sys.stdout.flush()
            await stopped.wait()
    finally:
        await provider.aclose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m nemo_gym_testing.opensandbox", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0: any free one; the URL is printed")
    parser.add_argument("--api-key", required=True)
    parser.add_argument("--backend", type=json.loads, default={"local": {}}, help="the boxes' provider, as JSON")
    given = parser.parse_args()
    asyncio.run(run(given.port, given.api_key, given.backend))
