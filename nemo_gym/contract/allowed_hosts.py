"""The entries of an allow-list of hosts, and which names and addresses they let through."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_gym.contract.errors import ConfigError

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
