"""Listening sockets, bound by the parent before any server starts, and waiting for the servers of other hosts.

The run starts only if every port can be bound. The parent keeps its copy of each socket, so that a restarted server
has the same port, and requests that arrive meanwhile wait in the kernel's queue.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_gym._util.tasks import Backoff
from nemo_gym.config.composition import Composition
from nemo_gym.config.hosts import Hosts
from nemo_gym.config.keys import HOST, HOSTS
from nemo_gym.config.servers import ServerBlock
from nemo_gym.config.visibility import Address
from nemo_gym.contract.credentials import is_loopback
from nemo_gym.contract.errors import ConfigError, ServerError
from nemo_gym.stack.endpoints import http_answer, why_not_ready

DEFAULT_HOST = "127.0.0.1"
LISTEN_BACKLOG = 4096


@dataclass(frozen=True)
class Listener:
    """One server's socket and where it listens."""

    instance: str
    socket: socket.socket
    address: Address
    number: int = 0
    """Number among the instance's replicas on this host."""

    @property
    def name(self) -> str:
        """The instance, plus the number of a replica that is not the first."""
        return f"{self.instance}.{self.number}" if self.number else self.instance


def bind_listeners(
    servers: Iterable[ServerBlock],
    default_host: str = DEFAULT_HOST,
    places: Mapping[str, Address] | None = None,
    free: Sequence[int] | None = None,
) -> dict[str, Listener]:
    """Bind a socket for each server, on its configured port or else a free one (one of ``free``, if given), and on a
    free port for each further replica (``num_workers``); return name → listener. In a composition on several hosts,
    bind only the servers in ``places``, at the addresses given there. If a socket cannot be bound, close all of them
    and raise `ConfigError` with the instance, the port, the process that has it, and the fix."""
    listeners: dict[str, Listener] = {}
    if places is not None:
        servers = [server for server in servers if server.instance in places]
    # Configured ports first, so that a free port never turns out to be another server's configured one.
    ordered = sorted(servers, key=lambda server: not server.values.get("port"))
    try:
        for server in ordered:
            if places is None:
                address, setting = _configured(server, default_host), ".".join((*server.path, "port"))
            else:
                address, setting = places[server.instance], f"{HOSTS}.machines.<this host>.servers.{server.instance}"
            listeners[server.instance] = _bind(server, address, setting, listeners, free)
            for number in range(1, server.workers if places is None else 1):
                elsewhere = Address(address.host, 0, address.scheme)
                replica = replace(_bind(server, elsewhere, setting, listeners, free), number=number)
                listeners[replica.name] = replica
    except BaseException:
        close_listeners(listeners.values())
        raise
    return listeners


def close_listeners(listeners: Iterable[Listener]) -> None:
    for listener in listeners:
        listener.socket.close()


def check_addresses(composition: Composition) -> None:
    """Raise `ConfigError` for a server of a composition on one host that would listen beyond this machine."""
    if composition.values.get(HOSTS) is None:
        for server in composition.servers.values():
            _configured(server, str(composition.values.get("default_host") or DEFAULT_HOST))


def _configured(server: ServerBlock, default_host: str) -> Address:
    host = str(server.values.get("host") or default_host)
    port = int(server.values.get("port") or 0)
    if not is_loopback(host):
        setting = f"{server.where}.host" if server.values.get("host") else "default_host"
        raise ConfigError(
            f"{setting}: '{host}' is not a loopback address (127.0.0.1, ::1, localhost), and servers speak"
            f" plain HTTP; use 127.0.0.1, and a TLS proxy in front where others must call, or a '{HOSTS}' block that"
            " names a private network",
            key=".".join((*server.path, "host")),
        )
    return Address(host, port)


def _bind(
    server: ServerBlock, address: Address, setting: str, bound: dict[str, Listener], free_ports: Sequence[int] | None
) -> Listener:
    host, port = address.host, address.port
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(
            f"{server.where}.host: '{host}' is not an address of this machine: {error.strerror}"
        ) from error
    # In random order, because commands that start at the same time would all try the lowest port first.
    ports = random.sample(free_ports, len(free_ports)) if free_ports and not port else [port]
    for port in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((target[0], port, *target[2:]))
            listener.listen(LISTEN_BACKLOG)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE and len(ports) > 1:
                continue
            raise _not_bound(server, Address(host, port), setting, error, bound) from error
        listener.setblocking(False)
        return Listener(server.instance, listener, Address(host, listener.getsockname()[1], address.scheme))
    raise ConfigError(
        f"{server.where}: every port from {min(ports)} to {max(ports)} that is not disallowed is in use; widen"
        " port_range_low and port_range_high",
        key="port_range_low",
        instance=server.instance,
    )


def _not_bound(
    server: ServerBlock, address: Address, setting: str, error: OSError, bound: dict[str, Listener]
) -> ConfigError:
    host, port = address.host, address.port
    in_hosts = setting.startswith(f"{HOSTS}.")
    fix = f"choose another with {setting}=<port>" + ("" if in_hosts else ", or 0 for a free one")
    if error.errno == errno.EADDRINUSE:
        same = next((name for name, other in bound.items() if other.address.port == port), None)
        holder = f"server '{same}' of this run" if same else _holder(port)
        problem = f"port {port} on {host} is in use by {holder}"
    elif error.errno == errno.EADDRNOTAVAIL and in_hosts:
        problem = f"{host} is not an address of this machine"
        fix = f"set {HOST}= to the entry of {HOSTS}.machines that is this machine, or correct that entry's address"
    elif error.errno == errno.EACCES:
        problem = f"port {port} needs more rights than this user has"
    else:
        problem = f"{host}:{port} cannot be bound: {os.strerror(error.errno or 0)}"
    return ConfigError(f"{server.where}: {problem}; {fix}", key=setting, instance=server.instance, port=port)


def _holder(port: int) -> str:
    """Describe the process that listens on a port, as far as this user may see it."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(fd.readlink()) in inodes for fd in (process / "fd").iterdir()):
                return f"process {process.name} ({(process / 'comm').read_text().strip()})"
        except OSError:
            continue
    return "another process"


LONGEST_PAUSE_S = 2.0
WORD_EVERY_S = 10.0
MAX_NAMED = 5


Missing = dict[str, dict[Address, str | None]]
"""Server → the replicas that are not ready → the reason that each one reports, if any."""


async def wait_for_others(hosts: Hosts, timeout_s: float, say: Callable[[str], None]) -> None:
    """Wait until ``/ready`` of every replica of every server returns 200. After ``timeout_s``, one ready replica per
    server is enough; the others are reported with ``say``. Raises `ServerError` for a server without a ready replica.
    """
    missing: Missing = {name: dict.fromkeys(places) for name, places in hosts.replicas.items()}
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(
                _report_missing(missing, say),
                *(_until_ready(p, missing[name]) for name in missing for p in [*missing[name]]),
            )
    except TimeoutError:
        pass
    unserved = [name for name, places in missing.items() if len(places) == len(hosts.replicas[name])]
    if unserved:
        raise ServerError(
            f"not ready after {timeout_s:g} s: {_describe_missing({name: missing[name] for name in unserved})};"
            " start ng_run on those hosts with the same arguments and their own host=, or wait longer with"
            " startup_timeout_s="
        )
    if unready := _describe_missing(missing):
        say(f"going on without {unready}")


async def _until_ready(place: Address, missing: dict[Address, str | None]) -> None:
    backoff = Backoff(first_s=0.05, longest_s=LONGEST_PAUSE_S)
    while (response := await http_answer(place.url, "/ready", timeout_s=5.0)) is None or response[0] != 200:
        missing[place] = why_not_ready(response)
        await backoff.again()
    del missing[place]


async def _report_missing(missing: Missing, say: Callable[[str], None]) -> None:
    since_s = 0.0
    said = ""
    while any(missing.values()):
        await asyncio.sleep(0.1)
        since_s += 0.1
        if since_s >= WORD_EVERY_S:
            since_s = 0.0
            if (words := _describe_missing(missing, at_most=MAX_NAMED)) != said:
                said = words
                say(f"waiting for {words}")


def _describe_missing(missing: Missing, *, at_most: int | None = None) -> str:
    described = [
        f"{name} at {place.host}:{place.port}" + (f" ({why})" if why else "")
        for name, places in missing.items()
        for place, why in places.items()
    ]
    more = len(described[at_most:]) if at_most is not None else 0
    return ", ".join(described[:at_most]) + (f" and {more} more" if more else "")
