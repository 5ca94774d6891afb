"""One call in the model: its prompt chunk by chunk, its answer token by token."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from nemo_gym_testing.gateway.asked import Asked
from nemo_gym_testing.gateway.tiny.model import CHUNK, Floats, KeyValues, TinyModel, log_softmax
from nemo_gym_testing.gateway.tiny.prefixes import PrefixCache
from nemo_gym_testing.gateway.tiny.sampling import draw_token

_TAIL_TOKENS = 32
"""Sampled tokens that are decoded to look for stop strings."""


class Generation:
    """Runs in the engine's model thread; ``cancel`` may be called from any thread."""

    def __init__(
        self,
        asked: Asked,
        model: TinyModel,
        prefixes: PrefixCache,
        *,
        end_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        rng: np.random.Generator,
        forced: Sequence[int] | None = None,
    ) -> None:
        """``forced``: the ids to take instead of sampled ones; their logprobs are still the model's."""
        self.asked = asked
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        """Natural logarithms under the raw distribution: at temperature 1, before any truncation or penalty."""
        self.finish: str | None = None
        self.stop_reason: str | int | None = None
        self.cached_tokens = 0
        self._model = model
        self._prefixes = prefixes
        self._end_ids = frozenset() if asked.ignore_end else end_ids
        self._decode = decode
        self._rng = rng
        self._forced = forced
        self._prompt = np.asarray(asked.prompt_ids, dtype=np.int64)
        self._cache: KeyValues | None = None
        self._last: Floats | None = None
        self._seen: Counter[int] = Counter()
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Stop before the next token, or the next chunk of the prompt."""
        self._cancelled.set()

    @property
    def done(self) -> bool:
        return self.finish is not None or self._cancelled.is_set()

    def advance(self, tokens: int) -> None:
        """Compute the next chunk of the prompt, or up to ``tokens`` tokens of the answer."""
        if self._cache is None:
            self._cache = self._prefixes.start(self._prompt)
            self.cached_tokens = self._cache.count
        if self._cache.count < len(self._prompt) and not self.done:
            self._last = self._model.forward(self._prompt[self._cache.count :][:CHUNK], self._cache)[-1]
            return
        for _ in range(tokens):
            if self.done:
                return
            self._step()

    def release(self) -> None:
        """Keep the computed keys and values in the prefix cache, for later calls."""
        if self._cache is not None and self._cache.count:
            self._prefixes.keep(np.concatenate([self._prompt, np.array(self.token_ids, dtype=np.int64)]), self._cache)

    def _step(self) -> None:
        assert self._cache is not None and self._last is not None
        if len(self.token_ids) >= self.asked.max_tokens:
            self.finish = "length"
            return
        logits = self._model.logits(self._last)
        at = len(self.token_ids)
        if self._forced is not None:
            token = self._forced[at]
        else:
            token = draw_token(logits, self.asked.draw, self._seen, frozenset(self._prompt_set()), self._rng)
        self.token_ids.append(token)
        self.logprobs.append(float(log_softmax(logits)[token]))
        self._seen[token] += 1
        self._update_finish(token)
        if self.finish is None:
            self._last = self._model.forward(np.array([token], dtype=np.int64), self._cache)[-1]

    def _update_finish(self, token: int) -> None:
        asked = self.asked
        if token in asked.stop_ids:
            self.finish, self.stop_reason = "stop", token
        elif token in self._end_ids:
            self.finish = "stop"
        elif stop_string := self._stop_string():
            self.finish, self.stop_reason = "stop", stop_string
        elif self._forced is not None and len(self.token_ids) == len(self._forced):
            self.finish = "stop"
        elif len(self.token_ids) >= asked.max_tokens:
            self.finish = "length"

    def _stop_string(self) -> str | None:
        if not self.asked.stop:
            return None
        text = self._decode(self.token_ids[-_TAIL_TOKENS:])
        return next((stop for stop in self.asked.stop if stop in text), None)

    def _prompt_set(self) -> Sequence[int]:
        # The set of prompt tokens is only built if the penalty needs it.
        return self._prompt.tolist() if self.asked.draw.repetition_penalty != 1 else ()
