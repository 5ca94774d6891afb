"""What a box is asked to be: plain, immutable data that environments and agents write and providers read.

`SandboxSpec` is the whole of it. `AllowedHosts` says which names and addresses an allow-list lets through.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from nemo_gym._util.suggest import nearest
from nemo_gym.contract.errors import ConfigError, reject_unknown_keys

DEFAULT_PORTS = (80, 443)
"""Of an entry that names none."""
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_PLAIN_NAME = re.compile(rf"(?:{_LABEL}\.)*{_LABEL}")
_NAME = re.compile(rf"(?:\*\.)?{_PLAIN_NAME.pattern}")
_ENDS_IN_NUMBER = re.compile(r"(?:.*\.)?(?:\d+|0x[0-9a-f]*)")
"""Names that resolvers read as addresses (``127.1``, ``0x7f000001``)."""
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class _Entry:
    """One line of an allow-list: a name, ``*.name``, or a network, at a port or the default ones."""

    name: str | None
    network: ipaddress.IPv4Network | ipaddress.IPv6Network | None
    ports: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> _Entry:
        host = text.strip().lower()
        ports: tuple[int, ...] = DEFAULT_PORTS
        if (bracketed := re.fullmatch(r"\[([^\]]*)\](?::(.*))?", host)) is not None:
            host, given = bracketed[1], bracketed[2]
        elif host.count(":") == 1:
            host, given = host.split(":")
        else:
            given = None
        if given is not None:
            if not given.isdecimal() or not 1 <= int(given) <= 65535:
                raise ConfigError(f"egress.allow: '{text}' has no port between 1 and 65535 after its ':'")
            ports = (int(given),)
        with contextlib.suppress(ValueError):
            return cls(None, ipaddress.ip_network(host), ports)
        host = host.removesuffix(".")
        if not _NAME.fullmatch(host) or _ENDS_IN_NUMBER.fullmatch(host):
            raise ConfigError(
                f"egress.allow: '{text}' is no entry; write a name (pypi.org), *.name for all below it, or a network"
                " (10.0.0.0/8), with :port where it is not 80 and 443; for everything there is egress.policy 'open'"
            )
        return cls(host, None, ports)

    def names(self, host: str) -> bool:
        if self.name is None:
            return False
        return host.endswith(self.name[1:]) if self.name.startswith("*.") else host == self.name

    def holds(self, address: Address) -> bool:
        return self.network is not None and address.version == self.network.version and address in self.network


class AllowedHosts:
    """An allow-list of hosts. Raises `ConfigError` for an entry that cannot be read."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._text = ", ".join(entries)
        self._entries = [_Entry.parse(entry) for entry in entries]

    def __str__(self) -> str:
        return self._text

    def names(self, host: str, port: int) -> bool:
        """Whether a host may be asked for, by this name or address; where a name leads is judged by `reaches`."""
        host = host.lower().removesuffix(".")
        with contextlib.suppress(ValueError):
            return self._holds(_plain(ipaddress.ip_address(host)), port)
        # A resolver stops at a zero byte: what is before it would be asked for, and what is behind it judged.
        if _PLAIN_NAME.fullmatch(host) is None:
            return False
        return any(entry.names(host) and port in entry.ports for entry in self._entries)

    def reaches(self, address: Address, port: int) -> bool:
        """Whether a name that may be asked for may lead to this address."""
        address = _plain(address)
        return _is_public(address) or self._holds(address, port)

    def _holds(self, address: Address, port: int) -> bool:
        return any(entry.holds(address) and port in entry.ports for entry in self._entries)


def _plain(address: Address) -> Address:
    """The IPv4 address that an IPv6 address stands for, where it does."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _TRANSLATED:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and (address.sixtofour or address.teredo or address.is_site_local):
        return False
    return address.is_global and not address.is_multicast


DEFAULT_TTL_S = 3600.0
DEFAULT_READY_TIMEOUT_S = 120.0


class NetworkPolicy(StrEnum):
    """What processes in a box may reach by themselves. Doors are on loopback and exist under every policy."""

    NONE = "none"
    """Loopback only: no route, no DNS."""
    OPEN = "open"
    """Whatever the host reaches. For building images, never for a graded run."""


class SandboxRole(StrEnum):
    """What a box is for; written on it as a label, so that whoever holds only labels can reap."""

    WORK = "work"
    EVAL = "eval"
    HARVEST = "harvest"
    BUILD = "build"


LIMITS = ("cpu", "memory_mib", "disk_gib", "pids")
"""Resources that a box can have a limit of."""


@dataclass(frozen=True)
class SandboxResources:
    """Limits of one box. ``None`` leaves a limit to the provider, which has `default_limits`; one that is given and
    cannot be enforced is refused."""

    cpu: float | None = None
    """CPU cores, fractions allowed."""
    memory_mib: int | None = None
    """Memory of all processes and in-memory files together, in MiB; passing it kills a process (out of memory)."""
    disk_gib: float | None = None
    """Bytes the box may write, in GiB; passing it fails the write, or ends the box where that can only be watched."""
    gpu: int | None = None
    gpu_type: str | None = None
    pids: int | None = None
    """Processes and threads alive at once."""
    unlimited: tuple[str, ...] = ()
    """Those of `LIMITS` that the box shall not have, not by default either."""

    def __post_init__(self) -> None:
        if isinstance(self.unlimited, str):
            raise ConfigError(f"resources: unlimited must be a list of names, not '{self.unlimited}'")
        object.__setattr__(self, "unlimited", tuple(self.unlimited))
        for name in self.unlimited:
            if name not in LIMITS:
                raise ConfigError(
                    f"resources: unlimited holds '{name}'{nearest(str(name), LIMITS)}; known are {', '.join(LIMITS)}"
                )
            if getattr(self, name) is not None:
                raise ConfigError(f"resources: {name} is {getattr(self, name)} and unlimited; remove one of them")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SandboxResources:
        """Build from configuration; an unknown key raises `ConfigError` with the nearest right name."""
        reject_unknown_keys(values, [f.name for f in dataclasses.fields(cls)], where="resources")
        return cls(**values)

    def filled(self, defaults: SandboxResources) -> SandboxResources:
        """These limits, and those of ``defaults`` for what is left open here."""
        open_here = [name for name in LIMITS if getattr(self, name) is None and name not in self.unlimited]
        return dataclasses.replace(
            self,
            unlimited=(*self.unlimited, *(name for name in defaults.unlimited if name in open_here)),
            **{name: getattr(defaults, name) for name in open_here},
        )


DEFAULT_MEMORY_MIB = 8 * 1024
DEFAULT_DISK_GIB = 16.0
DEFAULT_PIDS = 2048


def default_limits(host_memory_mib: int | None) -> SandboxResources:
    """Limits of boxes for which neither spec nor configuration says anything: enough for the agents and tests that
    this suite is for, and not enough for one box to take a machine from its neighbours. Cores are not limited: the
    kernel shares them out evenly, and a quota would make tests time out on idle machines.

    Args:
        host_memory_mib: memory of the machine that boxes run on; ``None`` where nobody knows.
    """
    memory_mib = DEFAULT_MEMORY_MIB if host_memory_mib is None else min(DEFAULT_MEMORY_MIB, host_memory_mib * 3 // 4)
    return SandboxResources(memory_mib=memory_mib, disk_gib=DEFAULT_DISK_GIB, pids=DEFAULT_PIDS)


@dataclass(frozen=True)
class Door:
    """A listener on the box's loopback that reaches one target outside, and only the routes it allows.

    The listener belongs to whoever owns the box's host. It dials ``target``, adds ``headers`` (which never enter the
    box) and forwards only requests that match ``allow``. One of kind ``proxy`` has no target: it is a forward proxy to
    the hosts of ``allow`` (see `nemo_gym.sandbox.egress`).
    """

    name: str
    """What is behind it: ``model``, or an MCP server's name."""
    port: int
    """The TCP port on the box's 127.0.0.1."""
    target: str
    """Base URL outside the box; the request's path is appended to it."""
    allow: tuple[str, ...]
    """``METHOD /path`` patterns; ``*`` stands for one path segment, a final ``/**`` for any rest. Of a proxy: names,
    ``*.name`` or networks, with ``:port`` where it is not 80 and 443."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers set on every forwarded request, over what the box sent. Credentials belong here."""
    counted: tuple[str, ...] = ()
    """Patterns as in ``allow``: routes whose answers are counted (a model's answers). Where there are any, the door's
    statistics judge by them alone whether the target serves."""
    kind: Literal["routes", "proxy"] = "routes"
    max_answers: int | None = None
    """Answers of ``counted`` routes that it forwards; whoever asks for another gets 403. ``None``: any number."""


@dataclass(frozen=True)
class Mount:
    """A host directory or file that a box sees read-only (for example the shared cache of agent CLIs)."""

    source: str
    target: str


@dataclass(frozen=True)
class SandboxSpec:
    """Everything needed to create one box. Immutable and plain, apart from door headers free of secrets."""

    image: str | None = None
    """The provider's name for a root filesystem; ``None`` is the provider's default image."""
    ttl_s: float | None = None
    """Seconds the box lives without a renewal; ``None`` is `DEFAULT_TTL_S`."""
    ready_timeout_s: float | None = None
    """Seconds ``create`` may take; ``None`` is `DEFAULT_READY_TIMEOUT_S`."""
    workdir: str | None = None
    """Directory commands start in by default."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of every process in the box. Nothing of the host's environment is inherited."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Absolute path in the box → text, written before ``create`` returns."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Labels of the box; see `nemo_gym.sandbox.base.BoxLabel` for the names this suite writes and reaps by."""
    resources: SandboxResources = field(default_factory=SandboxResources)
    entrypoint: Sequence[str] | None = None
    """Replaces the image's own entry point; ``None`` keeps the box idle, waiting for execs."""
    provider_options: Mapping[str, Any] = field(default_factory=dict)
    """Options only one provider understands; unknown ones are refused by it."""
    ports: Sequence[int] = ()
    """Ports of the box that `SupportsEndpoint.endpoint` will be asked for."""
    network: NetworkPolicy = NetworkPolicy.NONE
    doors: Sequence[Door] = ()
    mounts: Sequence[Mount] = ()
    user: str | None = None
    """User commands run as by default; ``None`` is the image's."""
    requires: Sequence[str] = ()
    """Names of capabilities the box must have beyond what the other fields imply."""
    idempotency_key: str | None = None
    """Two creates with one key give one box, where the backend allows it."""

    def replace(self, **changes: Any) -> SandboxSpec:
        """A copy with the given fields changed."""
        return dataclasses.replace(self, **changes)
