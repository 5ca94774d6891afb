"""Serves any OpenAI-compatible endpoint as the policy model. Requests pass through if the endpoint speaks the caller's
dialect, and are translated if it does not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
import weakref
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import aiohttp
import orjson
import structlog
from pydantic import Field, PrivateAttr, field_validator
from starlette.responses import Response, StreamingResponse

from nemo_gym._util.tasks import NETWORK_JITTER, Backoff, retry_after_s
from nemo_gym.base_responses_api_model import (
    BaseResponsesAPIModelConfig,
    InferenceCall,
    SimpleResponsesAPIModel,
)
from nemo_gym.contract.errors import ModelError
from nemo_gym.contract.session import CONNECT_TIMEOUT_S, IDLE_TIMEOUT_S
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects import messages as messages_chat
from nemo_gym.gateway.dialects import responses as responses_chat
from nemo_gym.gateway.dialects.adapters import EVENT_STREAM
from nemo_gym.gateway.dialects.content import refuse
from nemo_gym.gateway.dialects.endpoint import BROKEN_OFF
from nemo_gym.gateway.dialects.errors import relayed_error
from nemo_gym.gateway.engines import EngineConnections, EngineEndpoint, OpenAIEngine
from nemo_gym.gateway.engines.http import EventReader, told_error, told_status
from nemo_gym.gateway.engines.openai import wants_newer_budget, with_newer_budget
from nemo_gym.gateway.engines.types import EngineCheck
from nemo_gym.gateway.inference import failure_event
from nemo_gym.gateway.model_server import reply_of_completion, upstream_error
from nemo_gym.gateway.policy_request import ModelTimeoutError, chosen_limits, metadata_parameters, took_too_long
from nemo_gym.http.client import get_global_aiohttp_client

ROUTES = {Dialect.CHAT: "/chat/completions", Dialect.RESPONSES: "/responses"}
_HOSTED_TOOLS = ("web_search", "file_search", "code_interpreter", "mcp", "shell")
_HOSTED_OPTIONS = ("web_search_options", "plugins")
API_KEY_ENV = "OPENAI_API_KEY"
RETRIED_STATUSES = frozenset({500, 502, 503, 504, 520})
FIRST_BACKOFF_S = 0.5
COMMENTS_HELD_S = 60.0
"""How long to wait for a stream's first event while only comments arrive. The stream is then opened: callers may give
up after some minutes without a response's head."""
READY_TTL_S = 5.0
READY_TIMEOUT_S = 5.0

log = structlog.get_logger(__name__)


class OpenStream:
    """A stream of the endpoint, which holds its connection and its slot until it is closed. One that nobody reads, as
    its caller left before it began, is closed when it is dropped."""

    def __init__(self, pieces: AsyncIterator[bytes], begun: bytes, held: contextlib.ExitStack) -> None:
        """``begun``: the piece that was read already."""
        self.begun, self.pieces = begun, pieces
        self.close = weakref.finalize(self, held.close)
        self.close.atexit = False


Reply: TypeAlias = OpenStream | tuple[int, bytes, dict[str, str]]
"""The endpoint's reply: an open stream, or status, body and headers."""


class SimpleModelServerConfig(BaseResponsesAPIModelConfig):
    """Configuration of an endpoint."""

    openai_base_url: str
    """Ends in ``/v1``."""
    openai_api_key: str | None = Field(None, repr=False)
    """Default: the environment variable ``OPENAI_API_KEY``. Never logged."""
    openai_model: str
    """The model's name at the endpoint. It replaces the model name in a harness's request."""
    api: Literal["auto", "chat", "responses"] = "auto"
    """The API of the endpoint. ``auto`` tries the caller's dialect first and remembers which route is missing."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Default parameters; a request's own values take precedence."""
    openai_default_headers: dict[str, str] = Field(default_factory=dict, repr=False)
    max_concurrent_requests: int | None = Field(None, gt=0)
    """The limit of concurrent requests, each until the end of its reply; ``None`` means no limit."""
    hosted_tools: bool = False
    """Whether requests of sessions may name tools that the endpoint itself runs, such as a web search, and files by
    address. With them, a box without a network reaches what the endpoint reaches."""
    drop_input_reasoning_items: bool = False
    """Leave reasoning items out of Responses inputs, for endpoints that refuse the items they produced themselves."""
    connect_timeout_s: float = Field(CONNECT_TIMEOUT_S, gt=0)
    idle_timeout_s: float = Field(IDLE_TIMEOUT_S, gt=0)
    """The longest pause between two pieces of a response that has begun."""
    max_retries: int = Field(2, ge=0)
    """Retries after a failed connection or one of `RETRIED_STATUSES`. A 429 goes to the caller, who has to wait."""

    @field_validator("openai_base_url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"'{url}' is not a URL; give the endpoint's base URL, for example http://127.0.0.1:8000/v1"
            )
        return url.rstrip("/")


class SimpleModelServer(SimpleResponsesAPIModel):
    """An OpenAI-compatible endpoint."""

    config: SimpleModelServerConfig

    _missing_routes: set[Dialect] = PrivateAttr(default_factory=set)
    _newer_budget: bool = PrivateAttr(default=False)
    """Whether the endpoint has refused ``max_tokens``."""
    _slots: asyncio.Semaphore | None = PrivateAttr(default=None)
    _cached_readiness: tuple[float, dict[str, Any] | None] = PrivateAttr(default=(0.0, None))

    async def infer(self, call: InferenceCall) -> Response:
        endpoint_dialect, reply = await self._ask(call)
        if isinstance(reply, OpenStream):
            return StreamingResponse(_relay(reply, call.dialect), media_type=EVENT_STREAM)
        status, body, headers = reply
        if status != 200:
            # Pass the endpoint's error on: the harness has to know what is wrong with its request.
            if call.dialect is Dialect.MESSAGES:
                return relayed_error(call.dialect, status, body)
            return Response(body, status, headers, "application/json")
        _require_whole(endpoint_dialect, body)
        if endpoint_dialect is call.dialect:
            return Response(body, media_type="application/json")
        return self._translated(call, endpoint_dialect, body)

    def _count_call(self, call: InferenceCall, reply: Response) -> Response:
        counted = super()._count_call(call, reply)
        if isinstance(counted, StreamingResponse) and call.dialect is Dialect.CHAT:
            options = {**self.config.extra_body, **call.body}.get("stream_options")
            if not (options or {}).get("include_usage"):
                counted.body_iterator = without_usage(counted.body_iterator)
        return counted

    async def _ask(self, call: InferenceCall) -> tuple[Dialect, Reply]:
        """Return the endpoint's dialect and its reply."""
        for dialect in self._dialects(call.dialect):
            translated = dialect is not call.dialect
            reply = await self._send(dialect, self._request(call, dialect), stream=call.stream and not translated)
            if isinstance(reply, tuple) and self.config.api == "auto" and _route_is_missing(*reply[:2]):
                log.info("the endpoint lacks a route", route=ROUTES[dialect], instance=self.config.name)
                self._missing_routes.add(dialect)
                continue
            return dialect, reply
        raise ModelError(
            f"the endpoint {self.config.openai_base_url} has neither {' nor '.join(ROUTES.values())}; is"
            " 'openai_base_url' right (it usually ends in /v1)?"
        )

    def _dialects(self, requested: Dialect) -> list[Dialect]:
        if self.config.api != "auto":
            return [Dialect(self.config.api)]
        first = Dialect.RESPONSES if requested is Dialect.RESPONSES else Dialect.CHAT
        other = Dialect.CHAT if first is Dialect.RESPONSES else Dialect.RESPONSES
        # If both routes were missing, try again: the endpoint may have been starting.
        return [d for d in (first, other) if d not in self._missing_routes] or [first, other]

    def _request(self, call: InferenceCall, dialect: Dialect) -> dict[str, Any]:
        body = call.body
        if call.dialect is Dialect.MESSAGES:
            body = messages_chat.chat_request(body)
        if dialect is Dialect.CHAT and call.dialect is Dialect.RESPONSES:
            body = responses_chat.chat_request(body)
        elif dialect is Dialect.RESPONSES and call.dialect is not Dialect.RESPONSES:
            body = responses_chat.responses_request(body)
        parameters, metadata = metadata_parameters(body)
        if parameters:
            body = {**parameters, **body, "metadata": metadata}
            if not metadata:
                del body["metadata"]
        if call.session is not None and not self.config.hosted_tools:
            _refuse_hosted_tools(body)
        body = {**self.config.extra_body, **body, "model": self.config.openai_model}
        if dialect is not call.dialect:
            body.pop("stream", None)
            body.pop("stream_options", None)
        elif call.stream and dialect is Dialect.CHAT:
            # The session counts tokens even if the harness did not request the usage; see `without_usage`.
            body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        if dialect is Dialect.RESPONSES and self.config.drop_input_reasoning_items and isinstance(body["input"], list):
            body["input"] = [item for item in body["input"] if item.get("type") != "reasoning"]
        return body

    async def _send(self, dialect: Dialect, body: dict[str, Any], *, stream: bool) -> Reply:
        url = self.config.openai_base_url + ROUTES[dialect]
        if self._newer_budget:
            body = with_newer_budget(body)
        data = orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)
        tries = self.config.max_retries + 1
        backoff = Backoff(first_s=FIRST_BACKOFF_S, tries=tries, jitter=NETWORK_JITTER)
        while True:
            try:
                reply = await self._send_once(url, data, stream)
            except (aiohttp.ClientError, ConnectionError) as error:
                if not await backoff.again():
                    raise ModelError(
                        f"the model endpoint {url} cannot be used: {type(error).__name__}: {error}"
                        f" (tried {tries} times); is it running, and is 'openai_base_url'"
                        " right?",
                        retryable=True,
                    ) from error
            except TimeoutError as error:
                raise took_too_long(self._request_s()) from error
            else:
                if isinstance(reply, tuple) and reply[0] == 400 and wants_newer_budget(body, reply[1]):
                    self._newer_budget = True
                    return await self._send(dialect, body, stream=stream)
                if not isinstance(reply, tuple) or reply[0] not in RETRIED_STATUSES:
                    return self._require_accepted(reply)
                if not await backoff.again(instead_s=retry_after_s(reply[2].get("Retry-After"))):
                    raise upstream_error(reply[0], reply[1].decode(errors="replace"), reply[2])

    async def _send_once(self, url: str, data: bytes, stream: bool) -> Reply:
        # A relayed stream outlives `infer` and its time limit, so the request has its own.
        connect_s = chosen_limits().connect_timeout_s or self.config.connect_timeout_s
        timeout = aiohttp.ClientTimeout(total=self._request_s(), sock_connect=connect_s)
        with contextlib.ExitStack() as held:
            if (slots := self._slots_in_use()) is not None:
                await slots.acquire()
                held.callback(slots.release)
            reply = await get_global_aiohttp_client().post(
                url, data=data, headers=self._headers(), timeout=timeout, allow_redirects=False
            )
            held.callback(reply.close)
            retry_after, pieces = reply.headers.get("Retry-After"), _pieces(reply, self._idle_s())
            if stream and reply.status == 200 and reply.content_type != "application/json":
                # Until something has arrived, an error can still be told by the status, and be tried again.
                begun, body, events = b"", b"", EventReader()
                held_until = time.monotonic() + COMMENTS_HELD_S
                # Comments may come first.
                while not body and time.monotonic() < held_until and (piece := await anext(pieces, b"")):
                    begun += piece
                    body = next(events.feed(piece), b"")
                if told_error(body) is None:
                    return OpenStream(pieces, begun, held.pop_all())
            else:
                body = b"".join([piece async for piece in pieces])
            error = told_error(body) if reply.status == 200 else None
            status = reply.status if error is None else told_status(error)
            return status, body, {"Retry-After": retry_after} if retry_after else {}

    def _request_s(self) -> float:
        return chosen_limits().request_timeout_s or self.config.request_timeout_s

    def _idle_s(self) -> float:
        return chosen_limits().idle_timeout_s or self.config.idle_timeout_s

    def _require_accepted(self, reply: Reply) -> Reply:
        if isinstance(reply, tuple):
            status, body, headers = reply
            if status in (401, 403):
                # Do not pass on the endpoint's message: it may quote the key.
                raise ModelError(
                    f"the model endpoint refused the API key ({status}); set 'openai_api_key' (policy_api_key) or"
                    f" {API_KEY_ENV}",
                    upstream_status=status,
                )
            if status == 429:
                raise upstream_error(status, body.decode(errors="replace"), headers)
            if 300 <= status < 400:
                raise ModelError(
                    f"the model endpoint redirects ({status}); set 'openai_base_url' to the redirect's target"
                )
        return reply

    def _slots_in_use(self) -> asyncio.Semaphore | None:
        if self._slots is None and self.config.max_concurrent_requests is not None:
            self._slots = asyncio.Semaphore(self.config.max_concurrent_requests)
        return self._slots

    def _headers(self) -> dict[str, str]:
        key = self.config.openai_api_key or os.environ.get(API_KEY_ENV)
        authorization = {"Authorization": f"Bearer {key}"} if key else {}
        return {"Content-Type": "application/json", **authorization, **self.config.openai_default_headers}

    def _translated(self, call: InferenceCall, endpoint_dialect: Dialect, body: bytes) -> Response:
        try:
            answer = orjson.loads(body)
            if endpoint_dialect is Dialect.RESPONSES:
                answer = responses_chat.completion_of_response(answer)
            return reply_of_completion(call, answer)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ModelError(
                f"the model endpoint's response is not a valid response of {ROUTES[endpoint_dialect]}:"
                f" {body[:200].decode(errors='replace')}"
            ) from error

    async def preflight(self) -> list[EngineCheck]:
        config = self.config
        endpoint = EngineEndpoint(
            config.name, config.openai_base_url, model=config.openai_model, headers=self._headers()
        )
        connections = EngineConnections()
        try:
            return [await OpenAIEngine(endpoint, connections).check()]
        finally:
            await connections.aclose()

    async def ready(self) -> dict[str, Any] | None:
        """Return ``None`` if the endpoint responds, with whatever status; otherwise the problem. Cached briefly."""
        checked_at, state = self._cached_readiness
        if time.monotonic() - checked_at < READY_TTL_S and checked_at:
            return state
        url = f"{self.config.openai_base_url}/models"
        try:
            timeout = aiohttp.ClientTimeout(total=READY_TIMEOUT_S)
            async with get_global_aiohttp_client().get(url, headers=self._headers(), timeout=timeout):
                state = None
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            state = {"detail": f"the model endpoint {url} cannot be reached: {type(error).__name__}: {error}"}
        self._cached_readiness = (time.monotonic(), state)
        return state


def _refuse_hosted_tools(body: Mapping[str, Any]) -> None:
    tools = _objects_in(body.get("tools"), "tools")
    where = [place for place, tool in tools if str(tool.get("type")).startswith(_HOSTED_TOOLS)]
    where += [name for name in _HOSTED_OPTIONS if body.get(name) is not None]
    where += _remote_files(body)
    if where:
        refuse(
            where[0],
            "is run or fetched by the endpoint; if a run's rows need it, set the model server's 'hosted_tools: true'",
        )


def _remote_files(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield where files are named by address. The endpoint fetches them, and gives the model their text."""
    for history in ("messages", "input"):
        for message_place, message in _objects_in(body.get(history), history):
            for key in ("content", "output"):
                for place, part in _objects_in(message.get(key), f"{message_place}.{key}"):
                    file = part.get("file")
                    data = file.get("file_data") if isinstance(file, Mapping) else None
                    if part.get("file_url") or (isinstance(data, str) and data[:4].lower() == "http"):
                        yield place


def _objects_in(value: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects in a list with their places; what else is in it is for the endpoint to judge."""
    for number, item in enumerate(value if isinstance(value, list) else ()):
        if isinstance(item, Mapping):
            yield f"{where}.{number}", item


def _require_whole(dialect: Dialect, answer: bytes) -> None:
    """Raise `ModelError` for an answer that the endpoint broke off."""
    ends = BROKEN_OFF if dialect is Dialect.CHAT else responses_chat.BROKEN_OFF
    if not any(b'"%s"' % end.encode() in answer for end in ends):
        return  # most answers need not be parsed
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError, AttributeError):  # no answer at all
        value = orjson.loads(answer)
        if dialect is Dialect.RESPONSES:
            # vLLM ends the stream of an aborted answer by `response.completed`; other events tell their failure.
            is_event = value.get("type") == "response.completed"
            responses_chat.require_whole(value["response"] if is_event else value)
        elif (reason := value["choices"][0].get("finish_reason")) in ends:
            raise ModelError(f"the model endpoint broke the answer off ('{reason}')", retryable=True)


def _route_is_missing(status: int, body: bytes) -> bool:
    """Whether a reply means that the route does not exist, as opposed to the model."""
    return status in (405, 501) or (status == 404 and b"model" not in body.lower())


async def _pieces(reply: aiohttp.ClientResponse, idle_s: float) -> AsyncIterator[bytes]:
    """Yield the body as it arrives. Raises `ModelTimeoutError` if nothing arrives for ``idle_s``."""
    while True:
        try:
            async with asyncio.timeout(idle_s) as silence:
                piece = await reply.content.readany()
        except TimeoutError as error:
            if not silence.expired():
                raise
            raise ModelTimeoutError(
                f"the model endpoint started its response and then sent nothing for {idle_s:g} s"
                " (idle_timeout_s, or the run's model_idle_timeout_s)"
            ) from error
        if not piece:
            return
        yield piece


async def _relay(stream: OpenStream, dialect: Dialect) -> AsyncIterator[bytes]:
    """Yield the endpoint's events as they arrive; an error's event ends an answer that was broken off, stopped
    arriving, or ended without saying so. Leaving early closes the connection, so the endpoint stops work."""
    last: deque[bytes] = deque(maxlen=_LAST_EVENTS)

    async def all_pieces() -> AsyncIterator[bytes]:
        yield stream.begun
        async for piece in stream.pieces:
            yield piece

    try:
        async for events in _whole_events(all_pieces()):
            for event in events:
                data = _data_of(event)
                _require_whole(dialect, data)
                last.append(data)
            yield b"".join(events)
        if not any(map(_SAYS_END.search, last)):
            raise ModelError("the model endpoint ended its stream without saying that the answer is complete")
    except ModelError as error:
        yield failure_event(dialect, error)
    except (aiohttp.ClientError, TimeoutError) as error:
        yield failure_event(dialect, ModelError(f"the model endpoint's stream broke: {type(error).__name__}"))
    finally:
        stream.close()


_LAST_EVENTS = 8
"""The end of an answer is among so many last events; the usage and the marker follow it."""
# An error is an end, too. Some endpoints send no "[DONE]", others no finish reason. Within a JSON string, the quotes
# would be escaped.
_SAYS_END = re.compile(
    rb'\A\[DONE\]|"finish_reason"\s*:\s*"|"error"\s*:\s*[{"]|'
    rb'"type"\s*:\s*"(?:response\.(?:completed|incomplete|failed)|error)"'
)
_EVENT_END = re.compile(rb"(?<=\n\n)|(?<=\n\r\n)")


async def _whole_events(pieces: AsyncIterable[Any]) -> AsyncIterator[list[bytes]]:
    """Yield the events that each piece of a stream completes, and at last what is left."""
    rest = b""
    async for piece in pieces:
        *events, rest = _EVENT_END.split(rest + piece)
        if events:
            yield events
    if rest:
        yield [rest]


def _data_of(event: bytes) -> bytes:
    return next(EventReader().feed(event + b"\n\n"), b"")


async def without_usage(stream: AsyncIterable[Any]) -> AsyncIterator[bytes]:
    """Yield a chat stream's whole events, except a chunk without choices that reports the usage: harnesses that did
    not ask for it read ``choices[0]`` of every chunk."""
    async for events in _whole_events(stream):
        if kept := b"".join(event for event in events if not _only_reports_usage(event)):
            yield kept


def _only_reports_usage(event: bytes) -> bool:
    if b'"usage"' not in event:
        return False
    try:
        chunk = orjson.loads(_data_of(event))
    except orjson.JSONDecodeError:
        return False
    return isinstance(chunk, dict) and chunk.get("choices") == [] and bool(chunk.get("usage"))


if __name__ == "__main__":
    SimpleModelServer.run_webserver()
