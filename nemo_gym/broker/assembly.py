"""Makes a broker out of its configuration: its directory, keys, registry, backend and timers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from nemo_gym.broker.access import Access
from nemo_gym.broker.admission import Admission
from nemo_gym.broker.backend import Backend
from nemo_gym.broker.boxes import Boxes
from nemo_gym.broker.config import BrokerConfig
from nemo_gym.broker.creation import Creations
from nemo_gym.broker.exec_manager import Execs
from nemo_gym.broker.images import Images
from nemo_gym.broker.metrics import Metrics
from nemo_gym.broker.permissions import Permissions
from nemo_gym.broker.reconcile import Reconciler
from nemo_gym.broker.registry.database import Durability, open_engine
from nemo_gym.broker.registry.execs import ExecStore
from nemo_gym.broker.registry.store import BoxStore, ImageStore
from nemo_gym.broker.registry.writer import GroupCommitWriter
from nemo_gym.broker.sealing import Sealer
from nemo_gym.broker.service import BrokerService
from nemo_gym.broker.spool import SpoolSpace
from nemo_gym.broker.tokens import TokenSigner
from nemo_gym.broker.upkeep import Upkeep
from nemo_gym.broker.warm import WarmPools
from nemo_gym.contract.credentials import ServerCredentials
from nemo_gym.contract.errors import ConfigError
from nemo_gym.sandbox.base import SandboxProvider

KEY_BYTES = 32


def assemble(
    config: BrokerConfig,
    state_dir: Path,
    provider: SandboxProvider,
    credentials: ServerCredentials | None,
    endpoints: Sequence[str] = (),
) -> BrokerService:
    """A broker that has asked nobody for anything yet. Runs in the server's event loop. ``endpoints``: the base URLs
    of the stack's model servers and environments.

    Raises:
        ConfigError: the state directory is another process's, or cannot be used; the database's URL is wrong.
    """
    held = contextlib.ExitStack()
    try:
        _lock(state_dir, held)
        identity = config.identity or _kept(state_dir / "identity", lambda: f"broker-{uuid.uuid4().hex[:16]}")
        derive = _keys(state_dir, credentials)
        url = config.database_url or f"sqlite:///{state_dir / 'broker.sqlite'}"
        writer = GroupCommitWriter(open_engine(url))
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
        metrics=Metrics(boxes, reconciler, space),
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
    """The stack's key for this server; without a stack, one kept in the state directory."""
    if credentials is not None:
        return credentials.derive
    kept = _kept(state_dir / "key", lambda: secrets.token_hex(KEY_BYTES))
    return ServerCredentials("broker", bytes.fromhex(kept)).derive


def _kept(path: Path, make: Callable[[], str]) -> str:
    """The text of a file that is made once, readable by this user alone."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        text = make()
        partial = path.with_name(f"{path.name}.new")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        return text
