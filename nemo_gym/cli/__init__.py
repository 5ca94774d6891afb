"""The commands: thin, lazily importing layers over configuration, serving and rollouts. Programs import NeMo Gym's run
helper from here."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

_RUN_HELPER = ("GlobalConfigDictParserConfig", "RunHelper")


def __getattr__(name: str) -> Any:
    if name in _RUN_HELPER:
        from nemo_gym.cli import program

        return getattr(program, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _interrupted_early(*_: object) -> None:
    os.write(2, f"{_PROGRAM}: error: interrupted\n".encode())
    os._exit(130)


def imports_are_done() -> None:
    """Give SIGINT back to Python, because from here on the command handles it."""
    if signal.getsignal(signal.SIGINT) is _interrupted_early:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_PROGRAM = os.path.basename(sys.argv[0]) if sys.argv else ""  # noqa: PTH119 - pathlib is not imported for this
# A program of a user's, such as ng_train.py, handles its interrupts itself.
_IS_COMMAND = _PROGRAM in ("ng", "gym") or (_PROGRAM.startswith("ng_") and "." not in _PROGRAM)
# A command spends its first tenths of a second on imports, which nothing surrounds with a `try`. An ignored SIGINT, as
# under nohup, stays ignored.
if _IS_COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _interrupted_early)
