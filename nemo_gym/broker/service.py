"""`BrokerService`: all parts of one broker, and its metrics."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import secrets
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import structlog

from nemo_gym._util.files import write_private
from nemo_gym.broker.access import Access, Permissions, TokenSigner
from nemo_gym.broker.backend import Backend
from nemo_gym.broker.boxes import Admission, Boxes, Sealer
from nemo_gym.broker.config import BrokerConfig
from nemo_gym.broker.creation import Creations, WarmPools
from nemo_gym.broker.execs import Execs
from nemo_gym.broker.images import Images
from nemo_gym.broker.registry import Durability, RegistryWriter, open_engine
from nemo_gym.broker.spool import SpoolSpace
from nemo_gym.broker.stores import BoxStore, ExecStore, ImageStore
from nemo_gym.broker.upkeep import Upkeep
from nemo_gym.contract.credentials import ServerCredentials
from nemo_gym.contract.errors import ConfigError, NemoGymError
from nemo_gym.http.telemetry import Reading
from nemo_gym.sandbox.base import SandboxProvider

log = structlog.get_logger(__name__)

KEY_BYTES = 32


class BrokerService:
    """The broker, assembled from its configuration. Create it in the server's event loop; that contacts neither the
    backend nor the database.

    Args:
        endpoints: the base URLs of the stack's model servers and environments.

    Raises:
        ConfigError: another process uses the state directory, or it cannot be used; the database URL is wrong.
    """

    def __init__(
        self,
        config: BrokerConfig,
        state_dir: Path,
        provider: SandboxProvider,
        credentials: ServerCredentials | None,
        endpoints: Sequence[str] = (),
    ) -> None:
        self.config = config
        self._held = contextlib.ExitStack()
        """Releases what only one process may hold: the lock of the state directory."""
        self.draining = asyncio.Event()
        """Set when the broker is told to stop: it refuses creates, and ends streams so that clients reconnect later.
        """
        try:
            _lock(state_dir, self._held)
            identity = config.identity or _read_or_make(
                state_dir / "identity", lambda: f"broker-{uuid.uuid4().hex[:16]}"
            )
            derive = _keys(state_dir, credentials)
            url = config.database_url or f"sqlite:///{state_dir / 'broker.sqlite'}"
            self._writer = RegistryWriter(open_engine(url))
        except BaseException:
            self._held.close()
            raise
        self.backend = Backend(provider, identity)
        admission = Admission(
            max_boxes=config.max_boxes,
            max_per_owner=config.max_boxes_per_owner,
            max_waiting=config.max_waiting,
            timeout_s=config.queue_timeout_s,
        )
        store = BoxStore(self._writer, identity)
        self.boxes = Boxes(store, self.backend, admission, Sealer(derive("sandbox-seal")))
        self._space = SpoolSpace(state_dir / "spool", config.spool_bytes)
        self._space.load()
        exec_store = ExecStore(self._writer, Durability[config.exec_durability.upper()])
        self.execs = Execs(exec_store, self.backend, self._space, max_output_bytes=config.max_output_bytes)
        self._warm = WarmPools(self.boxes, config.warm, config.prefetch)
        self.creations = Creations(self.boxes, self._warm)
        self.access = Access(
            TokenSigner(derive("sandbox-lease")), self.boxes, credentials, config.caller_tokens, config.trusted_callers
        )
        self.permissions = Permissions(config, endpoints)
        self.images = Images(ImageStore(self._writer, identity), self.backend, identity)
        self._upkeep = Upkeep(self.boxes, self.execs, self._space, config)

    async def start(self) -> None:
        await self._upkeep.start()
        try:
            await self.images.reconcile()
        except NemoGymError as error:
            log.warning("images_not_reconciled", error=str(error)[:300])
        await self._warm.start()

    async def not_ready(self) -> dict[str, Any] | None:
        """Return why the broker cannot do its work, or ``None`` if it can."""
        if self.draining.is_set():
            return {"detail": "the broker is stopping"}
        if self._upkeep.unreconciled is not None:
            return {"detail": f"the backend was not reconciled: {self._upkeep.unreconciled}"}
        try:
            await self.boxes.store.ping()
        except NemoGymError as error:
            return {"detail": error.message}
        return None

    def readings(self) -> Iterator[Reading]:
        """Gauges, read at each scrape; creates, commands and renewals are counted where they happen."""
        admission, boxes = self.boxes.admission, self.boxes.live.values()
        states = [({"state": state}, count) for state, count in Counter(box.state.value for box in boxes).items()]
        owners = [({"owner": owner}, places) for owner, places in admission.held.items()]
        running = sum(run.phase == "running" for box in boxes for run in box.execs.values())
        yield Reading("sandbox_broker_boxes", "Boxes that are not gone, by state", states)
        yield Reading("sandbox_broker_owner_boxes", "Places that an owner holds", owners)
        yield Reading("sandbox_broker_waiting", "Creates that wait for a place", [({}, admission.waiting)])
        yield Reading("sandbox_broker_execs_running", "Commands that run", [({}, running)])
        yield Reading("sandbox_broker_spool_bytes", "Output that is kept", [({}, self._space.used)])
        yield Reading(
            "sandbox_broker_boxes_without_record",
            "Boxes without a record that were reaped",
            [({}, self._upkeep.reaped)],
        )

    async def aclose(self) -> None:
        await self._warm.aclose()
        await self._upkeep.aclose()
        if self.config.on_stop == "destroy":
            await self._upkeep.destroy_all()
        await self.boxes.aclose()
        await self.backend.aclose()
        await self._writer.aclose()
        self._held.close()


def _lock(state_dir: Path, held: contextlib.ExitStack) -> None:
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = held.enter_context((state_dir / "lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"another broker runs on the state directory {state_dir}; give this one its own state_dir", key="state_dir"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"the state directory {state_dir} cannot be used ({error.strerror}); set state_dir", key="state_dir"
        ) from error


def _keys(state_dir: Path, credentials: ServerCredentials | None) -> Callable[[str], bytes]:
    """Return the function that derives keys: from the stack's key for this server or, without a stack, from a key in
    the state directory."""
    if credentials is not None:
        return credentials.derive
    key_hex = _read_or_make(state_dir / "key", lambda: secrets.token_hex(KEY_BYTES))
    return ServerCredentials("broker", bytes.fromhex(key_hex)).derive


def _read_or_make(path: Path, make: Callable[[], str]) -> str:
    """Return the text of a file. If it does not exist, create it with ``make()``, readable only by this user."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        text = make()
        write_private(path, text, sync=True)
        return text
