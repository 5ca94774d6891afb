"""What the renderings of a row keep of its tests' own words and numbers."""

from __future__ import annotations

import random

from resources_servers.swe_bench.confirm.making import BLINDED
from resources_servers.swe_bench.confirm.rendering import Chosen, Order, render
from resources_servers.swe_bench.confirm.wording import OWN_NUMBERS, first_pins


def test_one_rendering_keeps_the_numbers_of_the_tests_and_others_do_not() -> None:
    source = "def test_limit():\n    assert shorten('some words', 12) == 'some'\n"
    order = Order("discover", random.Random(0), "/var/tmp/r", "tests/test_x.py")
    rendered = render(source, Chosen(frozenset({"test_limit"}), frozenset()), order)
    assert rendered is not None
    pins = [first_pins(number, [rendered]) for number in range(BLINDED + 1)]
    assert pins[OWN_NUMBERS] == {"12"}
    assert [one for number, one in enumerate(pins) if number != OWN_NUMBERS] == [set()] * BLINDED
    assert 0 <= OWN_NUMBERS < BLINDED
