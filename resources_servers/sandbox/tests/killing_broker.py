"""The broker's own program, which kills itself with SIGKILL at the n-th boundary that it crosses.

A boundary is the moment before or after a transaction is committed, or before or after the backend is asked for
something. ``KILL_STEP`` is n, counted among those called ``KILL_NAME`` where that is set; every boundary crossed is
appended to the file ``KILL_LOG``. While the file ``FAIL_FILE`` holds the name of something that the backend is asked
for and the name of an error, that fails. Nothing of this is in the broker itself.
"""

from __future__ import annotations

import functools
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_gym.broker.registry import RegistryWriter
from nemo_gym.contract.errors import SandboxError
from nemo_gym.sandbox import facade
from resources_servers.sandbox.tests.broker_process import APP

_KILL_STEP = int(os.environ.get("KILL_STEP", "0"))
_KILL_NAME = os.environ.get("KILL_NAME", "")
_LOG = os.open(os.environ["KILL_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
_FAILING = Path(os.environ.get("FAIL_FILE", os.devnull))
_ERRORS = {"SandboxError": SandboxError, "RuntimeError": RuntimeError}
_crossed = 0
_ASKED = ("create", "close", "reap", "renew", "start_exec", "put_archive", "open_door", "connect", "list")


def boundary(name: str) -> None:
    global _crossed
    counts = not _KILL_NAME or name == _KILL_NAME
    _crossed += counts
    os.write(_LOG, f"{name}\n".encode())
    if counts and _crossed == _KILL_STEP:
        os.kill(os.getpid(), signal.SIGKILL)


def around_commits() -> None:
    commit, call = RegistryWriter._commit, RegistryWriter.call

    def called(self: RegistryWriter, operation: Any, *args: Any, **options: Any) -> Any:
        frame = sys._getframe(1)
        while frame.f_code.co_qualname.startswith("RegistryWriter.") and frame.f_back is not None:
            frame = frame.f_back  # `run` and `rows` write for a method of a store, which awaits them
        operation.__qualname__ = frame.f_code.co_qualname
        return call(self, operation, *args, **options)

    def killing(self: RegistryWriter, batch: list[Any]) -> bool:
        name = "+".join(sorted({request.operation.__qualname__.split(".<locals>")[0] for request in batch}))
        boundary(f"before commit of {name}")
        done = commit(self, batch)
        boundary(f"after commit of {name}")
        return done

    RegistryWriter._commit = killing  # type: ignore[method-assign]
    RegistryWriter.call = called  # type: ignore[method-assign]


def around_backend() -> None:
    create_provider = facade.create_provider

    def wrapped(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        async def asked(*args: Any, **options: Any) -> Any:
            boundary(f"before {name}")
            failing, _, error = (_FAILING.read_text() if _FAILING.exists() else "").partition(" ")
            if name == failing:
                raise _ERRORS[error]("the test lets it fail")
            result = await method(*args, **options)
            boundary(f"after {name}")
            return result

        return asked

    def create(*args: Any, **settings: Any) -> Any:
        provider = create_provider(*args, **settings)
        for name in _ASKED:
            setattr(provider, name, wrapped(name, getattr(provider, name)))
        return provider

    facade.create_provider = create


if __name__ == "__main__":
    around_commits()
    around_backend()
    sys.argv = [str(APP)]
    runpy.run_path(str(APP), run_name="__main__")
