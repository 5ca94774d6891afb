"""The commands: thin, lazily importing layers over configuration, serving and rollouts. Programs import NeMo Gym's run
helper from here."""

from __future__ import annotations

from typing import Any

_RUN_HELPER = ("GlobalConfigDictParserConfig", "RunHelper")


def __getattr__(name: str) -> Any:
    if name in _RUN_HELPER:
        from nemo_gym.cli import run_helper

        return getattr(run_helper, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
