"""The process that removes boxes whose lease ended, though every process of this suite may be dead, and boxes that
wrote more than they may, as engines have no quota to rely on.

One per engine and user, whoever starts it first. It is run by its path in an isolated interpreter (``python -I -S``),
so it imports nothing but the standard library: it costs about 10 MB and starts in some 30 ms. What it knows it reads
from the engine: a container's lease is its label, or its name once it was renewed (see ``names.py``).

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
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

MANAGED = "nemo_gym.managed"
EXPIRES_AT = "nemo_gym.lease_expires_at"
DISK_BYTES = "nemo_gym.docker.disk_bytes"
POLL_S = 1.0
DISK_POLL_S = 0.5
DISK_IDLE_SHARE = 4
"""Measuring takes at most a fifth of the time, however many files there are."""
LINGER_S = 120.0
"""How long it waits for new boxes when there are none."""
_UNREACHABLE_LIMIT_S = 3600.0
_GRACE_S = 0.5


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("docker", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Engine:
    def __init__(self, url: str, certificates: str | None) -> None:
        self._url = url
        self._certificates = certificates

    def request(self, method: str, path: str) -> tuple[int, Any]:
        """Status and decoded body. Raises `OSError` or `http.client.HTTPException` when the engine does not answer."""
        connection = self._connection()
        try:
            connection.request(method, path)
            response = connection.getresponse()
            body = response.read()
            return response.status, json.loads(body) if body else None
        finally:
            connection.close()

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
        """The engine's list of this suite's containers."""
        filters = quote(json.dumps({"label": [f"{MANAGED}=true"]}))
        status, found = self.request("GET", f"/containers/json?{options}&filters={filters}")
        if status != 200:
            raise OSError(f"the engine answered {status}")
        return list(found)

    def boxes(self) -> dict[str, tuple[str, float | None]]:
        """Container id → name and end of lease (Unix seconds), of every container of this suite."""
        boxes = {}
        for container in self.containers("all=1"):
            name = ((container.get("Names") or [""])[0] or "").lstrip("/")
            boxes[str(container["Id"])] = (name, lease_end(name, container.get("Labels") or {}))
        return boxes

    def remove(self, container_id: str) -> None:
        self.request("DELETE", f"/containers/{container_id}?force=1&v=1")


def lease_end(name: str, labels: dict[str, str]) -> float | None:
    """When a container's lease ends, in Unix seconds; a name that says so is newer than the label."""
    for text in (name.partition(".")[2], labels.get(EXPIRES_AT, "")):
        try:
            return float(text)
        except ValueError:
            continue
    return None


def now_s() -> float:
    """A clock that nobody sets, and that runs while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Watchdog:
    """Remembers, for each lease it has seen, when it ends on a clock that does not jump."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._deadlines: dict[str, tuple[float, float]] = {}

    def look(self) -> int:
        """Remove what has ended; how many boxes are left."""
        boxes = self._engine.boxes()
        for gone in set(self._deadlines) - set(boxes):
            del self._deadlines[gone]
        for container_id, (_, end) in boxes.items():
            if end is None:
                continue
            known = self._deadlines.get(container_id)
            if known is None or known[0] != end:
                self._deadlines[container_id] = (end, now_s() + end - time.time())
        left = len(boxes)
        for container_id, (end, deadline) in list(self._deadlines.items()):
            if now_s() < deadline + _GRACE_S:
                continue
            # It may have been renewed since it was listed.
            if self._engine.boxes().get(container_id, ("", None))[1] not in (end, None):
                continue
            with contextlib.suppress(OSError, http.client.HTTPException):
                self._engine.remove(container_id)
                left -= 1
        return left


def over_disk_limit(engine: Engine) -> dict[str, tuple[int, int]]:
    """Container id → bytes written and bytes allowed, of every running box that wrote more."""
    over = {}
    # Measuring walks through what each box wrote, so it is not asked for where nothing is limited.
    if any((found.get("Labels") or {}).get(DISK_BYTES) for found in engine.containers("all=0")):
        for container in engine.containers("all=0&size=1"):
            limit = (container.get("Labels") or {}).get(DISK_BYTES)
            if not limit or int(container.get("SizeRw") or 0) <= int(limit):
                continue
            # Engines add up what files say of themselves; a sparse file takes less than that.
            taken = on_disk(engine, str(container["Id"]))
            written = int(container["SizeRw"]) if taken is None else taken
            if written > int(limit):
                over[str(container["Id"])] = written, int(limit)
    return over


def on_disk(engine: Engine, container_id: str) -> int | None:
    """Bytes that a box's files take on this host; ``None`` where its engine keeps them out of our sight."""
    status, found = engine.request("GET", f"/containers/{container_id}/json")
    layer = ((found.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir") if status == 200 else None
    if not layer or not os.access(layer, os.R_OK | os.X_OK):
        return None
    seen: dict[tuple[int, int], int] = {}
    for directory, _, names in os.walk(layer):
        for name in names:
            with contextlib.suppress(OSError):  # gone meanwhile
                found_at = Path(directory, name).lstat()
                seen[found_at.st_dev, found_at.st_ino] = found_at.st_blocks * 512
    return sum(seen.values())


def watch_disks(engine: Engine) -> None:
    """Remove boxes that wrote too much, for ever. A thread of its own: leases must not wait for measuring."""
    while True:
        began = now_s()
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            for container_id, (size, limit) in over_disk_limit(engine).items():
                engine.remove(container_id)
                said = f"removed box {container_id[:12]}: it wrote {size} bytes, its limit disk_gib allows {limit}\n"
                sys.stderr.write(said)
        time.sleep(max(DISK_POLL_S, DISK_IDLE_SHARE * (now_s() - began)))


def try_lock(path: str) -> int | None:
    """A descriptor that holds the lock for as long as it is open; ``None`` when another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def watch(lock_path: str, lock: int, watchdog: Watchdog) -> None:
    """Look again and again; return when there have been no boxes, or no engine, for long."""
    last_box = last_answer = now_s()
    while True:
        try:
            left = watchdog.look()
            last_answer = now_s()
            last_box = now_s() if left else last_box
        except (OSError, http.client.HTTPException, ValueError):
            if now_s() - last_answer > _UNREACHABLE_LIMIT_S:
                return
        if now_s() - last_box > LINGER_S:
            # Whoever created a box and then saw the lock held relies on us: so give it up first and look once more.
            os.close(lock)
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                if not watchdog.look():
                    return
            again = try_lock(lock_path)
            if again is None:
                return
            lock, last_box = again, now_s()
        time.sleep(POLL_S)


def main(lock_path: str, url: str, certificates: str | None = None) -> int:
    lock = try_lock(lock_path)
    if lock is None:
        return 0
    # The starter waits for this process, and finds the lock held when it has returned; the child goes on.
    os.set_inheritable(lock, True)
    if os.fork():
        return 0
    os.setsid()
    threading.Thread(target=watch_disks, args=(Engine(url, certificates),), daemon=True).start()
    watch(lock_path, lock, Watchdog(Engine(url, certificates)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
