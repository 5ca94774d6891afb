"""A policy whose tokenizer has as many entries as real ones: byte-level BPE, learnt once from Python source on this
machine and kept in the cache directory."""

from __future__ import annotations

import random
import shutil
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from nemo_gym_testing.gateway.tiny.policies import FAMILIES, make_policy

ENTRIES = 150_000
_LEARNT_FROM_BYTES = 48 << 20
_FAMILY = "chatml_think"
# Qwen's expression: its vocabularies have about 150,000 entries.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_large_policy(directory: Path, cache: Path) -> Path:
    """Write the policy into ``directory``. Learning the tokenizer takes about a minute the first time."""
    make_policy(directory, _FAMILY)
    learnt = cache / f"bpe-{ENTRIES}.json"
    if not learnt.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = learnt.with_suffix(".partial")
        _learn().save(str(partial))
        partial.rename(learnt)
    shutil.copy(learnt, directory / "tokenizer.json")
    return directory


@lru_cache(maxsize=1)
def tool_outputs(count: int = 64, size: int = 2000) -> list[str]:
    """Return texts that agents read: ``count`` random passages of source files, of ``size`` characters each."""
    texts = [file.read_text(errors="replace") for file in sorted(_stdlib().glob("*.py"))]
    source = random.Random(5)
    passages: list[str] = []
    while len(passages) < count:
        text = source.choice(texts)
        if len(text) > 2 * size:
            start = source.randrange(len(text) - size)
            passages.append(text[start : start + size])
    return passages


def _stdlib() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _corpus() -> Iterator[str]:
    left = _LEARNT_FROM_BYTES
    for folder in (_stdlib(), Path(sysconfig.get_path("purelib"))):
        for file in sorted(folder.rglob("*.py")):
            text = file.read_text(errors="replace")
            left -= len(text)
            if left < 0:
                return
            yield text


def _learn() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = FAMILIES[_FAMILY].special
    trainer = trainers.BpeTrainer(
        vocab_size=ENTRIES - len(special),
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer
