from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nemo_gym.gateway.policy_request import LARGE
from nemo_gym.gateway.tokens.byte_level import token_bytes
from tests.gateway.tokens.policies import FAMILIES, policy
from tests.properties import examples

BYTE_LEVEL = tuple(family for family in FAMILIES if family != "inst_strict")


def test_every_family_but_the_one_with_spaces_as_symbols_is_looked_up() -> None:
    assert [family for family in FAMILIES if token_bytes(policy(family).tokenizer) is None] == ["inst_strict"]


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@examples(60)
def test_text_is_the_tokenizers_own_for_any_ids(family: str, data: st.DataObject) -> None:
    """Special tokens among them, bytes that are no UTF-8, ids that are no token's; short and long answers."""
    tokenizer = policy(family).tokenizer
    beyond = policy(family).vocabulary_size + 3
    ids = data.draw(st.lists(st.integers(0, beyond), max_size=40))
    ids = ids * data.draw(st.sampled_from([1, 1 + LARGE // max(1, len(ids))]))
    assert policy(family).decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)
    assert policy(family).decode(ids, skip_special_tokens=True) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("family", BYTE_LEVEL)
def test_long_answers_are_the_tokenizers_own_text_whichever_tokens_were_seen_before(family: str) -> None:
    tokenizer, size = policy(family).tokenizer, policy(family).vocabulary_size
    pieces = token_bytes(tokenizer)
    assert pieces is not None
    source = random.Random(7)
    for most in (20, size // 2, size, size):
        ids = [source.randrange(most) for _ in range(3 * LARGE)]
        for form in (ids, tuple(ids), array("i", ids)):
            assert pieces.text(form) == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("length", [3, 2 * LARGE])
def test_what_cannot_be_an_id_is_refused_as_the_tokenizer_does(length: int) -> None:
    tokenizer = policy("chatml_think").tokenizer
    pieces = token_bytes(tokenizer)
    assert pieces is not None
    for wrong in (-1, 2**32):
        with pytest.raises(OverflowError):
            tokenizer.decode([5] * length + [wrong])
        with pytest.raises(OverflowError):
            pieces.text([5] * length + [wrong])


def test_every_byte_and_added_tokens_of_any_script_are_the_tokenizers_own() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: place for place, char in enumerate(alphabet)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    added = ["<｜User｜>", "é", "Ġ", "a b", "\n", "né", "漢", "Ã©"]
    tokenizer.add_tokens([AddedToken(text, special=text.startswith("<")) for text in added])
    pieces = token_bytes(tokenizer)
    assert pieces is not None
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    assert size > 256
    for one in range(size):
        assert pieces.text([one]) == tokenizer.decode([one], skip_special_tokens=False)
    source = random.Random(11)
    for _ in range(2000):  # cut and joined anywhere, so that replacement characters are counted alike
        ids = [source.randrange(size) for _ in range(source.randrange(12))]
        assert pieces.text(ids) == tokenizer.decode(ids, skip_special_tokens=False)


def test_a_decoder_that_does_more_than_join_is_left_to_the_tokenizer() -> None:
    tokenizer = Tokenizer(models.BPE())
    assert token_bytes(tokenizer) is None
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    assert token_bytes(tokenizer) is None
