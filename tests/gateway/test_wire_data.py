"""JSON in pieces is the JSON it would have been as a whole."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from nemo_gym.gateway.journal_log import framed, read_frames
from nemo_gym.gateway.policy_request import JsonText, coalesced, size_of, written

LARGE = orjson.dumps([*range(50_000)])


@pytest.mark.parametrize(
    "content",
    [
        {"a": JsonText(b"[1, 2]"), "b": {"c": [JsonText(memoryview(LARGE)), "relayed-", None]}},
        {"plain": "text"},
        JsonText(b'{"x":1.50}'),
        [JsonText(b"null")] * 3,
    ],
)
def test_pieces_joined_are_the_content_with_texts_to_the_byte(content: Any) -> None:
    def plain(value: Any) -> Any:
        if isinstance(value, JsonText):
            return orjson.Fragment(bytes(value.data))
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    pieces = written(content)
    assert b"".join(pieces) == b"".join(coalesced(pieces)) == orjson.dumps(plain(content))
    assert size_of(pieces) == len(b"".join(pieces))


def test_large_texts_are_pieces_of_their_own_and_small_neighbours_are_joined() -> None:
    view = memoryview(LARGE)
    found = [*coalesced(written({"a": JsonText(b"1"), "b": JsonText(view), "c": JsonText(b"2")}))]
    assert found == [b'{"a":1,"b":', view, b',"c":2}']
    assert found[1] is view


def test_content_that_is_no_json_is_refused() -> None:
    with pytest.raises(TypeError, match=r"object is no JSON data|not JSON serializable"):
        written({"a": object()})


@pytest.mark.parametrize(("text", "something"), [(b"", False), (b"null", False), (b"[]", False), (b"[0]", True)])
def test_text_is_false_where_it_says_nothing(text: bytes, something: bool) -> None:
    assert bool(JsonText(text)) is bool(JsonText(memoryview(text))) is something


def test_frame_of_pieces_is_the_frame_of_the_whole() -> None:
    pieces = [b"head\n", memoryview(LARGE), b"", b"tail"]
    whole = b"".join(pieces)
    assert b"".join(framed(pieces)) == b"".join(framed((whole,)))
    assert [bytes(payload) for payload in read_frames(b"".join(framed((whole,)))).payloads] == [whole]
