"""Sockets of connections whose other end may be another machine, which can vanish without a word."""

from __future__ import annotations

import socket
from typing import Any

_WATCHED = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""Options of connections: seconds, seconds, probes, milliseconds."""


def watched_socket(address: Any) -> socket.socket:
    """A socket on which a peer that vanished is noticed within 30 s: while an answer is being waited for (the kernel
    asks it) and while bytes are being sent (nobody acknowledges them). ``address``: as of `socket.getaddrinfo`."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    if family in (socket.AF_INET, socket.AF_INET6):
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _WATCHED.items():
            if (option := getattr(socket, name, None)) is not None:  # not every system has each
                made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
