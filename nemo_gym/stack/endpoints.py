"""The stack file, which describes a running stack with its addresses and its key; health checks over HTTP; and the
scrape configuration with which Prometheus reads the run's metrics (``--config.file=<run_dir>/prometheus.yml``).

``<run_dir>/stack.json`` is readable only by its owner, because the root key in it permits calls to every server. Each
change replaces the file atomically, so a reader never sees a partial one.

``metrics/*.json`` holds Prometheus' targets, one file for the servers and one for each pipeline; Prometheus reloads
the files when they change. Only their owner may read the files.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nemo_gym._util.files import write_private
from nemo_gym._util.suggest import nearest
from nemo_gym.config.compose import run_directory_root
from nemo_gym.contract.errors import ConfigError

STACK_FILE = "stack.json"
SCRAPE_TOKEN_FILE = "metrics.token"
SCRAPE_FILE = "prometheus.yml"
SCRAPE_TARGETS = "metrics"
SCRAPE_JOB = "nemo_gym"


@dataclass(frozen=True)
class ServerEntry:
    """One server of a stack."""

    instance: str
    server_type: str
    implementation: str
    url: str
    pid: int | None
    log: str
    restarts: int = 0


@dataclass(frozen=True)
class StackEntry:
    """A stack: the process that supervises it, and its servers."""

    run_id: str
    run_dir: str
    pid: int
    started_ticks: int
    """The supervisor's start time in kernel ticks, which distinguishes it from a later process with the same pid."""
    root_key: str = field(repr=False)
    chosen: dict[str, str] = field(default_factory=dict)
    servers: tuple[ServerEntry, ...] = ()
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    """The servers' addresses and references, which the pipeline needs; without any secret."""
    observability: dict[str, Any] = field(default_factory=dict, repr=False)
    """The composition's ``observability`` block, which may contain the collector's key."""

    @property
    def is_running(self) -> bool:
        return start_ticks(self.pid) == self.started_ticks

    def server(self, instance: str) -> ServerEntry:
        """Return the server of that name. Raises `ConfigError`, which suggests the nearest name."""
        for server in self.servers:
            if server.instance == instance:
                return server
        names = [server.instance for server in self.servers]
        raise ConfigError(
            f"run '{self.run_id}' has no server '{instance}'{nearest(instance, names)}; it has: {', '.join(names)}",
            key="agent_name",
        )


def write_stack(stack: StackEntry) -> Path:
    """Write the stack file, atomically and with mode 0600, and link its directory by run id for `find_stack`."""
    path = Path(stack.run_dir) / STACK_FILE
    write_private(path, json.dumps(asdict(stack), indent=1))
    link = run_directory_root() / stack.run_id
    if link.resolve() != Path(stack.run_dir).resolve():
        link.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if link.is_symlink():
                link.unlink()
        with contextlib.suppress(FileExistsError):
            link.symlink_to(Path(stack.run_dir).resolve())
    return path


def remove_stack(run_dir: Path, run_id: str) -> None:
    """Remove the stack file and the link of a stopped stack. Its logs stay."""
    (run_dir / STACK_FILE).unlink(missing_ok=True)
    link = run_directory_root() / run_id
    if link.is_symlink():
        link.unlink(missing_ok=True)


def read_stack(run_dir: Path) -> StackEntry:
    """Return the stack of a run directory. Raises `ConfigError` if there is none."""
    path = run_dir / STACK_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        servers = tuple(ServerEntry(**server) for server in raw.pop("servers"))
        return StackEntry(servers=servers, **raw)
    except FileNotFoundError:
        raise ConfigError(
            f"no stack runs in {run_dir}: {STACK_FILE} is not there; start one with ng_run run_dir={run_dir}, or see"
            " ng_status",
            key="run_dir",
        ) from None
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", key="run_dir", file=str(path)) from error


def require_free(run_dir: Path) -> None:
    """Raise `ConfigError` if a stack runs in a run directory."""
    try:
        present = read_stack(run_dir)
    except ConfigError:
        return
    if present.is_running:
        raise ConfigError(
            f"a stack runs in {run_dir} already (process {present.pid}); stop it, or choose another with run_dir=",
            key="run_dir",
        )


def running_stacks() -> list[StackEntry]:
    """Return every running stack of this user on this machine, newest first."""
    found: dict[str, StackEntry] = {}
    root = run_directory_root()
    for folder in root.iterdir() if root.is_dir() else ():
        with contextlib.suppress(ConfigError):
            stack = read_stack(folder)
            if stack.is_running:
                found[stack.run_id] = stack
    return sorted(found.values(), key=lambda stack: stack.started_ticks, reverse=True)


def find_stack(run_dir: str | None = None, run_id: str | None = None) -> StackEntry:
    """Return the stack of a run directory or run id, or by default the only one that runs. Raises `ConfigError`."""
    if run_dir is not None:
        stack = read_stack(Path(run_dir).expanduser())
        if not stack.is_running:
            raise ConfigError(
                f"the stack of {run_dir} no longer runs (its supervisor {stack.pid} has ended); start it again with"
                " ng_run",
                key="run_dir",
            )
        return stack
    stacks = running_stacks()
    if run_id is not None:
        for stack in stacks:
            if stack.run_id == run_id:
                return stack
        names = [stack.run_id for stack in stacks]
        raise ConfigError(
            f"no stack '{run_id}' runs{nearest(run_id, names)}; running: {', '.join(names) or 'none'}", key="run_id"
        )
    if not stacks:
        raise ConfigError("no stack runs: start one with ng_run, or give run_dir=", key="run_dir")
    if len(stacks) > 1:
        choices = ", ".join(f"run_id={stack.run_id}" for stack in stacks)
        raise ConfigError(f"{len(stacks)} stacks are running; choose one: {choices}", key="run_id")
    return stacks[0]


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks after boot; ``None`` if there is no such process, or only a
    zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def pss_mib(pids: Iterable[int]) -> float:
    """Return the memory of these processes in MiB, with shared pages counted proportionally (PSS). Processes of other
    users count as 0."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total / 1024


async def http_status(url: str, path: str, timeout_s: float) -> int | None:
    """Return the status of a GET; ``None`` if there is no HTTP response within ``timeout_s``."""
    response = await http_answer(url, path, timeout_s)
    return response[0] or None if response is not None else None


async def http_answer(url: str, path: str, timeout_s: float) -> tuple[int, bytes] | None:
    """Return status and body of a GET; ``None`` if there is no HTTP response within ``timeout_s``. If only TLS fails,
    the status is 0 and the body a problem with the reason. Uses no HTTP library, so that a parent process need not
    load one."""
    scheme, _, netloc = url.partition("://")
    host, _, port = netloc.rpartition(":")
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            secure = True if scheme == "https" else None
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=secure)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            await writer.drain()
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            return int(head.split(None, 2)[1]), body
    except ssl.SSLError as error:
        return 0, json.dumps({"detail": f"the TLS connection failed: {error}"}).encode()
    except (OSError, TimeoutError, ValueError, IndexError):
        return None
    finally:
        if writer is not None:
            writer.close()


def why_not_ready(answer: tuple[int, bytes] | None) -> str | None:
    """Return the reason that a server gives for not being ready; ``None`` if it is ready or did not respond."""
    if answer is None or answer[0] == 200:
        return None
    try:
        body = json.loads(answer[1])
    except ValueError:
        body = None
    if not isinstance(body, dict):
        return f"/ready answers {answer[0]}"
    parts = [str(body[key]) for key in ("detail", "reason") if body.get(key)]
    if isinstance(engines := body.get("engines"), dict):
        parts += [f"{name}: {state}" for name, state in engines.items()]
    return "; ".join(parts) or f"/ready answers {answer[0]}"


async def health_of(stack: StackEntry, timeout_s: float = 2.0) -> dict[str, str]:
    """Return server URL → health for every server of a stack: ``ok``, ``silent`` (no response) or the HTTP status as
    ``HTTP 503``. The servers are checked concurrently."""
    urls = [server.url for server in stack.servers]
    statuses = await asyncio.gather(*(http_status(url, "/health", timeout_s) for url in urls))
    words = {200: "ok", None: "silent"}
    return {url: words.get(status, f"HTTP {status}") for url, status in zip(urls, statuses, strict=True)}


def public_listing(stack: StackEntry) -> list[dict[str, Any]]:
    """Return the servers without any key, for tables and ``--json``."""
    return [asdict(server) for server in stack.servers]


def write_scraping(run_dir: Path, token: str, servers: Sequence[tuple[str, str, str]], run_id: str) -> None:
    """Write the run's scrape configuration. ``servers``: instance, server type and URL of each."""
    folder = run_dir / SCRAPE_TARGETS
    folder.mkdir(mode=0o700, exist_ok=True)
    write_private(run_dir / SCRAPE_TOKEN_FILE, token)
    job = {
        "job_name": SCRAPE_JOB,
        "authorization": {"credentials_file": str(run_dir / SCRAPE_TOKEN_FILE)},
        "file_sd_configs": [{"files": [str(folder / "*.json")]}],
    }
    # JSON is YAML.
    write_private(run_dir / SCRAPE_FILE, json.dumps({"scrape_configs": [job]}, indent=1) + "\n")
    targets = [_target(url, server=name, server_type=kind, run_id=run_id) for name, kind, url in servers]
    write_private(folder / "servers.json", json.dumps(targets, indent=1))


@contextmanager
def added_target(run_dir: Path, name: str, url: str, run_id: str) -> Iterator[None]:
    """Add a target to the run until the block ends."""
    folder = run_dir / SCRAPE_TARGETS
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{name}-{os.getpid()}.json"
    write_private(path, json.dumps([_target(url, server=name, server_type=name, run_id=run_id)], indent=1))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _target(url: str, **labels: str) -> Mapping[str, Any]:
    parts = urlsplit(url)
    return {"targets": [parts.netloc], "labels": {"__scheme__": parts.scheme, **labels}}
