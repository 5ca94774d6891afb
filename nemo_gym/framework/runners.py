"""Agent runners, which a trainer's user writes, and how the framework calls them, here or in a Ray task."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from nemo_gym.contract.errors import ConfigError
from nemo_gym.framework.config import CONFIG_PATH, RunnerConfig


@dataclass(frozen=True, slots=True)
class SessionHandle:
    """The addresses that a runner gets for its session; they need no further headers. For trusted runners only,
    because the addresses hold the session's tokens."""

    session_id: str
    base_url: str = field(repr=False)
    """The base URL for an OpenAI or Anthropic client; it ends in ``/v1`` and works with any API key."""
    complete_url: str = field(repr=False)
    """``POST {"reward_info": {"reward": …}}`` here ends the session's work. Only the first such request counts."""
    model: str = "policy"


class AgentRunner(Protocol):
    """A function, or a class with this ``__call__``. The session's work ends when it returns; an exception fails this
    session and no other."""

    def __call__(
        self, *, session: SessionHandle, raw_prompt: Any, sample_index: int, tools_kwargs: Any = None, **kwargs: Any
    ) -> Awaitable[None]: ...


Runner = Callable[..., Awaitable[None]]


def load_runner(config: RunnerConfig, where: str) -> Runner:
    """Import a runner and bind its ``runner_kwargs``. Raises `ConfigError` if it cannot be imported or called."""
    fqn = config.runner_fqn or ""
    kwargs = dict(config.runner_kwargs)
    if config.tool_config_path is not None:
        kwargs["tool_config"] = _tools(config.tool_config_path, where)
    loaded = imported(fqn, f"{where}.runner_fqn")
    if inspect.isclass(loaded):
        try:
            loaded = loaded(**kwargs)
        except TypeError as error:
            raise ConfigError(f"{where}.runner_kwargs: {fqn} refuses them: {error}", key="runner_kwargs") from error
        called = type(loaded).__call__ if callable(loaded) else None
    else:
        called = loaded if callable(loaded) else None
        loaded = partial(loaded, **kwargs) if kwargs and called is not None else loaded
    if called is None or not inspect.iscoroutinefunction(called):
        raise ConfigError(
            f"{where}.runner_fqn: '{fqn}' is no async function and no class with an async __call__", key="runner_fqn"
        )
    runner: Runner = loaded
    return runner


def imported(fqn: str, where: str) -> Any:
    """Import the object that an import path names. Raises `ConfigError` naming the configuration key ``where``."""
    module, colon, name = fqn.partition(":")
    if not colon:
        module, _, name = fqn.rpartition(".")
    try:
        if not module:
            raise ImportError("it names no module")
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{where}: '{fqn}' cannot be imported: {error}; write package.module.name", key=where.rpartition(".")[2]
        ) from error
    return target


def _tools(path: str, where: str) -> Any:
    try:
        from verl.tools.tool_registry import initialize_tools_from_config
    except ImportError as error:
        raise ConfigError(
            f"{where}.tool_config_path needs the package verl: {error}", key="tool_config_path"
        ) from None
    tools = initialize_tools_from_config(path)
    if not tools:
        raise ConfigError(f"{where}.tool_config_path: '{path}' holds no tools", key="tool_config_path")
    return tools


async def call_runner(runner: Runner, call: Mapping[str, Any]) -> None:
    """Call a runner with the arguments of ``call``, without ``tools_kwargs`` if the sample has none."""
    given = {name: value for name, value in call.items() if name != "tools_kwargs" or value is not None}
    await runner(**given)


def run_in_task(config: RunnerConfig, where: str, call: Mapping[str, Any]) -> None:
    """Run a runner as the body of a Ray task. The process that started the task keeps the session and finds its
    reward."""
    asyncio.run(call_runner(load_runner(config, where), call))


class RayDispatch:
    """Runs runners as Ray tasks. Ray does not retry a failed task, because its session is already partly used."""

    def __init__(self) -> None:
        try:
            import ray
        except ImportError:
            raise ConfigError(
                f"{CONFIG_PATH}: dispatch_mode 'ray_task' needs Ray: pip install 'nemo-gym-suite[transfer-queue]'",
                key="dispatch_mode",
            ) from None
        self._ray = ray

    async def run(self, config: RunnerConfig, where: str, call: Mapping[str, Any]) -> None:
        """Run a task and wait for it; if cancelled, end the task."""
        options = {"num_cpus": config.ray_num_cpus, "max_retries": 0}
        reference = self._ray.remote(**options)(run_in_task).remote(config, where, dict(call))
        try:
            await reference
        except asyncio.CancelledError:
            self._ray.cancel(reference, force=True)
            raise
        except self._ray.exceptions.RayTaskError as error:
            # Raise the runner's own exception, not Ray's long text about it.
            cause = getattr(error, "cause", None)
            if isinstance(cause, Exception):
                raise cause from error
            raise
