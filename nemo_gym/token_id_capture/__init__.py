"""NeMo Gym's names for capturing token ids. Here the gateway keeps them for every session of an attempt.

A model server written for NeMo Gym finds that nothing is captured in its own process; one that asks for
``external_staging`` is refused, with what to use instead.
"""

from __future__ import annotations

from typing import Any


def current_capture_context() -> Any:
    """``None``: no capture runs inside of a plugin's process."""
    return None
