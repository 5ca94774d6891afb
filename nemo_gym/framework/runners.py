"""Agent runners: what a trainer's user writes, and how the framework calls it, here or in a Ray task."""

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
    """What a runner gets of its session: addresses that work without further headers. For trusted runners only, since
    the addresses hold the session's tokens."""

    session_id: str
    base_url: str = field(repr=False)
    """For an OpenAI or Anthropic client; it ends in ``/v1``, and any API key will do."""
    complete_url: str = field(repr=False)
    """``POST {"reward_info": {"reward": …}}`` ends the session's work. The first one counts."""
    model: str = "policy"


class AgentRunner(Protocol):
    """A function, or a class with this ``__call__``. It works until it returns; what it raises fails this session and
    no other."""

    def __call__(
        self, *, session: SessionHandle, raw_prompt: Any, sample_index: int, tools_kwargs: Any = None, **kwargs: Any
    ) -> Awaitable[None]: ...


Runner = Callable[..., Awaitable[None]]


def load_runner(config: RunnerConfig, where: str) -> Runner:
    """Import a runner and bind its ``runner_kwargs``. Raises `ConfigError` for what cannot be imported or called."""
    fqn = config.runner_fqn or ""
    kwargs = dict(config.runner_kwargs)
    if config.tool_config_path is not None:
        kwargs["tool_config"] = _tools(config.tool_config_path, where)
    found = imported(fqn, f"{where}.runner_fqn")
    if inspect.isclass(found):
        try:
            found = found(**kwargs)
        except TypeError as error:
            raise ConfigError(f"{where}.runner_kwargs: {fqn} refuses them: {error}", key="runner_kwargs") from error
        called = type(found).__call__ if callable(found) else None
    else:
        called = found if callable(found) else None
        found = partial(found, **kwargs) if kwargs and called is not None else found
    if called is None or not inspect.iscoroutinefunction(called):
        raise ConfigError(
            f"{where}.runner_fqn: '{fqn}' is no async function and no class with an async __call__", key="runner_fqn"
        )
    runner: Runner = found
    return runner


def imported(fqn: str, where: str) -> Any:
    """What an import path names. Raises `ConfigError`, which names the key ``where``."""
    module, colon, name = fqn.partition(":")
    if not colon:
        module, _, name = fqn.rpartition(".")
    try:
        if not module:
            raise ImportError("it names no module")
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{where}: '{fqn}' cannot be imported: {error}; write package.module.name", key=where.rpartition(".")[2]
        ) from error
    return found


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
    """``call`` without ``tools_kwargs`` where the sample has none."""
    given = {name: value for name, value in call.items() if name != "tools_kwargs" or value is not None}
    await runner(**given)


def run_in_task(config: RunnerConfig, where: str, call: Mapping[str, Any]) -> None:
    """The body of a Ray task: the runner and nothing else. The session, its tokens and its reward stay with whoever
    started the task."""
    asyncio.run(call_runner(load_runner(config, where), call))


class RayDispatch:
    """Runs runners as Ray tasks. A task that fails is not run again by Ray: it would meet a session half used."""

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
        """Wait for the task; cancelled, it is ended."""
        options = {"num_cpus": config.ray_num_cpus, "max_retries": 0}
        reference = self._ray.remote(**options)(run_in_task).remote(config, where, dict(call))
        try:
            await reference
        except asyncio.CancelledError:
            self._ray.cancel(reference, force=True)
            raise
        except self._ray.exceptions.RayTaskError as error:
            # What the runner raised, and not the page of text that Ray makes of it.
            cause = getattr(error, "cause", None)
            if isinstance(cause, Exception):
                raise cause from error
            raise
