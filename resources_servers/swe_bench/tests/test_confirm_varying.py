"""Variations: inputs that are in no public test, alike wherever they stand, and only where a test bears them."""

from __future__ import annotations

import ast
import random
import re

from resources_servers.swe_bench.confirm.labels import KINDS, Kind, Labels, Variation

SOURCE = """
def test_one():
    assert cut("river  of stone", 20, 0, 0.125) == ["river", "of"]
    assert table["river"][1] == "river  of"

def test_two():
    assert cut("river  of stone", 20, 0, 0.1) == "river"
"""


def varied(kinds: dict[str, tuple[Kind, ...]], seed: int = 3, vocabulary: tuple[str, ...] = ("of",)) -> list[object]:
    tree = ast.parse(SOURCE)
    Variation(random.Random(seed), ast.parse(SOURCE), kinds, vocabulary).apply(tree)
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]


def shape(text: object) -> list[int]:
    return [len(part) for part in re.findall(r"\w+| +", str(text))]


def test_variation_gives_inputs_other_shapes_than_relabelling_does() -> None:
    tree = ast.parse(SOURCE)
    Labels(random.Random(3), {"river", "stone", "20"}, {"of"}).apply(tree)
    relabelled = [shape(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    assert [5, 2, 2, 1, 5] in relabelled
    kinds = tuple(kind for kind in KINDS if kind != "more words")
    for seed in range(20):
        text = next(value for value in varied({"test:test_one": kinds}, seed) if len(shape(value)) == 5)
        assert all(one != other for one, other in zip(shape(text)[::2], [5, 2, 5], strict=True)), text
        assert shape(text)[1] != 2 and shape(text)[3] != 1


def test_variation_leaves_a_number_that_is_too_long_for_python() -> None:
    text = "12 " + "9" * 5000
    tree = ast.parse(f"def test_one():\n    assert cut({text!r})\n")
    kinds: dict[str, tuple[Kind, ...]] = {"test:test_one": ("numbers",)}
    Variation(random.Random(3), ast.parse(tree), kinds, ()).apply(tree)
    assert ast.unparse(tree).endswith("9" * 5000 + "')")


def test_variation_says_the_same_wherever_the_same_stood() -> None:
    texts = [value for value in varied({"test:test_one": KINDS}) if isinstance(value, str)]
    part, whole = sorted((text for text in texts if " " in text), key=len)[:2]
    assert whole.startswith(part)
    assert texts.count(whole.split(" ")[0]) >= 2


def test_variation_gives_texts_more_words() -> None:
    counts = set()
    for seed in range(20):
        text = max(map(str, varied({"test:test_one": ("more words",)}, seed)), key=len)
        words = text.split()
        assert [word for word in words if word in ("river", "of", "stone")] == ["river", "of", "stone"]
        counts.add(len(words))
    assert counts == {3, 4, 5}


def test_variation_changes_numbers_in_their_order_and_no_place_in_a_list() -> None:
    numbers = [value for value in varied({"test:test_one": KINDS}) if isinstance(value, int)]
    assert 0 < numbers[0] < numbers[1] or 0 < numbers[1] < numbers[0]
    for seed in range(5):
        tree = ast.parse(SOURCE)
        Variation(random.Random(seed), ast.parse(SOURCE), {"test:test_one": KINDS}, ()).apply(tree)
        asked = [
            node.slice.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Subscript)
            and isinstance(node.slice, ast.Constant)
            and isinstance(node.slice.value, int)
        ]
        assert asked == [1], "which element is asked for is no input"
    fractions = varied({"test:test_one": ("fractions",), "test:test_two": ("fractions",)})
    (fraction,) = (value for value in fractions if isinstance(value, float) and value != 0.1)
    assert fraction != 0.125
    assert (fraction * 1024).is_integer(), "computing with it is exact in every order"
    assert 0.1 in fractions, "computing with tenths is not"


def test_variation_keeps_to_what_each_test_bears() -> None:
    values = varied({"test:test_one": KINDS, "test:test_two": ("numbers",)})
    assert "river  of stone" in values, "the words of the second test"
    assert 20 not in values and 0 in values
    assert len([value for value in values if isinstance(value, str) and "stone" in value]) == 1
