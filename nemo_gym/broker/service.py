"""`BrokerService`: all parts of one broker, its periodic tasks, its recovery after a restart, and its metrics."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import secrets
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import structlog

from nemo_gym._util.files import write_private
from nemo_gym._util.tasks import BackgroundTasks
from nemo_gym.broker.access import Access, Permissions, TokenSigner
from nemo_gym.broker.backend import BROKER_LABEL, ENDED, SANDBOX_LABEL, Backend
from nemo_gym.broker.box import Box, SpoolSpace
from nemo_gym.broker.boxes import Admission, Boxes, Sealer, SealError, door_digest
from nemo_gym.broker.config import BrokerConfig
from nemo_gym.broker.creation import Creations, WarmPools
from nemo_gym.broker.execs import Execs
from nemo_gym.broker.images import Images
from nemo_gym.broker.registry import BoxRecord, BoxState, Durability, RegistryWriter, open_engine
from nemo_gym.broker.stores import BoxStore, ExecStore, ImageStore
from nemo_gym.contract.credentials import ServerCredentials
from nemo_gym.contract.errors import ConfigError, NemoGymError, SandboxError, SandboxLostError
from nemo_gym.http.telemetry import Reading
from nemo_gym.sandbox.base import SandboxInfo, SandboxProvider
from nemo_gym.sandbox.wire.models import DoorModel

log = structlog.get_logger(__name__)

# -- Reconciliation ------------------------------------------------------------------------------------------------
# Reconciliation makes the registry and the backend agree, at the start of the broker and on a timer. It completes
# interrupted creates and deletes, destroys boxes whose leases have ended, records vanished boxes as gone, and reaps
# boxes of this broker without a record. The backend's inventory decides which boxes exist, never the registry.

_AT_ONCE = 16


class Reconciler:
    """Reconciles all boxes of one broker."""

    def __init__(self, boxes: Boxes, execs: Execs) -> None:
        self._boxes, self._execs = boxes, execs
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self.reaped = 0
        """Boxes without a record that were destroyed so far."""

    async def run(self) -> None:
        """Reconcile every box once. Raises `NemoGymError` if the registry or the backend does not respond."""
        boxes = self._boxes
        records = {record.sandbox_id: (record, leases) for record, leases in await boxes.store.live()}
        boxes.adopt(entry for sandbox_id, entry in records.items() if sandbox_id not in boxes.live)
        # Only a box that existed before the inventory was taken counts as vanished if the inventory lacks it.
        before = [box for box in boxes.live.values() if box.ready]
        inventory = await boxes.backend.inventory()
        adopting = [box for box in boxes.live.values() if box.adopting]
        await asyncio.gather(
            *(self._logged(self._adopt(box, records[box.sandbox_id][0], inventory), box) for box in adopting),
            *(self._logged(self._check(box, inventory.get(box.sandbox_id)), box) for box in before),
            *(self._logged(boxes.destroy(box, box.reason or "closed"), box) for box in self._stuck()),
        )
        for sandbox_id in inventory.keys() - boxes.live.keys():
            await self._reap(sandbox_id)

    def _stuck(self) -> list[Box]:
        """Return the boxes whose destruction failed earlier."""
        return [
            box
            for box in self._boxes.live.values()
            if box.state is BoxState.CLOSING and not box.adopting and (box.closing is None or box.closing.done())
        ]

    async def _logged(self, work: object, box: Box) -> None:
        async with self._at_once:
            try:
                await work  # type: ignore[misc]
            except NemoGymError as error:
                # The failure of one box must not stop the others; the next run tries it again.
                log.warning("reconcile_failed", sandbox_id=box.sandbox_id, error=str(error)[:500])

    async def _reap(self, sandbox_id: str) -> None:
        labels = {BROKER_LABEL: self._boxes.backend.identity, SANDBOX_LABEL: sandbox_id}
        try:
            reaped = await self._boxes.backend.provider.reap(labels)
        except SandboxError as error:
            log.warning("reap_failed", sandbox_id=sandbox_id, error=str(error)[:500])
            return
        self.reaped += len(reaped)
        log.info("box_without_record_reaped", sandbox_id=sandbox_id, boxes=len(reaped))

    async def _check(self, box: Box, info: SandboxInfo | None) -> None:
        """Record the end of a running box if the backend shows that the box has ended."""
        if not box.ready:
            return
        if info is None:
            await self._boxes.lost(box)
        elif info.status in ENDED:
            await self._boxes.lost(box, "exited")

    # -- after a restart -----------------------------------------------------------------------------------------

    async def _adopt(self, box: Box, record: BoxRecord, inventory: dict[str, SandboxInfo]) -> None:
        if not box.adopting:
            return  # its client repeated the create meanwhile, so the inventory may lack it
        info = inventory.get(box.sandbox_id)
        if box.state is BoxState.CLOSING:
            await self._boxes.destroy(box, box.reason or "closed")
        elif box.left_s <= 0:
            await self._boxes.destroy(box, "expired")
        elif box.state is BoxState.CREATING:
            await self._finish_create(box, record)
        elif info is None:
            await self._execs.recover(box, None)
            await self._boxes.lost(box)
        else:
            await self._take_over(box, record)
        box.adopting = False

    async def _finish_create(self, box: Box, record: BoxRecord) -> None:
        try:
            body = self._boxes.opened(record.request, box.sandbox_id)
        except SealError:
            await self._boxes.destroy(box, "lost")
            return
        if not await self._boxes.backend.creates_once():
            # A second create could make a second box, so destroy the first; the client's retry creates another.
            await self._boxes.destroy(box, "create_failed")
            return
        await self._boxes.bring_up(box, body, interrupted=True)

    async def _take_over(self, box: Box, record: BoxRecord) -> None:
        """Resume a running box: connect, renew its lease to the promised end, kill the commands whose output was not
        read to the end, and open its doors again."""
        boxes, backend = self._boxes, self._boxes.backend
        try:
            if record.descriptor is None:
                raise SandboxLostError(f"provider '{backend.name}' cannot connect to boxes of an earlier process")
            handle = await backend.connect(boxes.sealer.open(record.descriptor, box.sandbox_id))
            await backend.provider.renew(handle, max(box.left_s, 1.0))
            await self._execs.recover(box, handle)
            for sealed in await boxes.store.doors_of(box.sandbox_id):
                door = DoorModel.model_validate_json(boxes.sealer.open(sealed, box.sandbox_id))
                await backend.open_door(handle, door.to_door())
                box.doors[door.name] = door_digest(door)
        except (SandboxLostError, SealError) as error:
            log.warning("box_not_adopted", sandbox_id=box.sandbox_id, error=str(error))
            await self._execs.recover(box, None)
            await boxes.destroy(box, "lost")
            return
        box.handle = handle


# -- Upkeep --------------------------------------------------------------------------------------------------------

_EXPIRY_TICK_S = 0.2
_FORGET_EVERY_S = 15.0
_RECONCILE_RETRY_S = 1.0
"""Pause after a reconciliation that failed. Clients of boxes that are not taken over yet wait for the next one."""


def _log_failure(task: asyncio.Task[Any], error: BaseException) -> None:
    log.warning("sandbox_destroy_failed", task=task.get_name(), error=str(error)[:500])


class Upkeep:
    """The broker's periodic tasks."""

    def __init__(self, boxes: Boxes, execs: Execs, space: SpoolSpace, config: BrokerConfig) -> None:
        self._boxes, self._space, self._config = boxes, space, config
        self._reconciler = Reconciler(boxes, execs)
        self._gone_with_output: dict[str, float] = {}
        """Id of a box that is gone but still has output on disk → when it was first seen so (monotonic)."""
        self._periodic = BackgroundTasks()
        self._expiring = BackgroundTasks(_log_failure)
        self.unreconciled: str | None = "the first reconciliation has not ended yet"
        """Why the last reconciliation failed or has not ended; ``None`` if it succeeded."""

    @property
    def reaped(self) -> int:
        """Number of boxes without a record that were destroyed so far."""
        return self._reconciler.reaped

    @property
    def _is_behind(self) -> bool:
        """Whether the last reconciliation failed, as a whole or for a box that clients wait for."""
        return self.unreconciled is not None or any(
            box.adopting and box.state is not BoxState.CLOSING for box in self._boxes.live.values()
        )

    async def start(self) -> None:
        """Reconcile once, then start the periodic tasks, which soon repeat a reconciliation that failed."""
        await self._reconcile()
        interval_s = self._config.reconcile_interval_s
        retry_s = min(interval_s, _RECONCILE_RETRY_S)
        self._periodic.start(self._every(_EXPIRY_TICK_S, self._expire), name="broker leases")
        self._periodic.start(
            self._every(lambda: retry_s if self._is_behind else interval_s, self._reconcile),
            name="broker reconcile",
        )
        self._periodic.start(self._every(_FORGET_EVERY_S, self._forget), name="broker forget")

    async def aclose(self) -> None:
        await self._periodic.cancel()
        await self._expiring.join(timeout_s=10)

    async def destroy_all(self) -> None:
        """Destroy every box of this broker, when the broker stops in an orderly way."""
        live = [*self._boxes.live.values()]
        results = await asyncio.gather(*(self._boxes.destroy(box, "closed") for box in live), return_exceptions=True)
        for box, error in zip(live, results, strict=True):
            if error is not None:
                log.warning("sandbox_destroy_failed", sandbox_id=box.sandbox_id, error=str(error)[:500])

    async def _every(self, pause_s: float | Callable[[], float], work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(pause_s() if callable(pause_s) else pause_s)
            try:
                await work()
            except Exception:
                # The task must go on: without it, boxes would live for ever.
                log.exception("upkeep_failed", work=work.__name__)

    async def _expire(self) -> None:
        now = time.monotonic()
        for box in [*self._boxes.live.values()]:
            # A box whose destruction failed before its intent was recorded keeps its state, and is tried again. The
            # lease of a box begins when it is made, which may take longer than the lease.
            is_busy = any(task is not None and not task.done() for task in (box.creating, box.closing))
            if box.deadline <= now and box.state in (BoxState.CREATING, BoxState.RUNNING) and not is_busy:
                self._expiring.start(self._boxes.destroy(box, "expired"), name=f"expire {box.sandbox_id}")
                await asyncio.sleep(0)

    async def _reconcile(self) -> None:
        try:
            await self._reconciler.run()
            self.unreconciled = None
        except NemoGymError as error:
            if self.unreconciled != str(error):
                log.warning("reconcile_failed", error=str(error)[:500])
            self.unreconciled = str(error)

    async def _forget(self) -> None:
        now = time.monotonic()
        boxes_with_output = await asyncio.to_thread(self._space.boxes)
        self._gone_with_output = {
            sandbox_id: self._gone_with_output.get(sandbox_id, now)
            for sandbox_id in boxes_with_output - self._boxes.live.keys()
        }
        for sandbox_id, since in self._gone_with_output.items():
            if now - since > self._config.output_retention_s:
                self._space.forget(sandbox_id)
        while ids := await self._boxes.store.forget(time.time() - self._config.retention_s):
            for sandbox_id in ids:
                self._space.forget(sandbox_id)


# -- Service -------------------------------------------------------------------------------------------------------

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
