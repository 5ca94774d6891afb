"""Boxes and their commands as steps: the start of a box, each command, its end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from nemo_gym.http.tracing import step
from nemo_gym.sandbox.base import SandboxProvider

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
