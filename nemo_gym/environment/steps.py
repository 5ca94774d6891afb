"""Rewards of environments that are stepped through: ``POST /reset``, then ``POST /step`` until it ends.

NeMo Gym's gymnasium plugins have no ``verify``: their agent adds up what ``/step`` answered and reports the sum. Here
an agent reports no reward of its own, so the environment's server adds up what its own route answered, by attempt. And
an agent has no private field of its row, so they are put back into what it posts.
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
from nemo_gym.contract.session import RolloutIdentity
from nemo_gym.environment.attempts import AttemptKey, RowStore
from nemo_gym.http.requests import parse_json_object

_STEPPED = ("/reset", "/step")
MAX_STEP_BYTES = 16 << 20
"""Of a step's answer that is looked into."""


@dataclass
class Episode:
    """The first episode of an attempt: another ``/reset`` begins nothing that counts."""

    reward: float = 0.0
    steps: int = 0
    resets: int = 0
    """That the environment answered: the second one leaves the episode as it is, so that a good step cannot be had
    again and again, and no beginning be chosen."""
    terminated: bool = False
    truncated: bool = False

    @property
    def has_ended(self) -> bool:
        return self.terminated or self.truncated or self.resets > 1

    def began(self, status: int) -> None:
        """A ``/reset`` was answered."""
        self.resets += status == 200

    def add(self, status: int, body: bytes) -> None:
        """Count what a step answered, unless the episode is over."""
        try:
            answer: Any = orjson.loads(body) if status == 200 else None
        except orjson.JSONDecodeError:
            return
        if not isinstance(answer, dict):
            return
        reward = answer.get("reward")
        if self.has_ended or isinstance(reward, bool) or not isinstance(reward, int | float):
            return
        self.reward += reward
        self.steps += 1
        self.terminated, self.truncated = bool(answer.get("terminated")), bool(answer.get("truncated"))

    def as_fields(self) -> dict[str, Any]:
        return {"reward": self.reward, "terminated": self.terminated, "truncated": self.truncated, "steps": self.steps}


def is_stepped(routes: list[Any]) -> bool:
    """Whether an application has both routes of a stepped environment."""
    return set(_STEPPED) <= {route.path for route in routes if isinstance(route, Route)}


class StepRewards:
    """Around the application of a stepped environment."""

    def __init__(self, app: ASGIApp, rows: RowStore) -> None:
        self._app = app
        self._rows = rows
        self._episodes: dict[AttemptKey, Episode] = {}

    def episode_of(self, rollout: RolloutIdentity) -> Episode | None:
        """What an attempt has earned; ``None`` for one that took no step."""
        episode = self._episodes.get(AttemptKey.of(rollout))
        return episode if episode is not None and episode.steps else None

    def forget(self, rollout: RolloutIdentity) -> None:
        self._episodes.pop(AttemptKey.of(rollout), None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ref = Headers(scope=scope).get(ROW_REF_HEADER) if scope.get("path") in _STEPPED else None
        if ref is None:
            await self._app(scope, receive, send)
            return
        stored = await self._rows.get(ref)
        asked = await parse_json_object(Request(scope, receive))
        whole = iter([{"type": "http.request", "body": orjson.dumps({**asked, **stored.row}), "more_body": False}])
        episode = self._episodes.setdefault(AttemptKey.of(stored.rollout), Episode())
        status, answer = 0, bytearray()

        async def with_the_row() -> Message:
            return next(whole, None) or await receive()

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body" and len(answer) <= MAX_STEP_BYTES:
                answer.extend(message.get("body", b""))
            if message["type"] == "http.response.body" and not message.get("more_body"):
                # Before the agent hears of it: whoever asks for the verdict next, gets this step's reward too.
                if scope["path"] == "/reset":
                    episode.began(status)
                else:
                    episode.add(status, bytes(answer))
            await send(message)

        await self._app(scope, with_the_row, counted)
