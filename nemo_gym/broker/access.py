"""Access control: credentials, lease tokens, and what they permit."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from yarl import URL

from nemo_gym._util.files import cache_root
from nemo_gym._util.suggest import nearest
from nemo_gym.broker.box import Box
from nemo_gym.broker.boxes import Boxes, not_adopted
from nemo_gym.broker.config import BrokerConfig
from nemo_gym.broker.registry import BoxRecord, BoxState, LeaseRecord
from nemo_gym.config.files import plugin_roots
from nemo_gym.config.keys import AGENT_TYPE
from nemo_gym.contract.credentials import Caller, Role, ServerCredentials
from nemo_gym.contract.errors import CredentialError, FencedError
from nemo_gym.contract.sandbox import NetworkPolicy
from nemo_gym.contract.session import LeaseScope
from nemo_gym.http.requests import caller_of
from nemo_gym.sandbox.doors import INFERENCE_ROUTES, MCP_ROUTES, normalize_path
from nemo_gym.sandbox.wire.models import CreateSandbox, DoorModel
from nemo_gym.sandbox.wire.problems import BrokerError

# -- Lease tokens --------------------------------------------------------------------------------------------------
# Lease tokens are signed, so that a forged one is refused without a look-up, and they are looked up, so that they can
# be revoked.
#
# ``ngl1.<box>.<lease>.<scope>.<mac>``. A token contains no expiry; its lease does, and renewal needs no new token.

PREFIX = "ngl1"


class TokenSigner:
    """Signs and checks lease tokens with a key that no other server has."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def issue(self, lease: LeaseRecord) -> str:
        body = f"{PREFIX}.{lease.sandbox_id}.{lease.lease_id}.{lease.scope}"
        return f"{body}.{self._mac(body)}"

    def check(self, token: str) -> tuple[str, str]:
        """Return the ids of a genuine token's box and lease; only the registry knows whether the lease still holds.
        Raises `BrokerError` ``unauthenticated`` for anything that this signer did not issue."""
        body, _, mac = token.rpartition(".")
        if not hmac.compare_digest(mac.encode(), self._mac(body).encode()):
            raise BrokerError("unauthenticated", "the lease token is not one of this broker's")
        parts = body.split(".")
        if len(parts) != 4 or parts[0] != PREFIX:
            raise BrokerError("unauthenticated", "the bearer token is not a lease token")
        return parts[1], parts[2]

    def _mac(self, body: str) -> str:
        digest = hmac.digest(self._key, body.encode("utf-8", "surrogateescape"), hashlib.sha256)
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")


# -- Callers -------------------------------------------------------------------------------------------------------
# The caller or the lease behind a request.
#
# A caller credential (of the stack) identifies who requests boxes; a lease token defines what its holder may do with
# one box. Other callers' boxes are reported as not found, whether they exist or not.

ANONYMOUS = Caller(Role.OPERATOR, "anonymous")
"""The caller of every request to a broker that was started without credentials (on loopback, by hand)."""
_BEARER = "bearer "
_RANK = {LeaseScope.READ: 0, LeaseScope.OPERATE: 1, LeaseScope.OWNER: 2}


@dataclass(frozen=True, slots=True)
class Grant:
    """A request's right to one box. Exactly one of ``box`` (live) and ``record`` (gone) is set."""

    sandbox_id: str
    scope: LeaseScope
    box: Box | None
    record: BoxRecord | None
    lease: LeaseRecord | None
    """``None`` for a caller credential."""

    @property
    def holds(self) -> bool:
        """Whether the lease still holds. Streams check it again and again, because they last long."""
        if self.lease is None or self.box is None:
            return True
        return not (self.lease.revoked or self.lease.epoch < self.box.epoch or self.box.lease_has_ended(self.lease))

    def require_held(self) -> None:
        """Check again what was checked before the request's body arrived.

        Raises:
            FencedError: the lease was revoked.
            BrokerError: the lease has ended (``lease_expired``).
        """
        if self.lease is None or self.box is None or self.holds:
            return
        if self.lease.revoked or self.lease.epoch < self.box.epoch:
            raise FencedError(f"this lease of box '{self.sandbox_id}' was revoked", sandbox_id=self.sandbox_id)
        raise _ended(self.sandbox_id)


class Access:
    """Authenticates requests.

    Args:
        credentials: the server's own; ``None`` if it was started without a stack.
        tokens: name → token of callers that are not servers of the stack.
        trusted: the names among them that count as environments; the others count as agents.
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
        """Return the authenticated sender. Raises `BrokerError` ``unauthenticated``."""
        caller = self._caller(request)
        if caller is None:
            raise BrokerError("unauthenticated", f"{request.url.path} needs a caller's credential")
        return caller

    def _caller(self, request: Request) -> Caller | None:
        if (stack_caller := caller_of(request)) is not None:
            return self._checked_stack_caller(stack_caller)
        token = _bearer(request)
        token_bytes = (token or "").encode()
        # Compare with every token, so that the time taken reveals nothing.
        names = [name for name, value in self._tokens.items() if hmac.compare_digest(value.encode(), token_bytes)]
        if names:
            return Caller(Role.ENVIRONMENT if names[0] in self._trusted else Role.AGENT, names[0])
        if self._credentials is None:
            return None if self._tokens else ANONYMOUS
        if token is None or token.startswith(f"{PREFIX}."):
            return None
        try:
            return self._checked_stack_caller(self._credentials.check(token))
        except CredentialError as error:
            raise BrokerError("unauthenticated", error.message) from None

    def _checked_stack_caller(self, caller: Caller) -> Caller:
        # A caller's name decides which boxes belong to it, so two callers with one name would share their boxes.
        if self.is_outsider(caller):
            raise BrokerError(
                "unauthenticated",
                f"the broker's caller_tokens contain '{caller.name}', which is also the name of a server of its stack;"
                " rename it in caller_tokens",
            )
        return caller

    def is_outsider(self, caller: Caller) -> bool:
        """Return whether a caller used one of the configured tokens, and so is not a server of the stack."""
        return caller.name in self._tokens

    def sees(self, caller: Caller) -> str | None:
        """Return the creator whose boxes a caller may see and reap; ``None`` means all boxes."""
        return None if sees_all(caller) else caller.name

    async def any_caller(self, request: Request) -> None:
        """Require a caller's credential or any valid lease. Raises `BrokerError` otherwise."""
        token = _bearer(request)
        if token is not None and token.startswith(f"{PREFIX}."):
            await self.box(request, self.signer.check(token)[0], LeaseScope.READ)
        else:
            self.caller(request)

    async def box(self, request: Request, sandbox_id: str, wanted: LeaseScope, *, creator_may: bool = False) -> Grant:
        """Return the request's right to a box, which must include the scope ``wanted``.

        Args:
            creator_may: whether the credential of the box's creator is accepted instead of a lease.

        Raises:
            BrokerError: ``unauthenticated``, ``lease_expired``, ``scope`` or ``sandbox_not_found``; or
                ``backend_unreachable`` for a box that reconciliation has not taken over yet.
            FencedError: the lease was revoked.
        """
        token = _bearer(request)
        if token is not None and token.startswith(f"{PREFIX}."):
            return await self._by_lease(token, sandbox_id, wanted)
        caller = self._caller(request)
        if caller is None or not creator_may:
            raise BrokerError("unauthenticated", f"{request.url.path} needs a lease token of the box (Bearer)")
        box = self._boxes.get(sandbox_id)
        record = None if box is not None else await self._boxes.store.find(sandbox_id)
        creator = box.creator if box is not None else record.creator if record is not None else ""
        if (box is None and record is None) or self.sees(caller) not in (None, creator):
            raise _not_found(sandbox_id)
        _require_gone(record)
        return Grant(sandbox_id, LeaseScope.OWNER, box, record, None)

    async def _by_lease(self, token: str, sandbox_id: str, required_scope: LeaseScope) -> Grant:
        token_box, lease_id = self.signer.check(token)
        if token_box != sandbox_id:
            raise _not_found(sandbox_id)
        box = self._boxes.get(sandbox_id)
        record = None if box is not None else await self._boxes.store.find(sandbox_id)
        if box is not None:
            lease, epoch = box.leases.get(lease_id), box.epoch
        elif record is not None:
            leases = await self._boxes.store.leases_of(sandbox_id)
            lease, epoch = next((lease for lease in leases if lease.lease_id == lease_id), None), record.epoch
        else:
            raise _not_found(sandbox_id)
        if lease is None:
            raise BrokerError("unauthenticated", "the lease of this token no longer exists")
        if lease.revoked or lease.epoch < epoch:
            raise FencedError(f"this lease of box '{sandbox_id}' was revoked", sandbox_id=sandbox_id)
        # A box that is gone has only its record, whose times are on the wall clock.
        ended = lease.expires_at is not None and lease.expires_at <= time.time()
        if ended if box is None else box.lease_has_ended(lease):
            raise _ended(sandbox_id)
        if _RANK[lease.scope] < _RANK[required_scope]:
            raise BrokerError(
                "scope",
                f"this needs a lease of scope '{required_scope}', and this one is '{lease.scope}'",
                sandbox_id=sandbox_id,
            )
        _require_gone(record)
        return Grant(sandbox_id, lease.scope, box, record, lease)


def _ended(sandbox_id: str) -> BrokerError:
    return BrokerError("lease_expired", f"this lease of box '{sandbox_id}' has ended", sandbox_id=sandbox_id)


def _require_gone(record: BoxRecord | None) -> None:
    """Raise `BrokerError` for a record without a live box that does not say that its box is gone."""
    if record is not None and record.state is not BoxState.GONE:
        raise not_adopted(f"box '{record.sandbox_id}'")


def sees_all(caller: Caller) -> bool:
    return caller.role in (Role.PIPELINE, Role.OPERATOR)


def narrower(scope: LeaseScope, than: LeaseScope) -> bool:
    return _RANK[scope] < _RANK[than]


def _bearer(request: Request) -> str | None:
    value = request.headers.get("authorization", "")
    return value[len(_BEARER) :].strip() if value[: len(_BEARER)].lower() == _BEARER else None


def _not_found(sandbox_id: str) -> BrokerError:
    return BrokerError("sandbox_not_found", f"there is no box '{sandbox_id[:80]}'", sandbox_id=sandbox_id[:80])


# -- Permissions ---------------------------------------------------------------------------------------------------
# The boxes that a caller may request.
#
# Agent servers run other people's code, and callers from outside are not servers of the stack. The boxes of both reach
# only those parts of the broker's host and network that the configuration names. Environments, the pipeline and
# operators prepare images and grade; for them, only ``mount_roots`` is a restriction.

OWNER_LABEL = "nemo_gym.owner"
"""Label with which a caller names the owner whose quota its box counts against; by default the caller itself."""
DOOR_ROUTES = (*INFERENCE_ROUTES, *MCP_ROUTES)
_TRUSTED = (Role.PIPELINE, Role.OPERATOR, Role.ENVIRONMENT)
_HOST_PATH = re.compile(r"(?:(?:docker|oci)-archive:|(?:[A-Za-z][A-Za-z0-9+.-]*:(?://)?)?(?=[/~.]))(.*)", re.DOTALL)
"""Matches an image that is a path on the backend's host, bare or after a type of file (``docker-archive:/x``)."""


def is_trusted(role: Role) -> bool:
    """Return whether callers with this role prepare images and grade."""
    return role in _TRUSTED


class Permissions:
    """The rules of one broker, from its configuration."""

    def __init__(self, config: BrokerConfig, endpoints: Iterable[str] = ()) -> None:
        """``endpoints``: the base URLs that doors may lead to if the configuration has no ``door_targets``."""
        self._config = config
        mount_roots = config.mount_roots
        roots = [*(mount_roots or ()), *(_agent_directories() if config.agent_packages else ())]
        self._trusted_may_mount_anything = mount_roots is None
        """Whether a trusted server of the stack may mount any path, as it could with its own provider."""
        self._roots = [Path(os.path.realpath(root)) for root in roots]
        targets = endpoints if config.door_targets is None else config.door_targets
        self._targets = [_base(target) for target in targets]

    def check_create(self, caller: Caller, body: CreateSandbox, *, is_outsider: bool) -> None:
        """Raise `BrokerError` ``mount_refused`` or ``not_permitted`` if the caller may not create this box."""
        spec, trusted = body.spec, is_trusted(caller.role)
        if not (self._trusted_may_mount_anything and trusted and not is_outsider):
            self._check_paths((mount.source for mount in spec.mounts), "spec.mounts")
        if trusted:
            return
        if spec.network is not NetworkPolicy.NONE:
            raise _not_permitted(
                "spec.network",
                f"'{spec.network}' gives a box this broker's network; '{caller.name}' ({caller.role}) opens boxes with"
                " network 'none', and doors in them",
            )
        if spec.image is not None and (path := _HOST_PATH.fullmatch(spec.image)) is not None:
            self._check_paths([os.path.expanduser(path[1])], "spec.image")  # noqa: PTH111 - need not be normal
        for name, value in spec.provider_options.items():
            allowed = self._config.agent_provider_options
            if name not in allowed or allowed[name] != value:
                raise _not_permitted(
                    f"spec.provider_options.{name[:80]}",
                    f"'{caller.name}' ({caller.role}) may set only the backend options and values that are"
                    " in this broker's agent_provider_options",
                )
        if body.labels.get(OWNER_LABEL, caller.name) != caller.name:
            raise _not_permitted(
                f"labels.{OWNER_LABEL}", f"boxes of '{caller.name}' ({caller.role}) count against its own quota"
            )
        self.check_doors(spec.doors)

    def check_doors(self, doors: Iterable[DoorModel]) -> None:
        """Raise `BrokerError` ``not_permitted`` for a door that only trusted callers may open. The broker dials a
        door's target from its own host."""
        for door in doors:
            if door.kind == "proxy":
                raise _not_permitted(
                    f"door '{door.name[:80]}': kind",
                    "a proxy dials from this broker's host; an environment that makes its attempts' boxes here opens"
                    " it, an agent does not",
                )
            for route in door.allow:
                if route not in DOOR_ROUTES:
                    raise _not_permitted(
                        f"door '{door.name[:80]}': allow",
                        f"'{route[:80]}' is not a route of a model or an MCP server{nearest(route, DOOR_ROUTES)}; an"
                        f" agent's doors forward {', '.join(DOOR_ROUTES)}",
                    )
            if not any(_base(door.target).startswith(base) for base in self._targets):
                raise _not_permitted(
                    f"door '{door.name[:80]}': target",
                    f"'{door.target[:200]}' is not below any of this broker's door_targets"
                    " (by default the model servers and environments of its run)",
                )

    def _check_paths(self, sources: Iterable[str], field: str) -> None:
        for source in sources:
            # Resolve links first, because the backend follows them too.
            if not any(Path(os.path.realpath(source)).is_relative_to(root) for root in self._roots):
                raise BrokerError(
                    "mount_refused",
                    f"{field}: '{source}' is not below a directory that this broker lets boxes mount from; name one in"
                    " its mount_roots, or set agent_packages for the programs of agents",
                )


def _agent_directories() -> Iterable[str]:
    """Yield the directories of agent programs on this host: those that ``ng_prepare agents`` and
    ``scripts/install-clis`` fill in the cache, and the agent folders of plugins."""
    yield from (str(cache_root() / name) for name in ("agents", "clis"))
    yield from (str(root / AGENT_TYPE) for root in plugin_roots())


def _base(target: str) -> str:
    """Normalize a URL to the form that the door dials, for comparison. Raises `BrokerError` if it is ambiguous."""
    try:
        url = URL(target)
        path = normalize_path(url.raw_path or "/")
        if path is not None and url.raw_host is not None:
            return f"{url.scheme}://{url.raw_host}:{url.port}{path.rstrip('/')}/"
    except ValueError:
        pass
    raise _not_permitted("target", f"'{target[:200]}' is not a plain http:// or https:// URL")


def _not_permitted(field: str, why: str) -> BrokerError:
    return BrokerError("not_permitted", f"{field}: {why}")
