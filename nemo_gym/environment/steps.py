"""Rewards of stepped environments: an agent calls ``POST /reset``, then ``POST /step`` until the episode ends.

NeMo Gym's gymnasium plugins have no ``verify``: their agent sums the rewards of ``/step`` and reports the sum. Here an
agent may not report its own reward, so the environment's server sums the rewards of its own route, per attempt. An
agent also lacks the private fields of its row, so the server adds them to the bodies it posts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.contract.credentials import ROW_REF_HEADER
from nemo_gym.contract.errors import VerifierError
from nemo_gym.contract.session import RolloutIdentity
from nemo_gym.environment.attempts import AttemptKey, RowStore
from nemo_gym.http.requests import parse_json_object

_STEPPED = ("/reset", "/step")
QUOTED_BYTES = 200


@dataclass
class Episode:
    """The first episode of an attempt; episodes after another ``/reset`` do not count."""

    reward: float = 0.0
    steps: int = 0
    resets: int = 0
    """Successful resets. The second one ends the counted episode, so that an agent can neither repeat a good step nor
    choose among starting states."""
    terminated: bool = False
    truncated: bool = False
    unreadable: str = ""
    """The first successful ``/step`` whose reward cannot be read, quoted; the episode then has no reward."""

    @property
    def has_ended(self) -> bool:
        return self.terminated or self.truncated or self.resets > 1

    def began(self, status: int) -> None:
        """Record the status of a ``/reset``."""
        self.resets += status == 200

    def add(self, status: int, body: bytes) -> None:
        """Add the reward of a successful step, unless the episode is over."""
        if status != 200 or self.has_ended:
            return
        try:
            reply: Any = orjson.loads(body)
        except orjson.JSONDecodeError:
            reply = None
        reward = reply.get("reward") if isinstance(reply, dict) else None
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            self.unreadable = self.unreadable or body[:QUOTED_BYTES].decode(errors="replace")
            return
        self.reward += reward
        self.steps += 1
        self.terminated, self.truncated = bool(reply.get("terminated")), bool(reply.get("truncated"))

    def as_fields(self) -> dict[str, Any]:
        """The fields of the attempt's verdict. Raises `VerifierError` if the reward of a step cannot be read."""
        if self.unreadable:
            raise VerifierError(
                "no verdict: a successful /step of the environment has no number as its 'reward' (the plugin must"
                f" return one): {self.unreadable}"
            )
        return {"reward": self.reward, "terminated": self.terminated, "truncated": self.truncated, "steps": self.steps}


def is_stepped(routes: list[Any]) -> bool:
    """Whether an application has both routes of a stepped environment."""
    return set(_STEPPED) <= {route.path for route in routes if isinstance(route, Route)}


class StepRewards:
    """Wraps the application of a stepped environment, and counts its rewards."""

    def __init__(self, app: ASGIApp, rows: RowStore) -> None:
        self._app = app
        self._rows = rows
        self._episodes: dict[AttemptKey, Episode] = {}

    def episode_of(self, rollout: RolloutIdentity) -> Episode | None:
        """The episode of an attempt; ``None`` if it has taken no step."""
        episode = self._episodes.get(AttemptKey.of(rollout))
        return episode if episode is not None and (episode.steps or episode.unreadable) else None

    def forget(self, rollout: RolloutIdentity) -> None:
        self._episodes.pop(AttemptKey.of(rollout), None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ref = Headers(scope=scope).get(ROW_REF_HEADER) if scope.get("path") in _STEPPED else None
        if ref is None:
            await self._app(scope, receive, send)
            return
        stored = await self._rows.get(ref)
        posted = await parse_json_object(Request(scope, receive))
        messages = iter([{"type": "http.request", "body": orjson.dumps({**posted, **stored.row}), "more_body": False}])
        episode = self._episodes.setdefault(AttemptKey.of(stored.rollout), Episode())
        status, response_body = 0, bytearray()

        async def receive_with_row() -> Message:
            return next(messages, None) or await receive()

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                response_body.extend(message.get("body", b""))
            if message["type"] == "http.response.body" and not message.get("more_body"):
                # Count before the agent gets the response, so that a verdict requested next includes this step.
                if scope["path"] == "/reset":
                    episode.began(status)
                else:
                    episode.add(status, bytes(response_body))
            await send(message)

        await self._app(scope, receive_with_row, send_counted)
