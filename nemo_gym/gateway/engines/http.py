"""The base of all HTTP engines: one call, its deadline and cancellation, its failures, and its events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson

from nemo_gym._util.suggest import nearest
from nemo_gym._util.tasks import retry_after_s
from nemo_gym.contract.errors import ConfigError, InvalidBodyError
from nemo_gym.contract.session import CONNECT_TIMEOUT_S, IDLE_TIMEOUT_S, NONE_CHOSEN, REQUEST_TIMEOUT_S
from nemo_gym.gateway.engines.types import (
    EngineAnswerError,
    EngineAnswerTooLargeError,
    EngineCheck,
    EngineCredentialError,
    EngineError,
    EngineFailedError,
    EngineLacksModelError,
    EngineLostError,
    EngineRateLimitedError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
    WeightsSpan,
)
from nemo_gym.gateway.policy_request import chosen_limits
from nemo_gym.http.client import RequestHeads
from nemo_gym.http.connections import (
    BROKEN,
    Connections,
    NoHttpError,
    NotConnectedError,
    Patience,
    Reply,
    TooLongError,
)

DONE = b"[DONE]"


class EventReader:
    """Collects ``data`` fields into events. Skips comments and other fields; accepts all three line endings."""

    def __init__(self) -> None:
        self._line_pieces: list[bytes] = []
        """The pieces of an incomplete line, so that a line of thousands of chunks is joined only once."""
        self._line_bytes = 0
        self._data: list[bytes] = []

    @property
    def held_bytes(self) -> int:
        """The size of the incomplete event."""
        return self._line_bytes + sum(map(len, self._data))

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of every event that ``chunk`` completes."""
        self._line_pieces.append(chunk)
        self._line_bytes += len(chunk)
        if b"\n" not in chunk and b"\r" not in chunk and not self._line_pieces[0].endswith(b"\r"):
            return
        text = b"".join(self._line_pieces)
        if b"\r" in text:
            # A lone CR at the end may be half of a CRLF: it waits for the next chunk.
            pending = b"\r" if text.endswith(b"\r") else b""
            text = text.removesuffix(pending).replace(b"\r\n", b"\n").replace(b"\r", b"\n") + pending
        *lines, rest = text.split(b"\n")
        self._line_pieces, self._line_bytes = [rest], len(rest)
        for line in lines:
            if line.startswith(b"data:"):
                value = line[5:]
                self._data.append(value.removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []


# The base of all HTTP engines: one call, its deadline, its cancellation, and the classes of its failures.

READ_OUT_S = 0.05
MAX_ANSWER_BYTES = 64 << 20
"""Limit of one response, or of one event of a stream: 65,536 tokens with their logprobs are a sixth of it."""
BYTES_PER_TOKEN = 4096
"""Limit of one token: with the logprobs of twenty alternatives it has about 3,000 bytes."""
_BESIDE_TOKENS_BYTES = 1 << 20
_ERROR_BYTES = 1 << 20
"""Limit of a response with a status other than 200."""
MAX_LISTED_MODELS = 10
QUOTED_CHARS = 500
"""How much of an engine's error body an error message quotes."""


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """The address of an engine and its time limits."""

    name: str
    base_url: str
    """Without a trailing slash."""
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    """The model's name at the engine, if its requests need one."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    request_timeout_s: float = REQUEST_TIMEOUT_S
    """From the connection to the last byte."""
    idle_timeout_s: float | None = IDLE_TIMEOUT_S
    """Between two reads of a response that has begun; with ``None`` only ``request_timeout_s`` applies."""
    probe_timeout_s: float = 5.0
    max_answer_bytes: int = MAX_ANSWER_BYTES

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"engine '{self.name}': '{self.base_url}' is not a URL; give for example http://127.0.0.1:8000"
            )
        object.__setattr__(self, "base_url", self.base_url.rstrip("/"))


class HttpEngine:
    """A base for adapters; see `nemo_gym.gateway.engines.types.Engine` for the contract."""

    health_route = "/health"
    models_route = "/v1/models"
    tokenize_route: str | None = None
    """The route that tokenizes a text; ``None`` for protocols without token ids."""

    def __init__(self, endpoint: EngineEndpoint, http: Connections) -> None:
        """Raises `ConfigError` for headers that cannot be sent."""
        self.endpoint = endpoint
        self.weights_version: str | None = None
        self.reported_version: str | None = None
        """The weights version that the server itself reported last, if it does."""
        self.context_tokens: int | None = None
        """The engine's limit of prompt and answer together; ``None`` until (and unless) the engine reports it."""
        self._asked_for_context = False
        self._http = http
        self._request_heads = self._heads_at(endpoint.base_url)
        self._patience = Patience(endpoint.connect_timeout_s, endpoint.request_timeout_s, endpoint.idle_timeout_s)
        self._probe_patience = Patience(endpoint.connect_timeout_s, endpoint.probe_timeout_s)

    def _heads_at(self, base_url: str) -> RequestHeads:
        key = {"Authorization": f"Bearer {self.endpoint.api_key}"} if self.endpoint.api_key else {}
        return RequestHeads(base_url, {**self.endpoint.headers, **key})

    def _patience_of_call(self) -> Patience:
        """Return the engine's time limits, each replaced by the limit that the call's run chose, if any."""
        chosen, default = chosen_limits(), self._patience
        if chosen is NONE_CHOSEN:
            return default
        return Patience(
            chosen.connect_timeout_s or default.connect_s,
            chosen.request_timeout_s or default.total_s,
            chosen.idle_timeout_s or default.idle_s,
        )

    @property
    def name(self) -> str:
        return self.endpoint.name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.endpoint.base_url!r})"

    async def probe(self) -> None:
        await self._ask("GET", self.health_route)
        if self.tokenize_route is not None and not self._asked_for_context:  # text engines check their own context
            self._asked_for_context = (await self.check()).unreachable is None

    async def check(self) -> EngineCheck:
        """Check once whether the engine accepts the API key and has the model, and how long its context is. Never
        raises for a response of the engine."""
        try:
            models = _listed_models(self.parsed(await self._ask("GET", self.models_route)))
            name = self.endpoint.model
            if name is None and len(models) == 1:
                (name,) = models
            card = models.get(name) if name is not None else None
            if card is not None or self.endpoint.model is None:
                context = (card or {}).get("max_model_len")
                self.context_tokens = context if isinstance(context, int) and context > 0 else None
                return EngineCheck(self.name, context_tokens=self.context_tokens)
        except EngineCredentialError as error:
            return EngineCheck(self.name, problem=error.message)
        except (EngineRefusedError, EngineAnswerError):
            models = {}  # not every endpoint has this route
        except EngineError as error:
            return EngineCheck(self.name, unreachable=error.message)
        return await self._check_name(models)

    async def tokenize(self, text: str) -> list[int] | None:
        """Return the ids of ``text`` by the engine's tokenizer, without special tokens; ``None`` if unavailable."""
        if self.tokenize_route is None:
            return None
        body: dict[str, Any] = {"prompt": text, "add_special_tokens": False}
        if self.endpoint.model:
            body["model"] = self.endpoint.model
        try:
            tokens = self.parsed(await self._ask("POST", self.tokenize_route, orjson.dumps(body))).get("tokens")
        except EngineError:
            return None  # no problem: not every version has the route
        return tokens if isinstance(tokens, list) else None

    async def _check_name(self, models: Mapping[str, Any]) -> EngineCheck:
        """Check a model that the engine does not list. If an adapter cannot find out, that is no problem."""
        return EngineCheck(self.name)

    def unknown_model(self, models: Mapping[str, Any]) -> EngineCheck:
        model = self.endpoint.model or ""
        listed = f"; it serves {', '.join(list(models)[:MAX_LISTED_MODELS])}" if models else ""
        return EngineCheck(
            self.name,
            problem=f"engine '{self.name}' at {self.endpoint.base_url} has no model '{model}'{nearest(model, models)}"
            f"{listed}; set policy_model_name (the engine's 'model')",
        )

    async def post(
        self, route: str, body: Mapping[str, Any], *, max_tokens: int | None = None
    ) -> tuple[bytes | bytearray, Mapping[str, str]]:
        """Return the body of a 200 and its headers by lower-case names; raises `EngineError` for everything else.
        ``max_tokens``: the requested limit, if known; a body longer than so many tokens can be raises
        `EngineAnswerTooLargeError`."""
        data = _written(body)
        return await self._whole(
            "POST", route, data, self._patience_of_call(), self._answer_bytes(len(data), max_tokens)
        )

    async def post_stream(
        self, route: str, body: Mapping[str, Any], *, max_tokens: int, answers: int = 1
    ) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a 200 as they arrive. Closing the iterator closes the connection. A stream longer than
        ``answers`` answers of ``max_tokens`` tokens can be raises `EngineAnswerTooLargeError`."""
        data = _written(body)
        passed, at_most_bytes = 0, answers * _believed_bytes(len(data), max_tokens)
        head = self._request_heads.of("POST", route, len(data))
        try:
            reply = await self._http.send(self._request_heads.origin, head, data, self._patience_of_call())
            try:
                if reply.status != 200:
                    raise self._status_error(reply, await _error_body(reply))
                self._check_encoding(reply)
                async for chunk in reply:
                    passed += len(chunk)
                    if passed > at_most_bytes:
                        raise self._too_large(f"a stream of more than {at_most_bytes} bytes")
                    yield chunk
            finally:
                reply.close()
        except BROKEN as error:
            raise self._broken(error) from error

    async def post_events(
        self,
        route: str,
        body: Mapping[str, Any],
        *,
        max_tokens: int,
        answers: int = 1,
        echoed_prompt: bytes | None = None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the JSON of each server-sent event, up to the end marker. Raises if the stream ends without it, or if
        an event is an error. ``max_tokens`` and ``answers``: see `post_stream`. ``echoed_prompt``: the prompt as JSON,
        removed from events that repeat it; see `without_echo`. The caller enforces the token limit."""
        reader = EventReader()
        at_most = self.endpoint.max_answer_bytes
        async with contextlib.aclosing(
            self.post_stream(route, body, max_tokens=max_tokens, answers=answers)
        ) as chunks:
            async for chunk in chunks:
                for data in reader.feed(chunk):
                    if data == DONE:
                        await _read_out(chunks)
                        return
                    event = self.parsed(without_echo(data, echoed_prompt))
                    if "error" in event:
                        raise self._event_error(event["error"])
                    yield event
                if reader.held_bytes > at_most:
                    raise self._too_large(f"an event of more than {at_most} bytes")
        raise EngineLostError(
            f"engine '{self.name}' ended its stream without saying that it is complete",
            retryable=True,
            engine=self.name,
        )

    def parsed(self, raw: bytes | bytearray) -> dict[str, Any]:
        try:
            value = orjson.loads(raw)
        except orjson.JSONDecodeError:
            value = None
        if not isinstance(value, dict):
            raise self.malformed(f"not a JSON object: {raw[:200].decode(errors='replace')}")
        return value

    def malformed(self, what: str) -> EngineAnswerError:
        return EngineAnswerError(
            f"engine '{self.name}' sent a response that violates its protocol: {what}",
            retryable=True,
            engine=self.name,
        )

    def check_tokens(self, sampled: int, max_tokens: int) -> None:
        """Raise `EngineAnswerTooLargeError` if the engine sampled more tokens than requested."""
        if sampled > max_tokens:
            raise EngineAnswerTooLargeError(
                f"engine '{self.name}' sampled {sampled} tokens or more; the request allowed {max_tokens}",
                engine=self.name,
            )

    def _answer_bytes(self, asked_bytes: int, max_tokens: int | None) -> int:
        """Return the size limit of a response, which may repeat the request."""
        if max_tokens is None:
            return self.endpoint.max_answer_bytes
        return min(_believed_bytes(asked_bytes, max_tokens), self.endpoint.max_answer_bytes)

    def _too_large(self, what: str) -> EngineAnswerTooLargeError:
        return EngineAnswerTooLargeError(
            f"engine '{self.name}' sent {what}, which is above the limit: {BYTES_PER_TOKEN} bytes per requested"
            f" token, or 'max_answer_bytes' ({self.endpoint.max_answer_bytes})",
            engine=self.name,
        )

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Convert the errors of code that reads a response's data to `EngineAnswerError`."""
        try:
            yield
        except (
            KeyError,
            IndexError,
            TypeError,
            ValueError,
            AttributeError,
            RecursionError,
            msgspec.DecodeError,
        ) as error:
            raise self.malformed(f"{type(error).__name__}: {error}") from error

    def span(self, first: str | None) -> WeightsSpan:
        """Return the span of weights from ``first``, which the caller read when the call began, to now."""
        return WeightsSpan(first if first is not None else self.weights_version, self.weights_version)

    # -- one call ------------------------------------------------------------------------------------------------

    async def _ask(
        self, method: str, route: str, body: bytes = b"", request_heads: RequestHeads | None = None
    ) -> bytes | bytearray:
        """Send a request about the engine itself, within the time limit of probes, and return the body of a 200."""
        patience, at_most_bytes = self._probe_patience, self.endpoint.max_answer_bytes
        whole, _ = await self._whole(method, route, body, patience, at_most_bytes, request_heads)
        return whole

    async def _whole(
        self,
        method: str,
        route: str,
        body: bytes,
        patience: Patience,
        at_most_bytes: int,
        request_heads: RequestHeads | None = None,
    ) -> tuple[bytes | bytearray, Mapping[str, str]]:
        """Send a request and return the whole body of a 200 and its headers. ``request_heads``: those for another
        part of the server than the base URL."""
        request_heads = request_heads or self._request_heads
        head = request_heads.of(method, route, len(body))
        try:
            reply = await self._http.send(request_heads.origin, head, body, patience)
            try:
                whole = await (reply.read(at_most_bytes) if reply.status == 200 else _error_body(reply))
            finally:
                # If the reply was read to its end, its connection is reused; otherwise the connection is closed, which
                # makes the engine stop.
                reply.close()
        except BROKEN as error:
            raise self._broken(error) from error
        if reply.status != 200:
            raise self._status_error(reply, bytes(whole), probe=method == "GET")
        self._check_encoding(reply)
        return whole, reply.headers

    def _check_encoding(self, reply: Reply) -> None:
        encoding = reply.headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            raise self.malformed(f"an unrequested content encoding '{encoding}'")

    def _broken(self, error: Exception) -> EngineError:
        """Return the `EngineError` for one of the exceptions in `BROKEN`."""
        self._asked_for_context = False  # after a restart it may have another one
        where = f"engine '{self.name}' at {self.endpoint.base_url}"
        if isinstance(error, NotConnectedError):
            why = error.__cause__
            if isinstance(why, UnicodeError):  # the host is no valid name
                text = f"{where} cannot be reached: {why}; is its base URL right?"
            elif isinstance(why, TimeoutError):
                text = f"{where} took no connection within {self.endpoint.connect_timeout_s} s"
            else:
                reason = getattr(why, "strerror", None) or why
                text = f"{where} cannot be reached: {reason}; is it running?"
            return EngineUnreachableError(text, retryable=True, engine=self.name)
        if isinstance(error, TimeoutError):
            return EngineTimeoutError(f"{where} did not answer in time", retryable=True, engine=self.name)
        if isinstance(error, TooLongError):
            return self._too_large(str(error))
        if isinstance(error, NoHttpError):
            return self.malformed(str(error))
        return EngineLostError(
            f"the connection to {where} broke: {type(error).__name__}", retryable=True, engine=self.name
        )

    def _status_error(self, reply: Reply, body: bytes, *, probe: bool = False) -> EngineError:
        status = reply.status
        details: dict[str, Any] = {"engine": self.name, "upstream_status": status}
        if status in (401, 403):
            # Without the engine's own text, which may quote the key.
            return EngineCredentialError(
                f"engine '{self.name}' refused its API key ({status}); set the engine's 'api_key' (POLICY_API_KEY)",
                **details,
            )
        quoted = self._quoted(body)
        if status == 429 or (status == 503 and "retry-after" in reply.headers):
            seconds = retry_after_s(reply.headers.get("retry-after"))
            return EngineRateLimitedError(
                f"engine '{self.name}' asks to wait: {quoted}", retry_after_s=seconds, **details
            )
        if status == 408:
            return EngineTimeoutError(f"engine '{self.name}' answered {status}: {quoted}", retryable=True, **details)
        if status == 404 and not probe:
            return EngineLacksModelError(
                f"engine '{self.name}' at {self.endpoint.base_url} has no such model or route (404); are its base URL"
                f" and policy_model_name (the engine's 'model') right? {quoted}",
                body=body,
                **details,
            )
        if 400 <= status < 500:
            return EngineRefusedError(
                f"engine '{self.name}' refused the request ({status}): {quoted}", body=body, **details
            )
        if status >= 500:
            return EngineFailedError(f"engine '{self.name}' answered {status}: {quoted}", retryable=True, **details)
        return EngineAnswerError(f"engine '{self.name}' answered {status}; is its base URL right?", **details)

    def error_in(self, body: bytes | bytearray) -> EngineError | None:
        """Return the error that an engine put into the body of a 200; ``None`` if there is none in it."""
        error = told_error(body)
        return None if error is None else self._event_error(error)

    def _event_error(self, error: Any) -> EngineError:
        code = told_status(error)
        text = self._quoted(orjson.dumps(error))
        if code == 429:
            return EngineRateLimitedError(f"engine '{self.name}' asks to wait: {text}", engine=self.name)
        if code == 408:
            return EngineTimeoutError(f"engine '{self.name}' gave up: {text}", retryable=True, engine=self.name)
        if code < 500:
            return EngineRefusedError(
                f"engine '{self.name}' refused the request: {text}",
                body=orjson.dumps({"error": error}),
                engine=self.name,
            )
        return EngineFailedError(
            f"engine '{self.name}' failed while answering: {text}", retryable=True, engine=self.name
        )

    def _quoted(self, body: bytes) -> str:
        text = body.decode(errors="replace")
        if self.endpoint.api_key:
            text = text.replace(self.endpoint.api_key, "***")
        return text[:QUOTED_CHARS]


def told_error(body: bytes | bytearray) -> Any:
    """Return the error in the body of a 200 or in an event's data; ``None`` if there is none. OpenRouter and other
    proxies answer 200 before they know whether their provider succeeds, and then send ``{"error": {"code": 502, …}}``.
    """
    if b'"error"' not in body:
        return None
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    # A Responses object that failed has an error, too, but is an answer.
    return value.get("error") or None if isinstance(value, dict) and "output" not in value else None


def told_status(error: Any) -> int:
    """Return the status that an error in the body of a 200 names; 502 if it names none."""
    code = str(error.get("code")) if isinstance(error, dict) else ""  # LiteLLM's is a string
    return int(code) if code.isdecimal() and 400 <= int(code) < 600 else 502


def _listed_models(reply: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    cards = reply.get("data")
    listed = cards if isinstance(cards, list) else []
    return {card["id"]: card for card in listed if isinstance(card, Mapping) and isinstance(card.get("id"), str)}


def _written(body: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError as error:  # parsed JSON can be serialized again, except for some numbers and deep nesting
        raise InvalidBodyError(f"the request cannot be written as JSON for an engine: {error}") from None


def _believed_bytes(asked_bytes: int, max_tokens: int) -> int:
    """Return how long an answer of ``max_tokens`` tokens can be, which may repeat the request."""
    return _BESIDE_TOKENS_BYTES + 2 * asked_bytes + max_tokens * BYTES_PER_TOKEN


async def _error_body(reply: Reply) -> bytes:
    try:
        return bytes(await reply.read(_ERROR_BYTES))
    except TooLongError as error:
        return str(error).encode()


async def _read_out(chunks: AsyncGenerator[bytes, None]) -> None:
    """Read the rest after the end marker for at most `READ_OUT_S`, so that the connection can be reused."""
    with contextlib.suppress(TimeoutError, EngineError):
        async with asyncio.timeout(READ_OUT_S):
            async for _ in chunks:
                pass


_PROMPT_KEY = b'"prompt_token_ids":'


def without_echo(raw: bytes | bytearray, prompt_json: bytes | None) -> bytes | bytearray:
    """Return a JSON text with ``null`` for ``prompt_token_ids`` if these equal ``prompt_json`` to the byte; otherwise
    the text unchanged, and the caller still has to compare the ids.

    ``prompt_json``: the ids as a JSON array without spaces. Inside a JSON string the key's quotes would be escaped, so
    a match is a key.
    """
    at = raw.find(_PROMPT_KEY) if prompt_json is not None else -1
    if prompt_json is None or at < 0:
        return raw
    start = at + len(_PROMPT_KEY)
    if not raw.startswith(prompt_json, start):
        return raw
    with memoryview(raw) as view:
        return b"".join((view[:start], b"null", view[start + len(prompt_json) :]))
