"""An engine without a socket, for tests of decisions; what goes over the wire is tested with the shipped fakes."""

from __future__ import annotations

from nemo_gym.gateway.engines import EngineError


class StubEngine:
    def __init__(self, name: str) -> None:
        self.name = name
        self.weights_version: str | None = None
        self.probes = 0
        self.probe_error: EngineError | None = None

    async def probe(self) -> None:
        self.probes += 1
        if self.probe_error is not None:
            raise self.probe_error

    async def sample_one(self) -> None:
        pass


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
