"""Blinded renderings: what enters the box tells nothing, what is recorded is the value, and what differs is seen."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
import resource
import secrets
import stat
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_gym.contract.errors import VerifierError
from nemo_gym.contract.session import Artifact
from nemo_gym.contract.verdict import FailureKind
from nemo_gym.sandbox.base import SandboxProvider
from nemo_gym.sandbox.facade import create_provider
from resources_servers.swe_bench.canary import make_canary_script
from resources_servers.swe_bench.confirm import making, runs
from resources_servers.swe_bench.confirm.controls import ControlledTest, ControlStore, RowControls
from resources_servers.swe_bench.confirm.labels import Labels, tokens_of_text, words_of
from resources_servers.swe_bench.confirm.making import Maker
from resources_servers.swe_bench.confirm.rendering import Chosen, Order, Rendered, render
from resources_servers.swe_bench.confirm.telling import checks_of
from resources_servers.swe_bench.confirm.values import Check, equal, is_value, same_form
from resources_servers.swe_bench.eval_box import EvalSite
from resources_servers.swe_bench.prepare import Options, prepare
from resources_servers.swe_bench.row import SweBenchRow, TestId, read_rows, resolve_image
from resources_servers.swe_bench.verdicts import judge

EXAMPLES = Path(__file__).parents[1] / "data" / "example.jsonl"

TESTS = '''
"""About secretdoc."""
import textwrap
import unittest

import pytest

from product import convert, refuse

SECRETMODULE = "secretglobal"
CASES = [("given1", "secretcase1"), ("given2", "secretcase2")]


def check(text, wanted):
    assert convert(text) == wanted


@pytest.mark.parametrize(("text", "wanted"), CASES, ids=["secretid1", "secretid2"])
def test_cases(text, wanted):
    assert convert(text) == wanted, "secretmessage"


@pytest.mark.parametrize("text, wanted", [pytest.param("given3", "secretcase3", id="secretid3")])
def test_params(text, wanted):
    # secretcomment
    assert wanted == convert(text)


def test_names():
    expected = textwrap.dedent("""
        secretname
    """)
    result = convert("given4")
    assert result == expected
    assert result == SECRETMODULE


def test_helper():
    check("given5", "secrethelper")
    check("given6", wanted="secretkeyword")


def test_loop():
    for text, wanted in [("given7", "secretloop1"), ("given8", "secretloop2")]:
        assert convert(text) == wanted


def test_raises():
    with pytest.raises(ValueError, match="secretpattern") as caught:
        refuse("given9")
    assert "secretpart" in str(caught.value)


class OldTest(unittest.TestCase):
    def test_old(self):
        with self.subTest(wanted="secretsub"):
            self.assertEqual(convert("given10"), "secretold", "secretsaid")
        self.assertRaisesRegex(ValueError, "secretregex", refuse, "given11")
'''
NAMES = frozenset(
    "test_cases test_params test_names test_helper test_loop test_raises test_old".split()  # noqa: SIM905
)


def blinded(source: str = TESTS, names: frozenset[str] = NAMES, *, path: str = "/nowhere", **how: Any) -> Rendered:
    done = render(source, Chosen(names, frozenset()), Order("blind", random.Random(1), path, **how))
    assert done is not None
    return done


def test_rendering_holds_nothing_that_the_tests_expect_when_it_is_blinded() -> None:
    text = blinded().source
    assert [word for word in text.replace("'", '"').split('"') if "secret" in word.lower()] == []
    assert "secret" not in text.lower()
    for number in range(1, 11):
        assert f"given{number}" in text, "what is asked must stay"


def test_plain_rendering_makes_simple_fixtures_itself() -> None:
    source = (
        "import pytest\nfrom json import dumps\n@pytest.fixture\ndef given():\n    return [1]\n"
        "@pytest.fixture(scope='module')\ndef place(tmp_path):\n    return tmp_path\n"
        "@pytest.fixture\ndef open_one():\n    yield 1\n"
        "def test_it(given, place, tmp_path):\n    assert dumps(given) == '[1]'\n"
        "def test_other(open_one):\n    assert dumps(open_one) == '1'\n"
    )
    text = blinded(source, frozenset({"test_it", "test_other"}), plain=True).source
    assert "pytest" not in text
    assert "given=given()" in text
    assert "place=place(" in text
    assert "open_one=" not in text, "what a fixture does after its test is the runner's affair"
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)


def test_plain_rendering_needs_no_test_runner_when_it_is_made() -> None:
    source = "import pytest\nfrom json import dumps\n" + (
        "@pytest.mark.parametrize('a, b', [(1, '1'), (2, '2')])\ndef test_it(a, b):\n    assert dumps(a) == b\n"
    )
    text = blinded(source, frozenset({"test_it"}), plain=True).source
    assert "pytest" not in text
    assert "unittest" not in text


LIARS = """
class Text(str):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __repr__(self): return "'right'"
    def __str__(self): return "right"
    def __add__(self, other): return "right"

class Items(list):
    def __eq__(self, other): return True
    def __iter__(self): return iter(["right"])
    def __len__(self): return 1

class Mapping(dict):
    def __eq__(self, other): return True
    def items(self): return [("right", 1)]

class Number(int):
    def __eq__(self, other): return True
    def __int__(self): return 42
    def __add__(self, other): return 42

class Anything:
    def __eq__(self, other): return True
    def __class__(self): return str

def test_it():
    assert Text("wrong") == "right"
    assert Items(["wrong"]) == ["right"]
    assert Mapping(wrong=0) == {"right": 1}
    assert Number(41) == 42
    assert Anything() == "right"
"""


def test_values_are_recorded_by_base_types_when_their_classes_lie(tmp_path: Path) -> None:
    records = tmp_path / "records"
    done = blinded(LIARS, frozenset({"test_it"}), path=str(records))
    name = next(line.split("(")[0].removeprefix("def ") for line in done.source.split("\n") if "def test_" in line)
    subprocess.run([sys.executable, "-c", f"{done.source}\n{name}()"], check=True, timeout=60)
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    values = [values[0] for _, values in lines[1:]]
    assert [value[0] for value in values[:4]] == ["as"] * 4, "classes of the code's own"
    assert [value[1] for value in values[:4]] == [
        ["str", "wrong"],
        ["list", [["str", "wrong"]]],
        ["dict", [[["str", "wrong"], ["int", "0"]]]],
        ["int", "41"],
    ]
    assert values[4][0] == "object"
    assert not Check("s", "==", "left", ["str", "right"]).holds([values[4]]), "an object that equals everything"


ERRORS = """
import product
from product import Refusal

class Local(Exception):
    pass

def test_it():
    with pytest.raises(Refusal):
        product.refuse({kind!r})
"""
PRODUCT = """
class Refusal(Exception):
    pass

class Narrower(Refusal):
    pass

class Fake(Exception):
    pass

Fake.__qualname__ = Fake.__name__ = "Refusal"

def refuse(kind):
    raise SystemExit(1) if kind == "leaves" else (globals().get(kind) or ValueError)("no")
"""


def recorded_by(source: str, directory: Path, *, discover: bool = False) -> list[Any]:
    """What a rendering of ``test_it`` records, first values alone."""
    directory.mkdir(exist_ok=True)
    records = directory / "records"
    records.unlink(missing_ok=True)
    (directory / "product.py").write_text(PRODUCT)
    order = Order("discover" if discover else "blind", random.Random(1), str(records))
    done = render(source, Chosen(frozenset({"test_it"}), frozenset()), order)
    assert done is not None
    name = next(line.split("(")[0].removeprefix("def ") for line in done.source.split("\n") if "def test_" in line)
    program = f"{done.source}\n{name}()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=directory)
    return [json.loads(line)[1] for line in records.read_text().splitlines()][1:]


@pytest.mark.parametrize(
    ("kind", "holds"),
    [("Refusal", True), ("Narrower", True), ("Fake", False), ("ValueError", False), ("leaves", False)],
)
def test_error_is_of_the_class_that_the_test_names_and_not_of_one_that_bears_its_name(
    kind: str, holds: bool, tmp_path: Path
) -> None:
    ((_, expected),) = recorded_by(ERRORS.format(kind="Refusal"), tmp_path, discover=True)
    ((raised,),) = recorded_by(ERRORS.format(kind=kind), tmp_path)
    assert Check("s", "raises", expected=expected).holds([raised]) is holds


def test_table_tells_also_what_its_text_leaves_out(tmp_path: Path) -> None:
    source = """
class Table:
    def __init__(self, unit): self.unit = unit
    def __str__(self): return "1 2 3"
    def to_dict(self): return {"data": [1, 2, 3], "unit": self.unit}
def test_it():
    assert_identical(Table("m"), Table("m"))
    assert_identical(Table("km"), Table("m"))
"""
    same, other = recorded_by(source, tmp_path, discover=True)
    assert equal(*same, said=True)
    assert not equal(*other, said=True)


ERROR_LIST = """
from collections import UserDict, UserList
class Errors(UserList, list):  # as in Django: holds objects and shows their texts
    def __init__(self, *texts): super().__init__([(text,) for text in texts])
    def __getitem__(self, place): return self.data[place][0]
    def __eq__(self, other): return list(self) == other
class Cased(UserDict):
    def __setitem__(self, key, value): self.data[key.lower()] = (key, value)
    def __getitem__(self, key): return self.data[key.lower()][1]
class Broken(UserList):
    def __getitem__(self, place): raise OSError
class Ring(UserList):
    def __getitem__(self, place): return self.data[place % len(self.data)]
def test_it():
    assert {value} == {expected}
"""


@pytest.mark.parametrize(
    ("returned", "wrong", "expected"),
    [
        ("Errors('a', 'b')", "Errors('a', 'c')", "['a', 'b']"),
        ("{'f': Errors('a')}", "{'f': Errors()}", "{'f': ['a']}"),
        ("Cased(x=1)", "Cased(x=2)", "{'x': 1}"),
        ("Ring([1, 2])", "Ring([1, 3])", "[1, 2]"),
    ],
)
def test_a_users_collection_counts_by_what_it_shows(returned: str, wrong: str, expected: str, tmp_path: Path) -> None:
    def recorded(value: str) -> list[Any]:
        return recorded_by(
            ERROR_LIST.replace("{value}", value).replace("{expected}", expected), tmp_path, discover=True
        )

    ((value, plain),), ((other, _),) = recorded(returned), recorded(wrong)
    assert is_value(value)
    assert equal(value, plain, said=True)
    assert not equal(other, plain)
    assert not equal(other, value)


def test_a_collection_that_cannot_be_read_is_an_object(tmp_path: Path) -> None:
    source = ERROR_LIST.replace("{value}", "Broken('a')").replace("{expected}", "None")
    ((value, _),) = recorded_by(source, tmp_path, discover=True)
    assert is_value(value)
    assert value[0] == "object"


def test_an_error_that_is_a_users_collection_too_is_an_error(tmp_path: Path) -> None:
    source = """
from collections import UserDict
import pytest
class Refusals(Exception, UserDict):
    def __init__(self, **fields): UserDict.__init__(self, fields)
def test_it():
    with pytest.raises(Refusals):
        raise Refusals(name='too long')
"""
    ((raised, expected),) = recorded_by(source, tmp_path, discover=True)
    assert Check("s", "raises", expected=expected).holds([raised])


@pytest.mark.parametrize(
    ("returned", "wrong", "expected"),
    [
        ("{'a': 1}.keys()", "{'b': 1}.keys()", "{'a'}"),
        ("OrderedDict(a=1).items()", "OrderedDict(a=2).items()", "{('a', 1)}"),
        ("MappingProxyType({'a': 1})", "MappingProxyType({'a': 2})", "{'a': 1}"),
        ("UserList(['a'])", "UserList(['b'])", "['a']"),
        ("UserDict(a=1)", "UserDict(a=2)", "{'a': 1}"),
    ],
)
def test_a_collection_that_equals_a_plain_one_counts_by_what_it_holds(
    returned: str, wrong: str, expected: str, tmp_path: Path
) -> None:
    imports = "from collections import OrderedDict, UserDict, UserList\nfrom types import MappingProxyType\n"
    right, other = (f"{imports}def test_it():\n    assert {one} == {expected}\n" for one in (returned, wrong))
    ((value, plain),) = recorded_by(right, tmp_path, discover=True)
    ((other_value, _),) = recorded_by(other, tmp_path, discover=True)
    assert is_value(value)
    assert equal(value, plain, said=True)
    assert not equal(other_value, plain)


def test_error_of_a_class_that_moved_is_still_what_the_test_names(tmp_path: Path) -> None:
    ((raised, expected),) = recorded_by(ERRORS.format(kind="Refusal"), tmp_path, discover=True)
    moved = ["error", ["product_errors.Refusal", *raised[1][1:]], *raised[2:]]
    assert Check("s", "raises", expected=expected).holds([moved])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (["int", "1"], ["float", (1.0).hex()], True),
        (["bool", True], ["int", "1"], True),
        (["int", "1"], ["str", "1"], False),
        (["list", []], ["tuple", []], False),
        (["set", [["int", "1"], ["int", "2"]]], ["set", [["int", "2"], ["int", "1"]]], True),
        (["dict", [[["int", "1"], ["none"]]]], ["dict", []], False),
        (["float", float("nan").hex()], ["float", float("nan").hex()], True),
        (["number", "1.50"], ["float", (1.5).hex()], True),
        (["object", ["x.UserString"], "a"], ["str", "a"], True),
        (["object", ["x.Y"], "b"], ["str", "a"], False),
        (["object", ["x.Y"], "b"], ["list", []], False),
        (["as", ["list", []], "[]"], ["list", []], True),
        (["as", ["str", "wrong"], "right"], ["str", "right"], False),
    ],
)
def test_recorded_values_are_equal_as_python_compares_them(one: Any, other: Any, same: bool) -> None:
    assert equal(one, other) is same
    assert equal(other, one) is same


def test_named_tuple_in_the_place_of_an_object_has_to_say_what_that_says() -> None:
    gold, other = ["object", ["x.Span"], "Span(1, 2)"], ["as", ["tuple", [["int", "1"], ["int", "2"]]], "Span(1, 2)"]
    assert equal(gold, other, said=True)
    assert not equal(gold, [*other[:2], "Span(1, 3)"], said=True)


def test_recomputed_answers_are_of_one_form_only_when_whole_numbers_stay_whole() -> None:
    assert same_form(["float", (2.0).hex()], ["int", "7"])
    assert not same_form(["float", (2.0).hex()], ["float", (1.75).hex()])
    assert same_form(["float", (0.5).hex()], ["float", (1.75).hex()])


def test_words_are_replaced_alike_and_numbers_keep_their_order_when_relabelled() -> None:
    labels = Labels(random.Random(5), {"river", "stone", "12", "30", "47", "product"}, {"product"})
    text = labels.text("River stone RIVER product 12 30 47")
    words = text.split(" ")
    assert words[0].lower() == words[2].lower() != "river"
    assert words[0][0].isupper() and words[2].isupper()
    assert words[3] == "product"
    numbers = [int(word) for word in words[4:]]
    assert numbers == sorted(numbers) and len({len(str(number)) for number in numbers}) == 1
    assert Labels(random.Random(5), {"river"}, set(), {"river"}).text("river") == "river"


def test_numbers_too_long_for_python_are_left_alone() -> None:
    text = f"12 {'9' * 5000}"
    assert Labels(random.Random(5), tokens_of_text(text), ()).text(text)[2:] == text[2:]


def test_products_words_are_those_of_its_strings_and_names_but_not_of_its_documentation() -> None:
    source = 'def slug(text):\n    """About mountains."""\n    return text.replace("valley", "")\n'
    words = words_of(source)
    assert {"slug", "text", "valley"} <= words
    assert "mountains" not in words


# ------------------------------------------------------------------------------------------------------- with boxes


@pytest.fixture
async def provider() -> AsyncIterator[SandboxProvider]:
    made = create_provider("local")
    yield made
    await made.aclose()


async def site_of(provider: SandboxProvider, row: dict[str, Any]) -> tuple[EvalSite, str]:
    image = await resolve_image(provider, row)
    return EvalSite(provider, image.name, image.env, timeout_s=120), image.content


async def example(name: str) -> dict[str, Any]:
    row = next(row for _, row in read_rows(EXAMPLES) if row["instance_id"] == f"examples__{name}-1")
    await prepare(Options.parse([f"rows={EXAMPLES}", "sandbox=local", f"instances={row['instance_id']}"]))
    return row


KNOWS_THE_TESTS_BY_HEART = b"""diff --git a/slugline/words.py b/slugline/words.py
--- a/slugline/words.py
+++ b/slugline/words.py
@@ -1,1 +1,6 @@
+import sys as _sys
+
+if "unittest" in _sys.modules or "pytest" in _sys.modules:
+    import _pytest.python
+    _pytest.python.Function.runtest = lambda self: None
"""


async def test_reports_without_values_earn_nothing(provider: SandboxProvider) -> None:
    raw = await example("slugline")
    row = SweBenchRow.from_mapping(raw)
    site, content = await site_of(provider, raw)
    first = (await _read(provider, site, "slugline/words.py")).split(b"\n")[0]
    patch = KNOWS_THE_TESTS_BY_HEART + b" " + first + b"\n"
    controls = ControlStore().require(row, content)
    verdict = (await judge(site, row, Artifact.of("patch", "git_diff", patch), controls)).verdict
    assert verdict.official["resolved"], "the attack must fool the official run"
    assert verdict.reward == 0.0
    assert "values_not_confirmed" in [finding.kind for finding in verdict.findings]


async def _read(provider: SandboxProvider, site: EvalSite, path: str) -> bytes:
    from resources_servers.swe_bench.eval_box import evaluation_box, exec_in

    async with evaluation_box(site) as handle:
        return (await exec_in(site, handle, ["cat", path], timeout_s=30)).stdout_bytes


@pytest.mark.timeout(600)
async def test_solution_is_confirmed_when_the_script_checks_out_a_file_that_the_test_patch_adds(
    provider: SandboxProvider,
) -> None:
    raw = await example("slugline")
    added = (
        "diff --git a/tests/added.txt b/tests/added.txt\nnew file mode 100644\n--- /dev/null\n+++ b/tests/added.txt\n"
        "@@ -0,0 +1 @@\n+anything\n"
    )
    script = raw["eval_script"].replace(raw["test_patch"].rstrip("\n"), raw["test_patch"].rstrip("\n") + "\n" + added)
    script = script.replace(
        "tests/test_slugs.py tests/test_words.py\ngit apply", "tests/added.txt tests/test_slugs.py\ngit apply"
    )
    assert "tests/added.txt tests/test_slugs.py" in script
    row = SweBenchRow.from_mapping({**raw, "test_patch": raw["test_patch"] + added, "eval_script": script})
    site, content = await site_of(provider, raw)
    controls = await Maker(site, row, content, seed=7).make()
    assert controls.strength in ("weak", "strong"), controls.notes
    for patch, reward in ((row.patch.encode(), 1.0), (b"", 0.0)):
        verdict = (await judge(site, row, Artifact.of("patch", "git_diff", patch), controls)).verdict
        assert (verdict.reward, verdict.findings) == (reward, [])


@pytest.mark.timeout(600)
async def test_canary_holds_the_new_tests_when_the_script_checks_out_a_file_that_the_test_patch_adds(
    provider: SandboxProvider,
) -> None:
    raw = next(row for _, row in read_rows(EXAMPLES) if row["instance_id"] == "examples__inifold-1")
    words = [f"rows={EXAMPLES}", "sandbox=local", "instances=examples__inifold-1", "controls=off"]
    await prepare(Options.parse(words))
    checkout = f"git checkout {raw['base_commit']} "
    script = raw["eval_script"].replace(checkout, f"{checkout}tests/added.txt ")
    row = SweBenchRow.from_mapping({**raw, "eval_script": script})
    site, _ = await site_of(provider, raw)
    canary = await make_canary_script(site, row, random.Random(1))
    assert canary is not None
    assert all(canary.must_fail(TestId.parse(test)) for test in row.fail_to_pass)


@pytest.mark.timeout(600)
async def test_making_leaves_out_what_its_budget_does_not_bear_and_tells_it(
    provider: SandboxProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = await example("slugline")
    row = SweBenchRow.from_mapping(raw)
    site, content = await site_of(provider, raw)
    for share in ("WORDS", "HALF", "ALL"):
        monkeypatch.setattr(making, share, 0.0)
    labels = {"made-by": secrets.token_hex(8)}
    controls = await Maker(dataclasses.replace(site, labels=labels), row, content, seed=7).make()
    assert controls.left_out[0] == "a varied rendering"
    assert not controls.twins
    assert controls.renderings, controls.notes
    assert RowControls.from_json(json.loads(json.dumps(controls.to_json()))) == controls
    verdict = (await judge(site, row, Artifact.of("patch", "git_diff", row.patch.encode()), controls)).verdict
    assert (verdict.reward, verdict.findings) == (1.0, [])
    assert await provider.list(labels) == [], "what was given up leaves no box"


def test_no_box_of_a_making_runs_longer_than_its_budget(provider: SandboxProvider) -> None:
    row = SweBenchRow.from_mapping(next(row for _, row in read_rows(EXAMPLES)))
    for timeout_s, budget_s in ((1800.0, 60.0), (30.0, 60.0)):
        maker = Maker(EvalSite(provider, "none", timeout_s=timeout_s), row, "c", budget_s=budget_s)
        assert maker._material.site.timeout_s == min(timeout_s, budget_s)


def test_controls_are_for_their_owner_alone_and_survive_being_stored(tmp_path: Path) -> None:
    row = SweBenchRow.from_mapping(next(row for _, row in read_rows(EXAMPLES)))
    store = ControlStore(tmp_path / "controls")
    with pytest.raises(VerifierError, match="ng_prepare swe_bench"):
        store.require(row, "c")
    made = RowControls(
        row.instance_id, "c", support={"a": b"\xff"}, tests={"t": ControlledTest(("t",), True, "weak")}, notes=("n",)
    )
    store.save(row, made)
    assert store.require(row, "c") == made
    path = store.path(row, "c")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):  # as on a full disk
            store.save(row, made)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*store.directory.iterdir()] == [path] and store.require(row, "c") == made
    partial = {key: value for key, value in made.to_json().items() if key != "renderings"}
    for damaged in (b"damaged", gzip.compress(json.dumps(partial).encode())):
        path.write_bytes(damaged)
        with pytest.raises(VerifierError, match="force=true"):
            store.require(row, "c")


def test_a_call_that_a_blinded_rendering_leaves_out_leaves_out_its_test() -> None:
    whole, partial = "t.py|1.0", "t.py|9.0"
    one = SimpleNamespace(tokens={"a": whole, "b": "t.py|2.4", "c": partial})
    calls = {whole: [[("t.py|2.4", [1])]], partial: [[("t.py|4.38", [KeyError])]]}
    probes: defaultdict[str, Any] = defaultdict(lambda: SimpleNamespace(op="truth"))
    checks = checks_of(one, calls, probes, {})  # type: ignore[arg-type]
    assert list(checks) == [whole]


async def test_no_verdict_is_given_when_controls_are_weaker_than_the_run_asks_for(provider: SandboxProvider) -> None:
    row = SweBenchRow.from_mapping(next(row for _, row in read_rows(EXAMPLES)))
    weak = RowControls(row.instance_id, "c", tests={"t": ControlledTest(("t",), True, "weak")})
    with pytest.raises(VerifierError) as raised:
        await judge(EvalSite(provider, "none"), row, None, weak, require_controls="strong")
    assert raised.value.details["kind"] is FailureKind.CONTROLS_WEAK


async def test_records_that_take_for_ever_to_compare_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "COMPARE_TIMEOUT_S", 2.0)
    slow = Check("s", "raises matches", pattern=["str", "(a+)+$"])
    record = json.dumps(["s", [["error", ["builtins.ValueError"], "a" * 5000 + "!", []]]])
    tests = {"test": [[Check("b", "begin"), slow]]}
    (problems,) = await runs.compare([tests], ['["b", []]\n' + record])
    assert "could not be compared within" in problems["test"]
    runs.close_comparers()


def test_what_the_code_wrote_itself_is_no_record() -> None:
    text = 'null\n[1]\n["s", [["int", 5]]]\n["s", [["list", ["x"]]]]\n' + "[" * 100_000 + '\n["s", [["int", "5"]]]'
    assert runs.read_records(text) == [("s", [["int", "5"]])]
