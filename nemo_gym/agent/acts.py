"""The running acts of an agent server, and their client for the policy.

Each rollout has at most one act. A newer attempt, a cancel, or the caller's disconnect ends it. However an act ends,
its teardown completes first: when the caller gets the response, the act's box is gone.

`OwnRunMiddleware` attaches an attempt's tokens to the calls of an overridden ``run``, even if the agent's types drop
them.

`PolicyClient` calls the policy endpoint of one attempt, with bounded and classified retries. All attempts share the
connections of their server's event loop (`nemo_gym.http.client`). A separate client per attempt would need its own TLS
context, which reads every certificate authority of the system: 25 ms of CPU.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import orjson
import structlog
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym._util.suggest import validation_problems
from nemo_gym._util.tasks import NETWORK_JITTER, Backoff, retry_after_s, without_exit
from nemo_gym.contract.credentials import INFERENCE_TOKEN_HEADER, ROW_REF_HEADER, Role, RoleError
from nemo_gym.contract.errors import ContractError, FencedError, InvalidBodyError, ModelError
from nemo_gym.contract.session import (
    CONNECT_TIMEOUT_S,
    WAIT_BEYOND_S,
    AgentOutcome,
    InferenceEndpoint,
    RolloutIdentity,
)
from nemo_gym.contract.verdict import SESSION_KEY, is_context_exceeded, outcome_of_refusal
from nemo_gym.http.client import attach_headers, inference_context, read_whole, send_once
from nemo_gym.http.connections import BROKEN, Patience, Reply, is_own_timeout
from nemo_gym.http.delivery import CallerGoneError, end, while_connected
from nemo_gym.http.openai_client import SHOULD_RETRY_HEADER
from nemo_gym.http.problems import send_problem
from nemo_gym.http.requests import json_object, require_role
from nemo_gym.http.telemetry import Counter, inject, rollout_context
from nemo_gym.sandbox.door_statistics import DoorStatistics, Exchange

REMEMBERED = 4096
"""Rollouts whose newest attempt is remembered, to refuse older ones; about 1 MB."""

ACTS = Counter("nemo_gym_acts", "Acts of an agent that were answered, by outcome", ("outcome",))

T = TypeVar("T")
log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Act:
    attempt: int
    task: asyncio.Task[object]


class ActRegistry:
    """The acts of one agent server."""

    def __init__(self) -> None:
        self._acts: dict[tuple[str, str], _Act] = {}
        self._latest: dict[tuple[str, str], int] = {}
        """The newest known attempt of the `REMEMBERED` most recently used rollouts, least recent first."""

    @property
    def active(self) -> int:
        return len(self._acts)

    async def run(self, rollout: RolloutIdentity, work: Callable[[], Coroutine[Any, Any, T]], request: Request) -> T:
        """Run ``work`` for an attempt while its caller is connected; its calls and logs name the rollout.

        An older attempt of the rollout is ended first. Raises `FencedError` if this attempt was replaced or cancelled,
        `ContractError` if it is already running, and `CallerGoneError` if the caller disconnected.
        """
        key = (rollout.run_id, rollout.rollout_id)
        self._admit(key, rollout)
        if (older := self._acts.get(key)) is not None:
            await end(older.task)
            self._admit(key, rollout)
        with rollout_context(rollout.rollout_id):
            task: asyncio.Task[T] = asyncio.create_task(without_exit(work))
        act = self._acts[key] = _Act(rollout.attempt, task)
        try:
            return await while_connected(request, task)
        except CallerGoneError:
            log.info("act ended: its caller is gone", rollout_id=rollout.rollout_id, attempt=rollout.attempt)
            raise
        except asyncio.CancelledError:
            if not task.cancelled() or (me := asyncio.current_task()) is None or me.cancelling():
                raise
            raise FencedError(f"{rollout} was cancelled", rollout_id=rollout.rollout_id) from None
        finally:
            if not task.done():
                await end(task)
            if self._acts.get(key) is act:
                del self._acts[key]

    def _admit(self, key: tuple[str, str], rollout: RolloutIdentity) -> None:
        latest = self._latest.get(key, 0)
        if latest > rollout.attempt:
            raise FencedError(f"{rollout} was replaced by attempt {latest}", rollout_id=rollout.rollout_id)
        running = self._acts.get(key)
        if running is not None and running.attempt == rollout.attempt:
            raise ContractError(f"{rollout} is already running here", rollout_id=rollout.rollout_id)
        self._remember(key, rollout.attempt)

    def _remember(self, key: tuple[str, str], attempt: int) -> None:
        self._latest.pop(key, None)
        self._latest[key] = attempt
        if len(self._latest) > REMEMBERED:
            # The environment refuses attempts that come this late too.
            self._latest.pop(next(iter(self._latest)))

    async def cancel(self, rollout: RolloutIdentity) -> tuple[bool, float]:
        """End the act of this attempt or of an older one. Returns whether there was one, and the seconds it took."""
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
    """Attaches an attempt's tokens as headers to the calls of an overridden ``run``: the row reference for the
    environment, and the inference token for the model server and for this server, whose ``/v1/responses`` may call the
    model. Callers whose role ``/run`` does not serve are refused here, and so is a body that could not be passed on to
    the environment, before the plugin runs."""

    def __init__(self, app: ASGIApp, *, agent: str, environment: str | None, model: str | None) -> None:
        self.app = app
        self._agent, self._environment, self._model = agent, environment, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/run":
            try:
                require_role(HTTPConnection(scope), Role.PIPELINE, Role.OPERATOR)
            except RoleError as error:
                await send_problem(scope, receive, send, error)
                return
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
    """The conversation exceeds the model's context or a limit of the model server, or is refused and has a call with
    arguments that are no JSON object: the policy's doing, not a failure of the endpoint. A policy could otherwise end
    its attempt without a reward by a huge tool output, or by such a call."""

    code = "context_exceeded"


class PolicyClient:
    """Calls one attempt's policy endpoint. Makes at most ``max_tries`` tries, and retries only temporary failures."""

    def __init__(self, endpoint: InferenceEndpoint, *, max_tries: int) -> None:
        self.endpoint = endpoint
        self._base_url = endpoint.base_url.rstrip("/")
        self._model = endpoint.model
        self._headers = {"Authorization": f"Bearer {endpoint.token}"}
        # The endpoint ends overdue calls itself and reports why; this limit is for an endpoint that never responds.
        self._limit_s = endpoint.request_timeout_s + WAIT_BEYOND_S
        self._patience = Patience(CONNECT_TIMEOUT_S, self._limit_s)
        self._max_tries = max_tries
        self.statistics = DoorStatistics()
        """Its tries and their answers, as a model's door counts those of a harness in a box."""

    async def _send(self, url: str, headers: dict[str, str], data: bytes) -> tuple[Reply, bytes]:
        """Make one try, which ``statistics`` count. Raises one of `BROKEN`."""
        self.statistics.requests += 1
        try:
            reply = await send_once("POST", url, headers=headers, data=data, patience=self._patience)
            content = await read_whole(reply)
        except BROKEN as error:
            Exchange(self.statistics).unreachable(f"{type(error).__name__}: {error}")
            raise
        if reply.status == 200:
            self.statistics.answered += 1
            self.statistics.failures_since_answer = 0
        else:
            exchange = Exchange(self.statistics)
            exchange.answers(reply.status, {})  # its headers tell about a stream or a coding, which are over
            exchange.saw(content)
            exchange.ends()
        return reply, content

    async def ask(self, route: Route, body: dict[str, Any]) -> dict[str, Any]:
        """Send ``body`` and return the endpoint's response as it is, after a check of the fields that agents read.
        Raises `ModelError`, which names the field, for a response of another form, and if the endpoint refuses the
        request or every try fails."""
        data = orjson.dumps({**body, "model": self._model})
        headers = {**self._headers}
        inject(headers)
        url = self._base_url + route
        backoff = Backoff(
            first_s=FIRST_BACKOFF_S, longest_s=MAX_BACKOFF_S, tries=self._max_tries, jitter=NETWORK_JITTER
        )
        while True:
            try:
                reply, content = await self._send(url, headers, data)
                if reply.status == 200:
                    return _answer(route, content)
                problem = f"answered {reply.status}: {_problem(content)}"
                if reply.status == 413 or (reply.status == 400 and is_context_exceeded(problem)):
                    raise ContextExceededError(f"the conversation is larger than the endpoint takes ({problem})")
                if reply.status in (400, 422) and self.statistics.answered and _holds_malformed_call(body):
                    raise ContextExceededError(f"the endpoint refuses a call that the policy wrote ({problem})")
                final = reply.headers.get(SHOULD_RETRY_HEADER) == "false"
                if final or reply.status not in RETRIED_STATUSES:
                    raise ModelError(f"the policy endpoint {problem}", status=reply.status)
                server_delay_s = retry_after_s(reply.headers.get("retry-after"))
            except BROKEN as error:
                if is_own_timeout(error):
                    raise ModelError(f"the policy endpoint did not answer within {self._limit_s:g} s") from error
                problem, server_delay_s = f"failed: {type(error).__name__}: {error}", None
            if not await backoff.again(instead_s=server_delay_s):
                raise ModelError(f"the policy endpoint {problem} (tried {self._max_tries} times)", retryable=True)


def at_wall_clock(model: DoorStatistics | None, said: str) -> tuple[AgentOutcome, str]:
    """The outcome of an attempt whose time is up, and one sentence. ``model`` counts all its requests to the model, if
    they are known: an attempt that a dead model kept waiting, or that did not get as far as its first request, holds
    no work of the policy, and must not be graded."""
    if model is not None and not model.requests:
        return AgentOutcome.CRASHED, f"it never asked the model; {said}"
    if model is None or not model.explains_timeout:
        return AgentOutcome.TIMED_OUT, said
    return outcome_of_refusal(model.last_status, model.last_error or ""), f"{model.unanswered('the model')}; {said}"


def _holds_malformed_call(body: Mapping[str, Any]) -> bool:
    """Whether a call in a request's history has arguments that are not the text of a JSON object."""
    items = body["input"] if isinstance(body.get("input"), list) else ()
    calls = [item for item in items if item.get("type") == "function_call"]
    for message in body.get("messages") or ():
        calls += [call["function"] for call in message.get("tool_calls") or ()]
    try:
        # Some servers give no text at all for a tool without parameters.
        return not all(isinstance(orjson.loads(call.get("arguments") or "{}"), dict) for call in calls)
    except (orjson.JSONDecodeError, TypeError):
        return True


def _problem(content: bytes) -> str:
    """The error message in an error response's body, or the start of the body."""
    excerpt = content[:300].decode("utf-8", "replace")
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        return excerpt
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else excerpt


def _answer(route: Route, content: bytes) -> dict[str, Any]:
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict):
        raise ModelError(f"the policy endpoint's response is not a JSON object: {content[:200]!r}")
    try:
        _ANSWERS[route].model_validate(answer)
    except ValidationError as error:
        problems = f"the policy endpoint's answer is malformed: {validation_problems(error)}"
        raise ModelError(f"{problems} (it begins with {content[:200]!r})") from None
    return answer


# The fields of an endpoint's answer that agents read. A wrong one is the endpoint's failure. What the policy itself
# writes, the names and arguments of its calls, may have any type: the policy gets an error that says what is wrong.


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True)


class _Part(_Fields):
    type: str | None = None
    text: str | None = None
    refusal: str | None = None


_Count = Annotated[float, Field(ge=0)]
_Content = Annotated[list[_Part] | None, BeforeValidator(lambda said: None if isinstance(said, str) else said)]
"""Parts; a string is accepted too."""
_READ_ITEMS = ("message", "reasoning", "function_call")


class _Item(_Fields):
    type: str = "message"
    content: _Content = None
    summary: list[_Part] | None = None
    call_id: str | None = Field(None, validate_default=True)

    @field_validator("call_id")
    @classmethod
    def _call_has_id(cls, call_id: str | None, info: ValidationInfo) -> str | None:
        if call_id is None and info.data.get("type") == "function_call":
            raise ValueError("a function call must have one")
        return call_id


def _read_item(item: Any) -> Any:
    """Only the type of an item that agents do not read."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    return {"type": kind} if isinstance(kind, str) and kind not in _READ_ITEMS else item


class _IncompleteDetails(_Fields):
    reason: str | None = None


class _Error(_Fields):
    message: str | None = None


class _CachedTokens(_Fields):
    cached_tokens: _Count | None = None


class _ResponseUsage(_Fields):
    input_tokens: _Count | None = None
    output_tokens: _Count | None = None
    input_tokens_details: _CachedTokens | None = None


class _ResponseAnswer(_Fields):
    output: list[Annotated[_Item, BeforeValidator(_read_item)]]
    status: str | None = None
    incomplete_details: _IncompleteDetails | None = None
    error: _Error | None = None
    usage: _ResponseUsage | None = None


class _Function(_Fields):
    name: Any
    arguments: Any


class _Call(_Fields):
    id: str
    function: _Function


class _Message(_Fields):
    content: _Content = None
    tool_calls: list[_Call] | None = None


class _Choice(_Fields):
    message: _Message
    finish_reason: str | None = None


class _ChatUsage(_Fields):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None


class _ChatAnswer(_Fields):
    choices: list[_Choice] = Field(min_length=1)
    usage: _ChatUsage | None = None


_ANSWERS: dict[Route, type[_Fields]] = {"/responses": _ResponseAnswer, "/chat/completions": _ChatAnswer}
