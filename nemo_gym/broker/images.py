"""Images made of boxes, and their owners.

An image belongs to the caller that committed it. Only that caller, the pipeline and operators may replace or delete
it. Images that the broker did not make (mainly those of ``ng_prepare``, which uses the backend directly) have no owner
here, and agents cannot change them. An agent's image has a name in the backend that the broker generates. So whatever
name an agent chooses, no other caller gets a box of that image, now or when an image of that name is prepared later.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from weakref import WeakValueDictionary

import structlog

from nemo_gym.broker.access import is_trusted, sees_all
from nemo_gym.broker.backend import Backend
from nemo_gym.broker.registry import ImageRecord
from nemo_gym.broker.stores import ImageStore
from nemo_gym.contract.credentials import Caller
from nemo_gym.contract.errors import SandboxError
from nemo_gym.sandbox.base import SandboxHandle, SupportsSnapshot, require
from nemo_gym.sandbox.wire.problems import BrokerError

log = structlog.get_logger(__name__)

PRIVATE = "nemo-gym-agent."
"""Prefix of the backend's names of agents' images."""
_AT_ONCE = 16


class Images:
    """The images in one broker's backend, with the rights of each caller."""

    def __init__(self, store: ImageStore, backend: Backend, identity: str) -> None:
        self._store, self._backend, self._identity = store, backend, identity
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def commit(self, owner: Caller, handle: SandboxHandle, image: str, labels: Mapping[str, str]) -> None:
        """Store a box's files as ``image``, owned by the box's creator.

        Raises:
            BrokerError: ``image_owned``: another caller has an image of this name.
            SandboxError: the provider failed.
        """
        snapshots, name = self._snapshots(), self._name(owner, image)
        async with self._lock(name):
            record = await self._store.find(name)
            if record is not None:
                _check_owner(owner, record, image)
            elif name != image and await self._belongs_to_another(image):
                raise _owned(owner, image)
            else:
                await self._store.claim(ImageRecord(name, owner.name, owner.role, time.time()))
            try:
                await snapshots.commit(handle, name, labels)
            except SandboxError as error:
                if record is None:
                    await self._forget_missing(name)
                raise await self._backend.judged(error, handle) from error

    async def labels(self, caller: Caller, image: str, *, own_only: bool = False) -> Mapping[str, str] | None:
        """Return the labels of the image that `of_box` selects; ``None`` if there is none, or if ``own_only`` is set
        and the image is not the agent's own."""
        name = await self.of_box(caller, image)
        if own_only and name == image:
            return None
        return await self._snapshots().image_labels(name)

    async def remove(self, caller: Caller, image: str) -> None:
        """Delete an image. Raises `BrokerError` ``image_owned`` if it belongs to another caller."""
        snapshots, name = self._snapshots(), self._name(caller, image)
        async with self._lock(name):
            record = await self._store.find(name)
            if record is not None:
                _check_owner(caller, record, image)
            elif name != image:
                if await self._belongs_to_another(image):
                    raise _owned(caller, image)
                return
            await snapshots.remove_image(name)
            await self._store.forget(name)

    async def of_box(self, caller: Caller, image: str) -> str:
        """Return the backend's name of the image from which a caller requests a box. The caller's own image takes
        precedence over any other of that name."""
        name = self._name(caller, image)
        return name if name == image or await self._store.find(name) is not None else image

    async def reconcile(self) -> None:
        """Forget names for which the backend has no image, as after an interrupted commit. Call it after a restart."""
        if not isinstance(self._backend.provider, SupportsSnapshot):
            return
        limit = asyncio.Semaphore(_AT_ONCE)

        async def look(record: ImageRecord) -> None:
            async with limit:
                await self._forget_missing(record.name)

        await asyncio.gather(*(look(record) for record in await self._store.all()))

    def _name(self, caller: Caller, image: str) -> str:
        """Return the backend's name of a caller's image. Raises `BrokerError` ``image_owned`` if ``image`` is itself
        the backend's name of an agent's image."""
        if PRIVATE in image and not sees_all(caller):
            raise _owned(caller, image)
        if is_trusted(caller.role):
            return image
        # Include the broker's identity, because another broker of this backend may have agents with the same names.
        identity_text = "\0".join((self._identity, caller.name, image)).encode("utf-8", "surrogateescape")
        return f"{PRIVATE}{hashlib.sha256(identity_text).hexdigest()[:40]}"

    async def _belongs_to_another(self, image: str) -> bool:
        """Return whether another caller has already prepared an image under the name that an agent requests."""
        return await self._store.find(image) is not None or await self._snapshots().image_labels(image) is not None

    async def _forget_missing(self, name: str) -> None:
        try:
            if await self._snapshots().image_labels(name) is None:
                await self._store.forget(name)
        except SandboxError as error:
            # The name stays taken until its owner commits or deletes the image, or the broker starts again.
            log.warning("image_not_looked_for", image=name, error=str(error)[:300])

    def _snapshots(self) -> SupportsSnapshot:
        provider = self._backend.provider
        require(provider, SupportsSnapshot, why="for images")
        assert isinstance(provider, SupportsSnapshot)
        return provider

    def _lock(self, name: str) -> asyncio.Lock:
        """Return the lock of a name. It makes checking the owner, recording it and calling the backend one step."""
        lock = self._locks.get(name)
        if lock is None:
            self._locks[name] = lock = asyncio.Lock()
        return lock


def _check_owner(caller: Caller, record: ImageRecord, image: str) -> None:
    if record.owner != caller.name and not sees_all(caller):
        raise _owned(caller, image)


def _owned(caller: Caller, image: str) -> BrokerError:
    return BrokerError(
        "image_owned",
        f"'{caller.name}' ({caller.role}) cannot replace or delete image '{image[:200]}', which it does not own;"
        " choose another name",
        image=image[:200],
    )
