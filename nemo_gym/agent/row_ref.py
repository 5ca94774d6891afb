"""Carries the row reference of a ``/run`` body along to the environment, whatever the agent's types keep of it."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.contract.credentials import ROW_REF_HEADER
from nemo_gym.contract.errors import InvalidBodyError
from nemo_gym.contract.rows import SESSION_KEY
from nemo_gym.http.client import attach_headers
from nemo_gym.http.problems import json_object, send_problem


class RowRefMiddleware:
    """Calls that an overridden ``run`` makes to its environment carry the reference as a header. A body that cannot be
    passed on to the environment is refused here, before the plugin tries."""

    def __init__(self, app: ASGIApp, environment: str | None) -> None:
        self.app = app
        self._environment = environment

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/run" or self._environment is None:
            await self.app(scope, receive, send)
            return
        messages: list[Message] = []
        body = bytearray()
        while True:
            message = await receive()
            messages.append(message)
            if message["type"] != "http.request":
                break
            body += message.get("body", b"")
            if not message.get("more_body"):
                break

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        try:
            ref = _row_ref(json_object(bytes(body), scope["path"]))
        except InvalidBodyError as error:
            await send_problem(scope, receive, send, error)
            return
        if ref is None:
            await self.app(scope, replay, send)
            return
        with attach_headers(self._environment, {ROW_REF_HEADER: ref}):
            await self.app(scope, replay, send)


def _row_ref(body: dict[str, Any]) -> str | None:
    session = body.get(SESSION_KEY)
    ref = session.get("row_ref") if isinstance(session, dict) else None
    return ref if isinstance(ref, str) else None
