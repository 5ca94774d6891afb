"""What makes two requests of a session the same request."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from nemo_gym.contract.errors import InvalidBodyError
from nemo_gym.gateway.dialects.memo import same_items
from nemo_gym.gateway.tokens.history import Prefix

# How an answer is delivered, and what is only said about the caller. Claude Code, for one, repeats a turn that it saw
# break off with `stream` turned off: that is the same turn.
_NOT_THE_REQUEST = frozenset(
    {
        "stream",
        "stream_options",
        "metadata",
        "client_metadata",
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "store",
    }
)


_HISTORIES = ("messages", "input")
_VIEWS = 4
_OPTIONS = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS


class FingerprintMemo:
    """The memory of one session: histories that start as one before are digested from where they differ."""

    def __init__(self) -> None:
        self._views: list[tuple[Prefix[Any], Prefix[bytes]]] = []
        self._parameters: tuple[str, dict[str, Any], bytes] | None = None

    def parameters(self, route: str, given: dict[str, Any]) -> bytes:
        """A digest of all but the history. Most requests have what the last one had, as the very same objects."""
        known = self._parameters
        if known is None or known[0] != route or not same_items(known[1], given):
            known = self._parameters = (route, given, _digest(_canonical([route, given])))
        return known[2]

    def digest(self, history: Sequence[Any]) -> bytes:
        """A digest of all elements of a history, the same with an empty memory. They must not be changed later."""
        shared, elements, digests = 0, Prefix[Any](), Prefix[bytes]()
        for place, view in enumerate(self._views):
            common = view[0].common(history)
            if common > shared:
                shared, (elements, digests) = common, view
            if common and common == len(view[0]):
                del self._views[place]  # what a request extends is not needed any more
                break
        last = digests[shared - 1] if shared else b""
        new = [last := _digest(last + _canonical(element)) for element in history[shared:]]
        self._views = [(elements.grown(shared, history[shared:]), digests.grown(shared, new)), *self._views][:_VIEWS]
        return last


def request_fingerprint(route: str, body: Mapping[str, Any], memo: FingerprintMemo | None = None) -> str:
    """A digest of what is asked for, whatever the order of its keys. With a ``memo`` it costs what is new. Raises
    `InvalidBodyError` for a body that is nested too deeply."""
    memo = memo or FingerprintMemo()
    given = {key: value for key, value in body.items() if key not in _NOT_THE_REQUEST}
    histories = [(key, given.pop(key)) for key in _HISTORIES if isinstance(given.get(key), list)]
    told = [memo.parameters(route, given)]
    for key, history in histories:
        told += (key.encode(), memo.digest(history))
    return _digest(b"/".join(told)).hex()


def _canonical(value: Any) -> bytes:
    try:
        # Some levels around it: what is taken here is also written inside of records and replies.
        return orjson.dumps([[[[[[[[[[value]]]]]]]]]], option=_OPTIONS)
    except TypeError:  # all that was read can be written, but for depth: 1,024 levels are read and 254 are written
        raise InvalidBodyError("the body is nested too deeply: at most 240 levels are taken") from None


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
