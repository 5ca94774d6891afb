"""What a recorded value may not get away with when it is compared outside the box."""

from __future__ import annotations

import random
from typing import Any

import pytest

from resources_servers.swe_bench.confirm.rendering import Chosen, Order, render
from resources_servers.swe_bench.confirm.values import Check, Value

TEXT: Value = ["str", "a-tale"]
NUMBER: Value = ["int", "4"]
OPAQUE: Value = ["object", ["x.Any", "builtins.object"], "anything"]
ERROR = ["builtins.ValueError", "builtins.Exception", "builtins.BaseException", "builtins.object"]


@pytest.mark.parametrize("answer", [TEXT, NUMBER, ["list", [TEXT]], ["none"], OPAQUE])
@pytest.mark.parametrize("op", ["==", "is", "like"])
def test_what_was_too_large_to_record_equals_no_other_answer(op: str, answer: Value) -> None:
    check = Check("s", op, expected=None if op == "like" else answer, answer=answer)
    assert check.holds([answer])
    assert not check.holds([["cut"]])


def test_likeness_to_a_plain_answer_needs_a_plain_value() -> None:
    assert not Check("s", "like", answer=NUMBER).holds([OPAQUE])
    assert Check("s", "like", answer=["float", (0.3).hex()]).holds([["float", (0.1 + 0.2).hex()]])


def test_members_too_large_to_record_equal_no_other_members() -> None:
    answer: Value = ["list", [TEXT, NUMBER]]
    assert not Check("s", "==", expected=answer, answer=answer).holds([["list", [["cut"], NUMBER]]])


def test_what_gold_answers_too_largely_may_be_too_large() -> None:
    assert Check("s", "==", expected=["cut"], answer=["cut"]).holds([["cut"]])


@pytest.mark.parametrize(
    ("op", "answer", "expected"),
    [
        ("!=", NUMBER, ["int", "5"]),
        ("in", NUMBER, ["list", [NUMBER]]),
        ("not in", NUMBER, ["list", []]),
        ("<", NUMBER, ["int", "5"]),
        (">=", NUMBER, ["int", "4"]),
        ("close", ["float", (4.0).hex()], NUMBER),
        ("almost", ["float", (4.0).hex()], NUMBER),
        ("startswith", TEXT, ["str", "a-"]),
        ("matches", TEXT, ["str", "tale"]),
        ("count", ["list", [NUMBER]], ["list", [NUMBER]]),
    ],
)
@pytest.mark.parametrize("evasion", [["cut"], OPAQUE])
def test_opaque_values_answer_nothing_where_gold_answers_plainly(
    op: str, answer: Value, expected: Value, evasion: Value
) -> None:
    check = Check("s", op, expected=expected, answer=answer)
    assert check.holds([answer])
    assert not check.holds([evasion])


def test_an_object_in_the_place_of_a_text_counts_by_what_it_says() -> None:
    check = Check("s", "startswith", expected=["str", "a-"], answer=TEXT)
    assert check.holds([["object", ["x.Lazy", "builtins.object"], "a-tale"]])


def test_opaque_values_stay_where_gold_is_opaque_too() -> None:
    assert Check("s", "!=", expected=OPAQUE, answer=OPAQUE).holds([OPAQUE])


@pytest.mark.parametrize("op", ["raises matches", "raises in"])
def test_an_error_that_refuses_to_say_anything_does_not_say_what_was_asked(op: str) -> None:
    check = Check("s", op, expected=["type", ERROR, [], []], pattern=["str", "too long"])
    assert check.holds([["error", ERROR, "it is too long", []]])
    assert not check.holds([["error", ERROR, None, []]])


@pytest.mark.parametrize(
    "record",
    [["int", "x"], ["int", "9" * 5000], ["float", "x"], ["complex", "x", "y"], ["number", "sNaN"], ["bytes", "xy"]],
)
@pytest.mark.parametrize("op", ["==", "<", "close", "in", "like"])
def test_records_that_cannot_be_compared_fail_the_check_and_nothing_else(op: str, record: Value) -> None:
    wanted: Any = ["list", [NUMBER]] if op == "in" else NUMBER
    assert not Check("s", op, expected=wanted, answer=NUMBER).holds([record])


def test_a_number_beyond_floats_is_not_close_to_one() -> None:
    assert not Check("s", "close", expected=NUMBER, answer=["float", (4.0).hex()]).holds([["int", "9" * 4000]])


def test_an_absolute_tolerance_is_not_taken_for_a_relative_one() -> None:
    thousand: Value = ["float", (1000.0).hex()]
    check = Check("s", "almost", expected=thousand, answer=thousand, extra=5.0)
    assert check.holds([["int", "1004"]])
    assert not check.holds([["int", "0"]])
    assert Check("s", "close", expected=thousand, answer=thousand, extra=0.1).holds([["int", "901"]])


@pytest.mark.parametrize(
    ("assertion", "op", "extra"),
    [
        ("self.assertAlmostEqual(f(1), 1000, delta=5)", "almost", 5.0),
        ("self.assertAlmostEqual(f(1), 1000, places=2)", "almost", 0.01),
        ("assert f(1) == approx(1000, abs=5)", "almost", 5.0),
        ("assert f(1) == approx(1000, rel=0.1)", "close", 0.1),
        ("assert f(1) == approx(1000)", "close", None),
        ("assert_allclose(f(1), 1000, 0.1)", "close", 0.1),
        ("assert_almost_equal(f(1), 1000, 2)", "almost", 0.01),
        ("self.assertEqual(f(1), 1000, 2)", "==", None),
    ],
)
def test_a_probe_knows_what_kind_of_tolerance_its_assertion_has(assertion: str, op: str, extra: float | None) -> None:
    order = Order("discover", random.Random(0), "/var/tmp/r", "tests/test_x.py")
    source = f"def test_x(self):\n    {assertion}\n"
    rendered = render(source, Chosen(frozenset({"test_x"}), frozenset()), order)
    assert rendered is not None
    (probe,) = rendered.probes.values()
    assert (probe.op, probe.extra) == (op, extra)
