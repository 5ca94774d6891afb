"""`RemoteProvider`: boxes that a broker holds."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from builtins import list as List  # noqa: N812 - the contract has a method of the builtin's name
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

import structlog
from pydantic import ValidationError

from nemo_gym._util.suggest import validation_problems
from nemo_gym._util.tasks import BackgroundTasks
from nemo_gym.contract.errors import (
    ConfigError,
    NemoGymError,
    SandboxCreateError,
    SandboxError,
    SandboxLostError,
)
from nemo_gym.contract.sandbox import DEFAULT_READY_TIMEOUT_S, Door, SandboxSpec
from nemo_gym.contract.session import LeaseScope, SandboxRef
from nemo_gym.sandbox import wire
from nemo_gym.sandbox.base import ExecRequest, SandboxCapabilities, SandboxHandle, SandboxInfo, SandboxStatus
from nemo_gym.sandbox.door_statistics import DoorStatistics
from nemo_gym.sandbox.providers.remote import process
from nemo_gym.sandbox.providers.remote.connection import (
    Broker,
    BrokerConnection,
    Brokers,
    BrokerUnreachableError,
    DoorCounts,
    RemoteBox,
    RemoteOptions,
    answer_as,
    box_of,
    find_brokers,
    refusals,
)
from nemo_gym.sandbox.providers.remote.process import RemoteProcess
from nemo_gym.sandbox.streaming_provider import StreamingProvider
from nemo_gym.sandbox.wire.models import (
    CommitImage,
    CreatedSandbox,
    CreateSandbox,
    DoorModel,
    ImageView,
    LeaseView,
    MintLease,
    ReapedView,
    RenewLease,
    SandboxPage,
    SandboxView,
)

log = structlog.get_logger(__name__)

_ADMISSION_S = 300.0
"""How long a create may wait at the broker for capacity, in addition to the box's own ``ready_timeout_s``."""
_IMAGE_S = 1800.0
"""How much longer a create may take with the default ``ready_timeout_s``, which leaves out the pull of the image."""
_COMMIT_TIMEOUT_S = 1800.0


class RemoteProvider(StreamingProvider):
    """Boxes behind a broker, or behind several replicas of it.

    Args:
        options: the fields of `RemoteOptions`. Unknown options raise `ConfigError`.
    """

    name = "remote"

    def __init__(self, **options: Any) -> None:
        self.options = RemoteOptions.from_mapping(options)
        self._connection = BrokerConnection(
            request_timeout_s=self.options.request_timeout_s, patience_s=self.options.patience_s
        )
        self._brokers: Brokers | None = None
        self._background = BackgroundTasks()
        self._doors = DoorCounts(self._connection)

    @property
    def capabilities(self) -> SandboxCapabilities:
        """The abilities of the broker's backend that the wire protocol supports. Asks the broker once; blocks."""
        return self._configured().ask_abilities_blocking(self._connection)

    # -------------------------------------------------------------------------------------------------- life

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        brokers = self._configured()
        try:
            capabilities = await brokers.ask_abilities(self._connection)
        except BrokerUnreachableError as error:
            raise SandboxCreateError(str(error), retryable=True, provider=self.name) from error
        capabilities.check(spec, self.name)
        key = spec.idempotency_key or uuid.uuid4().hex
        with refusals():
            body = CreateSandbox.of(spec)
        for broker, patience_s in brokers.in_order(spec.idempotency_key):
            try:
                return await self._create_at(broker, spec, key, body, patience_s)
            except NemoGymError as error:
                if patience_s is None or not error.retryable or error.details.get("started") != "no":
                    raise
                brokers.unreachable(broker)
        raise AssertionError("unreachable: the last broker makes the box or raises")

    async def _create_at(
        self, broker: Broker, spec: SandboxSpec, key: str, body: CreateSandbox, patience_s: float | None
    ) -> SandboxHandle:
        longest_s = _ADMISSION_S + (spec.ready_timeout_s or DEFAULT_READY_TIMEOUT_S + _IMAGE_S)
        headers = {wire.IDEMPOTENCY_KEY_HEADER: key}
        try:
            async with asyncio.timeout(longest_s):
                answer = await self._ask(
                    broker, "POST", headers=headers, body=body, silence_s=longest_s, patience_s=patience_s
                )
        except (TimeoutError, BrokerUnreachableError) as error:
            self._take_back(broker, key, spec)
            raise SandboxCreateError(
                str(error) or f"the broker did not create the box within {longest_s:g} s",
                retryable=True,
                provider=self.name,
                started=error.details.get("started") if isinstance(error, BrokerUnreachableError) else "unknown",
            ) from error
        except asyncio.CancelledError:
            self._take_back(broker, key, spec)
            raise
        try:
            lease = answer_as(CreatedSandbox, answer).lease
            box = RemoteBox(broker.url, lease.sandbox_id, _token(lease), lease.scope, lease.expires_at)
        except SandboxError:
            self._take_back(broker, key, spec)
            raise
        box.doors = {door.name: DoorStatistics() for door in spec.doors}
        return SandboxHandle(box.sandbox_id, self.name, box)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        try:
            view = await self._view(box_of(handle))
        except SandboxLostError:
            return SandboxStatus.STOPPED
        except BrokerUnreachableError:
            return SandboxStatus.UNKNOWN
        return view.state

    async def overrun(self, handle: SandboxHandle) -> str | None:
        try:
            return (await self._view(box_of(handle))).overrun
        except (SandboxLostError, BrokerUnreachableError):
            return None

    async def renew(self, handle: SandboxHandle, ttl_s: float) -> None:
        box = box_of(handle)
        with refusals():
            body = RenewLease(ttl_s=ttl_s)
        answer = await self._connection.ask_box(box, "PUT", "lease", body=body)
        box.expires_at = answer_as(LeaseView, answer).expires_at

    async def close(self, handle: SandboxHandle) -> None:
        """Destroy the box if this handle's lease has the owner's scope; otherwise only release the handle."""
        box = box_of(handle)
        await self._doors.forget(box)
        box.doors.clear()
        if box.scope is LeaseScope.OWNER:
            with contextlib.suppress(SandboxLostError):
                await self._connection.ask_box(box, "DELETE")

    async def list(self, labels: Mapping[str, str] | None = None) -> List[SandboxInfo]:
        return [info for broker in self._configured().all for info in await self._list_at(broker, labels or {})]

    async def _list_at(self, broker: Broker, labels: Mapping[str, str]) -> List[SandboxInfo]:
        infos: List[SandboxInfo] = []
        cursor: str | None = None
        while True:
            query = _label_query(labels) + ([("cursor", cursor)] if cursor else [])
            page = answer_as(SandboxPage, await self._ask(broker, "GET", query=query))
            infos += (view.to_info() for view in page.sandboxes)
            cursor = page.next_cursor
            if cursor is None:
                return infos

    async def reap(self, labels: Mapping[str, str]) -> List[str]:
        if not labels:
            raise SandboxError("reap needs at least one label, so that nobody destroys every box by accident")
        requests = (
            self._ask(broker, "DELETE", query=_label_query(labels), silence_s=_ADMISSION_S)
            for broker in self._configured().all
        )
        # If one broker cannot be reached, still destroy the boxes of the others.
        answers = await asyncio.gather(*requests, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [box_id for answer in answers for box_id in answer_as(ReapedView, cast(bytes, answer)).reaped]

    async def aclose(self) -> None:
        """Finish background work (killing abandoned commands), then close the connections."""
        await self._doors.aclose()
        await self._background.join()
        await self._connection.aclose()

    # ---------------------------------------------------------------------------------------------- commands

    async def start_exec(self, handle: SandboxHandle, request: ExecRequest) -> RemoteProcess:
        command = RemoteProcess(
            self._connection, box_of(handle), request, doors=self._doors, background=self._background
        )
        await command.start()
        return command

    # ------------------------------------------------------------------------------------------------- files

    async def put_archive(self, handle: SandboxHandle, path: str, tar: AsyncIterator[bytes]) -> None:
        await process.put(self._connection, box_of(handle), path, tar)

    def get_archive(
        self, handle: SandboxHandle, path: str, *, exclude: Sequence[str] = (), max_bytes: int | None = None
    ) -> AsyncIterator[bytes]:
        return process.get(self._connection, box_of(handle), path, exclude=exclude, max_bytes=max_bytes)

    # ------------------------------------------------------------------------------------------------- doors

    async def open_door(self, handle: SandboxHandle, door: Door) -> None:
        """Open a door that the broker serves. The broker connects to the target, whose address must be valid there."""
        box = box_of(handle)
        with refusals():
            body = DoorModel.of(door)
        await self._connection.ask_box(box, "PUT", "doors", door.name, body=body)
        box.doors[door.name] = DoorStatistics()

    async def close_door(self, handle: SandboxHandle, name: str) -> None:
        box = box_of(handle)
        await self._connection.ask_box(box, "DELETE", "doors", name)
        box.doors.pop(name, None)

    def door_statistics(self, handle: SandboxHandle) -> Mapping[str, DoorStatistics]:
        """The broker's statistics: current when a command has just ended, otherwise at most about a second old."""
        box = box_of(handle)
        self._doors.watch(box)
        return box.doors

    # ---------------------------------------------------------------------------------- images and connecting

    async def commit(self, handle: SandboxHandle, image: str, labels: Mapping[str, str]) -> None:
        box = box_of(handle)
        with refusals():
            body = CommitImage(image=image, labels=dict(labels))
        await self._connection.ask_box(box, "POST", "images", body=body, silence_s=_COMMIT_TIMEOUT_S)

    async def image_labels(self, image: str) -> Mapping[str, str] | None:
        """Return the image's labels if every reachable broker has it, because a create may go to any of them."""
        brokers = self._configured()
        labels: Mapping[str, str] | None = None
        unreachable: BrokerUnreachableError | None = None
        for broker in brokers.all:
            try:
                answer = await self._ask(broker, "GET", wire.image(image), patience_s=brokers.patience_of(broker))
            except BrokerUnreachableError as error:
                brokers.unreachable(broker)
                unreachable = error
            except SandboxError as error:
                if error.details.get("problem") == "image_not_found":
                    return None
                raise
            else:
                labels = answer_as(ImageView, answer).labels
        if labels is None and unreachable is not None:
            raise unreachable
        return labels

    async def remove_image(self, image: str) -> None:
        for broker in self._configured().all:
            await self._ask(broker, "DELETE", wire.image(image))

    async def serialize_handle(self, handle: SandboxHandle, *, scope: str) -> dict[str, Any]:
        """Return a `SandboxRef` with a new lease for ``scope``, or with this handle's lease if it has that scope."""
        box = box_of(handle)
        try:
            lease_scope = LeaseScope(scope)
        except ValueError:
            raise SandboxError(f"a box is lent with the scope {', '.join(LeaseScope)}, not with '{scope}'") from None
        token, expires_at = box.token, box.expires_at
        if lease_scope is not box.scope:
            # Repeating this request may leave a lease whose token was lost. It does no harm and ends with the box.
            answer = await self._connection.ask_box(box, "POST", "leases", body=MintLease(scope=lease_scope))
            lease = answer_as(LeaseView, answer)
            token, expires_at = _token(lease), lease.expires_at
            box.lent.add(lease.lease_id)
        ref = SandboxRef(
            broker_url=box.broker_url,
            sandbox_id=box.sandbox_id,
            lease_token=token,
            scope=lease_scope,
            expires_at=expires_at,
        )
        return ref.model_dump(mode="json")

    async def fence(self, handle: SandboxHandle) -> None:
        """End the leases that `serialize_handle` created. References that use this handle's own lease stay valid."""
        box = box_of(handle)
        for lease_id in list(box.lent):
            await self._connection.ask_box(box, "DELETE", "leases", lease_id)
            box.lent.discard(lease_id)

    async def connect(self, descriptor: Mapping[str, Any]) -> SandboxHandle:
        """Return a handle on a borrowed box. The broker's address in this provider's configuration takes precedence
        over the reference's, because addresses may differ between machines.

        Raises:
            SandboxError: the descriptor is no `SandboxRef`, or several brokers are configured but not the reference's.
            SandboxLostError: the box is gone, or the lease has ended or was replaced.
        """
        try:
            ref = SandboxRef.model_validate(dict(descriptor))
        except ValidationError as error:
            raise SandboxError(f"this is not a reference to a box of a broker; {validation_problems(error)}") from None
        brokers = self._find_brokers()
        url = ref.broker_url.rstrip("/") if brokers is None else brokers.url_of(ref.broker_url)
        if url is None:
            raise SandboxError(
                f"the reference names the broker {ref.broker_url}, which is not one of those configured"
            )
        box = RemoteBox(url, ref.sandbox_id, ref.lease_token, ref.scope, ref.expires_at)
        try:
            view = await self._view(box)
        except BrokerUnreachableError as error:
            raise SandboxLostError(str(error), **error.details) from error
        if view.state in (SandboxStatus.STOPPED, SandboxStatus.ERROR):
            raise SandboxLostError(f"sandbox {ref.sandbox_id} is gone ({view.termination_reason or view.state})")
        return SandboxHandle(box.sandbox_id, self.name, box)

    # ---------------------------------------------------------------------------------------------- internals

    def _find_brokers(self) -> Brokers | None:
        if self._brokers is None:
            self._brokers = find_brokers(self.options)
        return self._brokers

    def _configured(self) -> Brokers:
        brokers = self._find_brokers()
        if brokers is None:
            raise ConfigError(
                "remote sandbox: no broker is configured, so boxes can be borrowed but not created or listed; set"
                " 'url' or 'server'",
                key="url",
            )
        return brokers

    async def _ask(
        self,
        broker: Broker,
        method: str,
        path: str = wire.SANDBOXES,
        *,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> bytes:
        return await self._connection.ask(
            method, broker.url + path, headers={**broker.headers, **(headers or {})}, repeatable=True, **options
        )

    async def _view(self, box: RemoteBox) -> SandboxView:
        return answer_as(SandboxView, await self._connection.ask_box(box, "GET"))

    def _take_back(self, broker: Broker, key: str, spec: SandboxSpec) -> None:
        # With the caller's idempotency key, another create may already use the box, so let its lease end it.
        if spec.idempotency_key is None:
            self._background.start(self._discard(broker, key))

    async def _discard(self, broker: Broker, key: str) -> None:
        """Revoke an abandoned create, whether or not it has reached the broker yet."""
        try:
            await self._ask(broker, "DELETE", query={"idempotency_key": key}, silence_s=_ADMISSION_S)
        except NemoGymError as error:
            log.warning("remote_create_not_taken_back", error=str(error))


def _token(lease: LeaseView) -> str:
    if lease.token is None:
        raise SandboxError("the broker's response contains a lease without its token", sandbox_id=lease.sandbox_id)
    return lease.token


def _label_query(labels: Mapping[str, str]) -> List[tuple[str, str]]:
    return [("label", f"{key}={value}") for key, value in labels.items()]
