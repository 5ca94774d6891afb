"""What a caller may ask of its boxes.

Agent servers run what others wrote, and callers from outside are no servers of the stack: both get boxes that see
nothing of the broker's host or network but what the configuration names. Environments, the pipeline and operators
prepare images and grade, and are held to ``mount_roots`` alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from yarl import URL

from nemo_gym._util.directories import cache_root
from nemo_gym._util.suggest import nearest
from nemo_gym.broker.config import BrokerConfig
from nemo_gym.config.keys import AGENT_TYPE
from nemo_gym.config.roots import plugin_roots
from nemo_gym.contract.credentials import Caller, Role
from nemo_gym.contract.sandbox import NetworkPolicy
from nemo_gym.sandbox.doors import INFERENCE_ROUTES, MCP_ROUTES, normalize_path
from nemo_gym.sandbox.wire.boxes import CreateSandbox
from nemo_gym.sandbox.wire.doors import DoorModel
from nemo_gym.sandbox.wire.problems import BrokerError

OWNER_LABEL = "nemo_gym.owner"
"""Label by which a caller says whose quota its box counts against; default: its own."""
DOOR_ROUTES = (*INFERENCE_ROUTES, *MCP_ROUTES)
_TRUSTED = (Role.PIPELINE, Role.OPERATOR, Role.ENVIRONMENT)
_HOST_PATH = re.compile(r"(?:(?:docker|oci)-archive:|(?:[A-Za-z][A-Za-z0-9+.-]*:(?://)?)?(?=[/~.]))(.*)", re.DOTALL)
"""An image that is a path of the backend's host, by itself or after the kind of a file (``docker-archive:/x``)."""


def is_trusted(role: Role) -> bool:
    """Whether callers of this role prepare and grade."""
    return role in _TRUSTED


class Permissions:
    """The rules of one broker, by its configuration."""

    def __init__(self, config: BrokerConfig, endpoints: Iterable[str] = ()) -> None:
        """``endpoints``: what doors may lead to where the configuration names nothing."""
        self._config = config
        named = config.mount_roots
        roots = [*(named or ()), *(_packages() if config.agent_packages else ())]
        self._everybody = named is None
        """Whether a server of the stack that is trusted may mount anything, as with a provider of its own."""
        self._roots = [Path(os.path.realpath(root)) for root in roots]
        targets = endpoints if config.door_targets is None else config.door_targets
        self._targets = [_base(target) for target in targets]

    def check_create(self, caller: Caller, body: CreateSandbox, *, is_outsider: bool) -> None:
        """Raise `BrokerError` ``mount_refused`` or ``not_permitted`` for what the caller may not have."""
        spec, trusted = body.spec, is_trusted(caller.role)
        if not (self._everybody and trusted and not is_outsider):
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
                    f"'{caller.name}' ({caller.role}) may set no option of the backend to a value that this broker's"
                    " agent_provider_options do not name",
                )
        if body.labels.get(OWNER_LABEL, caller.name) != caller.name:
            raise _not_permitted(
                f"labels.{OWNER_LABEL}", f"boxes of '{caller.name}' ({caller.role}) count against its own quota"
            )
        self.check_doors(spec.doors)

    def check_doors(self, doors: Iterable[DoorModel]) -> None:
        """Raise `BrokerError` ``not_permitted`` for a door that only somebody trusted opens: the broker dials its
        target, from its own host."""
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
                        f"'{route[:80]}' is no route of a model or an MCP server{nearest(route, DOOR_ROUTES)}; an"
                        f" agent's doors forward {', '.join(DOOR_ROUTES)}",
                    )
            if not any(_base(door.target).startswith(base) for base in self._targets):
                raise _not_permitted(
                    f"door '{door.name[:80]}': target",
                    f"'{door.target[:200]}' is below none of this broker's door_targets"
                    " (by default the model servers and environments of its run)",
                )

    def _check_paths(self, sources: Iterable[str], field: str) -> None:
        for source in sources:
            # Links are followed first, because the backend follows them too.
            if not any(Path(os.path.realpath(source)).is_relative_to(root) for root in self._roots):
                raise BrokerError(
                    "mount_refused",
                    f"{field}: '{source}' is not below a directory that this broker lets boxes mount from; name one in"
                    " its mount_roots, or set agent_packages for the programs of agents",
                )


def _packages() -> Iterable[str]:
    """Where the programs of agents are on this host: what ``ng_prepare agents`` and ``scripts/install-clis`` put into
    the cache, and what plugins bring along."""
    yield from (str(cache_root() / name) for name in ("agents", "clis"))
    yield from (str(root / AGENT_TYPE) for root in plugin_roots())


def _base(target: str) -> str:
    """A URL as the door dials it, to be compared. Raises `BrokerError` for one that has no single reading."""
    try:
        url = URL(target)
        path = normalize_path(url.raw_path or "/")
        if path is not None and url.raw_host is not None:
            return f"{url.scheme}://{url.raw_host}:{url.port}{path.rstrip('/')}/"
    except ValueError:
        pass
    raise _not_permitted("target", f"'{target[:200]}' is no plain http:// or https:// URL")


def _not_permitted(field: str, why: str) -> BrokerError:
    return BrokerError("not_permitted", f"{field}: {why}")
