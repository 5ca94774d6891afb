"""Renders a test file: chosen tests in other words and another layout, with probes in place of assertions."""

from __future__ import annotations

import ast
import functools
import random
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from resources_servers.swe_bench.confirm.assertions import (
    AssertionRewriter,
    Mode,
    Probe,
    PythonBlinding,
    Side,
    is_constant,
)
from resources_servers.swe_bench.confirm.labels import Labels, Variation, random_name, tokens_of
from resources_servers.swe_bench.confirm.slicing import (
    FunctionNode,
    case_rows,
    functions_of,
    key_of_test,
    loads_in,
    parametrisation,
    slice_away,
    strip_ids,
)
from resources_servers.swe_bench.row import TestId

_RECORDER = Path(__file__).with_name("recorder.py")
_HELPER = re.compile(r"_ng_\w+")


@dataclass(frozen=True)
class Chosen:
    """The chosen test functions of one file, by the names or docstrings in their ids."""

    names: frozenset[str]
    docstrings: frozenset[str]

    @classmethod
    def of(cls, path: str, tests: Iterable[TestId]) -> Chosen:
        here = [test for test in tests if test.may_be_in(path)]
        return cls(
            frozenset(test.function for test in here if test.function),
            frozenset(test.docstring for test in here if test.docstring),
        )

    @classmethod
    def named(cls, keys: Iterable[str]) -> Chosen:
        """Return the tests of these keys. A key is ``test:`` and a qualified name."""
        return cls(frozenset(key.rpartition(".")[2].removeprefix("test:") for key in keys), frozenset())

    def holds(self, function: FunctionNode) -> bool:
        first_line = (ast.get_docstring(function) or "").split("\n")[0].strip()
        return function.name in self.names or (bool(first_line) and first_line in self.docstrings)


@dataclass
class Rendered:
    """One test file as it enters the box."""

    source: str
    probes: dict[str, Probe]
    tokens: dict[str, str]
    """A site's name in the rendering → ``<path>|<key>``. A test's key is ``test:`` and its qualified name."""
    words: set[str] = field(default_factory=set)
    """Tokens in the data of the rendering, before relabelling."""
    words_by_test: dict[str, set[str]] = field(default_factory=dict)
    beside: dict[str, str] = field(default_factory=dict)
    """Path → text of other files that the rendering needs."""


@dataclass(frozen=True)
class Order:
    """How to make one rendering."""

    mode: Mode
    rng: random.Random
    records_path: str
    path: str = ""
    """The file's path, which distinguishes the sites of several files."""
    labels: Labels | Variation | None = None
    dropped_sides: Mapping[str, Side] = field(default_factory=dict)
    plain: bool = False
    """Whether to render the file as a program that runs without a test runner."""
    keeps_titles: bool = False
    """Whether titles must stay because the test command selects tests by them."""


def render(source: str, chosen: Chosen, order: Order) -> Rendered | None:
    """Render one file. Return ``None`` if nothing in it can be rendered.

    Raises:
        SyntaxError, ValueError: this Python cannot parse the file.
    """
    tree = ast.parse(source)
    tests = [(classes, node) for classes, node, _ in functions_of(tree) if chosen.holds(node)]
    if not tests:
        return None
    keys = {id(node): key_of_test(classes, node) for classes, node in tests}
    _keep_chosen(tree, {id(node) for _, node in tests})
    blinding = PythonBlinding(order.mode, order.rng, order.path, order.dropped_sides)
    constants = _constants(tree.body)
    for _, function, _ in list(functions_of(tree)):
        constant_names = constants | _constants(function.body) | _case_names(function)
        rewriter = AssertionRewriter(blinding, constant_names)
        function.body = [new for statement in function.body for new in _flat(rewriter.visit(statement))]
    _strip_docstrings(tree)
    if order.mode == "blind":
        slice_away(tree, blinding.dropped)
        for _, function, _ in functions_of(tree):
            strip_ids(function)
        _drop_unused_helpers(tree, {id(node) for _, node in tests})
    words_by_test = {keys[id(node)]: tokens_of(node) for _, node in tests}
    words = tokens_of(tree)
    for _, node in tests:
        begin = blinding.call("put", keys[id(node)])
        node.body.insert(0, ast.Expr(begin))
    driver: list[ast.stmt] = []
    if order.plain:
        plain = _plain_driver(tree, tests)
        if plain is None:
            return None
        driver = plain
    if order.labels is not None:
        order.labels.apply(tree)
        for statement in driver:
            for inner in ast.walk(statement):
                if isinstance(inner, ast.keyword):
                    order.labels.apply(inner.value)
    if order.mode == "blind":
        _rename(tree, [node for _, node in tests], order.rng, driver)
        _shuffle(tree, {id(node) for _, node in tests}, order.rng)
    tree.body += driver
    text = _pasted(ast.unparse(ast.fix_missing_locations(tree)), order)
    compile(text, "rendering", "exec", dont_inherit=True)
    site_keys = {token: f"{order.path}|{key}" for key, token in blinding.tokens.items()}
    probes = {f"{order.path}|{key}": probe for key, probe in blinding.probes.items()}
    return Rendered(text, probes, site_keys, words, words_by_test)


def relayout(tree: ast.Module, tests: Sequence[FunctionNode], rng: random.Random, labels: Labels | None) -> str:
    """Return the chosen tests of a file as text, with their assertions, in other words, names and order. Cases are
    named by their positions. ``tree`` is changed in the same way."""
    chosen = {id(node) for node in tests}
    _keep_chosen(tree, chosen)
    _strip_docstrings(tree)
    for _, function, _ in functions_of(tree):
        strip_ids(function)
    _drop_unused_helpers(tree, chosen)
    if labels is not None:
        labels.apply(tree)
    for node in tests:
        _number_cases(tree, node)
    _rename(tree, tests, rng, [])
    _shuffle(tree, chosen, rng)
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _number_cases(tree: ast.Module, function: FunctionNode) -> None:
    for decorator in function.decorator_list:
        parametrised = parametrisation(decorator)
        rows = case_rows(tree, parametrised[1]) if parametrised else None
        if rows is not None and isinstance(decorator, ast.Call) and len(decorator.args) < 4:
            numbers: list[ast.expr] = [ast.Constant(f"{number}") for number in range(len(rows))]
            decorator.keywords.append(ast.keyword("ids", ast.List(numbers, ast.Load())))


def _keep_chosen(tree: ast.Module, chosen: Collection[int]) -> None:
    """Remove all tests that are not chosen, and what the file does when it is run as a program."""
    for _, function, body in list(functions_of(tree)):
        if function.name.startswith("test") and id(function) not in chosen:
            _remove(function, body)
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "__name__" in loads_in(node.test))]


def _remove(function: FunctionNode, body: list[ast.stmt]) -> None:
    body.remove(function)
    if not body:
        body.append(ast.Pass())


def _drop_unused_helpers(tree: ast.Module, chosen: Collection[int]) -> None:
    """Remove helpers and fixtures that nothing uses any more, because they may hold what the tests expect."""
    for _ in range(10):
        loads = loads_in(tree)
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        texts = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        removed = False
        for classes, function, body in list(functions_of(tree)):
            name = function.name
            used = loads[name] or name in attributes or name in arguments or name in texts
            special = name.startswith(("test", "__", "setUp", "tearDown", "setup", "teardown", "pytest_"))
            automatic = any("autouse" in ast.dump(one) for one in function.decorator_list)
            foreign = bool(classes) and not (name.startswith("_") or name.startswith("assert"))
            if id(function) in chosen or used or special or automatic or foreign:
                continue
            _remove(function, body)
            removed = True
        if not removed:
            return


def _constants(body: Sequence[ast.stmt]) -> set[str]:
    """Return the names to which only constants are assigned."""
    values: dict[str, list[ast.expr]] = {}
    for node in (inner for statement in body for inner in ast.walk(statement)):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(one, ast.Name):
                        values.setdefault(one.id, []).append(node.value)
        elif isinstance(node, ast.For):
            for part in ast.walk(node.target):
                if isinstance(part, ast.Name):
                    values.setdefault(part.id, []).append(node.iter)
    names: set[str] = set()
    for _ in range(3):
        names |= {name for name, assigned in values.items() if all(is_constant(value, names) for value in assigned)}
    return names


def _case_names(function: FunctionNode) -> set[str]:
    return {name for decorator in function.decorator_list for name in (parametrisation(decorator) or ([], None))[0]}


def _flat(result: object) -> list[ast.stmt]:
    if isinstance(result, list):
        return result
    return [result] if isinstance(result, ast.stmt) else []


def _strip_docstrings(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:] or ([] if isinstance(node, ast.Module) else [ast.Pass()])


def _rename(tree: ast.Module, tests: Sequence[FunctionNode], rng: random.Random, driver: Sequence[ast.stmt]) -> None:
    """Give tests and their local variables other names."""
    renamed = {node.name: f"test_{random_name(rng)}" for node in tests}
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)} | set(loads_in(tree))
    for node in tests:
        if node.name not in used:
            node.name = renamed[node.name]
    for statement in driver:
        for inner in ast.walk(statement):
            if isinstance(inner, ast.Name) and inner.id in renamed and inner.id not in used:
                inner.id = renamed[inner.id]
            elif isinstance(inner, ast.Constant) and inner.value in renamed and inner.value not in used:
                inner.value = renamed[inner.value]
    for node in tests:
        inner_nodes = [one for statement in node.body for one in ast.walk(statement)]
        fixed = {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
        fixed |= {name for one in inner_nodes if isinstance(one, ast.Global | ast.Nonlocal) for name in one.names}
        fixed |= {one.name for one in inner_nodes if isinstance(one, ast.ExceptHandler) and one.name}
        fixed |= {(one.asname or one.name) for one in inner_nodes if isinstance(one, ast.alias)}
        definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        if any(isinstance(one, definitions) for one in inner_nodes):
            continue
        if {"locals", "eval", "exec", "vars"} & {one.id for one in inner_nodes if isinstance(one, ast.Name)}:
            continue
        local = {one.id for one in inner_nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        names = {name: random_name(rng) for name in sorted(local - fixed)}
        for one in inner_nodes:
            if isinstance(one, ast.Name) and one.id in names:
                one.id = names[one.id]


def _shuffle(tree: ast.Module, tests: Collection[int], rng: random.Random) -> None:
    """Shuffle the tests of each body among their places."""
    bodies: list[list[ast.stmt]] = [tree.body, *(n.body for n in ast.walk(tree) if isinstance(n, ast.ClassDef))]
    for body in bodies:
        places = [number for number, node in enumerate(body) if id(node) in tests]
        nodes = [body[number] for number in places]
        rng.shuffle(nodes)
        for number, node in zip(places, nodes, strict=True):
            body[number] = node


def _plain_driver(tree: ast.Module, tests: Sequence[tuple[tuple[str, ...], FunctionNode]]) -> list[ast.stmt] | None:
    """Return calls of the tests that need no runner, and remove the tests that do from ``tree``. Return ``None`` if no
    test can be called that way."""
    calls: list[str] = []
    for classes, function in tests:
        call = None if _needs_runner(function) or len(classes) > 1 else _plain_call(tree, classes, function)
        body = tree.body
        if classes:
            holders = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == classes[0]]
            if not holders:
                return None
            body = holders[0].body
        if call is None:
            if function in body:
                _remove(function, body)
            continue
        function.decorator_list = [one for one in function.decorator_list if "pytest" not in ast.dump(one)]
        calls.append(call)
    if not calls:
        return None
    for _, function, body in list(functions_of(tree)):
        if _is_plain_fixture(function):
            function.decorator_list = []
        if "'pytest'" in ast.dump(function) and function in body:
            _remove(function, body)
    if "id='pytest'" in ast.dump(tree):
        return None
    for node in list(tree.body):
        if isinstance(node, ast.Import) and any(one.name.split(".")[0] == "pytest" for one in node.names):
            node.names = [one for one in node.names if one.name.split(".")[0] != "pytest"]
            if not node.names:
                tree.body.remove(node)
    return ast.parse("\n".join(calls)).body


def _needs_runner(function: FunctionNode) -> bool:
    if isinstance(function, ast.AsyncFunctionDef):
        return True
    body = ast.Module(function.body, [])
    return "id='pytest'" in ast.dump(body)


def _plain_call(tree: ast.Module, classes: tuple[str, ...], function: FunctionNode) -> str | None:
    arguments = [one.arg for one in function.args.args if one.arg != "self"]
    cases: list[dict[str, str]] = [{}]
    for decorator in function.decorator_list:
        parametrised = parametrisation(decorator)
        if parametrised is None:
            continue
        names, table = parametrised
        rows = case_rows(tree, table)
        if rows is None:
            return None
        row_cases = []
        for row in rows:
            if isinstance(row, ast.Call):
                return None
            row_values = [row] if len(names) == 1 else list(getattr(row, "elts", []))
            if len(row_values) != len(names):
                return None
            row_cases.append({name: ast.unparse(value) for name, value in zip(names, row_values, strict=True)})
        cases = [{**case, **new} for new in row_cases for case in cases]
    needed = arguments[: len(arguments) - len(function.args.defaults)]
    fixture_names = [name for name in needed if name not in (cases[0] if cases else {})]
    fixtures = _plain_fixtures(tree)
    if not fixtures.keys() >= set(fixture_names):
        return None
    lines: list[str] = []
    name = function.name
    for case in cases:
        values = {**case, **{fixture: fixtures[fixture] for fixture in fixture_names}}
        arguments_text = ", ".join(f"{key}={value}" for key, value in values.items())
        if classes:
            lines += [
                "try:",
                f"    _ng_one = {classes[0]}({name!r}) if hasattr({classes[0]}, 'assertEqual') else {classes[0]}()",
                "    for _ng_hook in ('setUpClass', 'setup_class', 'setUp'):",
                "        getattr(_ng_one, _ng_hook, lambda: None)()",
                "    try:",
                f"        getattr(_ng_one, {name!r})({arguments_text})",
                "    finally:",
                "        for _ng_hook in ('tearDown', 'tearDownClass', 'doCleanups'):",
                "            getattr(_ng_one, _ng_hook, lambda: None)()",
                "except Exception:",
                "    pass",
            ]
        else:
            lines += ["try:", f"    {name}({arguments_text})", "except Exception:", "    pass"]
    return "\n".join(lines)


_TMP_PATH = "__import__('pathlib').Path(__import__('tempfile').mkdtemp())"


def _plain_fixtures(tree: ast.Module) -> dict[str, str]:
    """Return fixture → an expression that makes it without a test runner."""
    expressions = {"tmp_path": _TMP_PATH}
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and _is_plain_fixture(function):
            expressions[function.name] = f"{function.name}({_TMP_PATH if function.args.args else ''})"
    return expressions


def _is_plain_fixture(function: FunctionNode) -> bool:
    """Whether a fixture works without the test runner: it has no teardown and uses no fixture but ``tmp_path``."""
    yields = any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function))
    if len(function.decorator_list) != 1 or yields:
        return False
    decorator = function.decorator_list[0]
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    is_fixture = ast.unparse(called) in ("pytest.fixture", "fixture")
    has_options = isinstance(decorator, ast.Call) and (
        decorator.args or any(one.arg != "scope" for one in decorator.keywords)
    )
    arguments = [one.arg for one in function.args.args]
    return is_fixture and not has_options and arguments in ([], ["tmp_path"]) and not _needs_runner(function)


@functools.cache
def _recorder() -> ast.Module:
    tree = ast.parse(_RECORDER.read_text(encoding="utf-8"))
    _strip_docstrings(tree)
    return tree


def _pasted(text: str, order: Order) -> str:
    """Return the tests with the recorder before them, after ``from __future__`` imports, and random helper names."""
    lines = text.split("\n")
    future = [line for line in lines if line.startswith("from __future__ ")]
    other_lines = [line for line in lines if not line.startswith("from __future__ ")]
    recorder = ast.unparse(_recorder()).replace("@PATH@", order.records_path)
    full_text = "\n".join([*future, recorder, *other_lines, ""])
    names = {name: "_" + random_name(order.rng) for name in sorted(set(_HELPER.findall(full_text)))}
    return _HELPER.sub(lambda match: names[match[0]], full_text)
