"""The specification of a box: plain, immutable data that environments and agents write and providers read.

`SandboxSpec` is the complete specification. `AllowedHosts` decides which names and addresses an allow-list permits.
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
"""The ports of an allow-list entry that names none."""
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_PLAIN_NAME = re.compile(rf"(?:{_LABEL}\.)*{_LABEL}")
_NAME = re.compile(rf"(?:\*\.)?{_PLAIN_NAME.pattern}")
_ENDS_IN_NUMBER = re.compile(r"(?:.*\.)?(?:\d+|0x[0-9a-f]*)")
"""Matches names that resolvers treat as addresses (``127.1``, ``0x7f000001``)."""
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class _Entry:
    """One entry of an allow-list: a name, ``*.name``, or a network, with one port or the default ports."""

    name: str | None
    network: ipaddress.IPv4Network | ipaddress.IPv6Network | None
    ports: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> _Entry:
        host = text.strip().lower()
        ports: tuple[int, ...] = DEFAULT_PORTS
        if (bracketed := re.fullmatch(r"\[([^\]]*)\](?::(.*))?", host)) is not None:
            host, port_text = bracketed[1], bracketed[2]
        elif host.count(":") == 1:
            host, port_text = host.split(":")
        else:
            port_text = None
        if port_text is not None:
            if not port_text.isdecimal() or not 1 <= int(port_text) <= 65535:
                raise ConfigError(f"egress.allow: '{text}' has no port between 1 and 65535 after its ':'")
            ports = (int(port_text),)
        with contextlib.suppress(ValueError):
            return cls(None, ipaddress.ip_network(host), ports)
        host = host.removesuffix(".")
        if not _NAME.fullmatch(host) or _ENDS_IN_NUMBER.fullmatch(host):
            raise ConfigError(
                f"egress.allow: '{text}' is not a valid entry; use a name (pypi.org), *.name for all below it, or a"
                " network (10.0.0.0/8), with :port for other ports than 80 and 443; to allow everything, set"
                " egress.policy to 'open'"
            )
        return cls(host, None, ports)

    def names(self, host: str) -> bool:
        if self.name is None:
            return False
        return host.endswith(self.name[1:]) if self.name.startswith("*.") else host == self.name

    def holds(self, address: Address) -> bool:
        return self.network is not None and address.version == self.network.version and address in self.network


class AllowedHosts:
    """An allow-list of hosts. Raises `ConfigError` for an invalid entry."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._text = ", ".join(entries)
        self._entries = [_Entry.parse(entry) for entry in entries]

    def __str__(self) -> str:
        return self._text

    def names(self, host: str, port: int) -> bool:
        """Whether a client may request this name or address. `reaches` checks the addresses a name resolves to."""
        host = host.lower().removesuffix(".")
        with contextlib.suppress(ValueError):
            return self._holds(_to_ipv4(ipaddress.ip_address(host)), port)
        # A resolver stops at a zero byte, so it would resolve the part before it while this check sees the whole.
        if _PLAIN_NAME.fullmatch(host) is None:
            return False
        return any(entry.names(host) and port in entry.ports for entry in self._entries)

    def reaches(self, address: Address, port: int) -> bool:
        """Whether a permitted name may resolve to this address: it must be public, or on the list itself."""
        address = _to_ipv4(address)
        return _is_public(address) or self._holds(address, port)

    def _holds(self, address: Address, port: int) -> bool:
        return any(entry.holds(address) and port in entry.ports for entry in self._entries)


def _to_ipv4(address: Address) -> Address:
    """Replace an IPv6 address that stands for an IPv4 address (mapped or NAT64) by that IPv4 address."""
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
    """The network that processes in a box can reach directly. Doors are on loopback and exist under every policy."""

    NONE = "none"
    """Loopback only: no route, no DNS."""
    OPEN = "open"
    """Everything that the host can reach. For building images, never for a graded run."""


class SandboxRole(StrEnum):
    """The purpose of a box. It is one of the box's labels, so that a reaper can find boxes by labels alone."""

    WORK = "work"
    EVAL = "eval"
    HARVEST = "harvest"
    BUILD = "build"


LIMITS = ("cpu", "memory_mib", "disk_gib", "pids")
"""Resources of a box that can be limited."""


@dataclass(frozen=True)
class SandboxResources:
    """Limits of one box. ``None`` leaves a limit to the provider, which uses `default_limits`. A provider refuses a
    given limit that it cannot enforce."""

    cpu: float | None = None
    """CPU cores, fractions allowed."""
    memory_mib: int | None = None
    """Memory of all processes and in-memory files together, in MiB. Exceeding it kills a process (out of memory)."""
    disk_gib: float | None = None
    """Data the box may write, in GiB. Exceeding it fails the write, or ends the box if it can only be monitored."""
    gpu: int | None = None
    gpu_type: str | None = None
    pids: int | None = None
    """Processes and threads alive at once."""
    unlimited: tuple[str, ...] = ()
    """The `LIMITS` that the box must not have, not even by default."""

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
        """Build from configuration. An unknown key raises `ConfigError`, which suggests the nearest valid name."""
        reject_unknown_keys(values, [f.name for f in dataclasses.fields(cls)], where="resources")
        return cls(**values)

    def filled(self, defaults: SandboxResources) -> SandboxResources:
        """Fill limits that are left open here from ``defaults``."""
        unset = [name for name in LIMITS if getattr(self, name) is None and name not in self.unlimited]
        return dataclasses.replace(
            self,
            unlimited=(*self.unlimited, *(name for name in defaults.unlimited if name in unset)),
            **{name: getattr(defaults, name) for name in unset},
        )


DEFAULT_MEMORY_MIB = 8 * 1024
DEFAULT_DISK_GIB = 16.0
DEFAULT_PIDS = 2048


def default_limits(host_memory_mib: int | None) -> SandboxResources:
    """The limits of boxes for which neither spec nor configuration sets any: enough for this suite's agents and tests,
    but too little for one box to starve the others on its machine. Cores are not limited: the kernel shares them out
    evenly, and a quota would make tests time out on idle machines.

    Args:
        host_memory_mib: memory of the machine that boxes run on; ``None`` if unknown.
    """
    memory_mib = DEFAULT_MEMORY_MIB if host_memory_mib is None else min(DEFAULT_MEMORY_MIB, host_memory_mib * 3 // 4)
    return SandboxResources(memory_mib=memory_mib, disk_gib=DEFAULT_DISK_GIB, pids=DEFAULT_PIDS)


@dataclass(frozen=True)
class Door:
    """A listener on the box's loopback that forwards allowed requests to one target outside the box.

    The owner of the box's host runs the listener. It connects to ``target``, adds ``headers`` (which never enter the
    box) and forwards only requests that match ``allow``. A door of kind ``proxy`` has no target: it is a forward proxy
    to the hosts of ``allow`` (see `nemo_gym.sandbox.egress`).
    """

    name: str
    """The name of the target: ``model``, or an MCP server's name."""
    port: int
    """The TCP port on the box's 127.0.0.1."""
    target: str
    """Base URL outside the box; the request's path is appended to it."""
    allow: tuple[str, ...]
    """``METHOD /path`` patterns: ``*`` matches one path segment, a final ``/**`` any remainder. For a proxy: names,
    ``*.name`` or networks, with ``:port`` unless the ports are 80 and 443."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers set on every forwarded request; they replace headers from the box. Credentials belong here."""
    counted: tuple[str, ...] = ()
    """Patterns as in ``allow`` for routes whose responses are counted (a model's answers). If there are any, the
    door's statistics use only these routes to judge whether the target works."""
    kind: Literal["routes", "proxy"] = "routes"
    max_answers: int | None = None
    """How many responses of ``counted`` routes it forwards; further requests get 403. ``None`` means no limit."""


@dataclass(frozen=True)
class Mount:
    """A host directory or file mounted read-only into a box (for example the shared cache of agent CLIs)."""

    source: str
    target: str


@dataclass(frozen=True)
class SandboxSpec:
    """Everything needed to create one box. Immutable and plain. Only the doors' headers may contain secrets."""

    image: str | None = None
    """The provider's name for a root filesystem; ``None`` selects the provider's default image."""
    ttl_s: float | None = None
    """Seconds the box lives without a renewal; ``None`` is `DEFAULT_TTL_S`."""
    ready_timeout_s: float | None = None
    """Seconds ``create`` may take; ``None`` is `DEFAULT_READY_TIMEOUT_S`, not counting the pull or unpacking of the
    image."""
    workdir: str | None = None
    """The directory in which commands start by default; created if the image lacks it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of every process in the box. No variable of the host is inherited."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Absolute path in the box → text, written before ``create`` returns."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Labels of the box; see `nemo_gym.sandbox.base.BoxLabel` for the names this suite writes and reaps by."""
    resources: SandboxResources = field(default_factory=SandboxResources)
    entrypoint: Sequence[str] | None = None
    """Replaces the image's own entry point; with ``None`` the box stays idle and waits for execs."""
    provider_options: Mapping[str, Any] = field(default_factory=dict)
    """Options for one specific provider, which refuses unknown options."""
    ports: Sequence[int] = ()
    """Ports of the box for which `SupportsEndpoint.endpoint` will be called."""
    network: NetworkPolicy = NetworkPolicy.NONE
    doors: Sequence[Door] = ()
    mounts: Sequence[Mount] = ()
    user: str | None = None
    """The user that commands run as by default; ``None`` selects the image's user."""
    requires: Sequence[str] = ()
    """Names of capabilities that the box must have beyond those implied by the other fields."""
    idempotency_key: str | None = None
    """Two creates with the same key return the same box, if the backend supports it."""

    def replace(self, **changes: Any) -> SandboxSpec:
        """A copy with the given fields changed."""
        return dataclasses.replace(self, **changes)
