"""The HTTP protocol between the broker (`nemo_gym.broker`) and its clients: here, its paths and headers.

`models` defines the bodies, `problems` the errors, `frames` the output of execs. The broker, the ``remote`` provider
and the tests share these modules and define no other part of the protocol. The functions quote ids and names; no
caller builds a path by hand.
"""

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


def sandbox(sandbox_id: str, *parts: str) -> str:
    """The path of a box or, with ``parts``, of something below it, such as ``"execs", exec_id, "output"``."""
    return "/".join((SANDBOXES, *map(_part, (sandbox_id, *parts))))


def image(name: str) -> str:
    """One image. Its name may contain slashes and colons, which are quoted; the route's parameter is a path."""
    return f"{IMAGES}/{_part(name)}"


def _part(value: str) -> str:
    # A segment of dots alone is also encoded: an intermediary that normalizes paths would remove it.
    return quote(value, safe="") if value.strip(".") else value.replace(".", "%2E")
