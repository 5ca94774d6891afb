"""One box as an object (`AsyncSandbox`), renewal of its lease (`keep_renewed`), and the registry of providers.

The registry maps names to classes: first those that a program registered, then installed entry points. A provider
outside this repository is a package with an entry point in the group ``nemo_gym.sandbox_providers``; the built-in ones
work the same way. `create_provider` adds tracing to every provider (`observed`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import structlog

from nemo_gym._util.suggest import nearest
from nemo_gym._util.tasks import LoopThread, finish
from nemo_gym.config import sandbox_blocks
from nemo_gym.contract.errors import ConfigError, SandboxError, SandboxLostError, reject_unknown_keys
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.http.telemetry import step
from nemo_gym.sandbox.base import (
    DEFAULT_MAX_OUTPUT_BYTES,
    Connectable,
    ExecProcess,
    ExecRequest,
    SandboxEndpoint,
    SandboxExecResult,
    SandboxHandle,
    SandboxProvider,
    SandboxStatus,
    SupportsEndpoint,
    require,
)

ProviderClass = Callable[..., SandboxProvider]


def register_provider(name: str, provider_class: ProviderClass, *, override: bool = False) -> None:
    """Register ``provider_class`` (or any callable that returns a provider) as ``name`` in this process.

    Raises:
        ConfigError: the name is already registered with another class, and ``override`` is not set.
    """
    if not override and sandbox_blocks.registered_providers.get(name, provider_class) is not provider_class:
        raise ConfigError(f"sandbox provider '{name}' is registered already; pass override=True to replace it")
    sandbox_blocks.registered_providers[name] = provider_class


def get_provider_class(name: str) -> ProviderClass:
    """Return the class that is registered or installed under a provider's name.

    Raises:
        ConfigError: there is no such provider, or it cannot be imported; the message says what to install.
    """
    if name in sandbox_blocks.registered_providers:
        return sandbox_blocks.registered_providers[name]
    entry_point = sandbox_blocks.installed_providers().get(name)
    if entry_point is None:
        names = sandbox_blocks.list_providers()
        raise ConfigError(
            f"there is no sandbox provider '{name}'{nearest(name, names)}; installed are {', '.join(names) or 'none'}"
        )
    try:
        return cast(ProviderClass, entry_point.load())
    except ImportError as error:
        raise ConfigError(
            f"sandbox provider '{name}' cannot be imported ({error}); {_how_to_install(entry_point)}"
        ) from error
    except AttributeError as error:
        raise ConfigError(
            f"sandbox provider '{name}': its entry point '{entry_point.value}' does not exist in the module"
        ) from error


_NEMO_GYM_SECTIONS = frozenset({"connection", "create", "exec", "probe", "operations"})
"""Settings of NeMo Gym's providers."""


def create_provider(provider: str | Mapping[str, Any], **settings: Any) -> SandboxProvider:
    """Create a provider from its name, or from ``{name: settings}`` as `resolve_provider_config` returns it.

    Args:
        settings: further settings; they override those of the mapping.

    Raises:
        ConfigError: the mapping has another shape, or the provider or one of the settings is unknown.
    """
    if isinstance(provider, str):
        name, provider_settings = provider, {}
    elif len(provider) == 1:
        ((name, values),) = provider.items()
        provider_settings = dict(values or {})
    else:
        raise ConfigError(f"a sandbox provider is configured as {{name: settings}}, not with keys {sorted(provider)}")
    provider_settings |= settings
    provider_class = get_provider_class(name)
    parameters = inspect.signature(provider_class).parameters
    try:
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            reject_unknown_keys(provider_settings, list(parameters), where=f"sandbox provider '{name}'")
        return observed(provider_class(**provider_settings))
    except ConfigError as error:
        # A provider that extends another one passes on what it does not know, and the other one, under its own name,
        # knows only its own keys.
        unknown = error.details.get("keys", ())
        if foreign := sorted(_NEMO_GYM_SECTIONS.intersection(unknown)):
            raise ConfigError(
                f"sandbox provider '{name}': {', '.join(foreign)} are settings of NeMo Gym's provider of this name;"
                f" this one has others: leave out NeMo Gym's file and choose sandbox={name}, or write {name}: {{}}",
                key=foreign[0],
            ) from error
        for key in provider_settings:
            if key in unknown and (hint := nearest(key, parameters)):
                raise ConfigError(f"sandbox provider '{name}': unknown key '{key}'{hint}", key=key) from error
        raise


def _how_to_install(point: EntryPoint) -> str:
    if point.dist is None:
        return "install what it needs"
    extras = point.dist.metadata.get_all("Provides-Extra") or []
    package = f"{point.dist.name}[{point.name}]" if point.name in extras else point.dist.name
    return f"install it with: pip install '{package}'"


# -- The provider of one server ------------------------------------------------------------------------------------


class SandboxOwner:
    """Holds the one provider of a server process; ``sandbox_provider`` is a block name or ``{provider: settings}``."""

    def __init__(self, sandbox_provider: str | dict[str, Any], server_client: Any) -> None:
        self._configured, self._server_client = sandbox_provider, server_client
        self._provider: SandboxProvider | None = None

    def provider(self) -> SandboxProvider:
        """Return the provider, which the first call creates. Raises `ConfigError` if it or a setting is unknown."""
        if self._provider is None:
            blocks = self._server_client.global_config_dict
            self._provider = create_provider(sandbox_blocks.resolve_provider_config(self._configured, blocks))
        return self._provider

    async def aclose(self) -> None:
        if self._provider is not None:
            provider, self._provider = self._provider, None
            await provider.aclose()


# -- Tracing: the start of a box, each of its commands, and its end are recorded as steps --------------------------

Method = Callable[..., Awaitable[Any]]


def observed(provider: SandboxProvider) -> SandboxProvider:
    """Return ``provider`` itself with traced methods; a wrapper object would hide the protocols that it implements.
    The trace omits the text of commands, because a grader's commands may contain private data."""
    name = str(getattr(provider, "name", type(provider).__name__))  # providers written for NeMo Gym have no name
    for method, wrap in (("create", _create), ("exec", _exec), ("close", _close)):
        if (original := getattr(provider, method, None)) is not None:
            setattr(provider, method, wrap(original, name))
    return provider


def _create(create: Method, name: str) -> Method:
    async def create_box(spec: Any, *args: Any, **options: Any) -> Any:
        with step("box_start", provider=name, image=getattr(spec, "image", None)) as starting:
            handle = await create(spec, *args, **options)
            starting.set(sandbox_id=handle.sandbox_id)
            return handle

    return create_box


def _exec(exec_: Method, name: str) -> Method:
    async def exec_in_box(handle: Any, *args: Any, **options: Any) -> Any:
        with step("box_exec", provider=name, sandbox_id=handle.sandbox_id) as running:
            result = await exec_(handle, *args, **options)
            running.outcome = getattr(result, "error_type", None) or "ok"
            running.set(exit_code=result.return_code)
            return result

    return exec_in_box


def _close(close: Method, name: str) -> Method:
    async def close_box(handle: Any, *args: Any, **options: Any) -> Any:
        with step("box_close", provider=name, sandbox_id=handle.sandbox_id):
            return await close(handle, *args, **options)

    return close_box


log = structlog.get_logger(__name__)

DEFAULT_EXEC_TIMEOUT_S = 180.0
_RENEWALS_PER_TTL = 3
_RENEW_RETRY_S = 1.0


class AsyncSandbox:
    """One box, from ``start`` to ``stop``.

    Args:
        provider: a provider, which the caller must close; or a name or configuration ``{name: settings}``, from which
            this object creates a provider that `stop` closes.
        spec: the spec of the box; may instead be passed to `start`.
    """

    def __init__(self, provider: SandboxProvider | Mapping[str, Any] | str, spec: SandboxSpec | None = None) -> None:
        self._owns_provider = isinstance(provider, str | Mapping)
        self._provider = create_provider(provider) if isinstance(provider, str | Mapping) else provider
        self._spec = spec
        self._handle: SandboxHandle | None = None
        self._borrowed = False

    @property
    def provider(self) -> SandboxProvider:
        return self._provider

    @property
    def spec(self) -> SandboxSpec | None:
        return self._spec

    @property
    def handle(self) -> SandboxHandle:
        """The live box. Raises `SandboxError` before `start` and after `stop`."""
        if self._handle is None:
            raise SandboxError("this sandbox is not started; call start() first")
        return self._handle

    async def start(self, spec: SandboxSpec | None = None) -> Self:
        """Create the box, unless it is already started. A cancelled start leaves no box behind.

        Raises:
            ConfigError: no spec was given here or before, or the box was already started with another spec.
            SandboxCapabilityError, SandboxCreateError: see `SandboxProvider.create`.
        """
        if self._handle is not None:
            if spec is not None and spec != self._spec:
                raise ConfigError("this sandbox is started with another spec; make a second AsyncSandbox")
            return self
        self._spec = spec or self._spec
        if self._spec is None:
            raise ConfigError("this sandbox has no spec; pass one to AsyncSandbox(...) or start(...)")
        self._handle = await self._create(self._spec)
        return self

    async def _create(self, spec: SandboxSpec) -> SandboxHandle:
        # In a separate task: a provider may return a box although it is cancelled, and that box must be closed.
        creating = asyncio.ensure_future(self._provider.create(spec))
        try:
            handle = await asyncio.shield(creating)
        except asyncio.CancelledError:
            creating.cancel()
            await asyncio.wait({creating})
            if not creating.cancelled() and creating.exception() is None:
                await self._provider.close(creating.result())
            raise
        if spec.files and not hasattr(self._provider, "start_exec"):
            await self._upload_files(handle, spec)
        return handle

    async def _upload_files(self, handle: SandboxHandle, spec: SandboxSpec) -> None:
        """Upload ``spec.files`` for a provider written for NeMo Gym, whose ``create`` does not do that. If an upload
        fails, destroy the box."""
        try:
            with tempfile.TemporaryDirectory(prefix="nemo-gym-files-") as folder:
                for number, (path, text) in enumerate(spec.files.items()):
                    local = Path(folder) / str(number)
                    local.write_text(text, encoding="utf-8")
                    await self._provider.upload_file(handle, local, path)
        except BaseException:
            await finish(self._provider.close(handle))
            raise

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = DEFAULT_EXEC_TIMEOUT_S,
        user: str | None = None,
        stdin: bytes | None = None,
        merge_stderr: bool = False,
        max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
    ) -> SandboxExecResult:
        """Run one command to its end; see `SandboxProvider.exec`."""
        extra: dict[str, Any] = {}
        # Providers written for NeMo Gym accept only the first five arguments.
        if stdin is not None:
            extra["stdin"] = stdin
        if merge_stderr:
            extra["merge_stderr"] = merge_stderr
        if max_output_bytes != DEFAULT_MAX_OUTPUT_BYTES:
            extra["max_output_bytes"] = max_output_bytes
        return await self._provider.exec(
            self.handle, command, cwd=cwd, env=env, timeout_s=timeout_s, user=user, **extra
        )

    async def start_exec(self, request: ExecRequest) -> ExecProcess:
        """Start a command and stream its output."""
        return await self._provider.start_exec(self.handle, request)

    async def upload(self, local_path: Path | str, remote_path: str) -> None:
        """Copy a file of this host into the box."""
        await self._provider.upload_file(self.handle, Path(local_path), remote_path)

    async def download(self, remote_path: str, local_path: Path | str) -> None:
        """Copy a file of the box to this host."""
        await self._provider.download_file(self.handle, remote_path, Path(local_path))

    async def put_archive(self, path: str, tar: AsyncIterator[bytes]) -> None:
        """Unpack a tar stream below ``path`` in the box."""
        await self._provider.put_archive(self.handle, path, tar)

    def get_archive(
        self, path: str, *, exclude: Sequence[str] = (), max_bytes: int | None = None
    ) -> AsyncIterator[bytes]:
        """Yield a file or directory of the box as a tar stream."""
        return self._provider.get_archive(self.handle, path, exclude=exclude, max_bytes=max_bytes)

    async def status(self) -> SandboxStatus:
        """Return the box's status as the backend reports it; ``STOPPED`` when this object has no box."""
        return SandboxStatus.STOPPED if self._handle is None else await self._provider.status(self._handle)

    async def endpoint(self, port: int) -> SandboxEndpoint:
        """Return a URL on this host that reaches a port of the box. Raises `SandboxCapabilityError` if the provider
        does not support endpoints."""
        require(self._provider, SupportsEndpoint, why=f"to reach port {port} of the box")
        assert isinstance(self._provider, SupportsEndpoint)
        return SandboxEndpoint(await self._provider.endpoint(self.handle, port))

    async def renew(self, ttl_s: float) -> None:
        """Extend the lease to ``ttl_s`` seconds from now. Raises `SandboxLostError` when the box is gone."""
        await self._provider.renew(self.handle, ttl_s)

    async def serialize(self, *, scope: str | None = None) -> dict[str, Any]:
        """Return plain data with which another process can `connect` to the box."""
        require(self._provider, Connectable, why="to hand the box to another process")
        assert isinstance(self._provider, Connectable)
        return await self._provider.serialize_handle(self.handle, scope=scope or "operate")

    @classmethod
    async def connect(
        cls, descriptor: Mapping[str, Any], *, provider: SandboxProvider | Mapping[str, Any] | str
    ) -> Self:
        """Use a box that another process owns; `stop` then disconnects from it without destroying it."""
        sandbox = cls(provider)
        try:
            require(sandbox._provider, Connectable, why="to connect to a box of another process")
            assert isinstance(sandbox._provider, Connectable)
            sandbox._handle = await sandbox._provider.connect(descriptor)
        except BaseException:
            await sandbox.stop()
            raise
        sandbox._borrowed = True
        return sandbox

    async def stop(self) -> None:
        """Destroy the box if this object created it, and close the provider if this object created it. Idempotent."""
        handle, self._handle = self._handle, None
        try:
            if handle is not None and not self._borrowed:
                await self._provider.close(handle)
        finally:
            if self._owns_provider:
                await self._provider.aclose()

    async def __aenter__(self) -> Self:
        if self._spec is not None:
            await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        # If the caller is cancelled, its box is destroyed first; then the cancellation is raised.
        await finish(self.stop())


@contextlib.asynccontextmanager
async def keep_renewed(provider: SandboxProvider, handle: SandboxHandle, ttl_s: float) -> AsyncIterator[None]:
    """Renew a box's lease while the context is open, so that the box outlives its owner by at most ``ttl_s`` seconds.

    Renewals stop when the box is gone; the next exec then ends with the outcome ``LOST``.
    """
    renewing = asyncio.create_task(_renew_forever(provider, handle, ttl_s), name=f"renew {handle.sandbox_id}")
    try:
        yield
    finally:
        renewing.cancel()
        await asyncio.wait({renewing})


async def _renew_forever(provider: SandboxProvider, handle: SandboxHandle, ttl_s: float) -> None:
    pause_s = ttl_s / _RENEWALS_PER_TTL
    while True:
        await asyncio.sleep(pause_s)
        try:
            await provider.renew(handle, ttl_s)
            pause_s = ttl_s / _RENEWALS_PER_TTL
        except SandboxLostError as error:
            log.warning("sandbox_lease_lost", sandbox_id=handle.sandbox_id, error=str(error))
            return
        except SandboxError as error:
            # The backend may recover before the lease ends.
            log.warning("sandbox_renew_failed", sandbox_id=handle.sandbox_id, error=str(error))
            pause_s = min(_RENEW_RETRY_S, ttl_s / _RENEWALS_PER_TTL)


# -- Blocking ------------------------------------------------------------------------------------------------------

T = TypeVar("T")


_shared: tuple[int, LoopThread] | None = None
_sharing = threading.Lock()


def shared_loop() -> LoopThread:
    """Return the one event loop of all `Sandbox` objects of this process; a provider works only on one loop."""
    global _shared
    with _sharing:
        # A forked child inherits the object but not its thread.
        if _shared is None or _shared[0] != os.getpid():
            _shared = os.getpid(), LoopThread("sandbox-loop")
        return _shared[1]


class Sandbox:
    """`AsyncSandbox` without ``await``; arguments and errors are the same."""

    def __init__(self, provider: SandboxProvider | Mapping[str, Any] | str, spec: SandboxSpec | None = None) -> None:
        self._loop = shared_loop()

        async def make() -> AsyncSandbox:
            return AsyncSandbox(provider, spec)

        self._box = self._run(make())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` to its end. Raises `SandboxError` where this would block a running event loop."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._loop.run(work)
        work.close()
        raise SandboxError("Sandbox blocks its thread and this one runs an event loop; use AsyncSandbox here")

    def start(self, spec: SandboxSpec | None = None) -> Self:
        self._run(self._box.start(spec))
        return self

    def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = DEFAULT_EXEC_TIMEOUT_S,
        user: str | None = None,
        stdin: bytes | None = None,
        merge_stderr: bool = False,
    ) -> SandboxExecResult:
        return self._run(
            self._box.exec(
                command, cwd=cwd, env=env, timeout_s=timeout_s, user=user, stdin=stdin, merge_stderr=merge_stderr
            )
        )

    def upload(self, local_path: Path | str, remote_path: str) -> None:
        self._run(self._box.upload(local_path, remote_path))

    def download(self, remote_path: str, local_path: Path | str) -> None:
        self._run(self._box.download(remote_path, local_path))

    def status(self) -> SandboxStatus:
        return self._run(self._box.status())

    def endpoint(self, port: int) -> SandboxEndpoint:
        return self._run(self._box.endpoint(port))

    def serialize(self, *, scope: str | None = None) -> dict[str, Any]:
        return self._run(self._box.serialize(scope=scope))

    @classmethod
    def connect(cls, descriptor: Mapping[str, Any], *, provider: SandboxProvider | Mapping[str, Any] | str) -> Self:
        sandbox = cls.__new__(cls)
        sandbox._loop = shared_loop()
        sandbox._box = sandbox._run(AsyncSandbox.connect(descriptor, provider=provider))
        return sandbox

    def stop(self) -> None:
        self._run(self._box.stop())

    def __enter__(self) -> Self:
        if self._box.spec is not None:
            self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
