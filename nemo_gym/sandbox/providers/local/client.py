"""The client's side of a supervisor: its options and start, the connection and requests to it, running commands."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import itertools
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal, Self

from nemo_gym._util.files import INSTALL_ROOT, from_command
from nemo_gym._util.tasks import Backoff
from nemo_gym.contract.errors import (
    ConfigError,
    NemoGymError,
    SandboxArchiveError,
    SandboxArchiveTooLargeError,
    SandboxCreateError,
    SandboxError,
    SandboxLostError,
    reject_unknown_keys,
)
from nemo_gym.contract.sandbox import DEFAULT_TTL_S, NetworkPolicy, SandboxResources, SandboxSpec
from nemo_gym.sandbox.base import ExecEnd, ExecOutcome, ExecOutput, absolute
from nemo_gym.sandbox.linux import locked
from nemo_gym.sandbox.providers.local.protocol import (
    BASE_ENV,
    PROTOCOL_VERSION,
    Connection,
    Message,
    close_all,
    memory_file,
)
from nemo_gym.sandbox.providers.local.supervisor.main import BOOT, OPTIONS_VARIABLE, SOCKET_NAME

# -- Options ------------------------------------------------------------------------------------------------------
# The configuration of the local provider, and of other providers with a supervisor.


def default_state_dir(provider: str = "local") -> Path:
    """The default directory of boxes: on a disk, private to the user."""
    if os.geteuid() == 0:
        return Path("/var/lib/nemo-gym") / provider
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "nemo-gym" / provider


def default_image_dir(provider: str = "local") -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "nemo-gym" / "images" / provider


@dataclass(frozen=True)
class SupervisedOptions:
    """Settings that all providers with a supervisor share. Paths may begin with ``~``."""

    provider: ClassVar[str]
    builder: ClassVar[str]
    """Module whose function ``build`` creates a box in the supervisor."""
    program_option: ClassVar[str]
    """Option with the name or path of the program that creates boxes."""
    program_package: ClassVar[tuple[str, str]]
    """What that program is called, and how it is installed, for an error message."""

    state_dir: Path = field(default_factory=default_state_dir)
    """Directory of the supervisor and of the files that boxes write. Each directory has its own supervisor."""
    image_dir: Path = field(default_factory=default_image_dir)
    """Directory of images."""
    default_image: str = "host"
    """Image of specs that name none."""
    default_resources: SandboxResources = field(default_factory=SandboxResources)
    """Limits of boxes whose spec sets none. A limit that is not set here either has the suite's default."""
    hide: tuple[str, ...] = ()
    """Additional paths below the host's system directories to hide from boxes of the ``host`` image."""
    linger_s: float = 10.0
    """Seconds after which a supervisor without boxes and clients exits."""
    use_cgroups: bool = True
    """``False`` means no cgroups: there are no limits, and process trees are found through the processes' parents."""

    def program(self) -> str:
        """The path of the program that creates boxes.

        Raises:
            SandboxCreateError: it is not installed; the message says how to install it.
        """
        name: str = getattr(self, self.program_option)
        path = shutil.which(name)
        if path is None:
            title, installing = self.program_package
            raise SandboxCreateError(
                f"{title} was not found as '{name}': {installing} or set the option {self.program_option} of the "
                f"sandbox provider '{self.provider}'",
                provider=self.provider,
            )
        return str(Path(path).absolute())

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from configuration.

        Raises:
            ConfigError: an unknown key or a value of the wrong kind; the message names it.
        """
        where = f"sandbox provider '{cls.provider}'"
        reject_unknown_keys(values, [f.name for f in dataclasses.fields(cls)], where=where)
        options = dict(values)
        for name in ("state_dir", "image_dir"):
            if name in options:
                options[name] = from_command(options[name])
        if isinstance(options.get("default_resources"), Mapping):
            options["default_resources"] = SandboxResources.from_mapping(options["default_resources"])
        if "hide" in options:
            if isinstance(options["hide"], str) or not all(str(p).startswith("/") for p in options["hide"]):
                raise ConfigError(f"{where}: hide must be a list of absolute paths")
            options["hide"] = tuple(str(p) for p in options["hide"])
        if "linger_s" in options:
            try:
                options["linger_s"] = float(options["linger_s"])
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{where}: linger_s must be a number of seconds") from error
        for name in ("default_image", cls.program_option):
            if name in options and not (isinstance(options[name], str) and options[name]):
                raise ConfigError(f"{where}: {name} must be a non-empty string")
        if "use_cgroups" in options and not isinstance(options["use_cgroups"], bool):
            raise ConfigError(f"{where}: use_cgroups must be true or false")
        return cls(**options)


@dataclass(frozen=True)
class LocalOptions(SupervisedOptions):
    """Settings of the local provider."""

    provider: ClassVar[str] = "local"
    builder: ClassVar[str] = "nemo_gym.sandbox.providers.local.supervisor.construction"

    program_option: ClassVar[str] = "bwrap"
    program_package: ClassVar[tuple[str, str]] = (
        "bubblewrap",
        "install the package bubblewrap (`apt-get install bubblewrap`, `dnf install bubblewrap`)",
    )

    bwrap: str = "bwrap"
    """Name or path of bubblewrap."""


# -- Requests ------------------------------------------------------------------------------------------------------

_SUITE_PACKAGES = ("nemo_gym", "resources_servers", "responses_api_agents", "responses_api_models")
_SYSTEM_ROOTS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")


def create_request(spec: SandboxSpec, options: SupervisedOptions) -> Message:
    """Build the request that creates a box. Raises `ConfigError` or `SandboxError` for an invalid spec."""
    box_id = uuid.uuid4().hex[:12]
    for path in (*spec.files, *([spec.workdir] if spec.workdir else []), *(m.target for m in spec.mounts)):
        absolute(path)
    for mount in spec.mounts:
        if ".." in PurePosixPath(mount.target).parts:
            # While a box is built, the root of the host is above the box's.
            raise SandboxCreateError(
                f"mounts: the target '{mount.target}' must not contain '..'", provider=options.provider
            )
        if not Path(mount.source).exists():
            raise SandboxCreateError(f"mounts: there is no '{mount.source}' on this host", provider=options.provider)
    ttl_s = spec.ttl_s if spec.ttl_s is not None else DEFAULT_TTL_S
    if ttl_s <= 0:
        raise ConfigError(f"ttl_s must be positive, not {ttl_s}")
    disk_gib = spec.resources.disk_gib
    entrypoint = None
    if spec.entrypoint is not None:
        entrypoint = {
            "argv": list(spec.entrypoint),
            "env": dict(spec.env),
            "cwd": spec.workdir or "/",
            "user": spec.user,
        }
    return {
        "op": "create",
        "spec": {
            "box": box_id,
            "idempotency_key": spec.idempotency_key,
            "image": spec.image or options.default_image,
            "image_dir": str(options.image_dir),
            "program": options.program(),
            "hostname": f"box-{box_id}",
            "open_network": spec.network is NetworkPolicy.OPEN,
            "mounts": [[os.path.abspath(m.source), m.target] for m in spec.mounts],  # noqa: PTH100
            "hidden": [*_hidden_paths(), *options.hide],
            "limits": {
                "memory_mib": spec.resources.memory_mib,
                "pids": spec.resources.pids,
                "cpu": spec.resources.cpu,
                "disk_bytes": None if disk_gib is None else int(disk_gib * 1024**3),
            },
            "labels": dict(spec.metadata),
            "ttl_s": ttl_s,
            "files": dict(spec.files),
            "workdir": spec.workdir,
            "entrypoint": entrypoint,
        },
    }


def _hidden_paths() -> list[str]:
    """The paths of this suite and its Python environment that lie below the host's system directories."""
    package = INSTALL_ROOT / "nemo_gym"
    candidates = [package.parent / name for name in _SUITE_PACKAGES]
    for directory in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(package.parent)}:
        candidates += Path(directory).glob("nemo_gym_suite-*")
        candidates += Path(directory).glob("__editable__*nemo_gym*")
        candidates += (Path(directory) / name for name in _SUITE_PACKAGES)
    if sys.prefix != sys.base_prefix:
        candidates.append(Path(sys.prefix))
    if (package.parent / "pyproject.toml").is_file():
        candidates.append(package.parent)
    paths = {str(path) for path in candidates if path.exists() and str(path).startswith(_SYSTEM_ROOTS)}
    return sorted(path for path in paths if not any(path.startswith(f"{other}/") for other in paths))


def argv(command: str | Sequence[str]) -> list[str]:
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else [str(word) for word in command]
    if not argv or any("\0" in word for word in argv):
        raise SandboxError("a command must have at least one word, and no word may contain a zero byte")
    return argv


def stdin_file(data: bytes | None) -> int:
    if not data:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    return memory_file(data, "stdin")


# -- Client --------------------------------------------------------------------------------------------------------

_PASSED_ON = ("LD_LIBRARY_PATH",)
"""Variables that a Python installation may need to start if it is not in the directory that it was built for."""
_ERRORS: dict[str, type[NemoGymError]] = {
    "create": SandboxCreateError,
    "archive": SandboxArchiveError,
    "archive_too_large": SandboxArchiveTooLargeError,
    "lost": SandboxLostError,
}


@functools.cache
def release() -> str:
    """A name for the current version of the supervisor's code. Each version has its own directory below the state
    directory, so clients of a new release start a new supervisor while the old one's boxes live out their leases."""
    digest = hashlib.sha256(f"{PROTOCOL_VERSION} {sys.version}".encode())
    for path in supervisor_sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def supervisor_sources() -> list[Path]:
    """The files of every folder from which a supervisor loads modules."""
    sandbox = INSTALL_ROOT / "nemo_gym" / "sandbox"
    providers, local = sandbox / "providers", sandbox / "providers" / "local"
    folders = (sandbox.parent / "_util", sandbox, providers, local, local / "supervisor", providers / "apptainer")
    return sorted(path for folder in folders for path in folder.glob("*.py"))


def prepare_state_dir(path: Path) -> None:
    """Create the directory of a supervisor, private to this user.

    Raises:
        SandboxCreateError: the directory cannot be created, or belongs to another user.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat()
    except OSError as error:
        raise SandboxCreateError(
            f"the provider's state_dir {path} cannot be made: {error.strerror}; set state_dir to a directory "
            "this user may write, on a disk with space"
        ) from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        raise SandboxCreateError(f"the provider's state_dir {path} is not a directory of this user's; set another")
    if stat.S_IMODE(info.st_mode) & 0o077:
        path.chmod(0o700)


class EndedEarlyError(SandboxCreateError):
    """Several supervisors in a row exited before they answered; another call may succeed."""


class SupervisorClient:
    """A connection to the supervisor of one state directory. It connects on first use, and again after a break.

    A client is bound to the event loop that first uses it.
    """

    def __init__(self, options: SupervisedOptions) -> None:
        self.root = options.state_dir
        self.state_dir = options.state_dir / release()
        self._options = options
        self._name = f"the {options.provider} sandbox supervisor"
        self._ended_early = f"{self._name} ended right after its start; see {self.state_dir / 'supervisor.log'}"
        self._connection: Connection | None = None
        self._connecting: asyncio.Lock = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[tuple[Message, list[int]]]] = {}
        self.on_end: dict[str, Callable[[Message | None], None]] = {}
        """Exec id → what is called with the command's end event, or with ``None`` if the supervisor is lost first."""
        self.greeting: Message = {}

    async def request(self, message: Message, descriptors: Sequence[int] = ()) -> Message:
        """Send a request and wait for the response. This method always closes ``descriptors``.

        Raises:
            SandboxLostError: the supervisor or the box is gone.
            SandboxCreateError, SandboxArchiveError, SandboxError: the supervisor reported an error.
        """
        answer, received = await self.request_with_descriptors(message, descriptors)
        close_all(received)
        return answer

    async def request_with_descriptors(
        self, message: Message, descriptors: Sequence[int] = ()
    ) -> tuple[Message, list[int]]:
        """Like `request`, for responses with descriptors, which the caller must close."""
        try:
            connection = await self._connected()
        except BaseException:
            close_all(descriptors)
            raise
        return await self._ask(connection, message, descriptors)

    async def _ask(
        self, connection: Connection, message: Message, descriptors: Sequence[int] = ()
    ) -> tuple[Message, list[int]]:
        number = next(self._numbers)
        future: asyncio.Future[tuple[Message, list[int]]] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        connection.send({**message, "id": number}, descriptors)
        if connection.closed:
            self._pending.pop(number, None)
            raise SandboxLostError(f"{self._name} is gone", retryable=True)
        try:
            answer, received = await future
        finally:
            self._pending.pop(number, None)
        if "error" in answer:
            close_all(received)
            problem = answer["error"]
            kind = _ERRORS.get(problem["kind"], SandboxError)
            raise kind(problem["message"], provider=self._options.provider, kind=problem["kind"])
        return answer, received

    def notify(self, message: Message) -> None:
        """Send a request without waiting for the response. Without a connection, do nothing."""
        if self._connection is not None and not self._connection.closed:
            self._connection.send({**message, "id": 0})

    async def close(self) -> None:
        """Close the connection. Boxes stay until their leases end."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _connected(self) -> Connection:
        if self._connection is not None and not self._connection.closed:
            return self._connection
        async with self._connecting:
            if self._connection is not None and not self._connection.closed:
                return self._connection
            backoff = Backoff(first_s=0.02, tries=5)
            while True:
                sock = self._try_to_connect()
                if sock is None:
                    sock = await asyncio.to_thread(self._start_and_connect)
                connection = Connection(sock, on_message=self._received, on_close=self._connection_lost)
                self._connection = connection
                try:
                    self.greeting, _ = await self._ask(connection, {"op": "hello"})
                except SandboxLostError as error:
                    # The supervisor was about to exit; the next round starts another.
                    if await backoff.again():
                        continue
                    raise EndedEarlyError(self._ended_early) from error
                if self.greeting.get("protocol") != PROTOCOL_VERSION:
                    await self.close()
                    raise SandboxError(
                        f"the supervisor of {self.state_dir} (process {self.greeting.get('pid')}) uses another "
                        "protocol version; let its boxes end, stop it, or set another state_dir"
                    )
                return connection

    def _try_to_connect(self) -> socket.socket | None:
        try:
            directory = os.open(self.state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            try:
                sock.connect(f"/proc/self/fd/{directory}/{SOCKET_NAME}")
            except BaseException as error:
                sock.close()
                if isinstance(error, FileNotFoundError | ConnectionRefusedError):
                    return None
                raise
        finally:
            os.close(directory)
        return sock

    def _start_and_connect(self) -> socket.socket:
        """Start a supervisor, unless another process just did, and connect to it. Blocks; runs in a thread."""
        prepare_state_dir(self.root)
        prepare_state_dir(self.state_dir)
        with locked(self.state_dir / "start.lock"):
            sock = self._try_to_connect()
            if sock is not None:
                return sock
            self._start()
            sock = self._try_to_connect()
        if sock is None:
            raise SandboxCreateError(self._ended_early)
        return sock

    def _start(self) -> None:
        options = {
            "import_root": str(INSTALL_ROOT),
            "state_dir": str(self.state_dir),
            "linger_s": self._options.linger_s,
            "use_cgroups": self._options.use_cgroups,
            "builder": self._options.builder,
        }
        environment = BASE_ENV | {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        environment[OPTIONS_VARIABLE] = json.dumps(options)
        interpreter = os.path.realpath(sys.executable)
        with (self.state_dir / "supervisor.log").open("ab") as log:
            started = subprocess.run(
                [interpreter, "-I", "-S", "-X", "utf8", "-c", BOOT],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                check=False,
            )
        if started.stdout:
            with contextlib.suppress(ValueError):
                raise SandboxCreateError(str(json.loads(started.stdout)["error"]), provider=self._options.provider)
        if started.stdout or started.returncode:
            raise SandboxCreateError(f"{self._name} could not be started; see {self.state_dir / 'supervisor.log'}")

    def _received(self, message: Message, descriptors: list[int]) -> None:
        if message.get("event") == "end":
            close_all(descriptors)
            callback = self.on_end.pop(str(message["exec"]), None)
            if callback is not None:
                callback(message)
            return
        future = self._pending.get(int(message.get("id") or 0))
        if future is None or future.done():
            close_all(descriptors)
            return
        future.set_result((message, descriptors))

    def _connection_lost(self) -> None:
        for future in self._pending.values():
            if not future.done():
                future.set_exception(SandboxLostError(f"{self._name} is gone", retryable=True))
        ends, self.on_end = self.on_end, {}
        for callback in ends.values():
            callback(None)


def greeting_of(options: SupervisedOptions) -> Message:
    """Request the supervisor's description of itself and this machine. Blocks, and uses a separate connection.

    Raises:
        EndedEarlyError: several supervisors in a row exited before they answered; another call may succeed.
        SandboxCreateError, SandboxError: no supervisor can be started, or it uses another protocol version.
    """

    async def ask() -> Message:
        client = SupervisorClient(options)
        await client._connected()
        await client.close()
        return client.greeting

    with ThreadPoolExecutor(1) as thread:  # this one may run an event loop
        return thread.submit(asyncio.run, ask()).result()


# -- Process -------------------------------------------------------------------------------------------------------

_READ_BYTES = 256 * 1024
_QUEUED_BYTES = 4 * 1024 * 1024
_PIPE_BYTES = 256 * 1024


class LocalProcess:
    """A running command (`nemo_gym.sandbox.base.ExecProcess`). Pipes connect the command directly to this process."""

    def __init__(self, client: SupervisorClient, box_id: str, exec_id: str, *, max_output_bytes: int) -> None:
        self.exec_id = exec_id
        self.truncated: set[str] = set()
        """Streams to which the command wrote more than ``max_output_bytes``."""
        self._client = client
        self._box_id = box_id
        self._bytes_allowed = {"stdout": max_output_bytes, "stderr": max_output_bytes}
        self._streams: dict[Literal["stdout", "stderr"], int] = {}
        self._queue: deque[ExecOutput] = deque()
        self._queued_bytes = 0
        self._paused: set[Literal["stdout", "stderr"]] = set()
        self._end: ExecEnd | None = None
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def add_stream(self, name: Literal["stdout", "stderr"], descriptor: int) -> None:
        """Read a stream from a pipe. This object owns the descriptor from then on."""
        os.set_blocking(descriptor, False)
        with contextlib.suppress(OSError):  # there is a limit on the pipe memory of a user
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._streams[name] = descriptor
        self._loop.add_reader(descriptor, self._readable, name)

    def ended(self, message: Message | None) -> None:
        """Handle the supervisor's end event for the command; ``None`` means that the supervisor is gone."""
        if self._end is not None:
            return
        for name in list(self._streams):
            self._read_what_is_there(name)
        if message is None:
            self._end = ExecEnd(ExecOutcome.LOST)
        else:
            self._end = ExecEnd(
                ExecOutcome(message["outcome"]),
                return_code=message.get("return_code"),
                signal=message.get("signal"),
                duration_s=float(message.get("duration_s", 0.0)),
            )
        for name in list(self._streams):
            self._hand_to_drain(name)
        self._wake.set()

    async def events(self) -> AsyncGenerator[ExecOutput | ExecEnd, None]:
        """Yield the output in order of arrival, then the end. Stopping early kills the command."""
        try:
            while True:
                while self._queue:
                    output = self._queue.popleft()
                    self._queued_bytes -= len(output.data)
                    self._resume()
                    yield output
                if self._end is not None:
                    yield self._end
                    return
                self._wake.clear()
                await self._wake.wait()
        finally:
            if self._end is None:
                self.abandon()

    def _signal_request(self, number: int) -> Message:
        return {"op": "signal", "box": self._box_id, "exec": self.exec_id, "signal": int(number)}

    async def signal(self, number: int) -> None:
        """Send a signal to the command's whole process tree."""
        if self._end is None:
            await self._client.request(self._signal_request(number))

    async def kill(self) -> None:
        """Kill the whole process tree; idempotent."""
        await self.signal(signal.SIGKILL)

    def abandon(self) -> None:
        """Kill the command without waiting, and stop reading its output."""
        if self._end is None:
            self._client.notify(self._signal_request(signal.SIGKILL))
        self._client.on_end.pop(self.exec_id, None)
        for name in list(self._streams):
            self._close_stream(name)
        self._end = self._end or ExecEnd(ExecOutcome.LOST)

    def _readable(self, name: Literal["stdout", "stderr"]) -> None:
        self._read_once(name)
        if self._queued_bytes > _QUEUED_BYTES and name in self._streams:
            self._loop.remove_reader(self._streams[name])
            self._paused.add(name)

    def _resume(self) -> None:
        if self._paused and self._queued_bytes < _QUEUED_BYTES // 2:
            for name in self._paused & self._streams.keys():
                self._loop.add_reader(self._streams[name], self._readable, name)
            self._paused.clear()

    def _read_once(self, name: Literal["stdout", "stderr"]) -> bool:
        """Read once from a stream; return whether there may be more data."""
        try:
            data = os.read(self._streams[name], _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._close_stream(name)
            return False
        output = data[: self._bytes_allowed[name]]
        self._bytes_allowed[name] -= len(output)
        if len(output) < len(data):
            self.truncated.add(name)
        if output:
            self._queue.append(ExecOutput(name, output))
            self._queued_bytes += len(output)
            self._wake.set()
        return True

    def _read_what_is_there(self, name: Literal["stdout", "stderr"]) -> None:
        """Read the rest of an ended command's output, which is all in the pipe. The number of reads has a bound: a
        process that the command left behind may fill the pipe as fast as this process reads."""
        for _ in range(2 * _PIPE_BYTES // 4096):
            if name not in self._streams or not self._read_once(name):
                return

    def _hand_to_drain(self, name: Literal["stdout", "stderr"]) -> None:
        """Read and discard what comes through an ended command's pipe. A background process that the command left may
        still hold the pipe; without a reader it would block or be killed when it writes."""
        descriptor = self._streams.pop(name)
        self._loop.remove_reader(descriptor)
        loop = self._loop

        def drain() -> None:
            try:
                if os.read(descriptor, _READ_BYTES):
                    return
            except BlockingIOError:
                return
            except OSError:
                pass
            loop.remove_reader(descriptor)
            os.close(descriptor)

        loop.add_reader(descriptor, drain)

    def _close_stream(self, name: Literal["stdout", "stderr"]) -> None:
        descriptor = self._streams.pop(name)
        self._loop.remove_reader(descriptor)
        os.close(descriptor)
