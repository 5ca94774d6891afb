"""What every engine behind HTTP shares: one call, its deadline, its cancellation, and its failures classified."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import msgspec
import orjson

from nemo_gym.errors import ConfigError
from nemo_gym.gateway.engines.echo import without_echo
from nemo_gym.gateway.engines.errors import (
    EngineAnswerError,
    EngineCredentialError,
    EngineError,
    EngineFailedError,
    EngineLostError,
    EngineRateLimitedError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
)
from nemo_gym.gateway.engines.events import DONE, EventReader
from nemo_gym.gateway.engines.types import WeightsSpan

READ_OUT_S = 0.05
QUOTED_CHARS = 500
"""How much of an engine's error body is repeated in ours."""


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """Where an engine listens and how long it may take."""

    name: str
    base_url: str
    """Without a trailing slash."""
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    """The model's name at the engine, where its requests need one."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    connect_timeout_s: float = 10.0
    request_timeout_s: float = 3600.0
    """From the connection to the last byte."""
    idle_timeout_s: float | None = None
    """Between two reads; ``None`` leaves only ``request_timeout_s``, since an engine that does not stream is silent
    until it is done."""
    probe_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"engine '{self.name}': '{self.base_url}' is no URL; give for example http://127.0.0.1:8000"
            )
        object.__setattr__(self, "base_url", self.base_url.rstrip("/"))


class HttpEngine:
    """A base for adapters; see `nemo_gym.gateway.engines.base.Engine` for the contract."""

    health_route = "/health"

    def __init__(self, endpoint: EngineEndpoint, http: aiohttp.ClientSession) -> None:
        self.endpoint = endpoint
        self.weights_version: str | None = None
        self._http = http
        self._headers = {"Content-Type": "application/json", **endpoint.headers}
        if endpoint.api_key:
            self._headers["Authorization"] = f"Bearer {endpoint.api_key}"
        self._timeout = aiohttp.ClientTimeout(
            total=endpoint.request_timeout_s,
            sock_connect=endpoint.connect_timeout_s,
            sock_read=endpoint.idle_timeout_s,
        )

    @property
    def name(self) -> str:
        return self.endpoint.name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.endpoint.base_url!r})"

    async def probe(self) -> None:
        timeout = aiohttp.ClientTimeout(total=self.endpoint.probe_timeout_s)
        async with self._reply("GET", self.health_route, None, timeout) as reply:
            await reply.read()

    async def post(self, route: str, body: Mapping[str, Any]) -> tuple[bytes, Mapping[str, str]]:
        """The body and the headers of a 200; raises `EngineError` for everything else."""
        async with self._reply("POST", route, body, self._timeout) as reply:
            return await reply.read(), reply.headers

    async def post_json(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        raw, _ = await self.post(route, body)
        return self.parsed(raw)

    async def post_stream(self, route: str, body: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        """The bytes of a 200 as they arrive. Closing the iterator closes the connection."""
        async with self._reply("POST", route, body, self._timeout) as reply:
            async for chunk in reply.content.iter_any():
                yield chunk

    async def post_events(
        self, route: str, body: Mapping[str, Any], *, echo: bytes | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The JSON of each server-sent event, up to the end marker. Raises when the stream ends without it, or when
        an event is an error. ``echo``: the prompt as JSON, left out of events that repeat it; see `without_echo`."""
        reader = EventReader()
        async with contextlib.aclosing(self.post_stream(route, body)) as chunks:
            async for chunk in chunks:
                for data in reader.feed(chunk):
                    if data == DONE:
                        await _read_out(chunks)
                        return
                    event = self.parsed(without_echo(data, echo))
                    if "error" in event:
                        raise self._event_error(event["error"])
                    yield event
        raise EngineLostError(
            f"engine '{self.name}' ended its stream without saying that it is complete",
            retryable=True,
            engine=self.name,
        )

    def parsed(self, raw: bytes) -> dict[str, Any]:
        try:
            value = orjson.loads(raw)
        except orjson.JSONDecodeError:
            value = None
        if not isinstance(value, dict):
            raise self.malformed(f"not a JSON object: {raw[:200].decode(errors='replace')}")
        return value

    def malformed(self, what: str) -> EngineAnswerError:
        return EngineAnswerError(
            f"engine '{self.name}' answered something else than its protocol: {what}", retryable=True, engine=self.name
        )

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Turns what picking an answer apart can raise into an `EngineAnswerError`."""
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
        """The weights from ``first``, noted when the call began, to now."""
        return WeightsSpan(first if first is not None else self.weights_version, self.weights_version)

    # -- one call ------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _reply(
        self, method: str, route: str, body: Mapping[str, Any] | None, timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        data = None if body is None else orjson.dumps(body)
        with self._classified():
            reply = await self._http.request(
                method,
                self.endpoint.base_url + route,
                data=data,
                headers=self._headers,
                timeout=timeout,
                allow_redirects=False,
                middlewares=(_once(),) if body is None else None,
            )
            try:
                if reply.status != 200:
                    raise self._status_error(reply, await reply.read())
                yield reply
            finally:
                # A reply that was read to its end has already given its connection back; any other is cut off, which
                # is what makes the engine stop.
                reply.close()

    @contextlib.contextmanager
    def _classified(self) -> Iterator[None]:
        where = f"engine '{self.name}' at {self.endpoint.base_url}"
        try:
            yield
        except EngineError:
            raise
        except aiohttp.ConnectionTimeoutError as error:
            raise EngineUnreachableError(
                f"{where} took no connection within {self.endpoint.connect_timeout_s} s",
                retryable=True,
                engine=self.name,
            ) from error
        except TimeoutError as error:
            raise EngineTimeoutError(f"{where} did not answer in time", retryable=True, engine=self.name) from error
        except aiohttp.ClientConnectorError as error:
            raise EngineUnreachableError(
                f"{where} cannot be reached: {error.os_error.strerror or error.os_error}; is it running?",
                retryable=True,
                engine=self.name,
            ) from error
        except UnicodeError as error:  # a host that cannot be a name
            raise EngineUnreachableError(f"{where} cannot be reached: {error}; is its base URL right?") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineLostError(
                f"the connection to {where} broke: {type(error).__name__}", retryable=True, engine=self.name
            ) from error

    def _status_error(self, reply: aiohttp.ClientResponse, body: bytes) -> EngineError:
        status = reply.status
        known: dict[str, Any] = {"engine": self.name, "upstream_status": status}
        if status in (401, 403):
            # Not the engine's words: they may quote the key.
            return EngineCredentialError(
                f"engine '{self.name}' refused its API key ({status}); set the engine's 'api_key'", **known
            )
        said = self._quoted(body)
        if status == 429 or (status == 503 and "Retry-After" in reply.headers):
            seconds = retry_after_s(reply.headers.get("Retry-After"))
            return EngineRateLimitedError(f"engine '{self.name}' asks to wait: {said}", retry_after_s=seconds, **known)
        if status == 408:
            return EngineTimeoutError(f"engine '{self.name}' answered {status}: {said}", retryable=True, **known)
        if 400 <= status < 500:
            return EngineRefusedError(
                f"engine '{self.name}' refused the request ({status}): {said}", body=body, **known
            )
        if status >= 500:
            return EngineFailedError(f"engine '{self.name}' answered {status}: {said}", retryable=True, **known)
        return EngineAnswerError(f"engine '{self.name}' answered {status}; is its base URL right?", **known)

    def _event_error(self, said: Any) -> EngineError:
        code = said.get("code") if isinstance(said, dict) else None
        text = self._quoted(orjson.dumps(said))
        if code == 429:
            return EngineRateLimitedError(f"engine '{self.name}' asks to wait: {text}", engine=self.name)
        if isinstance(code, int) and 400 <= code < 500:
            return EngineRefusedError(f"engine '{self.name}' refused the request: {text}", engine=self.name)
        return EngineFailedError(
            f"engine '{self.name}' failed while answering: {text}", retryable=True, engine=self.name
        )

    def _quoted(self, body: bytes) -> str:
        text = body.decode(errors="replace")
        if self.endpoint.api_key:
            text = text.replace(self.endpoint.api_key, "***")
        return text[:QUOTED_CHARS]


def _once() -> aiohttp.ClientMiddlewareType:
    """For one probe, which is one request: aiohttp sends a GET again by itself when its connection breaks."""
    sent = False

    async def once(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        nonlocal sent
        if sent:
            raise aiohttp.ServerDisconnectedError
        sent = True
        return await send(request)

    return once


async def _read_out(chunks: AsyncGenerator[bytes, None]) -> None:
    """Read what may follow the end marker, so that the connection can be used again; not for long."""
    with contextlib.suppress(TimeoutError, EngineError):
        async with asyncio.timeout(READ_OUT_S):
            async for _ in chunks:
                pass


def retry_after_s(header: str | None) -> float | None:
    """Seconds from a ``Retry-After`` header in either of its forms; ``None`` when it says nothing usable."""
    if not header:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        at = parsedate_to_datetime(header)
    except ValueError:
        return None
    return max(0.0, (at - datetime.datetime.now(at.tzinfo)).total_seconds())
