"""A real PostgreSQL server of the tests' own, on loopback, run by an unprivileged user."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg

USER = "postgres"
START_PATIENCE_S = 60.0


def binaries() -> Path:
    """Where ``initdb`` and ``postgres`` are; fails where they are not installed."""
    found = shutil.which("initdb")
    candidates = [Path(found).resolve().parent] if found else []
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for directory in candidates:
        if (directory / "postgres").exists():
            return directory
    raise AssertionError("PostgreSQL is not installed; run scripts/install-system (Debian package: postgresql)")


class PostgresServer:
    """A running server with one superuser and no passwords."""

    def __init__(self, place: Path) -> None:
        self.place = place
        # The server refuses to run as root.
        self._as: dict[str, str] = {"user": USER, "group": USER} if os.geteuid() == 0 else {}
        self.user = USER if self._as else pwd.getpwuid(os.geteuid()).pw_name
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._as:
            entry = pwd.getpwnam(USER)
            os.chown(self.place, entry.pw_uid, entry.pw_gid)
        data = self.place / "data"
        if not data.exists():
            self._run("initdb", "-D", str(data), "-U", self.user, "-A", "trust", "-E", "UTF8", "--no-sync")
        arguments = ["-D", str(data), "-h", "127.0.0.1", "-p", str(self.port), "-k", str(self.place)]
        with (self.place / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(binaries() / "postgres"), *arguments],
                cwd=self.place,
                stdout=log,
                stderr=log,
                **self._as,  # type: ignore[call-overload]
            )
        deadline = time.monotonic() + START_PATIENCE_S
        while True:
            with contextlib.suppress(psycopg.OperationalError), psycopg.connect(self.url(USER), connect_timeout=2):
                return
            assert time.monotonic() < deadline, (self.place / "log").read_text()[-2000:]
            time.sleep(0.1)

    def stop(self) -> None:
        """At once, as after a crash; what was committed stays."""
        if self._process is not None:
            self._process.send_signal(3)
            self._process.wait(30)
            self._process = None

    def url(self, database: str) -> str:
        return f"postgresql://{self.user}@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """URL of an empty database."""
        name = f"t{uuid.uuid4().hex}"
        with psycopg.connect(self.url(USER), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(binaries() / program), *arguments],
            cwd=self.place,
            capture_output=True,
            text=True,
            **self._as,  # type: ignore[call-overload]
        )
        assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """A server in a directory of its own, which its user can reach."""
    place = Path(tempfile.mkdtemp(prefix="broker-postgres-"))
    place.chmod(0o755)
    server = PostgresServer(place)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(place, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
