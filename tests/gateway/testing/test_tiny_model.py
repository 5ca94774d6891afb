"""The tiny model: what it computes in pieces is what it computes at once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from nemo_gym.contract.errors import ConfigError
from nemo_gym.gateway.tokens import PolicyTokenizer
from nemo_gym_testing.gateway.asked import Draw
from nemo_gym_testing.gateway.tiny import FAMILIES, TinyModel, make_policy, recompute
from nemo_gym_testing.gateway.tiny.model import CHUNK, KeyValues, log_softmax
from nemo_gym_testing.gateway.tiny.prefixes import PrefixCache
from nemo_gym_testing.gateway.tiny.sampling import draw_token
from tests.gateway.testing.runs import policy, policy_dir

TEXT = "The tests fail because `parse(value)` returns None when the input is empty.\n" * 60


def model(family: str = "chatml_think") -> TinyModel:
    return TinyModel.load(policy_dir(family))


def random_ids(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.default_rng(5).integers(0, 4000, count)


def test_logprobs_of_cached_decoding_equal_full_recomputation() -> None:
    used, ids = model(), random_ids(CHUNK + 300)
    whole = recompute(used, ids)
    cache = KeyValues(used.shape)
    last = used.forward(ids[: CHUNK - 3], cache)[-1]
    last = used.forward(ids[CHUNK - 3 : CHUNK + 100], cache)[-1]
    decoded = []
    for token in ids[CHUNK + 100 :]:
        decoded.append(log_softmax(used.logits(last))[token])
        last = used.forward(np.array([token]), cache)[-1]
    assert np.abs(np.array(decoded) - whole[CHUNK + 100 :]).max() < 1e-5


def test_tokens_depend_on_everything_before_them_and_nothing_behind() -> None:
    used, ids = model(), random_ids(900)
    whole = recompute(used, ids)
    changed = ids.copy()
    changed[3] += 1
    assert np.all(recompute(used, changed)[4:] != whole[4:])
    cut = recompute(used, ids[:700])
    assert np.allclose(cut[1:], whole[1:700], atol=1e-5)


def test_wanted_logprobs_are_those_of_the_whole() -> None:
    used, ids = model(), random_ids(CHUNK * 2 + 5)
    wanted = np.zeros(len(ids), dtype=bool)
    wanted[[1, CHUNK - 1, CHUNK, CHUNK + 1, len(ids) - 1]] = True
    some, whole = recompute(used, ids, wanted), recompute(policy_dir("chatml_think"), ids)
    assert np.allclose(some[wanted], whole[wanted], atol=1e-5) and np.isnan(some[~wanted]).all()


def test_prefix_cache_gives_the_same_logprobs_and_only_computes_what_is_new() -> None:
    used, ids = model(), random_ids(400)
    prefixes = PrefixCache(used.shape)
    cache = KeyValues(used.shape)
    used.forward(ids[:300], cache)
    prefixes.keep(ids, cache)
    again = prefixes.start(ids)
    assert again.count == 300
    sibling = np.concatenate([ids[:200], ids[:50]])
    other = prefixes.start(sibling)
    assert other.count == 200
    used.forward(sibling[200:], other)
    last = used.forward(ids[300:399], again)[-1]
    assert log_softmax(used.logits(last))[ids[399]] == pytest.approx(recompute(used, ids)[399], abs=1e-5)
    assert prefixes.start(ids[:1]).count == 0, "the last token's output is what is sampled from"


def test_prefix_cache_forgets_the_longest_unused_and_what_a_longer_one_holds() -> None:
    used = model()
    prefixes = PrefixCache(used.shape, max_tokens=250)
    made = [random_ids(100) + number for number in range(3)]
    for ids in made:
        cache = KeyValues(used.shape)
        used.forward(ids, cache)
        prefixes.keep(ids, cache)
    assert [prefixes.start(ids).count for ids in made] == [0, 99, 99]
    longer = prefixes.start(np.append(made[2], 7))
    used.forward(np.array([7]), longer)
    prefixes.keep(np.append(made[2], 7), longer)
    assert prefixes.tokens == 201


@pytest.mark.parametrize("family", FAMILIES)
def test_policy_is_the_same_for_the_same_seed_and_complete(family: str, tmp_path: Path) -> None:
    first, second = make_policy(tmp_path / "a", family, 3), make_policy(tmp_path / "b", family, 3)
    names = sorted(file.name for file in first.iterdir())
    assert len(names) == 6
    for name in names:
        if name != "model.npz":
            assert (first / name).read_bytes() == (second / name).read_bytes()
    ids = random_ids(50)
    assert np.array_equal(recompute(first, ids)[1:], recompute(second, ids)[1:])
    assert not np.array_equal(recompute(first, ids)[1:], recompute(make_policy(second, family, 4), ids)[1:])
    assert PolicyTokenizer.load(first).vocabulary_size == TinyModel.load(first).shape.vocabulary


def test_prompts_take_few_tokens_and_decode_to_themselves() -> None:
    used = policy("chatml_think")
    source = Path(recompute.__code__.co_filename).read_text()
    schema = '{"type": "object", "properties": {"command": {"type": "string"}}}'
    for text, at_least in ((TEXT, 3), (schema, 3), (source, 2.5)):
        ids = used.encode(text)
        assert used.decode(ids) == text
        assert len(text) / len(ids) > at_least


def test_unknown_family_is_a_config_error_that_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="llama_headers"):
        make_policy(tmp_path, "llama_header")


def test_distribution_is_far_from_uniform_and_ends_answers() -> None:
    used, ids = model(), random_ids(200)
    hidden = used.forward(ids, KeyValues(used.shape))
    table = log_softmax(used.logits(hidden))
    entropies = -(np.exp(table) * table).sum(axis=1)
    assert entropies.min() > 2 and entropies.max() < np.log(used.shape.vocabulary) - 0.5
    ends = np.exp(table[:, policy("chatml_think").stops["<|im_end|>"]])
    assert 0.01 < ends.mean() < 0.1 and ends.max() < 0.5


def draws(count: int, **given: float) -> Counter[int]:
    rng = np.random.default_rng(0)
    logits = np.array([3.0, 2.0, 1.0, 0.0], dtype=np.float32)
    draw = Draw(**given)  # type: ignore[arg-type]
    return Counter(draw_token(logits, draw, Counter({0: 2}), frozenset(), rng) for _ in range(count))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [0.644, 0.237, 0.087, 0.032]),
        ({"temperature": 0.5}, [0.865, 0.117, 0.016, 0.002]),
        ({"temperature": 0}, [1, 0, 0, 0]),
        ({"top_k": 2}, [0.731, 0.269, 0, 0]),
        ({"top_p": 0.7}, [0.731, 0.269, 0, 0]),
        ({"top_p": 0.0}, [1, 0, 0, 0]),
        ({"min_p": 0.2}, [0.731, 0.269, 0, 0]),
        ({"presence_penalty": 1.0}, [0.399, 0.399, 0.147, 0.054]),
        ({"frequency_penalty": 1.0}, [0.197, 0.535, 0.197, 0.072]),
        ({"repetition_penalty": 3.0}, [0.197, 0.535, 0.197, 0.072]),
    ],
)
def test_draws_follow_the_distribution_that_the_parameters_make(
    given: dict[str, float], expected: list[float]
) -> None:
    found = draws(10_000, **given)
    assert [found[token] / 10_000 for token in range(4)] == pytest.approx(expected, abs=0.015)
