"""NeMo Gym's names for capturing token ids. In this suite the gateway keeps token ids for every session of an attempt.

A model server written for NeMo Gym gets no capture context in its own process. A configuration with
``external_staging`` is refused with an error that names the alternative.
"""

from __future__ import annotations

from typing import Any


def current_capture_context() -> Any:
    """Return ``None``: no capture runs inside a plugin's process."""
    return None
