"""Drawing one token from the model's distribution, as engines do."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from nemo_gym_testing.gateway.asked import Draw
from nemo_gym_testing.gateway.tiny.model import Floats, Logprobs


def draw_token(
    logits: Floats, draw: Draw, seen: Counter[int], prompt: frozenset[int], rng: np.random.Generator
) -> int:
    """Return a token id. ``seen``: how often each token was sampled in this answer; ``prompt``: the prompt's tokens
    (used by the repetition penalty only)."""
    scores = _penalised(logits.astype(np.float64), draw, seen, prompt)
    if draw.temperature <= 0:
        return int(np.argmax(scores))
    scores = (scores - np.max(scores)) / draw.temperature
    if 0 < draw.top_k < len(scores):
        scores[scores < np.partition(scores, -draw.top_k)[-draw.top_k]] = -np.inf
    probabilities: NDArray[np.float64] = np.exp(scores)
    probabilities /= probabilities.sum()
    if draw.min_p > 0:
        probabilities[probabilities < draw.min_p * np.max(probabilities)] = 0
    if draw.top_p < 1:
        order = np.argsort(-probabilities, kind="stable")
        before = np.cumsum(probabilities[order]) - probabilities[order]
        probabilities[order[before >= max(draw.top_p, 1e-9)]] = 0
    total = np.cumsum(probabilities)
    at = int(np.searchsorted(total, rng.random() * total[-1], side="right"))
    return min(at, int(np.flatnonzero(probabilities)[-1]))


def _penalised(scores: Logprobs, draw: Draw, seen: Counter[int], prompt: frozenset[int]) -> Logprobs:
    if seen and (draw.presence_penalty or draw.frequency_penalty):
        ids = list(seen)
        scores[ids] -= draw.presence_penalty + draw.frequency_penalty * np.array([seen[token] for token in ids])
    if draw.repetition_penalty != 1:
        ids = list(prompt.union(seen))
        scores[ids] = np.where(
            scores[ids] > 0, scores[ids] / draw.repetition_penalty, scores[ids] * draw.repetition_penalty
        )
    return scores
