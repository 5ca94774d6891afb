"""A bound on request bodies, so that no caller can fill this process's memory."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.contract.errors import NemoGymError
from nemo_gym.http.problems import send_problem


class BodyTooLargeError(NemoGymError):
    """A request body beyond the server's bound."""

    code = "body_too_large"
    status = 413


class BodyLimitMiddleware:
    """Answers with `BodyTooLargeError` where a route reads more than ``max_bytes`` of a body, whether its length was
    announced or not. What was not read is thrown away by the web server, so the connection stays usable."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        taken = 0
        error: BodyTooLargeError | None = None
        replaced = False

        async def bounded() -> Message:
            nonlocal taken, error
            if not (announced.isdigit() and int(announced) > self._max_bytes):
                message = await receive()
                taken += len(message.get("body", b""))
                if taken <= self._max_bytes:
                    return message
            error = self._too_large()
            raise error

        async def worded(message: Message) -> None:
            # A framework that was reading the body says 400 to whatever is raised meanwhile.
            nonlocal replaced
            if error is not None and message["type"] == "http.response.start" and message["status"] != error.status:
                replaced = True
                await send_problem(scope, receive, send, error)
            elif not replaced:
                await send(message)

        await self.app(scope, bounded, worded)

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"the body is larger than {self._max_bytes} bytes; raise the server's 'max_body_bytes' if it may be",
            limit_bytes=self._max_bytes,
        )
