"""A small decoder-only transformer in numpy: real attention, real logits, no training.

Rotary positions, RMSNorm, normalised queries and keys, SwiGLU, full causal attention, float32. Its weights are random,
but their scale is chosen so that the distributions are far from uniform and answers end by themselves now and then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import orjson
from numpy.typing import NDArray

from nemo_gym.contract.errors import ConfigError

Floats: TypeAlias = NDArray[np.float32]
Logprobs: TypeAlias = NDArray[np.float64]
CHUNK = 512
"""Tokens per forward pass of a prefill. Limits the attention scores to ``CHUNK`` × context × 4 bytes."""
_WEIGHTS = "model.npz"
_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes in numbers of values. ``logit_scale``: about the standard deviation of the logits."""

    vocabulary: int
    layers: int = 2
    width: int = 64
    heads: int = 2
    head_width: int = 16
    hidden: int = 160
    rope_base: float = 100_000.0
    logit_scale: float = 2.0
    end_logit: float = 6.5
    """Added to the logits of the tokens that end a turn."""


class KeyValues:
    """Keys and values of one sequence's tokens so far; grows as needed."""

    def __init__(self, shape: ModelShape, capacity: int = 256) -> None:
        self.count = 0
        """Number of tokens stored."""
        self.keys: Floats = np.empty((shape.layers, shape.heads, capacity, shape.head_width), np.float32)
        # The last column is one, so that the product with the scores' exponentials also gives their sum.
        self.values: Floats = np.ones((shape.layers, shape.heads, capacity, shape.head_width + 1), np.float32)

    def reserve(self, more: int) -> None:
        """Make room for ``more`` tokens."""
        capacity = self.keys.shape[2]
        if self.count + more <= capacity:
            return
        capacity = max(self.count + more, capacity * 3 // 2)
        self.keys, self.values = (self._grown(old, capacity) for old in (self.keys, self.values))

    def copy(self, count: int) -> KeyValues:
        """Return a copy of the first ``count`` tokens, to continue from."""
        copied = object.__new__(KeyValues)
        copied.count = count
        copied.keys, copied.values = (self._grown(old, count + CHUNK, count) for old in (self.keys, self.values))
        return copied

    def _grown(self, old: Floats, capacity: int, count: int | None = None) -> Floats:
        count = self.count if count is None else count
        new: Floats = np.empty((*old.shape[:2], capacity, old.shape[3]), np.float32)
        new[:, :, :count] = old[:, :, :count]
        if old is self.values:
            new[:, :, count:, -1] = 1
        return new


class TinyModel:
    """The model of a policy directory. ``forward`` changes nothing but the given keys and values."""

    def __init__(self, shape: ModelShape, weights: dict[str, Floats]) -> None:
        self.shape = shape
        self.weights = weights
        exponents = -np.arange(shape.head_width // 2) * 2 / shape.head_width
        self._frequencies: NDArray[np.float64] = np.power(shape.rope_base, exponents)

    @classmethod
    def random(cls, vocabulary: int, end_ids: Iterable[int], seed: int) -> TinyModel:
        """A model whose weights are drawn with ``seed``."""
        shape = ModelShape(vocabulary)
        draw = np.random.default_rng(seed)

        def matrix(rows: int, columns: int, gain: float = 1.0) -> Floats:
            made: Floats = (draw.standard_normal((rows, columns)) * gain / np.sqrt(rows)).astype(np.float32)
            return made

        inner = shape.heads * shape.head_width
        weights = {
            "embedding": draw.standard_normal((vocabulary, shape.width)).astype(np.float32),
            "head": matrix(shape.width, vocabulary, shape.logit_scale),
            "bias": np.zeros(vocabulary, np.float32),
        }
        ends = list(end_ids)
        weights["bias"][ends] = shape.end_logit
        weights["head"][:, ends] *= 0.25  # equally likely at every position: answers have a few dozen tokens
        for layer in range(shape.layers):
            for name in ("q", "k", "v"):
                weights[f"{layer}.{name}"] = matrix(shape.width, inner)
            weights[f"{layer}.o"] = matrix(inner, shape.width)
            weights[f"{layer}.gate"] = matrix(shape.width, shape.hidden)
            weights[f"{layer}.up"] = matrix(shape.width, shape.hidden)
            weights[f"{layer}.down"] = matrix(shape.hidden, shape.width)
            # Sharper than uniform attention, so that tokens far back matter.
            weights[f"{layer}.sharpness"] = np.full(shape.heads, 2.0, np.float32)
        return cls(shape, weights)

    @classmethod
    def load(cls, directory: str | Path) -> TinyModel:
        """Raises `ConfigError` naming the file that is missing."""
        folder = Path(directory)
        for name in (_CONFIG, _WEIGHTS):
            if not (folder / name).is_file():
                raise ConfigError(f"policy: '{folder / name}' does not exist; `make_policy` writes a whole directory")
        shape = ModelShape(**orjson.loads((folder / _CONFIG).read_bytes())["shape"])
        with np.load(folder / _WEIGHTS, allow_pickle=False) as file:
            return cls(shape, {name: file[name] for name in file.files})

    def save(self, directory: Path) -> None:
        config = {"model_type": "tiny", "vocab_size": self.shape.vocabulary, "shape": asdict(self.shape)}
        (directory / _CONFIG).write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2))
        with (directory / _WEIGHTS).open("wb") as file:
            np.savez(file, allow_pickle=False, **self.weights)

    def forward(self, ids: NDArray[np.int64], cache: KeyValues) -> Floats:
        """The last layer's output for ``ids``, which follow the tokens in ``cache`` and are added to it:
        ``float32 [len(ids), width]``. At most `CHUNK` ids at once."""
        shape, weights = self.shape, self.weights
        count, start = len(ids), cache.count
        end = start + count
        cache.reserve(count)
        rotation = self._rotation(start, count)
        hidden = weights["embedding"][ids]
        for layer in range(shape.layers):
            x = _rms_norm(hidden)
            q, k, v = (
                (x @ weights[f"{layer}.{name}"]).reshape(count, shape.heads, -1).transpose(1, 0, 2) for name in "qkv"
            )
            cache.keys[layer, :, start:end] = _rotated(_rms_norm(k), rotation)
            cache.values[layer, :, start:end, :-1] = v
            q = _rotated(_rms_norm(q), rotation) * (
                weights[f"{layer}.sharpness"][:, None, None] / np.float32(np.sqrt(shape.head_width))
            )
            attended = self._attended(q, cache.keys[layer, :, :end], cache.values[layer, :, :end])
            hidden = hidden + attended.transpose(1, 0, 2).reshape(count, -1) @ weights[f"{layer}.o"]
            x = _rms_norm(hidden)
            gate = x @ weights[f"{layer}.gate"]
            hidden = hidden + (gate / (1 + np.exp(-gate)) * (x @ weights[f"{layer}.up"])) @ weights[f"{layer}.down"]
        cache.count = end
        return hidden

    def logits(self, hidden: Floats) -> Floats:
        """``float32 [..., vocabulary]``."""
        made: Floats = _rms_norm(hidden) @ self.weights["head"] + self.weights["bias"]
        return made

    def _attended(self, q: Floats, keys: Floats, values: Floats) -> Floats:
        heads, count, _ = q.shape
        end = keys.shape[1]
        output: Floats = np.empty((heads, count, values.shape[2] - 1), np.float32)
        for head in range(heads):
            scores = q[head] @ keys[head].T
            # Queries and keys have a fixed length, so scores are small, and subtracting the largest before the
            # exponential is unnecessary.
            np.exp(scores, out=scores)
            if count > 1:
                scores[:, end - count :] *= np.tri(count, dtype=np.float32)
            summed = scores @ values[head]
            output[head] = summed[:, :-1] / summed[:, -1:]
        return output

    def _rotation(self, start: int, count: int) -> tuple[Floats, Floats]:
        angles = np.arange(start, start + count)[:, None] * self._frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def log_softmax(logits: Floats) -> Logprobs:
    """Natural logarithms of the probabilities, in float64, along the last axis."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide


def recompute(
    model: TinyModel | str | Path, ids: Sequence[int] | NDArray[np.int64], wanted: NDArray[np.bool_] | None = None
) -> Logprobs:
    """Return the logprob of every token given those before it, from a forward pass of a model or a policy directory:
    ``float64 [len(ids)]``. NaN for the first token, which nothing precedes, and for tokens that are not ``wanted``."""
    model = model if isinstance(model, TinyModel) else TinyModel.load(model)
    tokens: NDArray[np.int64] = np.asarray(ids, dtype=np.int64)
    cache = KeyValues(model.shape, len(tokens))
    found: Logprobs = np.full(len(tokens), np.nan)
    for start in range(0, len(tokens), CHUNK):
        hidden = model.forward(tokens[start : start + CHUNK], cache)
        places = np.arange(start + 1, min(start + 1 + len(hidden), len(tokens)))
        if wanted is not None:
            places = places[wanted[places]]
        if len(places):
            table = log_softmax(model.logits(hidden[places - 1 - start]))
            found[places] = table[np.arange(len(places)), tokens[places]]
    return found


def _rms_norm(x: Floats) -> Floats:
    scale: Any = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6))  # numpy 2.5 types it as float64
    made: Floats = x / scale
    return made


def _rotated(x: Floats, rotation: tuple[Floats, Floats]) -> Floats:
    cosine, sine = rotation
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    made: Floats = np.concatenate((first * cosine - second * sine, first * sine + second * cosine), axis=-1)
    return made
