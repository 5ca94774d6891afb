"""One broker over one backend, a count of the commands that its boxes ran, and the backend's own list of its boxes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaigns.faults.leftovers import Scope, leftovers
from nemo_gym.broker.backend import BROKER_LABEL, SANDBOX_LABEL
from nemo_gym.sandbox.base import BoxLabel, SandboxProvider
from nemo_gym.sandbox.facade import create_provider
from resources_servers.sandbox.tests import broker_process
from resources_servers.sandbox.tests.broker_process import BrokerProcess
from resources_servers.sandbox.tests.postgres import running_postgres

COUNTER_IN_BOX = "/opt/counter"
DATABASES = ("sqlite", "postgres")
PROVIDERS = ("local", "docker")


class RunCounter:
    """Counts how often each command ran. Commands write their id into a pipe of the host that every box mounts, so the
    count outlives boxes and includes every run."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self._path = directory / "pipe"
        os.mkfifo(self._path, 0o666)
        self._path.chmod(0o666)  # whatever the umask; commands may run as any user
        self._pipe = os.open(self._path, os.O_RDWR)
        self.ran: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @staticmethod
    def shell(mark: str) -> str:
        """Return the shell code that counts a command: one write, short enough for a pipe to take it atomically."""
        return f"echo {mark} > {COUNTER_IN_BOX}/pipe"

    def _read(self) -> None:
        partial = b""
        while True:
            *lines, partial = (partial + os.read(self._pipe, 65536)).split(b"\n")
            for line in lines:
                if line == b"stop":
                    return
                self.ran[line.decode()] += 1

    def close(self) -> None:
        os.write(self._pipe, b"stop\n")
        self._thread.join(10)
        os.close(self._pipe)


@dataclass(frozen=True)
class BackendBox:
    """A box as the backend lists it."""

    backend_id: str
    sandbox_id: str
    """The broker's id of the box, from a label."""
    key: str
    """The key of the create request, from a label."""


class Inventory:
    """One broker's boxes according to the backend, without asking the broker or its registry."""

    def __init__(self, provider: SandboxProvider, scope: Scope, identity: str) -> None:
        self.provider, self.scope, self.identity = provider, scope, identity

    async def boxes(self) -> list[BackendBox]:
        infos = await self.provider.list({BROKER_LABEL: self.identity})
        return [
            BackendBox(info.sandbox_id, info.labels.get(SANDBOX_LABEL, ""), info.labels.get("faults.key", ""))
            for info in infos
        ]

    def physical(self) -> set[str]:
        """Backend ids of the boxes that exist as files or containers, whether the provider lists them or not."""
        if self.scope.docker_host is None:
            return {path.name for path in self.scope.state_dir.glob("*/boxes/*") if not path.name.startswith(".")}
        label_filter = f"label={BROKER_LABEL}={self.identity}"
        command = ["docker", "-H", self.scope.docker_host, "ps", "-aq", "--no-trunc", "--filter", label_filter]
        return {*subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()}

    async def residue(self, within_s: float = 30.0) -> dict[str, list[str]]:
        """Return processes, mounts, cgroups, namespaces, files and containers that remain when no box should."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        while True:
            left = await asyncio.to_thread(leftovers, self.scope)
            if not left or loop.time() > deadline:
                return left
            await asyncio.sleep(0.5)


@dataclass
class Stage:
    """The broker of a campaign and what observes it."""

    broker: BrokerProcess
    inventory: Inventory
    counter: RunCounter
    run_id: str

    def spec(self) -> dict[str, Any]:
        """The spec of boxes whose commands are counted."""
        return {"mounts": [{"source": str(self.counter.directory), "target": COUNTER_IN_BOX}]}

    def labels(self, key: str) -> dict[str, str]:
        return {"faults.key": key, BoxLabel.RUN: self.run_id}

    @property
    def boundaries(self) -> Path:
        return self.broker.state_dir / "boundaries"


@contextlib.contextmanager
def database(kind: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of a broker with a registry of that kind."""
    if kind == "sqlite":
        yield {}
        return
    with running_postgres() as server:
        yield {"database_url": server.new_database()}


def backend_of(provider: str, folder: Path) -> tuple[dict[str, Any], str | None]:
    """Return the configuration of a backend, and the URL of its Docker Engine if it uses one."""
    if provider == "local":
        return {"local": {"state_dir": str(folder / "boxes"), "linger_s": 5}}, None
    from tests.docker_engine import start_engine

    engine = os.environ.get("DOCKER_HOST") or start_engine()
    return {"docker": {"base_url": engine}}, engine


@asynccontextmanager
async def stage(folder: Path, provider: str, settings: Mapping[str, Any]) -> AsyncIterator[Stage]:
    """Yield a broker that is not started yet. Leaving the block destroys everything that the broker made."""
    identity = f"faults-{uuid.uuid4().hex[:12]}"
    backend, engine = await asyncio.to_thread(backend_of, provider, folder)
    broker = BrokerProcess(
        folder / "state",
        backend,
        program=(str(Path(broker_process.__file__).with_name("killing_broker.py")),),
        env={"KILL_LOG": str(folder / "state" / "boundaries")},
        identity=identity,
        # The campaign judges only the reconciliation at startup: no later one may repair what it missed.
        **{"on_stop": "destroy", "reconcile_interval_s": 3600, **settings},
    )
    counter = RunCounter(folder / "counter")
    backends = create_provider(backend)
    scope = Scope(folder / "boxes", run_id=identity, docker_host=engine)
    try:
        yield Stage(broker, Inventory(backends, scope, identity), counter, identity)
    finally:
        try:
            await asyncio.to_thread(broker.close)
        finally:
            await backends.reap({BROKER_LABEL: identity})
            await backends.aclose()
            counter.close()
