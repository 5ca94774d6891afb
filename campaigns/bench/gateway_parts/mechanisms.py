"""The gateway's optimizations, and how the ablation switches each one off: by patches of module attributes.

A gateway process that finds a mechanism's name in ``NEMO_GYM_ABLATION`` switches the mechanism off before it serves.
The product has no such switches.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import orjson

VARIABLE = "NEMO_GYM_ABLATION"


@dataclass(frozen=True)
class Mechanism:
    """One optimization. ``files``: the code that has it. ``kind``: the kind of gateway that uses it."""

    files: str
    switch_off: Callable[[], None]
    kind: Literal["token", "text"] = "token"
    kept_for: str = ""
    """Why the mechanism stays, whatever it saves here; a mechanism without a reason has a bar."""


# -- the plain ways ------------------------------------------------------------------------------------------------


class _AiohttpReply:
    """`nemo_gym.http.connections.Reply` over aiohttp."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.headers.items()}

    async def read(self, at_most: int) -> bytes:
        from nemo_gym.http.connections import TooLongError

        body = await self._response.read()
        if len(body) > at_most:
            raise TooLongError(f"a body of more than {at_most} bytes")
        return body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._response.content.iter_any():
            yield chunk

    def close(self) -> None:
        self._response.release()


class _AiohttpConnections:
    """`nemo_gym.http.connections.Connections` over aiohttp."""

    def __init__(self, **_: Any) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def send(self, origin: Any, head: bytes, body: bytes, patience: Any) -> _AiohttpReply:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
            self._session = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
            )
        method, path, _ = head.split(b" ", 2)
        timeout = aiohttp.ClientTimeout(
            total=patience.total_s, connect=patience.connect_s, sock_read=patience.idle_s or patience.total_s
        )
        url = f"{'https' if origin.tls else 'http'}://{origin.host}:{origin.port}{path.decode()}"
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        response = await self._session.request(
            method.decode(), url, data=body or None, headers=headers, timeout=timeout, allow_redirects=False
        )
        return _AiohttpReply(response)

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()


def _aiohttp_client() -> None:
    from nemo_gym.gateway.engines import pool

    pool.EngineConnections = _AiohttpConnections


def _no_echo_comparison() -> None:
    from nemo_gym.gateway.engines import http, vllm

    http.without_echo = vllm.without_echo = lambda raw, prompt_json: raw


def _whole_decoder() -> None:
    from nemo_gym.gateway.engines import vllm

    vllm.long_completion = lambda raw: None


def _tokenizer_encodes() -> None:
    from nemo_gym.gateway.tokens import policy

    policy.ascii_encoder = lambda tokenizer: None


def _tokenizer_decodes() -> None:
    from nemo_gym.gateway.tokens import policy

    policy.token_bytes = lambda tokenizer: None


def _no_numpy() -> None:
    from nemo_gym.gateway import policy_request as packed
    from nemo_gym.gateway.tokens import byte_level as decoding
    from nemo_gym.gateway.tokens import turns

    packed.LARGE = 1 << 60
    decoding.LARGE = turns.LARGE = 1 << 60


def _parse_whole_bodies() -> None:
    from nemo_gym.gateway.dialects.chat import ConversationCache

    ConversationCache.parse = lambda self, raw: orjson.loads(raw)


def _lower_whole_bodies() -> None:
    from nemo_gym.gateway.dialects.chat import ConversationCache

    ConversationCache.lowered = lambda self, context, raw, lower_from: [
        message for _, group in lower_from(0) for message in group
    ]
    ConversationCache.parameters = lambda self, use, name, given, make: make()
    ConversationCache.tools = lambda self, raw, lower: lower()


def _digest_whole_bodies() -> None:
    from nemo_gym.gateway import inference

    fingerprint = inference.request_fingerprint
    inference.request_fingerprint = lambda route, body, cache=None: fingerprint(route, body)


def _read_whole_histories() -> None:
    from nemo_gym.gateway.tokens import history

    history._VIEWS = 0


def _no_prefix_memory() -> None:
    for switch_off in (_parse_whole_bodies, _lower_whole_bodies, _digest_whole_bodies, _read_whole_histories):
        switch_off()


def _prompts_written_anew() -> None:
    from nemo_gym.gateway.tokens.turns import Prompt, json_of

    Prompt.json = lambda self: json_of(self.ids())


def _histories_written_anew() -> None:
    from nemo_gym.gateway.text_backend import HistoryJson

    HistoryJson.array = lambda self, messages: orjson.dumps([*messages])


def _large_texts_stay() -> None:
    from nemo_gym.gateway import inference

    inference.large_texts = lambda turn, pieces: []


def _framework_routes() -> None:
    from nemo_gym.http.middleware import DirectRoutesMiddleware

    DirectRoutesMiddleware._find = lambda self, scope: None


def _all_layers() -> None:
    from nemo_gym.gateway.routes import InferenceShortcut

    InferenceShortcut.__call__ = lambda self, scope, receive, send: None


def _layers_and_framework_routes() -> None:
    _all_layers()
    _framework_routes()


def _two_writes() -> None:
    from nemo_gym.http import protocol

    protocol.JoinedWrites = lambda transport, loop: transport


def _framework_replies() -> None:
    from nemo_gym.gateway import inference as delivered
    from nemo_gym.gateway.policy_request import written
    from nemo_gym.http.requests import JsonResponse

    def begin(self: Any, content: Any, sent: Callable[[], None]) -> None:
        JsonResponse.__init__(self, None)
        self.body = b"".join(written(content))
        self.size = len(self.body)
        self.init_headers()
        self._sent = sent

    async def call(self: Any, scope: Any, receive: Any, send: Any) -> None:
        await JsonResponse.__call__(self, scope, receive, send)
        self._sent()

    delivered.DeliveredJson.__init__ = begin
    delivered.DeliveredJson.__call__ = call


def _memory_goes_back() -> None:
    from nemo_gym.http import webserver

    webserver.keep_memory = lambda: None


def _frequent_collections() -> None:
    from nemo_gym.http import webserver

    webserver.GC_THRESHOLDS = (700, 10, 10)


MECHANISMS: Mapping[str, Mechanism] = {
    "nothing": Mechanism("(a second gateway like the first)", lambda: None, kept_for="the noise"),
    "engine_client": Mechanism("http/connections", _aiohttp_client),
    "echo_as_bytes": Mechanism("engines/http (without_echo)", _no_echo_comparison),
    "long_completions": Mechanism("engines/vllm (long_completion)", _whole_decoder),
    "ascii_words": Mechanism("tokens/byte_level (AsciiEncoder)", _tokenizer_encodes),
    "token_bytes": Mechanism("tokens/byte_level (TokenBytes)", _tokenizer_decodes),
    "numpy_arrays": Mechanism("policy_request, tokens/turns", _no_numpy),
    "prompt_text": Mechanism("tokens/turns (Prompt.json)", _prompts_written_anew),
    "history_views": Mechanism("tokens/history (views)", _read_whole_histories),
    "body_prefixes": Mechanism("dialects/chat (parse)", _parse_whole_bodies),
    "lowering_memo": Mechanism("dialects/chat (lowered)", _lower_whole_bodies),
    "fingerprint_memo": Mechanism("dialects/chat (digest)", _digest_whole_bodies),
    "all_prefix_memos": Mechanism("the four above", _no_prefix_memory),
    "message_json": Mechanism("text_backend (HistoryJson)", _histories_written_anew, "text"),
    "released_texts": Mechanism("live_session (LargeText)", _large_texts_stay, kept_for="memory of long sessions"),
    "own_reply": Mechanism("inference (DeliveredJson)", _framework_replies, kept_for="large bodies, sent uncopied"),
    "shortcut": Mechanism("routes (InferenceShortcut)", _all_layers),
    "direct_routes": Mechanism(
        "http/middleware (DirectRoutesMiddleware)", _framework_routes, kept_for="other servers"
    ),
    "shortcut_and_direct_routes": Mechanism("both", _layers_and_framework_routes, kept_for="see both"),
    "joined_writes": Mechanism("http/protocol (JoinedWrites)", _two_writes, kept_for="other servers"),
    "kept_memory": Mechanism("http/webserver (mallopt)", _memory_goes_back, kept_for="large bodies at other servers"),
    "rare_collections": Mechanism("config/launch (GC_THRESHOLDS)", _frequent_collections, kept_for="other servers"),
}
