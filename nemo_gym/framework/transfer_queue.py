"""Writes trajectories to TransferQueue, for verl's trainers, in bounded time.

The package waits for a dead storage unit for 200 s, three times, and cannot replace it. Here each call has a deadline.
When a call fails or its deadline passes, new units replace the dead ones, their rows are written again from the
archive on disk under the same keys, and the call is repeated once. Readers in other processes then call `reconnect`.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from nemo_gym._util.tasks import BackgroundTasks
from nemo_gym.contract.errors import ConfigError, NemoGymError, ServerError
from nemo_gym.framework.samples import TrajectoryRow, shared_columns
from nemo_gym.storage import SqliteWriter

CALL_TIMEOUT_S = 4.0
RECOVERY_TIMEOUT_S = 20.0
"""How long a call waits for dead units to be replaced. Both tries of a call and this wait end within 30 s."""
_PROBE_TIMEOUT_S = 1.0
_REWRITTEN_AT_ONCE = 128
log = structlog.get_logger(__name__)
_SCHEMA = """
create table if not exists rows (
    partition text not null,
    key text not null,
    tag blob not null,
    fields blob not null,
    primary key (partition, key)
) without rowid;
"""


class TransferQueueError(NemoGymError):
    """TransferQueue did not store or return data in time."""

    code = "transfer_queue"


def _package() -> Any:
    try:
        import transfer_queue
    except ImportError:
        raise ConfigError(
            "TransferQueue is not installed: pip install 'nemo-gym-suite[transfer-queue]'", key="transfer_queue"
        ) from None
    return transfer_queue


class TransferQueueSink:
    """A `TrajectorySink` for TransferQueue.

    Args:
        archive: stores rows first; without an archive, the rows of a dead storage unit are lost.
        conf: TransferQueue's own configuration, used if this process starts it. A running one is joined.
    """

    def __init__(self, archive: TrajectoryArchive | None = None, *, conf: Any = None) -> None:
        self._tq = _package()
        self._archive = archive
        self._background = BackgroundTasks()
        self._recovery: asyncio.Task[None] | None = None
        self._epoch = 0
        """The number of recoveries: a call that failed before the latest recovery needs no other."""
        self._lost: dict[str, list[str]] = {}
        """The keys of rows that are still to be written again, by partition."""
        self._writing: Counter[tuple[str, str]] = Counter()
        """Partition and key of the rows that are in the archive, or will be, and may not be stored yet."""
        self.rewritten = 0
        """How many rows were written again."""
        self._tq.init(conf)

    async def put(self, partition: str, rows: Sequence[TrajectoryRow]) -> None:
        """Write one session's rows. Raises `TransferQueueError` within 30 s."""
        written = Counter((partition, row.key) for row in rows)
        self._writing += written
        try:
            if self._archive is not None:
                await self._archive.add(partition, rows)
            await self._call("put", lambda: self._put(partition, rows))
        finally:
            self._writing -= written

    async def tag(self, partition: str, uid: str, tag: Mapping[str, Any]) -> None:
        """Set a prompt's state, leaving other fields of its tag unchanged. Raises `TransferQueueError`."""
        await self._call("tag", lambda: self._tq.async_kv_put(key=uid, partition_id=partition, tag=dict(tag)))

    async def get(self, partition: str, keys: Sequence[str], columns: Sequence[str] | None = None) -> Any:
        """Return rows as a TensorDict; rows of dead units are first written again."""
        select = list(columns) if columns is not None else None
        return await self._call(
            "get",
            lambda: self._tq.async_kv_batch_get(keys=list(keys), partition_id=partition, select_fields=select),
        )

    async def forget_consumed(self) -> None:
        """Remove the rows from the archive that a trainer has cleared from TransferQueue."""
        if self._archive is None:
            return
        for partition in self._archive.partitions():
            # Chosen before the list is requested, because another batch may write rows meanwhile.
            keys = [key for key in self._archive.keys(partition) if (partition, key) not in self._writing]
            listed = await self._call("list", partial(self._tq.async_kv_list, partition_id=partition))
            stored = listed.get(partition) or {}
            await self._archive.remove(partition, [key for key in keys if key not in stored])

    async def aclose(self) -> None:
        await self._background.cancel()
        if self._archive is not None:
            await self._archive.aclose()

    # -- inside --------------------------------------------------------------------------------------------------

    async def _put(self, partition: str, rows: Sequence[TrajectoryRow]) -> None:
        await self._tq.async_kv_batch_put(
            keys=[row.key for row in rows],
            partition_id=partition,
            fields=as_tensordict(list(rows)),
            tags=[row.tag for row in rows],
        )

    async def _call(self, operation: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """Make a call, and repeat it once after dead units were replaced. ``operation`` names it in errors."""
        epoch = self._epoch
        try:
            return await self._in_time(call)
        except ValueError:
            raise  # the request itself is wrong, so a repetition would fail too
        except Exception as error:  # noqa: BLE001 - the package has no exception classes of its own
            first = error
        try:
            async with asyncio.timeout(RECOVERY_TIMEOUT_S):
                if epoch == self._epoch or self._lost:
                    await asyncio.shield(self._start_recovery())
        except Exception as error:
            why = f"not within {RECOVERY_TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else repr(error)
            raise TransferQueueError(
                f"TransferQueue: {operation} ended with {first!r}, and dead storage units were not replaced: {why}",
                retryable=True,
            ) from error
        try:
            return await self._in_time(call)
        except Exception as error:
            raise TransferQueueError(
                f"TransferQueue: {operation} failed twice: {type(error).__name__}: {error}", retryable=True
            ) from error

    @staticmethod
    async def _in_time(call: Callable[[], Awaitable[Any]]) -> Any:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return await call()

    def _start_recovery(self) -> asyncio.Task[None]:
        """Return the running recovery, or start one. It continues even if its callers stop waiting for it."""
        if self._recovery is None or self._recovery.done():
            self._recovery = self._background.start(self._recover(), name="transfer-queue-recovery")
        return self._recovery

    async def _recover(self) -> None:
        """Replace each dead storage unit by a new one at its place, and write the lost rows again."""
        client = self._tq.get_client()
        manager: Any = getattr(client, "storage_manager", None)
        infos = getattr(manager, "storage_unit_infos", None)
        if infos is None:
            return  # another storage backend, whose units are not Ray actors
        names = list(infos)
        alive = await asyncio.gather(*(asyncio.to_thread(_listens, infos[name]) for name in names))
        dead = [place for place, is_alive in enumerate(alive) if not is_alive]
        if dead:
            log.warning("storage units have died", places=dead, units=len(names))
            if self._archive is not None:
                for partition in self._archive.partitions():
                    await self._note_lost(client, partition, {*dead}, len(names))
            manager.storage_unit_infos = await asyncio.to_thread(self._replace, manager, infos, names, dead)
        # This also writes the rows that an earlier, failed recovery left.
        for partition in [*self._lost]:
            await self._rewrite(partition)
        self._epoch += 1

    def _replace(self, manager: Any, infos: Mapping[str, Any], names: list[str], dead: list[int]) -> dict[str, Any]:
        """Start new units, and return all units in their order, with the new ones at the places of the dead ones."""
        import ray
        from transfer_queue.storage.simple_storage import SimpleStorageUnit
        from transfer_queue.utils.zmq_utils import process_zmq_server_info

        config = {name: value for name, value in dict(manager.config).items() if name != "zmq_info"}
        fresh: dict[str, Any] = {}
        for place, name in enumerate(names):
            if place not in dead:
                fresh[name] = infos[name]
                continue
            # Detached, so that it outlives this worker like the unit that it replaces.
            unit = SimpleStorageUnit.options(lifetime="detached", num_cpus=0).remote(config=config)
            info = process_zmq_server_info(unit)
            fresh[info.id] = info
        controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
        conf = ray.get(controller.get_config.remote())
        conf.backend[conf.backend.storage_backend].zmq_info = fresh
        ray.get(controller.store_config.remote(conf))
        return fresh

    async def _note_lost(self, client: Any, partition: str, dead: set[int], units: int) -> None:
        assert self._archive is not None
        stored = (await self._tq.async_kv_list(partition_id=partition)).get(partition) or {}
        keys = [key for key in self._archive.keys(partition) if key in stored]
        if not keys:
            return
        meta = await client.async_kv_retrieve_meta(keys=keys, partition_id=partition, create=False)
        lost = [key for key, index in zip(keys, meta.global_indexes, strict=True) if index % units in dead]
        self._lost[partition] = list(dict.fromkeys([*self._lost.get(partition, []), *lost]))

    async def _rewrite(self, partition: str) -> None:
        assert self._archive is not None
        lost, count = self._lost[partition], 0
        while lost:
            keys = lost[-_REWRITTEN_AT_ONCE:]
            for together in _grouped_by_columns(list(self._archive.rows(partition, keys))):
                await self._put(partition, together)
            del lost[-len(keys) :]
            count += len(keys)
            self.rewritten += len(keys)
        del self._lost[partition]
        log.info("trajectories written again", partition=partition, rows=count)


def reconnect() -> None:
    """Connect to the current storage units. Readers in other processes call this after a recovery."""
    import transfer_queue.interface as interface

    client, interface._TQ_CLIENT = interface._TQ_CLIENT, None
    if client is not None:
        client.close()
    interface._init_from_existing()


def as_tensordict(rows: list[TrajectoryRow]) -> Any:
    """Return the rows as one TensorDict: sequences as jagged tensors, ``num_turns`` as a dense tensor, all else as
    non-tensor data."""
    import torch
    from tensordict import TensorDict
    from tensordict.tensorclass import NonTensorStack

    columns: dict[str, Any] = {}
    for name in shared_columns(rows):
        values = [row.fields[name] for row in rows]
        if name == "num_turns":
            columns[name] = torch.tensor(values, dtype=torch.long)
        elif all(isinstance(value, np.ndarray | torch.Tensor) for value in values):
            columns[name] = _jagged([torch.as_tensor(value) for value in values])
        else:
            columns[name] = NonTensorStack(*values)
    return TensorDict(columns, batch_size=[len(rows)])


def _jagged(tensors: list[Any]) -> Any:
    """Stack tensors [L] as a jagged [rows, L]; stack position ids of conversations with images, [4, L], as
    [rows, 4, L]."""
    import torch

    max_dim = max(tensor.dim() for tensor in tensors)
    if max_dim == 1:
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
    channels = next(tensor.shape[0] for tensor in tensors if tensor.dim() == 2)
    expanded = [tensor if tensor.dim() == 2 else tensor[None].expand(channels, -1) for tensor in tensors]
    lengths = torch.tensor([0, *(tensor.shape[1] for tensor in expanded)])
    values = torch.cat(expanded, dim=1)
    nested = torch.nested.nested_tensor_from_jagged(values=values, offsets=lengths.cumsum(0))
    nested._ragged_idx = 2  # as in verl's own tensors, the sequence is the last dimension
    return nested


def _grouped_by_columns(rows: Sequence[TrajectoryRow]) -> list[list[TrajectoryRow]]:
    """Group rows that have the same columns."""
    groups: dict[tuple[str, ...], list[TrajectoryRow]] = {}
    for row in rows:
        groups.setdefault(tuple(sorted(row.fields)), []).append(row)
    return list(groups.values())


def _listens(info: Any) -> bool:
    """Return whether a storage unit accepts connections."""
    with contextlib.suppress(OSError):
        with socket.create_connection((info.ip, info.ports["put_get_socket"]), timeout=_PROBE_TIMEOUT_S):
            return True
    return False


class TrajectoryArchive:
    """A SQLite file of rows. One process writes it, and reads only its own rows."""

    def __init__(self, path: Path) -> None:
        """Create the file if necessary. Raises `ConfigError` if that fails."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            self._connect().close()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"archive '{path}' cannot be written: {error}", key="archive") from error
        self._writer: SqliteWriter | None = None

    async def add(self, partition: str, rows: Sequence[TrajectoryRow]) -> None:
        """Store rows; once this returns, they survive a crash of the process."""
        packed = [(partition, row.key, _packed(row.tag), _packed(row.fields)) for row in rows]

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany("insert or replace into rows values (?, ?, ?, ?)", packed)

        await self._started().call(write)

    def keys(self, partition: str) -> list[str]:
        with self._reading() as connection:
            found = connection.execute("select key from rows where partition = ? order by key", (partition,))
            return [key for (key,) in found]

    def partitions(self) -> list[str]:
        with self._reading() as connection:
            return [name for (name,) in connection.execute("select distinct partition from rows order by 1")]

    def rows(self, partition: str, keys: Iterable[str]) -> Iterator[TrajectoryRow]:
        """Yield the rows of these keys, in order."""
        with self._reading() as connection:
            for key in keys:
                query = "select tag, fields from rows where partition = ? and key = ?"
                for tag, fields in connection.execute(query, (partition, key)):
                    yield TrajectoryRow(key, pickle.loads(fields), pickle.loads(tag))

    async def remove(self, partition: str, keys: Sequence[str]) -> None:
        """Delete rows that a trainer has consumed."""
        gone = [(partition, key) for key in keys]

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany("delete from rows where partition = ? and key = ?", gone)

        await self._started().call(write)

    async def aclose(self) -> None:
        if self._writer is not None:
            await self._writer.aclose()
            self._writer = None

    def _started(self) -> SqliteWriter:
        if self._writer is None:
            self._writer = SqliteWriter(
                self._connect, name="trajectory-archive", translate=self._failed, stops_when_broken=False
            )
        return self._writer

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = normal")
        connection.executescript(_SCHEMA)
        return connection

    def _reading(self) -> contextlib.closing[sqlite3.Connection]:
        return contextlib.closing(self._connect())

    def _failed(self, error: Exception) -> NemoGymError:
        return ServerError(f"archive '{self.path}' cannot be written: {type(error).__name__}: {error}")


def _packed(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
