"""The connection to one Docker Engine: blocking SDK calls on threads, and its errors as this suite's."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from nemo_gym.contract.errors import SandboxError, SandboxLostError

P = ParamSpec("P")
T = TypeVar("T")

_THREADS = 32
DEFAULT_SOCKET = "/var/run/docker.sock"
START_HINT = "start one with 'scripts/dockerd start', or point DOCKER_HOST (or the provider's base_url) at one"


def private_engine_socket() -> str:
    """Where ``scripts/dockerd`` puts the socket of the engine it starts."""
    state = os.environ.get("NEMO_GYM_DOCKER_DIR")
    directory = Path(state) if state else Path("~").expanduser() / ".cache" / "nemo-gym" / "docker"
    return str(directory / "engine.sock")


def engine_url(configured: str | None) -> str:
    """The engine's URL: as configured, else ``DOCKER_HOST``, the default socket, or the private engine's socket."""
    if configured:
        return configured
    if host := os.environ.get("DOCKER_HOST"):
        return host
    for path in (DEFAULT_SOCKET, private_engine_socket()):
        if Path(path).is_socket():
            return f"unix://{path}"
    return f"unix://{DEFAULT_SOCKET}"


class Engine:
    """One engine. Blocking calls run on a small pool of threads through `call`, away from the event loop."""

    def __init__(self, base_url: str | None, *, request_timeout_s: float) -> None:
        self.url = engine_url(base_url)
        self._request_timeout_s = request_timeout_s
        self._client: Any = None
        self._release: str | None = None
        self._threads: ThreadPoolExecutor | None = None

    @property
    def client(self) -> Any:
        """The SDK's client (``docker.APIClient``, whose type stubs lag behind it), connected when first asked for.

        Raises:
            SandboxError: the ``docker`` package is missing, or no engine answers.
        """
        if self._client is None:
            try:
                import docker
                from docker.tls import TLSConfig
            except ModuleNotFoundError as error:
                raise SandboxError(
                    "the docker sandbox needs the 'docker' package: pip install 'nemo-gym-suite[docker]'"
                ) from error
            tls: TLSConfig | bool = False
            if self.url.startswith(("tcp://", "https://")) and os.environ.get("DOCKER_TLS_VERIFY"):
                certificates = Path(os.environ.get("DOCKER_CERT_PATH") or Path("~/.docker").expanduser())
                tls = TLSConfig(
                    client_cert=(str(certificates / "cert.pem"), str(certificates / "key.pem")),
                    ca_cert=str(certificates / "ca.pem"),
                    verify=True,
                )
            try:
                self._client = docker.APIClient(
                    base_url=self.url,
                    version="auto",
                    timeout=int(self._request_timeout_s),
                    tls=tls,
                    max_pool_size=_THREADS,
                )
            except docker.errors.DockerException as error:
                raise SandboxError(
                    f"no Docker Engine answers at {self.url} ({_cause(error)}); {START_HINT}",
                    retryable=True,
                    base_url=self.url,
                ) from error
        return self._client

    @property
    def release(self) -> str:
        """The engine's own version, for example ``20.10.24``; asked once."""
        if self._release is None:
            self._release = str(self.client.version().get("Version", ""))
        return self._release

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking function on the pool. Cancelling the caller does not stop the function."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="docker")
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None
        if self._client is not None:
            self._client.close()
            self._client = None

    def is_local(self) -> bool:
        """Whether the engine's processes, and so its containers', have process ids here."""
        if not self.url.startswith("unix://"):
            return False
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(self.url.removeprefix("unix://"))
                pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        except OSError:
            return False
        return bool(pid > 0)


def _cause(error: BaseException) -> str:
    """The innermost reason of an SDK error, without the layers of request libraries around it."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return str(error) or type(error).__name__


def status_of(error: BaseException) -> int | None:
    """The HTTP status the engine answered with; ``None`` when it did not answer."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    return status if isinstance(status, int) else None


def explain(error: BaseException) -> str:
    """What the engine said, in its own words."""
    said = getattr(error, "explanation", None)
    return str(said.decode(errors="replace") if isinstance(said, bytes) else said or error).strip()


def is_full_disk(text: str) -> bool:
    return "no space left on device" in text.lower() or "disk quota exceeded" in text.lower()


def translate(
    error: Exception, doing: str, *, kind: type[SandboxError] = SandboxError, **details: Any
) -> SandboxError:
    """An SDK or transport error as one of ours: ``doing`` completes "docker: while …"."""
    said = explain(error)
    if is_full_disk(said):
        return kind(
            f"docker: the engine's disk is full while {doing}; free space there, for example with "
            "'docker image prune' (docker info shows the directory as Docker Root Dir)",
            retryable=True,
            **details,
        )
    status = status_of(error)
    if status is None:
        return kind(f"docker: the engine stopped answering while {doing} ({_cause(error)}); {START_HINT}", **details)
    if status == 404 and "no such container" in said.lower():
        lost = SandboxLostError if kind is SandboxError else kind
        return lost(f"docker: the box is gone while {doing}", **details)
    return kind(f"docker: the engine refused while {doing}: {said}", retryable=status >= 500, **details)


def sdk_errors(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """What SDK calls raise: the engine's answers, transport errors of the request library below it, and ``more``."""
    import docker.errors
    import requests

    return (docker.errors.DockerException, requests.RequestException, OSError, *more)
