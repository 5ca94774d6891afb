"""A fake engine's samples: a function of the prompt and of the number of calls so far."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

VOCABULARY = 1000
END_ID = 2


@dataclass(frozen=True, slots=True)
class Sampled:
    """One answer: ids, the logprob of each, and whether it ended before the budget ran out: by the end token, or by
    the stop string ``stop_reason``, which its tokens include."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool
    stop_reason: str | None = None


Sampler = Callable[[Sequence[int], int, int], Sampled]
"""Called with the prompt ids, the token budget and the number of the call."""


def hashed_sampler(length: int = 8) -> Sampler:
    """Return a sampler of answers with ``length`` tokens, the end token last. They differ from call to call even for
    the same prompt, so that a test can tell a repeated answer from a new sample."""

    def sample(prompt_ids: Sequence[int], max_tokens: int, call: int) -> Sampled:
        digest = hashlib.sha256(f"{list(prompt_ids)}:{call}".encode()).digest()
        ids = [3 + (digest[i % 32] * 7 + i) % (VOCABULARY - 3) for i in range(length - 1)] + [END_ID]
        sampled = ids[:max_tokens]
        return Sampled(
            tuple(sampled),
            tuple(-(1 + digest[i % 32]) / 64 for i in range(len(sampled))),
            stopped=len(sampled) == length,
        )

    return sample
