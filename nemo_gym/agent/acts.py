"""Running acts of an agent server, and how one asks its policy.

There is one act per rollout, ended by a newer attempt, a cancel, or the caller's departure. However an act ends, its
own teardown is waited for: when its caller is told, its box is gone.

`OwnRunMiddleware` carries what an attempt was given along in the calls that an overridden ``run`` makes, whatever an
agent's types keep of it.

`PolicyClient` asks the policy endpoint of one attempt, with bounded and classified retries. Every attempt of a server
asks over the connections of that server's event loop (`nemo_gym.http.client`). A client of its own costs an attempt a
TLS context, which reads every certificate authority of the system: 25 ms of CPU.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import orjson
import structlog
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym._util.tasks import NETWORK_JITTER, Backoff, retry_after_s
from nemo_gym.contract.credentials import INFERENCE_TOKEN_HEADER, ROW_REF_HEADER
from nemo_gym.contract.errors import ContractError, FencedError, InvalidBodyError, ModelError
from nemo_gym.contract.session import CONNECT_TIMEOUT_S, WAIT_BEYOND_S, InferenceEndpoint, RolloutIdentity
from nemo_gym.contract.verdict import SESSION_KEY, is_context_exceeded
from nemo_gym.http.client import attach_headers, inference_context, read_whole, send_once
from nemo_gym.http.connections import BROKEN, Patience, is_own_timeout
from nemo_gym.http.delivery import CallerGoneError, end, while_connected
from nemo_gym.http.openai_client import SHOULD_RETRY_HEADER
from nemo_gym.http.problems import send_problem
from nemo_gym.http.requests import json_object
from nemo_gym.http.telemetry import Counter, inject

REMEMBERED = 4096
"""Rollouts whose older attempts are known for such: about 1 MB."""

ACTS = Counter("nemo_gym_acts", "Acts of an agent that were answered, by outcome", ("outcome",))

T = TypeVar("T")
log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Act:
    attempt: int
    task: asyncio.Task[object]


def invoked(agent: str) -> dict[str, str]:
    """What a span says of an act, by the conventions for generative AI."""
    return {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": agent}


class ActRegistry:
    """The acts of one agent server."""

    def __init__(self) -> None:
        self._acts: dict[tuple[str, str], _Act] = {}
        self._latest: dict[tuple[str, str], int] = {}
        """The newest attempt of each rollout that was seen, in the order of the last sight; the latest
        `REMEMBERED`."""

    @property
    def active(self) -> int:
        return len(self._acts)

    async def run(self, rollout: RolloutIdentity, work: Callable[[], Coroutine[Any, Any, T]], request: Request) -> T:
        """Run ``work`` for an attempt while its caller is connected.

        An older attempt of the rollout is ended first. Raises `FencedError` for an attempt that was replaced,
        `ContractError` for one that is already running, and `CallerGoneError` when the caller left.
        """
        key = (rollout.run_id, rollout.rollout_id)
        self._admit(key, rollout)
        if (older := self._acts.get(key)) is not None:
            await end(older.task)
            self._admit(key, rollout)
        task: asyncio.Task[T] = asyncio.create_task(work())
        act = self._acts[key] = _Act(rollout.attempt, task)
        try:
            return await while_connected(request, task)
        except CallerGoneError:
            log.info("act ended: its caller is gone", rollout_id=rollout.rollout_id, attempt=rollout.attempt)
            raise
        except asyncio.CancelledError:
            if not task.cancelled() or (me := asyncio.current_task()) is None or me.cancelling():
                raise
            raise FencedError(
                f"attempt {rollout.attempt} of rollout '{rollout.rollout_id}' was cancelled",
                rollout_id=rollout.rollout_id,
            ) from None
        finally:
            if not task.done():
                await end(task)
            if self._acts.get(key) is act:
                del self._acts[key]

    def _admit(self, key: tuple[str, str], rollout: RolloutIdentity) -> None:
        latest = self._latest.get(key, 0)
        if latest > rollout.attempt:
            raise FencedError(
                f"attempt {rollout.attempt} of rollout '{rollout.rollout_id}' was replaced by attempt {latest}",
                rollout_id=rollout.rollout_id,
            )
        running = self._acts.get(key)
        if running is not None and running.attempt == rollout.attempt:
            raise ContractError(
                f"attempt {rollout.attempt} of rollout '{rollout.rollout_id}' is already running here",
                rollout_id=rollout.rollout_id,
            )
        self._remember(key, rollout.attempt)

    def _remember(self, key: tuple[str, str], attempt: int) -> None:
        self._latest.pop(key, None)
        self._latest[key] = attempt
        if len(self._latest) > REMEMBERED:
            # An attempt that comes this late would have been refused by its environment, too.
            self._latest.pop(next(iter(self._latest)))

    async def cancel(self, rollout: RolloutIdentity) -> tuple[bool, float]:
        """End the act of this attempt or of an older one; whether there was one, and the seconds it took to end."""
        key = (rollout.run_id, rollout.rollout_id)
        self._remember(key, max(self._latest.get(key, 0), rollout.attempt))
        act = self._acts.get(key)
        if act is None or act.attempt > rollout.attempt:
            return False, 0.0
        started = time.monotonic()
        await end(act.task)
        return True, time.monotonic() - started

    async def finish(self) -> None:
        """End every act, at shutdown."""
        acts = [*self._acts.values()]
        for act in acts:
            act.task.cancel()
        await asyncio.gather(*(act.task for act in acts), return_exceptions=True)


class OwnRunMiddleware:
    """Calls that an overridden ``run`` makes carry its attempt's rights as headers: to the environment the reference
    to its row, to the model server its inference token; to this server the same, as its ``/v1/responses`` may make the
    model call. A body that cannot be passed on to the environment is refused here, before the plugin tries."""

    def __init__(self, app: ASGIApp, *, agent: str, environment: str | None, model: str | None) -> None:
        self.app = app
        self._agent, self._environment, self._model = agent, environment, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        token = Headers(scope=scope).get(INFERENCE_TOKEN_HEADER) if scope["type"] == "http" else None
        if token is None or self._model is None:
            await self._with_reference(scope, receive, send)
            return
        with inference_context(self._model, token), attach_headers(self._agent, {INFERENCE_TOKEN_HEADER: token}):
            await self._with_reference(scope, receive, send)

    async def _with_reference(self, scope: Scope, receive: Receive, send: Send) -> None:
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


RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0

Route = Literal["/chat/completions", "/responses"]


class ContextExceededError(ModelError):
    """The conversation grew past what the model takes: the policy's doing, and no failure of its endpoint."""

    code = "context_exceeded"


class PolicyClient:
    """Asks one attempt's endpoint. Retries what a later try may cure, at most ``max_tries`` times."""

    def __init__(self, endpoint: InferenceEndpoint, *, max_tries: int) -> None:
        self.endpoint = endpoint
        self._base_url = endpoint.base_url.rstrip("/")
        self._model = endpoint.model
        self._headers = {"Authorization": f"Bearer {endpoint.token}"}
        # The endpoint ends a call itself, and says why; this is for one that does not answer at all.
        self._limit_s = endpoint.request_timeout_s + WAIT_BEYOND_S
        self._patience = Patience(CONNECT_TIMEOUT_S, self._limit_s)
        self._max_tries = max_tries

    async def ask(self, route: Route, body: dict[str, Any]) -> dict[str, Any]:
        """The endpoint's answer to ``body``, a JSON object. Raises `ModelError` when the endpoint refuses, or fails
        every try."""
        data = orjson.dumps({**body, "model": self._model})
        headers = {**self._headers}
        inject(headers)
        url = self._base_url + route
        backoff = Backoff(
            first_s=FIRST_BACKOFF_S, longest_s=MAX_BACKOFF_S, tries=self._max_tries, jitter=NETWORK_JITTER
        )
        while True:
            try:
                reply = await send_once("POST", url, headers=headers, data=data, patience=self._patience)
                content = await read_whole(reply)
                if reply.status == 200:
                    return _object(content)
                problem = f"answered {reply.status}: {_problem(content)}"
                if reply.status in (400, 413) and is_context_exceeded(problem):
                    raise ContextExceededError(f"the conversation exceeds the model's context ({problem})")
                final = reply.headers.get(SHOULD_RETRY_HEADER) == "false"
                if final or reply.status not in RETRIED_STATUSES:
                    raise ModelError(f"the policy endpoint {problem}", status=reply.status)
                asked_s = retry_after_s(reply.headers.get("retry-after"))
            except BROKEN as error:
                if is_own_timeout(error):
                    raise ModelError(f"the policy endpoint did not answer within {self._limit_s:g} s") from error
                problem, asked_s = f"failed: {type(error).__name__}: {error}", None
            if not await backoff.again(instead_s=asked_s):
                raise ModelError(f"the policy endpoint {problem} (tried {self._max_tries} times)", retryable=True)


def _problem(content: bytes) -> str:
    """What went wrong, in the words of an error body."""
    said = content[:300].decode("utf-8", "replace")
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        return said
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else said


def _object(content: bytes) -> dict[str, Any]:
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict):
        raise ModelError(f"the policy endpoint's answer is no JSON object: {content[:200]!r}")
    return answer
