"""Token ids to text for byte-level vocabularies: bytes of each token looked up and joined.

In such a vocabulary every token is a string of bytes, written in an alphabet of 256 printable characters, and a text
is those bytes one after the other. The tokenizer makes a string of each token anew; a token's bytes never change.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from nemo_gym.gateway.packed import LARGE, packed

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

_PRINTABLE = [*chain(range(ord("!"), ord("~") + 1), range(ord("¡"), ord("¬") + 1), range(ord("®"), ord("ÿ") + 1))]
_OTHERS = [byte for byte in range(256) if byte not in {*_PRINTABLE}]
BYTES = {chr(byte): chr(byte) for byte in _PRINTABLE}
BYTES |= {chr(256 + place): chr(byte) for place, byte in enumerate(_OTHERS)}
"""The alphabet: a byte's own character of Latin-1 where that can be printed, else one further on."""


class TokenBytes:
    """What each token of a byte-level vocabulary is, found out when it is first asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self._known: dict[int, str] = {}
        """Tokens' bytes as characters of Latin-1: strings are joined in half the time that bytes are."""
        self._table: np.ndarray[Any, Any] | None = None
        """The same by place, for answers that are long."""

    def text(self, ids: Sequence[int]) -> str:
        """As ``tokenizer.decode(ids, skip_special_tokens=False)``: ids that are no token's are nothing, and bytes that
        are no UTF-8 are replaced. Raises `OverflowError` for what cannot be an id."""
        if len(ids) < LARGE or (found := self._looked_up(ids)) is None:
            known = self._known
            found = "".join([known[one] if one in known else self._found(one) for one in ids])
        return found if found.isascii() else found.encode("latin-1").decode(errors="replace")

    def _looked_up(self, ids: Sequence[int]) -> str | None:
        """Nothing where one of them is beyond the vocabulary."""
        import numpy as np

        try:
            places = np.frombuffer(packed("i", ids), dtype=np.int32)
        except (TypeError, OverflowError):
            return None
        if np.min(places) < 0 or np.max(places) >= self._size:
            return None
        if self._table is None:
            self._table = np.full(self._size, None, dtype=object)
        try:
            return "".join(self._table[places].tolist())
        except TypeError:  # some have not been asked for before
            for one in np.unique(places).tolist():
                self._table[one] = self._found(one)
            return "".join(self._table[places].tolist())

    def _found(self, token_id: int) -> str:
        if (found := self._known.get(token_id)) is not None:
            return found
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        try:
            found = "".join([BYTES[char] for char in token])
        except KeyError:  # an added token, written as it is
            found = token.encode().decode("latin-1")
        self._known[token_id] = found
        return found


def token_bytes(tokenizer: Tokenizer) -> TokenBytes | None:
    """Nothing for a tokenizer whose tokens are not bytes, or whose texts are more than their tokens joined."""
    if tokenizer.decoder is None:
        return None
    settings = json.loads(tokenizer.decoder.__getstate__())
    return TokenBytes(tokenizer) if settings.get("type") == "ByteLevel" else None
