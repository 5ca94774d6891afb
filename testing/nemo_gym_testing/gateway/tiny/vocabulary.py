"""The tokenizer of the tiny policies: byte-level BPE whose merges were learnt once, from this project's
text, Python's documentation and made-up tool calls.

``merges.txt`` holds the merges, so that making a policy is reproducible and takes milliseconds. To learn them anew:

    python -m nemo_gym_testing.gateway.tiny.vocabulary FILE... > merges.txt
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

MERGES = 3_800
"""With the bytes and the special tokens, a vocabulary just under 4,096."""
# Line breaks are separate words, as in current policies: a prompt's last tokens do not depend on the answer after it.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_FILE = Path(__file__).with_name("merges.txt")


def tokenizer(special: Sequence[str]) -> Tokenizer:
    """Return the tokenizer with ``special`` as its first ids."""
    merges = [tuple(line.split(" ")) for line in _FILE.read_text(encoding="utf-8").splitlines()]
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    made = _split(Tokenizer(models.BPE(vocabulary, [(first, second) for first, second in merges])))
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return made


def learn(texts: Iterable[str]) -> list[str]:
    """Learn the merges of ``texts``: the most useful first, each as ``left right``."""
    learner = _split(Tokenizer(models.BPE()))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + MERGES, initial_alphabet=alphabet, show_progress=False, max_token_length=16
    )
    learner.train_from_iterator(texts, trainer)
    return [" ".join(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]


def _split(made: Tokenizer) -> Tokenizer:
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    return made


if __name__ == "__main__":
    learnt = learn(Path(name).read_text(encoding="utf-8", errors="replace") for name in sys.argv[1:])
    sys.stdout.write("\n".join(learnt) + "\n")
