"""Inference tokens in the path, for runners that can set a base URL and nothing else.

The token is taken off before anything else sees the path, so that no log and no error can show it.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

_MARK = "/token/"


class PathTokenMiddleware:
    """``/sessions/<id>/token/<token>/v1/…`` as ``/sessions/<id>/v1/…`` with the token as bearer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/sessions/") and _MARK in scope["path"]:
            before, _, after = scope["path"].partition(_MARK)
            token, _, rest = after.partition("/")
            # Whatever else the caller sends as a key (clients insist on one) means nothing here.
            headers = [(k, v) for k, v in scope["headers"] if k not in (b"authorization", b"x-api-key")]
            headers.append((b"authorization", b"Bearer " + token.encode("latin-1", "replace")))
            path = f"{before}/{rest}"
            scope = {**scope, "path": path, "raw_path": path.encode(), "headers": headers}
        await self.app(scope, receive, send)
