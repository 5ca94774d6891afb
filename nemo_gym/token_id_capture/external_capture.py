"""Capture by an engine's own workers: not served here."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

from nemo_gym.contract.errors import ConfigError


class ExternalCaptureHandler(Protocol):
    """What a model server asks before and after a call."""

    def prepare_request(self, body: dict[str, Any]) -> dict[str, Any]: ...


def make_external_capture_handler(backend: Any) -> NoReturn:
    """Raises `ConfigError`: the gateway keeps token ids."""
    raise ConfigError(
        f"token_id_capture.external_staging ('{backend}') does not exist here; leave it out and use model=gateway,"
        " whose sessions keep the token ids of every attempt",
        key="token_id_capture",
    )
