"""Who may do what: the caller or the lease behind a request.

A caller credential (of the stack) says who asks for boxes; a lease token says what its holder may do with one box.
Boxes of others are not found, whether they exist or not.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from starlette.requests import Request

from nemo_gym.broker.box import Box
from nemo_gym.broker.boxes import Boxes
from nemo_gym.broker.registry.records import BoxRecord, LeaseRecord
from nemo_gym.broker.tokens import PREFIX, TokenSigner
from nemo_gym.contract.credentials import Caller, Role, ServerCredentials
from nemo_gym.contract.errors import CredentialError, FencedError
from nemo_gym.contract.session import LeaseScope
from nemo_gym.http.middleware import caller_of
from nemo_gym.sandbox.wire.problems import BrokerError

ANONYMOUS = Caller(Role.OPERATOR, "anonymous")
"""Everybody, on a broker that was started without credentials (on loopback, by hand)."""
_BEARER = "bearer "
_RANK = {LeaseScope.READ: 0, LeaseScope.OPERATE: 1, LeaseScope.OWNER: 2}


@dataclass(frozen=True, slots=True)
class Grant:
    """A request's right to one box. Exactly one of ``box`` (live) and ``record`` (gone) is there."""

    sandbox_id: str
    scope: LeaseScope
    box: Box | None
    record: BoxRecord | None
    lease: LeaseRecord | None
    """``None`` for a caller credential."""

    @property
    def holds(self) -> bool:
        """Whether the lease still holds: what goes on for long (streams) looks again and again."""
        if self.lease is None or self.box is None:
            return True
        return not (self.lease.revoked or self.lease.epoch < self.box.epoch or self.box.lease_has_ended(self.lease))


class Access:
    """Checks requests.

    Args:
        credentials: the server's own; ``None`` where it was started without.
        tokens: callers that are no servers of the stack, by name.
        trusted: those of them who count as environments; the others count as agents.
    """

    def __init__(
        self,
        signer: TokenSigner,
        boxes: Boxes,
        credentials: ServerCredentials | None,
        tokens: Mapping[str, str],
        trusted: Collection[str] = (),
    ) -> None:
        self.signer, self._boxes, self._credentials = signer, boxes, credentials
        self._tokens, self._trusted = dict(tokens), frozenset(trusted)

    def caller(self, request: Request) -> Caller:
        """The checked sender. Raises `BrokerError` ``unauthenticated``."""
        caller = self._caller(request)
        if caller is None:
            raise BrokerError("unauthenticated", f"{request.url.path} needs a caller's credential")
        return caller

    def _caller(self, request: Request) -> Caller | None:
        if (known := caller_of(request)) is not None:
            return self._of_the_stack(known)
        token = _bearer(request)
        given = (token or "").encode()
        # All of them are compared, so that the time taken tells nothing.
        names = [name for name, known in self._tokens.items() if hmac.compare_digest(known.encode(), given)]
        if names:
            return Caller(Role.ENVIRONMENT if names[0] in self._trusted else Role.AGENT, names[0])
        if self._credentials is None:
            return None if self._tokens else ANONYMOUS
        if token is None or token.startswith(f"{PREFIX}."):
            return None
        try:
            return self._of_the_stack(self._credentials.check(token))
        except CredentialError as error:
            raise BrokerError("unauthenticated", error.message) from None

    def _of_the_stack(self, caller: Caller) -> Caller:
        # What a caller made is its own by its name, so two callers of one name would have each other's boxes.
        if self.is_outsider(caller):
            raise BrokerError(
                "unauthenticated",
                f"the broker's caller_tokens name a caller '{caller.name}', as a server of its stack is named; rename"
                " that one",
            )
        return caller

    def is_outsider(self, caller: Caller) -> bool:
        """Whether a caller was told from the configuration's tokens, and is no server of the stack."""
        return caller.name in self._tokens

    def sees(self, caller: Caller) -> str | None:
        """Whose boxes a caller may see and reap; ``None`` is everybody's."""
        return None if caller.role in (Role.PIPELINE, Role.OPERATOR) else caller.name

    async def anyone(self, request: Request) -> None:
        """A caller, or the holder of any lease that holds. Raises `BrokerError`."""
        token = _bearer(request)
        if token is not None and token.startswith(PREFIX):
            await self.box(request, self.signer.check(token).sandbox_id, LeaseScope.READ)
        else:
            self.caller(request)

    async def box(self, request: Request, sandbox_id: str, wanted: LeaseScope, *, creator_may: bool = False) -> Grant:
        """The right to do something of scope ``wanted`` with a box.

        Args:
            creator_may: whether the credential of the caller that made the box does as well as a lease.

        Raises:
            BrokerError: ``unauthenticated``, ``lease_expired``, ``scope`` or ``sandbox_not_found``.
            FencedError: the lease was taken back.
        """
        token = _bearer(request)
        if token is not None and token.startswith(PREFIX):
            return await self._by_lease(token, sandbox_id, wanted)
        caller = self._caller(request)
        if caller is None or not creator_may:
            raise BrokerError("unauthenticated", f"{request.url.path} needs a lease token of the box (Bearer)")
        box = self._boxes.get(sandbox_id)
        record = None if box is not None else await self._boxes.store.find(sandbox_id)
        whose = box.creator if box is not None else record.creator if record is not None else ""
        if (box is None and record is None) or self.sees(caller) not in (None, whose):
            raise _not_found(sandbox_id)
        return Grant(sandbox_id, LeaseScope.OWNER, box, record, None)

    async def _by_lease(self, token: str, sandbox_id: str, wanted: LeaseScope) -> Grant:
        claim = self.signer.check(token)
        if claim.sandbox_id != sandbox_id:
            raise _not_found(sandbox_id)
        box = self._boxes.get(sandbox_id)
        record: BoxRecord | None = None
        if box is not None:
            lease, epoch = box.leases.get(claim.lease_id), box.epoch
        else:
            record = await self._boxes.store.find(sandbox_id)
            if record is None:
                raise _not_found(sandbox_id)
            held = await self._boxes.store.leases_of(sandbox_id)
            lease = next((lease for lease in held if lease.lease_id == claim.lease_id), None)
            epoch = record.epoch
        if lease is None:
            raise BrokerError("unauthenticated", "the lease of this token is not known any more")
        if lease.revoked or lease.epoch < epoch:
            raise FencedError(f"this lease of box '{sandbox_id}' was taken back", sandbox_id=sandbox_id)
        # Of a box that is gone nothing is left but the record, by the wall clock.
        ended = lease.expires_at is not None and lease.expires_at <= time.time()
        if ended if box is None else box.lease_has_ended(lease):
            raise BrokerError("lease_expired", f"this lease of box '{sandbox_id}' has ended", sandbox_id=sandbox_id)
        if _RANK[lease.scope] < _RANK[wanted]:
            raise BrokerError(
                "scope",
                f"this needs a lease of scope '{wanted}', and this one is '{lease.scope}'",
                sandbox_id=sandbox_id,
            )
        return Grant(sandbox_id, lease.scope, box, record, lease)


def narrower(scope: LeaseScope, than: LeaseScope) -> bool:
    return _RANK[scope] < _RANK[than]


def _bearer(request: Request) -> str | None:
    value = request.headers.get("authorization", "")
    return value[len(_BEARER) :].strip() if value[: len(_BEARER)].lower() == _BEARER else None


def _not_found(sandbox_id: str) -> BrokerError:
    return BrokerError("sandbox_not_found", f"there is no box '{sandbox_id[:80]}'", sandbox_id=sandbox_id[:80])
