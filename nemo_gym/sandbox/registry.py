"""Names of sandbox providers → classes: those registered by a program first, then installed entry points.

A provider outside this repository is a package with an entry point in the group ``nemo_gym.sandbox_providers``; the
built-in ones take the same path. What a provider does is traced (`observed`).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import EntryPoint
from typing import Any, cast

from nemo_gym._util.suggest import nearest
from nemo_gym.config import sandbox_blocks
from nemo_gym.contract.errors import ConfigError, reject_unknown_keys
from nemo_gym.http.tracing import step
from nemo_gym.sandbox.base import SandboxProvider

ProviderClass = Callable[..., SandboxProvider]


def register_provider(name: str, provider_class: ProviderClass, *, override: bool = False) -> None:
    """Make ``provider_class`` (or any callable that returns a provider) known as ``name`` in this process.

    Raises:
        ConfigError: the name was registered before with something else, and ``override`` is not set.
    """
    if not override and sandbox_blocks.registered_providers.get(name, provider_class) is not provider_class:
        raise ConfigError(f"sandbox provider '{name}' is registered already; pass override=True to replace it")
    sandbox_blocks.registered_providers[name] = provider_class


def get_provider_class(name: str) -> ProviderClass:
    """The class behind a provider's name.

    Raises:
        ConfigError: there is no such provider, or it cannot be imported; the message names what to install.
    """
    if name in sandbox_blocks.registered_providers:
        return sandbox_blocks.registered_providers[name]
    entry_point = sandbox_blocks.installed_providers().get(name)
    if entry_point is None:
        known = sandbox_blocks.list_providers()
        raise ConfigError(
            f"there is no sandbox provider '{name}'{nearest(name, known)}; installed are {', '.join(known) or 'none'}"
        )
    try:
        return cast(ProviderClass, entry_point.load())
    except ImportError as error:
        raise ConfigError(
            f"sandbox provider '{name}' cannot be imported ({error}); {_how_to_install(entry_point)}"
        ) from error
    except AttributeError as error:
        raise ConfigError(f"sandbox provider '{name}': its entry point '{entry_point.value}' names nothing") from error


def create_provider(provider: str | Mapping[str, Any], **settings: Any) -> SandboxProvider:
    """Make a provider from its name, or from ``{name: settings}`` as `resolve_provider_config` returns it.

    Args:
        settings: added to those of the mapping, and stronger.

    Raises:
        ConfigError: the mapping has another shape, the provider is unknown, or a setting is.
    """
    if isinstance(provider, str):
        name, given = provider, {}
    elif len(provider) == 1:
        ((name, values),) = provider.items()
        given = dict(values or {})
    else:
        raise ConfigError(f"a sandbox provider is configured as {{name: settings}}, not with keys {sorted(provider)}")
    given |= settings
    provider_class = get_provider_class(name)
    parameters = inspect.signature(provider_class).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        reject_unknown_keys(given, list(parameters), where=f"sandbox provider '{name}'")
    return observed(provider_class(**given))


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
        """The provider; raises `ConfigError` when it is unknown or cannot be configured so."""
        if self._provider is None:
            from nemo_gym.config.sandbox_blocks import resolve_provider_config

            configured = resolve_provider_config(self._configured, self._server_client.global_config_dict)
            self._provider = create_provider(configured)
        return self._provider

    async def aclose(self) -> None:
        if self._provider is not None:
            provider, self._provider = self._provider, None
            await provider.aclose()


# -- Boxes and their commands as steps: the start of a box, each command, its end ----------------------------------

Method = Callable[..., Awaitable[Any]]


def observed(provider: SandboxProvider) -> SandboxProvider:
    """``provider`` itself, with its methods replaced: an object around it would hide the protocols that it implements.
    Commands are not named: a grader's may hold what is private."""
    name = str(getattr(provider, "name", type(provider).__name__))  # NeMo Gym's have none
    for method, wrap in (("create", _create), ("exec", _exec), ("close", _close)):
        if (own := getattr(provider, method, None)) is not None:
            setattr(provider, method, wrap(own, name))
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
