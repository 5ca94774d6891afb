"""The process that removes boxes whose lease ended, even if every other process of this suite is dead. It also removes
boxes that wrote more than their disk limit, because engines have no reliable quota.

There is one watchdog per engine and user; the first process that needs it starts it. It is run by its path in an
isolated interpreter (``python -I -S``) and imports only the standard library, so it takes about 10 MB and starts in
some 30 ms. It reads everything from the engine: a container's lease is its label, or its name after a renewal (see
``engine.py``).

    python -I -S watchdog.py LOCK_FILE ENGINE_URL [CERTIFICATES_DIRECTORY]
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

MANAGED = "nemo_gym.managed"
EXPIRES_AT = "nemo_gym.lease_expires_at"
DISK_BYTES = "nemo_gym.docker.disk_bytes"
"""Label: bytes that the box may write."""
POLL_S = 1.0
DISK_POLL_S = 0.5
DISK_IDLE_SHARE = 4
"""Pause after a measurement, as a multiple of its duration: measuring takes at most a fifth of the time."""
LINGER_S = 120.0
"""How long the watchdog waits for new boxes before it exits."""
_UNREACHABLE_LIMIT_S = 3600.0
_GRACE_S = 0.5
_REMOVED_AT_ONCE = 8
_MEASURE_TIMEOUT_S = 60


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("docker", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class EngineClient:
    def __init__(self, url: str, certificates: str | None) -> None:
        self._url = url
        self._certificates = certificates

    def request(self, method: str, path: str) -> tuple[int, Any]:
        """Return status and decoded body. Raises `OSError` or `http.client.HTTPException` if there is no response."""
        with contextlib.closing(self._connection()) as connection:
            connection.request(method, path)
            response = connection.getresponse()
            body = response.read()
            return response.status, json.loads(body) if body else None

    def _connection(self) -> http.client.HTTPConnection:
        if self._url.startswith("unix://"):
            return _UnixConnection(self._url.removeprefix("unix://"), timeout=60)
        url = urlsplit(self._url)
        if self._certificates:
            context = ssl.create_default_context(cafile=f"{self._certificates}/ca.pem")
            context.load_cert_chain(f"{self._certificates}/cert.pem", f"{self._certificates}/key.pem")
            return http.client.HTTPSConnection(url.hostname or "", url.port or 2376, timeout=60, context=context)
        return http.client.HTTPConnection(url.hostname or "", url.port or 2375, timeout=60)

    def containers(self, options: str) -> list[dict[str, Any]]:
        """This suite's containers, as the engine lists them."""
        filters = quote(json.dumps({"label": [f"{MANAGED}=true"]}))
        status, containers = self.request("GET", f"/containers/json?{options}&filters={filters}")
        if status != 200:
            raise OSError(f"the engine answered {status}")
        return list(containers)

    def lease_ends(self) -> dict[str, float | None]:
        """Container id → end of lease (Unix seconds), for every container of this suite."""
        ends = {}
        for container in self.containers("all=1"):
            name = ((container.get("Names") or [""])[0] or "").lstrip("/")
            ends[str(container["Id"])] = lease_end(name, container.get("Labels") or {})
        return ends

    def remove(self, container_id: str) -> None:
        self.request("DELETE", f"/containers/{container_id}?force=1&v=1")


def lease_end(name: str, labels: Mapping[str, str]) -> float | None:
    """When a container's lease ends, in Unix seconds; ``None`` if neither its name nor its label gives a time. A time
    in the name is newer."""
    for text in (name.partition(".")[2], labels.get(EXPIRES_AT, "")):
        try:
            return float(text)
        except ValueError:
            continue
    return None


def now_s() -> float:
    """Return the time of a clock that cannot be set and that keeps running while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Watchdog:
    """Removes boxes whose lease ended. Keeps each lease's end on a clock that does not jump."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._deadlines: dict[str, tuple[float, float]] = {}
        self._removing: set[str] = set()
        self._slots = threading.Semaphore(_REMOVED_AT_ONCE)

    def look(self) -> int:
        """Begin to remove the boxes whose lease ended; return how many boxes there are."""
        lease_ends = self._engine.lease_ends()
        for removed_id in set(self._deadlines) - set(lease_ends):
            del self._deadlines[removed_id]
        for container_id, end in lease_ends.items():
            if end is not None and self._deadlines.get(container_id, (None, 0))[0] != end:
                self._deadlines[container_id] = (end, now_s() + end - time.time())
        for container_id, (end, deadline) in self._deadlines.items():
            if now_s() >= deadline + _GRACE_S and container_id not in self._removing:
                self._removing.add(container_id)
                threading.Thread(target=self._remove, args=(container_id, end), daemon=True).start()
        return len(lease_ends)

    def _remove(self, container_id: str, end: float) -> None:
        # In a thread of its own: the engine takes minutes to delete millions of files, and other leases end meanwhile.
        try:
            with self._slots, contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                # The lease may have been renewed since the boxes were listed.
                if self._engine.lease_ends().get(container_id) in (end, None):
                    self._engine.remove(container_id)
        finally:
            self._removing.discard(container_id)


def over_disk_limit(engine: EngineClient) -> dict[str, tuple[int, int]]:
    """Container id → bytes written and bytes allowed, for every running box that wrote more than it may."""
    over: dict[str, tuple[int, int]] = {}
    # To measure, the engine walks through all files of each box, so skip this if no box has a limit.
    if all(disk_limit(container) is None for container in engine.containers("all=0")):
        return over
    for container in engine.containers("all=0&size=1"):
        limit, written = disk_limit(container), int(container.get("SizeRw") or 0)
        if limit is not None and not 0 <= written <= limit:
            # Engines add up the apparent sizes of files; a sparse file takes less space. They report -1 for a box with
            # a path that is too long for them.
            disk_bytes = on_disk(engine, str(container["Id"]))
            written = written if disk_bytes is None else disk_bytes
            if written > limit:
                over[str(container["Id"])] = written, limit
    return over


def disk_limit(container: dict[str, Any]) -> int | None:
    """Bytes that a container may write; ``None`` if there is no limit."""
    limit = (container.get("Labels") or {}).get(DISK_BYTES)
    return int(limit) if limit else None


def on_disk(engine: EngineClient, container_id: str) -> int | None:
    """Bytes that a box's files take on this host's disk; ``None`` if they cannot be measured."""
    status, inspection = engine.request("GET", f"/containers/{container_id}/json")
    layer = ((inspection.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir") if status == 200 else None
    if not layer or not os.access(layer, os.R_OK | os.X_OK):
        return None
    # A box may nest directories beyond Python's limit of recursion and the kernel's limit of a path, which `du` can
    # follow. It fails if a file goes meanwhile, but adds up the others.
    command = ["du", "-s", "-k", "-x", layer]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_MEASURE_TIMEOUT_S,
        )
        return int(done.stdout.split()[0]) * 1024
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def watch_disks(engine: EngineClient) -> None:
    """Remove boxes that wrote too much, for ever. Needs a thread of its own: leases must not wait for measuring."""
    last_problem = ""
    while True:
        began = now_s()
        try:
            for container_id, (size, limit) in over_disk_limit(engine).items():
                # Before the removal: as soon as the box is gone, its user asks for the reason (`creation.overrun`).
                line = f"removing box {container_id[:12]}: it wrote {size} bytes, its limit disk_gib allows {limit}\n"
                sys.stderr.write(line)
                engine.remove(container_id)
        except (OSError, http.client.HTTPException, ValueError):
            pass  # the engine does not respond; `watch` notices if that lasts
        except Exception as error:  # noqa: BLE001
            # Whatever one box causes must not end the limits of all others.
            if (problem := f"disk limits could not be checked: {error!r}\n") != last_problem:
                sys.stderr.write(problem)
                last_problem = problem
        time.sleep(max(DISK_POLL_S, DISK_IDLE_SHARE * (now_s() - began)))


def try_lock(path: str) -> int | None:
    """Return a descriptor that holds the lock as long as it is open; ``None`` if another process holds the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def watch(lock_path: str, lock: int, watchdog: Watchdog) -> None:
    """Enforce leases until there have been no boxes for `LINGER_S`, or no engine for `_UNREACHABLE_LIMIT_S`."""
    last_box = last_answer = now_s()
    while True:
        try:
            box_count = watchdog.look()
            last_answer = now_s()
            last_box = now_s() if box_count else last_box
        except (OSError, http.client.HTTPException, ValueError):
            if now_s() - last_answer > _UNREACHABLE_LIMIT_S:
                return
        if now_s() - last_box > LINGER_S:
            # A process that created a box and then found the lock taken relies on this watchdog. So release the lock
            # first, then check for boxes once more.
            os.close(lock)
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                if not watchdog.look():
                    return
            new_lock = try_lock(lock_path)
            if new_lock is None:
                return
            lock, last_box = new_lock, now_s()
        time.sleep(POLL_S)


def main(lock_path: str, url: str, certificates: str | None = None) -> int:
    lock = try_lock(lock_path)
    if lock is None:
        return 0
    # The starter waits for this process to exit and then finds the lock taken; the child keeps it and runs on.
    os.set_inheritable(lock, True)
    if os.fork():
        return 0
    os.setsid()
    threading.Thread(target=watch_disks, args=(EngineClient(url, certificates),), daemon=True).start()
    watch(lock_path, lock, Watchdog(EngineClient(url, certificates)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
