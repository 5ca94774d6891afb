"""What the renderings of a row keep of its tests, and where the plain one stands."""

from __future__ import annotations

import io
import random
import tarfile
from types import SimpleNamespace
from typing import cast

import pytest

from nemo_gym.sandbox.base import SandboxProvider
from resources_servers.swe_bench.confirm.controls import ControlledRendering
from resources_servers.swe_bench.confirm.making import BLINDED, OWN_NUMBERS, first_pins
from resources_servers.swe_bench.confirm.material import Material, Package, RenderedSet
from resources_servers.swe_bench.confirm.rendering import Chosen, Order, render
from resources_servers.swe_bench.confirm.runs import Pristine, Recorded, Rendering
from resources_servers.swe_bench.confirm.telling import (
    BASE_RUNS,
    GOLD_RUNS,
    Rated,
    Telling,
    may_be_strong,
    one_plain,
    without_surplus,
)
from resources_servers.swe_bench.confirm.values import Check, Value
from resources_servers.swe_bench.eval_box import EvalSite
from resources_servers.swe_bench.preparation.examples import EXAMPLE_ROWS
from resources_servers.swe_bench.row import SweBenchRow, read_rows


def test_one_rendering_keeps_the_numbers_of_the_tests_and_others_do_not() -> None:
    source = "def test_limit():\n    assert shorten('some words', 12) == 'some'\n"
    order = Order("discover", random.Random(0), "/var/tmp/r", "tests/test_x.py")
    rendered = render(source, Chosen(frozenset({"test_limit"}), frozenset()), order)
    assert rendered is not None
    pins = [first_pins(number, [rendered]) for number in range(BLINDED + 1)]
    assert pins[OWN_NUMBERS] == {"12"}
    assert [one for number, one in enumerate(pins) if number != OWN_NUMBERS] == [set()] * BLINDED
    assert 0 <= OWN_NUMBERS < BLINDED


@pytest.mark.parametrize(
    ("changed", "package"),
    [
        (["lib/tool/deep/a.py"], Package("lib/tool/deep", "tool.deep")),
        (["setup.py", "lib/tool/a.py"], Package("lib/tool", "tool")),
        (["lib/tool/data.txt", "alone.py"], None),
    ],
)
def test_plain_rendering_stands_in_the_package_of_the_first_module_that_gold_changes(
    changed: list[str], package: Package | None
) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in ("lib/tool/__init__.py", "lib/tool/deep/__init__.py", "setup.py", "alone.py"):
            tar.addfile(tarfile.TarInfo(path))
    assert Package.of(changed, Pristine({}, buffer.getvalue())) == package


@pytest.mark.parametrize(
    ("imports", "path", "beside"),
    [
        ("from tool import shorten", "tests/test_x.py", ""),
        ("import tool\nfrom .compat import NAMES", "tests/test_x.py", "tests"),
        ("from . import NAMES", "tool/tests/test_x.py", "tool/tests"),
        ("from ..names import NAMES", "tests/unit/deep/test_x.py", "tests"),
        ("from . import NAMES", "tool/checks/test_x.py", "tool/checks"),
        ("from . import NAMES", "test_x.py", ""),
    ],
)
def test_plain_rendering_of_a_test_that_imports_from_its_own_package_stands_in_a_copy_of_it(
    imports: str, path: str, beside: str
) -> None:
    row = SweBenchRow.from_mapping(next(row for _, row in read_rows(EXAMPLE_ROWS)))
    material = Material(EvalSite(cast(SandboxProvider, None), "image"), row, random.Random(0))
    material.sources = {path: f"{imports}\n\ndef test_limit():\n    assert shorten(NAMES) == 'some'\n"}
    material.chosen = {path: Chosen(frozenset({"test_limit"}), frozenset())}
    rendered = material.render("blind", 1, None, plain=path)
    assert rendered is not None
    rendering = rendered.rendering
    assert rendering.files.keys() == {rendering.plain}
    assert rendering.beside == beside
    *directory, name = rendering.plain.split("/")
    above, _, named = beside.rpartition("/")
    assert rendering.copy.rpartition("/")[0] == above
    assert rendering.plain.removeprefix(rendering.copy).removesuffix(name) == (
        path.removeprefix(beside).removesuffix("test_x.py") if beside else ""
    )
    assert named not in directory
    assert rendering.module == (".".join([*directory, name.removesuffix(".py")]) if beside else "")


def test_plain_rendering_within_the_package_is_kept_unless_it_confirms_less() -> None:
    blinded = ControlledRendering(Rendering({}, "/r"), {"f|a": (), "f|b": ()})
    outside = ControlledRendering(Rendering({}, "/r", "x.py"), {"f|a": (), "f|b": ()})
    inside = ControlledRendering(Rendering({}, "/r", "tool/x.py", "tool.x"), {"f|a": ()})
    other = ControlledRendering(Rendering({}, "/r", "y.py"), {"g|c": ()})
    assert one_plain([blinded, outside, inside, other], {"f|a"}) == [blinded, inside, other]
    assert one_plain([blinded, outside, inside, other], {"f|a", "f|b"}) == [blinded, outside, other]
    assert one_plain([blinded], {"f|a"}) == [blinded]
    beside = ControlledRendering(Rendering({}, "/r", "copy/x.py", "copy.x", beside="tests"), {"f|a": ()})
    assert one_plain([blinded, beside, inside, other], {"f|a"}) == [blinded, inside, other]


def test_one_of_three_renderings_is_left_out_beside_twins_where_the_others_hold_its_tests() -> None:
    def rendering(*tests: str, plain: str = "") -> ControlledRendering:
        return ControlledRendering(Rendering({}, "/r", plain), dict.fromkeys(tests, ()))

    first, second, plain = (
        rendering("fixed", "kept"),
        rendering("fixed", "kept", "more"),
        rendering("fixed", plain="x.py"),
    )
    varied = rendering("fixed")
    assert without_surplus([first, second, plain, varied], {"fixed"}) == [second, plain, varied]
    for others in ([second, plain], [rendering("fixed"), plain, varied], [second, plain, rendering("other")]):
        assert without_surplus([first, *others], {"fixed"}) == [first, *others]


@pytest.mark.parametrize(
    ("gold_misses", "base_passes", "kept"), [((), (), True), ((3,), (), False), ((), (2,), False)]
)
async def test_what_gold_misses_or_base_passes_in_any_of_its_runs_decides_nothing(
    gold_misses: tuple[int, ...], base_passes: tuple[int, ...], kept: bool
) -> None:
    test, made = "f|test:a", '["s", []]\n'
    runs = {b"gold": iter(range(GOLD_RUNS)), b"": iter(range(BASE_RUNS))}

    async def run(patch: bytes, renderings: list[Rendering]) -> Recorded:
        numbers = [next(runs[patch]) for _ in renderings]
        records = [
            made if (number not in gold_misses if patch else number in base_passes) else "" for number in numbers
        ]
        return Recorded(applied=True, records=tuple(records))

    material = SimpleNamespace(gold=b"gold", notes=[], is_fixed=lambda one: True, run=run)
    rendering = ControlledRendering(Rendering({}, "/r"), {test: ((Check("s", "begin"),),)})
    one = RenderedSet(rendering.rendering, {})
    told = Telling(cast(Material, material), [Rated(one, rendering)], {test: [[]]})
    await told.run(1, 1)
    assert told.strengths() == {test: "weak"}
    await told.run(GOLD_RUNS - 1, BASE_RUNS - 1)
    assert [one.controlled.tests for one in told.kept] == ([rendering.tests] if kept else [])
    assert told.strengths() == {test: "weak" if kept else "none"}


def test_plain_rendering_within_the_package_is_imported_as_a_module_of_it() -> None:
    assert Rendering({}, "/r", "tool/x.py", "tool.x").command("pytest").endswith("python -c 'import tool.x'")
    assert Rendering({}, "/r", "x.py").command("pytest").endswith("python x.py")
    assert Rendering({}, "/r").command("pytest") == "pytest"


@pytest.mark.parametrize(
    ("assertion", "answer", "again"),
    [
        ("assert f() == 'x'", ["str", "x"], True),
        ("assert f() in names", ["int", "4"], True),
        ("assert f() == True", ["bool", True], False),
        ("assert f() is None", ["none"], False),
        ("assert f()", ["str", "x"], False),
    ],
)
def test_weak_test_is_drawn_again_only_where_other_words_can_change_what_it_asks(
    assertion: str, answer: Value, again: bool
) -> None:
    order = Order("discover", random.Random(0), "/var/tmp/r", "t.py")
    rendered = render(f"def test_x():\n    {assertion}\n", Chosen(frozenset({"test_x"}), frozenset()), order)
    assert rendered is not None
    own = RenderedSet(Rendering({}, "/var/tmp/r"), {"t.py": rendered})
    (key,) = rendered.probes
    assert may_be_strong(own, [[(key, [answer, answer])]]) is again
