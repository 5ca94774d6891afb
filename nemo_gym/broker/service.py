"""Assembly of the broker from its configuration."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import secrets
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from nemo_gym._util.files import write_private
from nemo_gym.broker.access import Access, Permissions, TokenSigner
from nemo_gym.broker.admission import Admission
from nemo_gym.broker.backend import Backend
from nemo_gym.broker.boxes import Boxes, Sealer
from nemo_gym.broker.config import BrokerConfig
from nemo_gym.broker.creation import Creations, WarmPools
from nemo_gym.broker.execs import Execs
from nemo_gym.broker.images import Images
from nemo_gym.broker.registry.database import Durability, RegistryWriter, open_engine
from nemo_gym.broker.registry.store import BoxStore, ExecStore, ImageStore
from nemo_gym.broker.spool import SpoolSpace
from nemo_gym.broker.upkeep import Reconciler, Upkeep
from nemo_gym.contract.credentials import ServerCredentials
from nemo_gym.contract.errors import ConfigError, NemoGymError
from nemo_gym.http.telemetry import Reading
from nemo_gym.sandbox.base import SandboxProvider

# -- Metrics -------------------------------------------------------------------------------------------------------


class State:
    """Gauges, read at each scrape; creates, commands and renewals are counted where they happen."""

    def __init__(self, boxes: Boxes, reconciler: Reconciler, space: SpoolSpace) -> None:
        self._boxes, self._reconciler, self._space = boxes, reconciler, space

    def readings(self) -> Iterator[Reading]:
        admission = self._boxes.admission
        counts: dict[str, int] = {}
        running = 0
        for box in self._boxes.live.values():
            counts[box.state.value] = counts.get(box.state.value, 0) + 1
            running += sum(run.phase == "running" for run in box.execs.values())
        states = [({"state": state}, count) for state, count in counts.items()]
        owners = [({"owner": owner}, places) for owner, places in admission.held.items()]
        yield Reading("sandbox_broker_boxes", "Boxes that are not gone, by state", states)
        yield Reading("sandbox_broker_owner_boxes", "Places that an owner holds", owners)
        yield Reading("sandbox_broker_waiting", "Creates that wait for a place", [({}, admission.waiting)])
        yield Reading("sandbox_broker_execs_running", "Commands that run", [({}, running)])
        yield Reading("sandbox_broker_spool_bytes", "Output that is kept", [({}, self._space.used)])
        yield Reading(
            "sandbox_broker_boxes_without_record",
            "Boxes without a record that were reaped",
            [({}, self._reconciler.reaped)],
        )


# -- Service -------------------------------------------------------------------------------------------------------

log = structlog.get_logger(__name__)


@dataclass
class BrokerService:
    config: BrokerConfig
    writer: RegistryWriter
    backend: Backend
    boxes: Boxes
    execs: Execs
    creations: Creations
    access: Access
    permissions: Permissions
    images: Images
    warm: WarmPools
    upkeep: Upkeep
    state: State
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False)
    """Releases what only one process may hold: the lock of the state directory."""
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the broker is told to stop: it refuses creates, and ends streams so that clients reconnect later."""

    async def start(self) -> None:
        await self.upkeep.start()
        try:
            await self.images.reconcile()
        except NemoGymError as error:
            log.warning("images_not_reconciled", error=str(error)[:300])
        try:
            await self.warm.start()
        except NemoGymError as error:
            # The reconciler destroys later what could not be destroyed now.
            log.warning("warm_pools_not_started", error=str(error)[:300])

    async def aclose(self) -> None:
        await self.warm.aclose()
        await self.upkeep.aclose()
        if self.config.on_stop == "destroy":
            await self.upkeep.destroy_all()
        await self.boxes.aclose()
        await self.backend.aclose()
        await self.writer.aclose()
        self.held.close()


# -- Assembly ------------------------------------------------------------------------------------------------------

KEY_BYTES = 32


def assemble(
    config: BrokerConfig,
    state_dir: Path,
    provider: SandboxProvider,
    credentials: ServerCredentials | None,
    endpoints: Sequence[str] = (),
) -> BrokerService:
    """Build the broker without contacting the backend or the database. Call it in the server's event loop.
    ``endpoints``: the base URLs of the stack's model servers and environments.

    Raises:
        ConfigError: another process uses the state directory, or it cannot be used; the database URL is wrong.
    """
    held = contextlib.ExitStack()
    try:
        _lock(state_dir, held)
        identity = config.identity or _read_or_make(state_dir / "identity", lambda: f"broker-{uuid.uuid4().hex[:16]}")
        derive = _keys(state_dir, credentials)
        url = config.database_url or f"sqlite:///{state_dir / 'broker.sqlite'}"
        writer = RegistryWriter(open_engine(url))
    except BaseException:
        held.close()
        raise
    backend = Backend(provider, identity)
    admission = Admission(
        max_boxes=config.max_boxes,
        max_per_owner=config.max_boxes_per_owner,
        max_waiting=config.max_waiting,
        timeout_s=config.queue_timeout_s,
    )
    boxes = Boxes(BoxStore(writer, identity), backend, admission, Sealer(derive("sandbox-seal")))
    space = SpoolSpace(state_dir / "spool", config.spool_bytes)
    space.load()
    exec_store = ExecStore(writer, Durability[config.exec_durability.upper()])
    execs = Execs(exec_store, backend, space, max_output_bytes=config.max_output_bytes)
    reconciler = Reconciler(boxes, execs)
    warm = WarmPools(boxes, config.warm, config.prefetch)
    return BrokerService(
        config=config,
        writer=writer,
        backend=backend,
        boxes=boxes,
        execs=execs,
        creations=Creations(boxes, warm),
        access=Access(
            TokenSigner(derive("sandbox-lease")), boxes, credentials, config.caller_tokens, config.trusted_callers
        ),
        permissions=Permissions(config, endpoints),
        images=Images(ImageStore(writer, identity), backend, identity),
        warm=warm,
        upkeep=Upkeep(
            boxes,
            reconciler,
            space,
            reconcile_interval_s=config.reconcile_interval_s,
            retention_s=config.retention_s,
            output_retention_s=config.output_retention_s,
        ),
        state=State(boxes, reconciler, space),
        held=held,
    )


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
