"""Paths and headers of the broker's API. These functions quote ids and names; no caller builds a path by hand."""

from __future__ import annotations

from urllib.parse import quote

IDEMPOTENCY_KEY_HEADER = "Idempotency-Key"
REQUEST_ID_HEADER = "X-Request-ID"

JSON = "application/json"
PROBLEM_JSON = "application/problem+json"
OCTET_STREAM = "application/octet-stream"
"""For output as frames (`nemo_gym.sandbox.wire.frames`), and for the bytes of standard input."""
EVENT_STREAM = "text/event-stream"
TAR = "application/x-tar"

SANDBOXES = "/v1/sandboxes"
CAPABILITIES = "/v1/capabilities"
IMAGES = "/v1/images"


def sandbox(sandbox_id: str) -> str:
    return f"{SANDBOXES}/{_part(sandbox_id)}"


def lease(sandbox_id: str) -> str:
    """The box's own lease: PUT renews it."""
    return f"{sandbox(sandbox_id)}/lease"


def leases(sandbox_id: str) -> str:
    """Leases with a narrower scope: POST creates one."""
    return f"{sandbox(sandbox_id)}/leases"


def one_lease(sandbox_id: str, lease_id: str) -> str:
    return f"{leases(sandbox_id)}/{_part(lease_id)}"


def run_exec(sandbox_id: str, exec_id: str) -> str:
    """One exec: PUT submits it, GET returns its state."""
    return f"{sandbox(sandbox_id)}/execs/{_part(exec_id)}"


def exec_output(sandbox_id: str, exec_id: str) -> str:
    return f"{run_exec(sandbox_id, exec_id)}/output"


def exec_stdin(sandbox_id: str, exec_id: str) -> str:
    return f"{run_exec(sandbox_id, exec_id)}/stdin"


def exec_signal(sandbox_id: str, exec_id: str) -> str:
    return f"{run_exec(sandbox_id, exec_id)}/signal"


def archive(sandbox_id: str) -> str:
    return f"{sandbox(sandbox_id)}/archive"


def archive_failure(sandbox_id: str) -> str:
    """GET with ``?request_id=`` returns why an archive broke off after its response had begun."""
    return f"{archive(sandbox_id)}/failure"


def doors(sandbox_id: str) -> str:
    """GET returns the traffic statistics of the box's doors."""
    return f"{sandbox(sandbox_id)}/doors"


def door(sandbox_id: str, name: str) -> str:
    return f"{doors(sandbox_id)}/{_part(name)}"


def sandbox_images(sandbox_id: str) -> str:
    """POST commits the box's files as an image."""
    return f"{sandbox(sandbox_id)}/images"


def image(name: str) -> str:
    """One image. Its name may contain slashes and colons, which are quoted; the route's parameter is a path."""
    return f"{IMAGES}/{_part(name)}"


def _part(value: str) -> str:
    # A segment of dots alone is also encoded: an intermediary that normalizes paths would remove it.
    return quote(value, safe="") if value.strip(".") else value.replace(".", "%2E")
