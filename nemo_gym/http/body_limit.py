"""Bounds on request bodies, so that no caller can fill this process's memory or hold its event loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.contract.errors import NemoGymError
from nemo_gym.http.body_values import TooManyValuesError, ValueCounter
from nemo_gym.http.problems import send_problem


class BodyTooLargeError(NemoGymError):
    """A request body beyond the server's bound."""

    code = "body_too_large"
    status = 413


_OF_CONTAINERS = 4


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What one request's body may have. Each names the key of the server that sets it."""

    max_bytes: int
    bytes_key: str = "max_body_bytes"
    max_values: int | None = None
    """JSON values, a list or an object being worth `_OF_CONTAINERS` of them."""
    values_key: str = ""

    def refuse_bytes(self) -> NemoGymError:
        return BodyTooLargeError(
            f"the body is larger than {self.max_bytes} bytes; raise the server's '{self.bytes_key}' if it may be",
            limit_bytes=self.max_bytes,
        )

    def refuse_values(self) -> NemoGymError:
        return TooManyValuesError(
            f"the body holds more than {self.max_values} JSON values (a list or an object is worth {_OF_CONTAINERS});"
            f" raise the server's '{self.values_key}' if it may",
            limit=self.max_values,
        )


class BodyLimitMiddleware:
    """Answers with `BodyTooLargeError` or `TooManyValuesError` where a route reads more of a body than its sender may
    send, whether its length was announced or not. What was not read is thrown away by the web server, so the
    connection stays usable.

    ``limits``: by whoever sends the request. Values are counted before anything is parsed, whoever parses it.
    """

    def __init__(self, app: ASGIApp, limits: Callable[[Scope], BodyLimits]) -> None:
        self.app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limits = self._limits(scope)
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        taken = 0
        counter = ValueCounter(_OF_CONTAINERS) if limits.max_values is not None else None
        error: NemoGymError | None = None
        replaced = False

        async def bounded() -> Message:
            nonlocal taken, error
            if error is None and not (announced.isdigit() and int(announced) > limits.max_bytes):
                message = await receive()
                body = message.get("body", b"")
                taken += len(body)
                if counter is not None and limits.max_values is not None and body:
                    counter.feed(body)
                    if counter.found > limits.max_values:
                        error = limits.refuse_values()
                        raise error
                if taken <= limits.max_bytes:
                    return message
            error = error or limits.refuse_bytes()
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
