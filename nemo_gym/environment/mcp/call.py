"""Calls a tool's route in an attempt's session, through every layer that an HTTP request would pass."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import structlog
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Scope

from nemo_gym._util.exact_json import dumps_exactly

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Reply:
    """A route's response; status 500 without a body if the route raised an error."""

    status: int = 500
    headers: MutableHeaders = field(default_factory=MutableHeaders)
    body: bytes = b""

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    def value(self) -> Any:
        """The body parsed as JSON, or ``None`` if it is not JSON."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None

    def text(self, tool: str) -> str:
        """The text to show a model: the body, or what was wrong with the call."""
        if self.ok:
            return self.body.decode("utf-8", "replace")
        if self.status >= 500:
            return f"tool '{tool}' failed; it may work when it is called again"
        value = self.value()
        return _complaint(value.get("detail")) if isinstance(value, dict) else f"status {self.status}"


def _complaint(detail: Any) -> str:
    """Format an error's ``detail``: the framework's list of wrong arguments, or a plugin's own text."""
    if isinstance(detail, list) and all(isinstance(item, dict) for item in detail):
        errors = [(".".join(map(str, item.get("loc", ())[1:])), item.get("msg", "")) for item in detail]
        return "; ".join(f"{where or 'arguments'}: {message}" for where, message in errors)
    return detail if isinstance(detail, str) else orjson.dumps(detail, default=str).decode()


async def call_route(app: ASGIApp, path: str, arguments: Mapping[str, Any], headers: Mapping[str, str]) -> Reply:
    """Send ``POST path`` inside this process. An error of the handler is logged and becomes a reply of status 500."""
    body = dumps_exactly(dict(arguments))
    all_headers = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "scheme": "http",
        "http_version": "1.1",
        "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in all_headers.items()],
        "client": None,
        "server": None,
    }
    reply = Reply()
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # this caller never disconnects; the call ends or is cancelled
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            reply.status, reply.headers = message["status"], MutableHeaders(raw=list(message["headers"]))
        elif message["type"] == "http.response.body":
            reply.body += message.get("body", b"")

    try:
        await app(scope, receive, send)
    except Exception:
        # The boundary of plugin code: a server without credentials raises errors instead of answering 500.
        log.exception("a tool failed", route=path)
        return Reply()
    return reply
