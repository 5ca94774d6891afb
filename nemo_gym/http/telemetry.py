"""Who may read a server's metrics, and where its process sends its spans."""

from __future__ import annotations

import hmac

from starlette.requests import Request

from nemo_gym.config.launch import ServerLaunch
from nemo_gym.config.observability import ObservabilityConfig
from nemo_gym.contract.credentials import CREDENTIAL_HEADER, Caller, Role
from nemo_gym.contract.errors import CredentialError
from nemo_gym.http import tracing
from nemo_gym.http.metrics import METRICS_PATH

_ROLES = (Role.PIPELINE, Role.ENVIRONMENT, Role.MODEL, Role.OPERATOR)
"""Who may read a server's metrics: agents have no business with others' rollouts."""


def require_scraper(request: Request, caller: Caller | None, token: str | None, *, secured: bool) -> None:
    """Raise `CredentialError` or `RoleError` unless the sender may read metrics: by the run's token as bearer, or by a
    credential of any role but ``agent``."""
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if token is not None and hmac.compare_digest(given.encode(), token.encode()):
        return
    if caller is not None:
        caller.require(*_ROLES, route=METRICS_PATH)
    elif secured:
        raise CredentialError(
            f"{METRICS_PATH} needs the run's metrics token as bearer (run_dir/metrics.token), or the header"
            f" {CREDENTIAL_HEADER}"
        )


def start_traces(config: ObservabilityConfig, *, server: str, run_id: str, **resource: str) -> None:
    """Send the spans of this process from now on, where the configuration says so."""
    if config.traces is None:
        return
    from importlib.metadata import version

    from nemo_gym.http.otlp import SpanExporter

    described = {
        "service.name": server,
        "service.namespace": "nemo_gym",
        "service.version": version("nemo-gym-suite"),
        "run_id": run_id,
        **resource,
    }
    tracing.install(SpanExporter(config.traces, described), config.traces.sample)


def start_server_telemetry(launch: ServerLaunch) -> None:
    """Of a server process, before it serves."""
    start_traces(ObservabilityConfig.of(launch.config), server=launch.instance, run_id=launch.run_id)
