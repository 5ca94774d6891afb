"""An engine whose responses all take the same time, however many run, so that a router's shares can be measured.

python -m campaigns.faults.router_steady_engine --port 8000 --log FILE --delay-s 0.2
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from aiohttp import web

from nemo_gym_testing.gateway import FakeVllmEngine
from nemo_gym_testing.gateway.engine import CallLog


class SteadyEngine(FakeVllmEngine):
    def __init__(self, port: int, log: Path, delay_s: float) -> None:
        super().__init__(port=port)
        self._log = log.open("ab", buffering=0)
        self._delay_s = delay_s

    async def respond(self, request: web.Request, call: CallLog) -> web.StreamResponse:
        self._log.write(b'{"event":"call"}\n')
        await asyncio.sleep(self._delay_s)
        return await super().respond(request, call)


async def serve(engine: SteadyEngine) -> None:
    async with engine:
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--delay-s", type=float, required=True)
    given = parser.parse_args()
    asyncio.run(serve(SteadyEngine(given.port, given.log, given.delay_s)))
