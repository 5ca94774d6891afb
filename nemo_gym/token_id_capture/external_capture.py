"""Capture of token ids by an engine's own workers, which this suite does not support."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

from nemo_gym.contract.errors import ConfigError


class ExternalCaptureHandler(Protocol):
    """The interface that a NeMo Gym model server calls before a request."""

    def prepare_request(self, body: dict[str, Any]) -> dict[str, Any]: ...


def make_external_capture_handler(backend: Any) -> NoReturn:
    """Raise `ConfigError`, because the gateway captures token ids."""
    raise ConfigError(
        f"token_id_capture.external_staging ('{backend}') does not exist here; leave it out and use model=gateway,"
        " whose sessions keep the token ids of every attempt",
        key="token_id_capture",
    )
