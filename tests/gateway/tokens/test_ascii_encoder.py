"""Words that are looked up are what the tokenizer itself makes of the text."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from nemo_gym.gateway.tokens.byte_level import AsciiEncoder, UnknownSyntaxError, ascii_encoder, ascii_pattern
from tests.gateway.tokens.policies import CORPUS, FAMILIES, policy
from tests.properties import examples

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
STAGES = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
GAPS = (r"\p{L}+",)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|im|>", "<｜User｜>")


def made(
    *patterns: str,
    digits: bool = False,
    added: Callable[[str], AddedToken] = lambda text: AddedToken(text, special=True, normalized=False),
    normalizer: normalizers.Normalizer | None = None,
    use_regex: bool = False,
    add_prefix_space: bool = False,
    behavior: str = "isolated",
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps += [pre_tokenizers.Split(Regex(pattern), behavior=behavior) for pattern in patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*CORPUS, "It's WE'LL don't été naïve 日本語"], trainer)
    tokenizer.add_tokens([added(text) for text in SPECIAL])
    return tokenizer


MADE = {
    "gpt2": made(use_regex=True),
    "qwen": made(QWEN, normalizer=normalizers.NFC()),
    "llama": made(LLAMA),
    "cases": made(CASES),
    "stages": made(*STAGES),
    "digits": made(use_regex=True, digits=True),
    "gaps": made(*GAPS),
    "normalized": made(QWEN, added=lambda text: AddedToken(text, normalized=True), normalizer=normalizers.NFC()),
    "mixed": made(QWEN, added=lambda text: AddedToken(text, normalized="start" in text)),
}


def words_of(name: str) -> AsciiEncoder:
    words = ascii_encoder(MADE[name])
    assert words is not None, name
    return words


WORDS = {name: words_of(name) for name in MADE}
PIECES = st.one_of(
    st.sampled_from([*SPECIAL, "<|im", "im_end|>", "'s", "'LL", "\r\n", "  ", "\n\n", " the", "camelCase", "12345"]),
    st.text(st.characters(max_codepoint=127), max_size=12),
    st.text(st.characters(codec="utf-8"), max_size=4),
)


@pytest.mark.parametrize("name", MADE)
@given(pieces=st.lists(PIECES, max_size=12))
@examples(300)
def test_a_text_is_encoded_as_the_tokenizer_does(name: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    ids = MADE[name].encode(text, add_special_tokens=False).ids
    assert WORDS[name].encode(text) == ids
    assert WORDS[name].encode(text) == ids  # what was looked up the first time as well


@pytest.mark.parametrize("name", MADE)
def test_every_two_ascii_characters_are_encoded_as_the_tokenizer_does(name: str) -> None:
    chars = [*map(chr, range(128))]
    random.Random(1).shuffle(chars)
    for first in chars:
        text = "x".join(first + second for second in chars)
        assert WORDS[name].encode(text) == MADE[name].encode(text, add_special_tokens=False).ids, repr(first)


def test_more_words_than_are_remembered_are_encoded_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_gym.gateway.tokens.byte_level._MAX_WORDS", 10)
    words = words_of("llama")
    text = " ".join(f"word{number} {'long' * 40}" for number in range(100))
    assert words.encode(text) == MADE["llama"].encode(text, add_special_tokens=False).ids
    assert len(words._known) <= 10


def test_a_policy_uses_words_where_its_vocabulary_is_bytes() -> None:
    for family in FAMILIES:
        assert (policy(family)._words is None) == (family == "inst_strict"), family


@pytest.mark.parametrize(
    "tokenizer",
    [
        made(QWEN, added=lambda text: AddedToken(text, lstrip=True)),
        made(QWEN, added=lambda text: AddedToken(text, rstrip=True)),
        made(QWEN, added=lambda text: AddedToken(text, single_word=True)),
        made(QWEN, add_prefix_space=True),
        made(QWEN, normalizer=normalizers.Lowercase()),
        made(QWEN, behavior="removed"),
        made(r"\p{Alphabetic}+|."),
    ],
    ids=["lstrip", "rstrip", "single_word", "prefix_space", "normalizer", "removed", "property"],
)
def test_a_tokenizer_that_does_more_is_left_to_itself(tokenizer: Tokenizer) -> None:
    assert ascii_encoder(tokenizer) is None


def test_a_tokenizer_that_cuts_texts_off_is_left_to_itself() -> None:
    tokenizer = made(QWEN)
    tokenizer.enable_truncation(100)
    assert ascii_encoder(tokenizer) is None


def test_a_tokenizer_that_does_otherwise_than_its_settings_say_is_left_to_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nemo_gym.gateway.tokens.byte_level.ascii_pattern", lambda source: r"\S+|\s+")
    assert ascii_encoder(MADE["llama"]) is None


@pytest.mark.parametrize(
    "source",
    ["^a", "a$", ".", r"\bword", "(?<=a)b", "[a[b]]", "[[:alpha:]]", "[a&&b]", "a{2}+", r"\h", r"\x41", "[]a]"],
)
def test_what_means_something_else_in_python_is_refused(source: str) -> None:
    with pytest.raises(UnknownSyntaxError):
        ascii_pattern(source)
