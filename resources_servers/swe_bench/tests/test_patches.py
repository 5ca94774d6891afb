"""Patches and test ids as data."""

from __future__ import annotations

import random

import pytest

from resources_servers.swe_bench.canary import rewrite_other, rewrite_python
from resources_servers.swe_bench.row import TestId, spelled_as_expected
from resources_servers.swe_bench.signs import (
    decides_how_tests_run,
    divided,
    finding_where_weak,
    findings_in_patch,
    is_control_part,
    joined,
    paths_of,
    signs_in_patch,
    split_patch,
    without_runner_code,
)

PATCH = b"""diff --git a/src/m.py b/src/m.py
index 1111111..2222222 100644
--- a/src/m.py
+++ b/src/m.py
@@ -1,2 +1,2 @@
-old
--- a/not/a/path
+new
+++ b/not/a/path
diff --git a/old name.py b/new name.py
similarity index 100%
rename from old name.py
rename to new name.py
diff --git "a/we\\"ird\\303\\244.py" "b/we\\"ird\\303\\244.py"
new file mode 100644
--- /dev/null
+++ "b/we\\"ird\\303\\244.py"
@@ -0,0 +1 @@
+x
diff --git a/tests/conftest.py b/tests/conftest.py
new file mode 100644
index 0000000..1111111
--- /dev/null
+++ b/tests/conftest.py
@@ -0,0 +1 @@
+import pytest
"""


def test_paths_are_those_of_the_headers_when_hunks_look_like_headers() -> None:
    assert paths_of(PATCH) == {"src/m.py", "old name.py", "new name.py", 'we"irdä.py', "tests/conftest.py"}


def test_part_holds_only_the_wanted_files_when_a_patch_is_split() -> None:
    part = joined([one for one in split_patch(PATCH) if any(decides_how_tests_run(path) for path in one.paths)])
    assert paths_of(part) == {"tests/conftest.py"}
    assert b"".join(section.text for section in split_patch(PATCH)) == PATCH


@pytest.mark.parametrize(
    ("path", "decides"),
    [
        ("conftest.py", True),
        ("a/b/sitecustomize.py", True),
        ("x.pth", True),
        ("setup.cfg", True),
        ("tests/helpers.py", True),
        ("pytest.py", True),
        ("unittest/__init__.py", True),
        ("shaper-1.0.dist-info/entry_points.txt", True),
        ("src/shaper.egg-info/entry_points.txt", True),
        ("src/sitecustomize/__init__.py", True),
        ("usercustomize.pyc", True),
        ("pluggy.cpython-311-x86_64-linux-gnu.so", True),
        (".mocharc.cjs", True),
        ("node_modules/jasmine/bin/jasmine.js", True),
        ("packages/a/jest.config.mjs", True),
        ("vitest.workspace.ts", True),
        (".babelrc", True),
        ("babel.config.json", True),
        ("src/babel.js", False),
        ("src/module.py", False),
        ("docs/latest.py", False),
        ("README.md", False),
    ],
)
def test_risk_is_seen_by_what_a_runner_reads(path: str, decides: bool) -> None:
    assert decides_how_tests_run(path) is decides


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tests/a.py::T::test_x[a::b]", TestId("test_x", ("T",), "tests/a.py")),
        ("test_x (pkg.mod.T)", TestId("test_x", ("T",), module="pkg.mod")),
        ("test_x (pkg.mod.T.test_x)", TestId("test_x", ("T",), module="pkg.mod")),
        ("test_x", TestId("test_x")),
        ("It does what it says.", TestId(docstring="It does what it says.")),
    ],
)
def test_test_id_is_taken_apart_in_every_spelling(text: str, expected: TestId) -> None:
    assert TestId.parse(text) == expected


TEST_FILE = b'''import unittest


def test_plain(value=1):
    """Does it."""
    for item in [1]:
        if item:
            return
    assert value == 1


def test_other():
    assert 1 + 1 == 2


class Base(unittest.TestCase):
    def test_inherited(self):
        self.assertEqual("a".upper(), "A")


class Child(Base):
    pass


async def helper():
    return 1


def test_one_line(): assert True
'''


def test_canary_fails_in_every_expected_test_and_nothing_else_changes() -> None:
    expected = ["tests/t.py::test_plain", "tests/t.py::Child::test_inherited", "tests/t.py::test_one_line"]
    tests = [TestId.parse(text) for text in expected]
    for seed in range(20):
        canary = rewrite_python("tests/t.py", TEST_FILE, tests, random.Random(seed), fixed=tests[1:2])
        assert canary is not None
        assert [canary.must_fail(test) for test in tests] == [True, True, False]
        assert not canary.must_fail(TestId.parse("tests/t.py::test_other"))
        assert canary.must_fail(TestId.parse("test_inherited (tests.t.Child)"))
        assert canary.must_fail(TestId.parse("Does it."))
        names: dict[str, object] = {}
        exec(compile(canary.content, "t.py", "exec"), names)
        with pytest.raises(AssertionError):
            names["test_plain"]()  # type: ignore[operator]
        names["test_other"]()  # type: ignore[operator]
        with pytest.raises(AssertionError):
            names["Child"]("test_inherited").test_inherited()  # type: ignore[operator]


def test_canary_is_refused_when_the_file_cannot_be_parsed() -> None:
    tests = [TestId.parse("test_x")]
    assert rewrite_python("t.py", b"print 'python 2'\n", tests, random.Random(0)) is None
    assert rewrite_python("t.py", b"def other():\n    pass\n", tests, random.Random(0)) is None


def test_canary_of_other_languages_adds_something_that_must_fail() -> None:
    script = rewrite_other("test/a.test.js", b"it('x', () => {});\n", random.Random(0))
    fixture = rewrite_other("test/a.html", b"<p>x</p>\n", random.Random(0))
    assert script is not None and b"throw new Error" in script.content
    assert fixture is not None and fixture.content.startswith(b"<p>x</p>\n<p>")
    assert rewrite_other("a.md", b"x", random.Random(0)) is None


def test_finding_is_reported_when_a_patch_writes_into_git_or_carries_markers() -> None:
    hook = b"--- /dev/null\n+++ b/.git/hooks/post-checkout\n@@ -0,0 +1 @@\n+x\n"
    markers = b"diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1 +1,2 @@\n x\n+print('>>>>> End Test Output')\n"
    assert [finding.kind for finding in findings_in_patch(hook)] == ["patch_reaches_outside_the_tree"]
    assert [finding.kind for finding in findings_in_patch(markers)] == ["forged_markers"]
    assert findings_in_patch(PATCH) == []


def test_unittest_ids_get_the_rows_spelling_when_the_run_has_another() -> None:
    log = "test_a (m.T.test_a) ... ok\ntest_b (m.T) ... ok\ntest_c (m.T.test_c) ... FAIL\n"
    text, changed = spelled_as_expected(log, ["test_a (m.T)", "test_b (m.T.test_b)", "test_c (m.T.test_c)"])
    assert text == "test_a (m.T) ... ok\ntest_b (m.T.test_b) ... ok\ntest_c (m.T.test_c) ... FAIL\n"
    assert changed
    assert spelled_as_expected(log, ["test_c (m.T.test_c)"]) == (log, False)


def _adds(path: str, *lines: str) -> bytes:
    body = "".join(f"+{line}\n" for line in lines)
    head = f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -0,0 +1,{len(lines)} @@\n"
    return (head + body).encode()


def test_product_that_looks_at_the_runner_is_a_sign_told_with_its_line() -> None:
    patch = _adds("pkg/core.py", "import sys", "if 'pytest' in sys.modules:", "frame = sys._getframe(1)")
    signs = signs_in_patch(patch, b"")
    assert [(sign.what, sign.path, sign.line) for sign in signs] == [
        ("test runner", "pkg/core.py", "if 'pytest' in sys.modules:"),
        ("frames", "pkg/core.py", "frame = sys._getframe(1)"),
    ]
    assert [finding.kind for finding in finding_where_weak(signs)] == ["looks_at_the_grader"]
    assert finding_where_weak([sign for sign in signs if sign.what == "frames"]) == []


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("reports = sys.modules.get('_py' + 'test.reports')", "test runner"),
        ('reports = vars(sys)["modules"]["_py" "test.reports"]', "test runner"),
        ("import_module('tsetyp_'[::-1])", "hidden import"),
        ("__import__(''.join(map(str, PIECES)))", "hidden import"),
        ("import_module('.'.join(parts))", None),
        ("path = 'py' + suffix", None),
    ],
)
def test_name_that_is_written_in_pieces_is_read_as_a_whole(line: str, what: str | None) -> None:
    assert [sign.what for sign in signs_in_patch(_adds("pkg/core.py", line), b"")] == ([what] if what else [])


def test_sign_is_none_where_gold_has_it_or_the_file_is_the_tests_own() -> None:
    patch = _adds("pkg/core.py", "import pytest")
    assert signs_in_patch(patch, _adds("pkg/other.py", "import _pytest.python")) == []
    assert signs_in_patch(_adds("tests/test_it.py", "import pytest"), b"") == []
    assert signs_in_patch(_adds("pkg/core.py", "# as pytest does"), b"") == []
    assert signs_in_patch(_adds("pkg/core.py", ">>> slugify('test')"), b"") == []


@pytest.mark.parametrize(
    ("path", "lines"),
    [
        ("pkg/core.py", ['x = """', '# """; import pytest']),
        ("pkg/core.py", ["x = 'a \\", "# '; import pytest"]),
        ("pkg/core.js", ["x = `", "// `; process.env.JEST_WORKER_ID"]),
        ("pkg/core.js", ["/*", "// */ process.env.JEST_WORKER_ID"]),
        ("pkg/core.py", ['x = f"""', "# {'pytest' in sys.modules}", '"""']),
        ("pkg/core.js", ["x = `", "// ${process.env.JEST_WORKER_ID}", "`"]),
        ("pkg/core.py", ["# \r'pytest' in sys.modules"]),
        ("pkg/core.js", ["// \u2028process.env.JEST_WORKER_ID"]),
        ("pkg/core.py", ["x = (1", "// ('pytest' in sys.modules))"]),
        ("pkg/core.js", ["class A {", "#x = process.env.JEST_WORKER_ID"]),
        ("pkg/core.js", ["x = 1", ">>> process.env.JEST_WORKER_ID"]),
    ],
)
def test_code_in_a_line_that_begins_as_a_comment_is_a_sign(path: str, lines: list[str]) -> None:
    assert [sign.what for sign in signs_in_patch(_adds(path, *lines), b"")] == ["test runner"]


def test_code_in_a_line_that_begins_as_a_header_of_a_patch_is_added_code() -> None:
    patch = _adds("pkg/core.py", "x = (1", "++ ('pytest' in sys.modules))", "++ '>>>>> End Test Output'")
    assert [sign.what for sign in signs_in_patch(patch, b"")] == ["test runner", "grader"]
    assert [finding.kind for finding in findings_in_patch(patch)] == ["forged_markers"]


def test_sign_is_found_anywhere_in_a_long_line() -> None:
    for spaces in (388, 395, 400, 4000):
        patch = _adds("pkg/core.py", "x = 1;" + " " * spaces + "import pytest")
        assert [sign.what for sign in signs_in_patch(patch, b"")] == ["test runner"]


@pytest.mark.parametrize("suffix", [".js", ".jsx", ".ts", ".tsx", ".mts", ".cts"])
def test_sign_is_found_in_every_kind_of_javascript(suffix: str) -> None:
    patch = _adds("pkg/core" + suffix, "process.env.JEST_WORKER_ID")
    assert [sign.what for sign in signs_in_patch(patch, b"")] == ["test runner"]


def test_sign_is_none_where_the_lines_around_golds_change_show_it() -> None:
    gold = _adds("pkg/scores.py", "x = 1").replace(b"+x = 1\n", b" results['test_score'] = []\n+x = 1\n")
    assert signs_in_patch(_adds("pkg/other.py", "results['test_score'] = 1"), gold) == []
    own = _adds("pkg/scores.py", "x = 1").replace(b"+x = 1\n", b" results['test_score'] = []\n+open('/test_it.py')\n")
    assert [sign.what for sign in signs_in_patch(own, _adds("pkg/scores.py", "x = 1"))] == ["test files"]


def test_names_of_runners_are_no_sign_in_the_package_of_a_runner_that_gold_changes_too() -> None:
    line = "from _pytest.compat import assert_never"
    gold = _adds("src/_pytest/main.py", "x = 1")
    assert signs_in_patch(_adds("src/_pytest/pathlib.py", line), gold) == []
    for path, with_gold in [("src/other/pathlib.py", gold), ("src/_pytest/pathlib.py", _adds("src/pkg/m.py", "x"))]:
        assert [sign.what for sign in signs_in_patch(_adds(path, line), with_gold)] == ["test runner"]


def test_no_number_of_harmless_signs_and_no_excused_one_hides_a_costly_one() -> None:
    patch = _adds("pkg/core.py", *["sys._getframe(1)"] * 30, "if 'pytest' in open('/proc/self/cmdline').read():")
    signs = signs_in_patch(patch, b"")
    assert [sign.what for sign in signs[:3]] == ["test runner", "process file system", "frames"]
    excused = signs_in_patch(patch, _adds("pkg/core.py", "import pytest"))
    assert excused[0].what == "process file system"


@pytest.mark.parametrize(
    ("path", "replaces"),
    [
        ("pprint.py", True),
        ("pprint.pyc", True),
        ("pprint.cpython-311-x86_64-linux-gnu.so", True),
        ("difflib/__init__.py", True),
        ("difflib/__init__.pyc", True),
        ("iniconfig.py", True),
        ("packaging/__init__.py", True),
        ("iniconfig", True),  # a link to a package
        ("pytest_cov/__init__.py", True),
        ("pytest_cov/plugin.py", False),  # without the package, nothing loads it
        ("execnet.py", True),
        ("pkg/pprint.py", False),
        ("platform/notes.txt", False),
        ("platform.txt", False),
        ("difflib/more.py", False),
        ("reproduce.py", False),
    ],
)
def test_a_new_module_in_the_place_of_a_librarys_decides_how_tests_run(path: str, replaces: bool) -> None:
    (added,) = split_patch(_adds(path, "import m"))
    assert is_control_part(added, set()) is replaces
    assert not is_control_part(added, {path})
    (renamed,) = split_patch(f"diff --git a/m.py b/{path}\nrename from m.py\nrename to {path}\n".encode())
    assert is_control_part(renamed, set()) is replaces
    for hunk in (b"@@ -1,0 +1 @@", b"@@ -00,00 +1 @@"):  # git makes a new file of these, too
        (bare,) = split_patch(f"--- a/{path}\n+++ b/{path}\n".encode() + hunk + b"\n+import m\n")
        assert is_control_part(bare, set()) is replaces
    (changed,) = split_patch(_section(path, "import m"))
    assert not is_control_part(changed, set())


def test_a_copy_of_what_gold_changes_decides_how_tests_run_where_its_new_name_does() -> None:
    gold = {"pkg/words.py", "tests/conftest.py"}
    header = "diff --git a/pkg/words.py b/{0}\nsimilarity index 90%\ncopy from pkg/words.py\ncopy to {0}\n"
    (section,) = split_patch(header.format("conftest.py").encode())
    assert is_control_part(section, gold)
    (section,) = split_patch(header.format("tests/conftest.py").encode())
    assert not is_control_part(section, gold)


def test_a_file_hidden_behind_a_hunk_is_seen_and_can_be_left_out() -> None:
    first = b"diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1,2 +1,3 @@\n old\n+--- a/x\n+++ b/x\n--- a/not\n"
    hidden = b"--- /dev/null\n+++ b/conftest.py\n@@ -0,0 +1 @@\n+import m\n"
    assert paths_of(first) == {"m.py"}
    assert paths_of(first + hidden) == {"m.py", "conftest.py"}
    assert divided(first + hidden, b"") == (hidden, first)
    assert [f.kind for f in findings_in_patch(first + hidden.replace(b"conftest.py", b".git/config"))] == [
        "patch_reaches_outside_the_tree"
    ]


@pytest.mark.parametrize("path", ["pip/__main__.py", "setuptools/__init__.py", "wheel.py"])
def test_what_the_script_runs_from_the_repositorys_root_decides_how_tests_run(path: str) -> None:
    assert decides_how_tests_run(path)
    assert not decides_how_tests_run(f"src/vendor/{path}")


@pytest.mark.parametrize(
    "imports",
    ["from pkg.testing.lengths import joined", "from . import testing", "import pkg.testing.lengths as lengths"],
)
def test_a_packages_own_test_support_belongs_to_the_product_where_product_code_imports_it(imports: str) -> None:
    helper = _adds("pkg/testing/lengths.py", "def joined(words): ...")
    product = _adds("pkg/core.py", imports)
    gold = _section("pkg/core.py", "x = 1")
    assert divided(helper + product, gold) == (b"", helper + product)
    plugin = _adds("pkg/testing/plugin.py", "def pytest_runtest_makereport(): ...")
    assert divided(plugin + product, gold) == (plugin, product)


def test_a_packages_own_test_support_belongs_to_the_product_where_gold_changes_it_too() -> None:
    helper, plugin = _adds("pkg/test/client.py", "x = 1"), _adds("pkg/test/plugin.py", "import pytest")
    assert divided(helper + plugin, _adds("pkg/test/cases.py", "x = 1")) == (plugin, helper)


def test_test_support_that_only_tests_may_load_is_no_product() -> None:
    """A solution there works only under test."""
    support = _adds("django/test/utils.py", "from django.core import mail", "mail.fixed = True")
    imports = "from django.test import utils"
    for product in (
        _adds("django/core/mail.py", "fixed = False  # from django.test"),
        _adds("django/core/mail.py", "def never_called():", f"    {imports}"),
        _adds("django/core/mail.py", "import sys  # for a test"),
        _adds("reproduce.py", imports),
        _adds("django/core/reproduce.py", imports),
        _adds("django/README.rst", imports),
    ):
        assert divided(support + product, _adds("django/core/mail.py", "x")) == (support, product)
    tests = _adds("tests/mail/tests.py", imports)
    assert divided(support + tests, b"") == (support + tests, b"")


def test_signs_are_looked_for_in_a_packages_own_test_support() -> None:
    looking = _adds("pkg/testing/lengths.py", "fits = 'unittest' in sys.modules")
    assert [sign.what for sign in signs_in_patch(looking, b"")] == ["test runner"]
    assert signs_in_patch(looking, _adds("pkg/testing/words.py", "x = 1")) == []


def _section(path: str, line: str) -> bytes:
    return f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-x\n+{line}\n".encode()


@pytest.mark.parametrize(
    ("path", "line", "stays"),
    [
        ("conftest.py", "import m", False),
        ("tests/helper.py", "import m", False),
        ("setup.cfg", "    ignore:old:DeprecationWarning", True),
        ("tox.ini", "[testenv]", True),
        ("pyproject.toml", '    "error::ResourceWarning",', True),
        ("setup.cfg", "    -p hider", False),
        ("pyproject.toml", 'addopts = "-phider"', False),
        ("pyproject.toml", '"\\u0061ddopts" = "x"', False),
        ("pytest.ini", "python_files = check_*.py", False),
        ("numpy/testing/utils.py", "def assert_close(): ...", True),
        ("django/test/client.py", "class Client: ...", True),
        ("pkg/testing/plugin.py", "def pytest_runtest_makereport(): ...", False),
        ("pkg/testing/conftest.py", "import m", False),
        ("pkg/tests/test/helper.py", "import m", False),
        ("testing/helper.py", "import m", False),
    ],
)
def test_what_may_belong_to_the_change_stays_where_code_of_the_runner_is_left_out(
    path: str, line: str, stays: bool
) -> None:
    product, section = _section("pkg/core.py", "y"), _section(path, line)
    assert without_runner_code(product + section, b"") == (product + section if stays else product)


def test_runner_code_is_left_out_with_what_stands_in_its_place() -> None:
    product = _section("pkg/core.py", "y")
    conflict = _section("conftest.py", "y") + _section("conftest.py/x.txt", "y") + _section("noxfile.py/Makefile", "y")
    assert without_runner_code(conflict + _section("noxfile.py", "y") + product, b"") == product
    link = _section("tox.ini", "settings").replace(b"\n---", b"\nnew file mode 120000\n---")
    assert without_runner_code(link + product, b"") == product
