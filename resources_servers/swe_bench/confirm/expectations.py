"""Wrong expectations of Python tests: renders a test file in other words, and variants with one wrong expectation.

`twin_of` renders a file with its assertions: it changes words, names and order, and removes only the other tests,
comments, docstrings and ids. Beside the text it returns the *wrongs*: the same text with one expectation changed, to
base's answer, to the expectation of a sibling case, or to a near miss.
"""

from __future__ import annotations

import ast
import copy
import itertools
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from resources_servers.swe_bench.confirm.assertions import AssertionRewriter, PythonBlinding, Side, key_of
from resources_servers.swe_bench.confirm.labels import MAX_DIGITS, Labels, name_of
from resources_servers.swe_bench.confirm.rendering import Chosen, relayout
from resources_servers.swe_bench.confirm.slicing import (
    FunctionNode,
    case_rows,
    functions_of,
    key_of_test,
    parametrisation,
)
from resources_servers.swe_bench.confirm.values import Value

Origin = Literal["input", "base", "sibling", "near"]
"""Where a wrong value comes from: base's answer, another expectation of the file, or a small change. With ``input``
the expected value stays and the test's input changes, so the shape of the expected value does not give it away."""

MAX_WRONGS = 9
"""The limit for one test in one rendering."""
_MAX_TARGETS = 24
_EXCLUDING = ("==", "is", "count")
_FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
}
_OPPOSITES = {
    "assertEqual": "assertNotEqual",
    "assertIn": "assertNotIn",
    "assertIs": "assertIsNot",
    "assertIsNone": "assertIsNotNone",
    "assertIsInstance": "assertNotIsInstance",
    "assertRegex": "assertNotRegex",
    "assertTrue": "assertFalse",
}
_OPPOSITE_OF = _OPPOSITES | {other: name for name, other in _OPPOSITES.items()}
_ERRORS = (
    "ValueError",
    "TypeError",
    "KeyError",
    "IndexError",
    "AttributeError",
    "RuntimeError",
    "LookupError",
    "OSError",
)
_EXACT = re.compile("equal|identical|same", re.IGNORECASE)
_INEXACT = re.compile("almost|close|approx|not|n_equal", re.IGNORECASE)
_MAX_PARTS = 64
_PART = re.compile(r"[^\W\d_]+|\d+")


@dataclass(frozen=True)
class Wrong:
    """A file with one expectation of one test changed."""

    test: str
    kind: str
    """The kind of expectation: ``equality``, ``raises``, ``truth``, …"""
    excluding: bool
    """Whether no code can meet both this expectation and the true one."""
    origin: Origin
    text: str


@dataclass
class TwinFile:
    """A file of a true twin, and the wrong files made from it."""

    text: str
    names: dict[str, str]
    """The name of a test function in ``text`` → the test."""
    wrongs: dict[str, list[Wrong]] = field(default_factory=dict)
    """Test → its wrongs, the most conclusive ones first."""


def twin_of(
    source: str,
    chosen: Chosen,
    *,
    rng: random.Random,
    labels: Labels | None = None,
    sides: Mapping[str, Side] | None = None,
    base: Mapping[str, Sequence[Value]] | None = None,
) -> TwinFile | None:
    """Return the twin of one file, or ``None`` if the file has no chosen test.

    Args:
        sides: key of an assertion → the side with the expected value.
        base: key → base's answers on the other side, one per invocation, in the words of ``labels``.

    Raises:
        SyntaxError, ValueError: this Python cannot parse the file.
    """
    tree = ast.parse(source)
    places = {_place(node): node for node in ast.walk(tree) if isinstance(node, ast.expr | ast.stmt)}
    tests = {
        id(node): (key_of_test(classes, node), node) for classes, node, _ in functions_of(tree) if chosen.holds(node)
    }
    if not tests:
        return None
    expectations = list(_expectations(ast.parse(source), sides or {}))
    finder = _Finder(tree, [node for _, node in tests.values()])
    targets = {
        test: [(expected, target) for expected in expectations for target in finder.targets(node, expected, places)]
        for test, node in tests.values()
    }
    text = relayout(tree, [node for _, node in tests.values()], rng, labels)
    twin = TwinFile(text, {node.name: test for test, node in tests.values()})
    nodes = dict(tests.values())
    for test, options in targets.items():
        maker = _WrongMaker(tree, rng, base or {}, finder.names_of_errors)
        expected_nodes = [target.node for expected, target in options if expected.op != "input"]
        maker.siblings = [node.value for node in expected_nodes if isinstance(node, ast.Constant)]
        maker.literals = [*maker.siblings, *finder.literals_of(nodes[test])]
        rng.shuffle(options)
        options.sort(key=lambda pair: not pair[1].whole)
        wrongs = [
            wrong for expected, target in options[:_MAX_TARGETS] for wrong in maker.wrongs(test, expected, target)
        ]
        twin.wrongs[test] = _picked([wrong for wrong in wrongs if wrong.text != text], rng)
    return twin


def _picked(wrongs: list[Wrong], rng: random.Random) -> list[Wrong]:
    """Return a few wrongs, alternating between origins, those first that exclude the true expectation."""
    rng.shuffle(wrongs)
    queues = {origin: [wrong for wrong in wrongs if wrong.origin == origin] for origin in get_args(Origin)}
    for queue in queues.values():
        queue.sort(key=lambda wrong: (not wrong.excluding, wrong.kind == "negation"))
    order = rng.sample(list(queues), len(queues))
    picked: list[Wrong] = []
    while len(picked) < MAX_WRONGS and any(queues.values()):
        picked += [queues[origin].pop(0) for origin in order if queues[origin]]
    return picked[:MAX_WRONGS]


# ------------------------------------------------------------------------------------------------- what is expected


_Place = tuple[str, int, int, int | None, int | None]


def _place(node: ast.expr | ast.stmt) -> _Place:
    return type(node).__name__, node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


@dataclass(frozen=True)
class _Expectation:
    """One thing that a function asserts, given by places in the pristine file."""

    function: _Place
    key: str
    op: str
    expected: tuple[_Place, ...] = ()
    """The expressions whose values are expected."""
    flip: _Place | None = None
    """The expression or method name whose negation makes the expectation wrong."""
    silence: _Place | None = None
    """A ``with`` statement that expects an error."""


class _Collector(AssertionRewriter):
    """Collects what a function expects. The rewritten function is discarded."""

    def __init__(self, function: FunctionNode, sides: Mapping[str, Side], helpers: Sequence[FunctionNode]) -> None:
        self.probes = PythonBlinding("discover", random.Random(0), "", {})
        super().__init__(self.probes, ())
        self.function, self.sides, self.helpers = _place(function), sides, helpers
        self.found: list[_Expectation] = []
        self._name = ""
        """The name of the current assertion method."""

    def _note(self, key: str, op: str, *expected: ast.expr, **more: _Place) -> None:
        self.found.append(_Expectation(self.function, key, op, tuple(map(_place, expected)), **more))

    def _two(
        self,
        key: str,
        op: str,
        left: ast.expr,
        right: ast.expr,
        *,
        expected: Side | None = None,
        extra: float | None = None,
    ) -> ast.expr:
        result = super()._two(key, op, left, right, expected=expected, extra=extra)
        probe = self.probes.probes[key]
        side = self.sides.get(key) or probe.expected or "right"
        expected_node, input_node = (left, right) if side == "left" else (right, left)
        if hasattr(expected_node, "lineno"):
            exact = probe.op == "like" and _EXACT.search(self._name) and not _INEXACT.search(self._name)
            op = "==" if exact else probe.op
            self._note(key, op, expected_node)
            if op in _EXCLUDING and hasattr(input_node, "lineno"):
                self._note(key, "input", input_node)
        return result

    def _parts(self, test: ast.expr, key: str) -> list[ast.expr]:
        result = super()._parts(test, key)
        probe = self.probes.probes.get(key)
        if probe is not None and probe.op in ("truth", "false"):
            self._note(key, "truth", flip=_place(test))
        elif (isinstance(test, ast.Compare) and len(test.ops) == 1) or isinstance(test, ast.Call | ast.UnaryOp):
            self._note(key, "negation", flip=_place(test))
        return result

    def _asserting_call(self, call: ast.Call, key: str) -> list[ast.expr] | None:
        name = self._name = name_of(call.func)
        result = super()._asserting_call(call, key)
        if name in _OPPOSITE_OF:
            self._note(key, "truth" if name in ("assertTrue", "assertFalse") else "negation", flip=_place(call.func))
        helper = any(inner.name == name for inner in self.helpers)
        if (
            result is None
            and not helper
            and name.startswith(("assert", "check", "expect", "verify", "fnmatch", "re_match"))
        ):
            self._note(key, f"said to {name}", *call.args, *(one.value for one in call.keywords))
        return result

    def visit_With(self, node: ast.With) -> ast.stmt:  # noqa: N802
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and name_of(call.func) in ("raises", "assertRaises", "assertRaisesRegex"):
                key = key_of(call)
                self._note(key, "raises", *call.args[:1])
                if len(node.items) == 1 and item.optional_vars is None:
                    self._note(key, "silence", silence=_place(node))
                matched = [one.value for one in call.keywords if one.arg in ("match", "expected_regex")]
                for pattern in (*call.args[1:], *matched):
                    self._note(key, "matches", pattern)
        return super().visit_With(node)

    visit_AsyncWith = visit_With  # noqa: N815

    def visit_If(self, node: ast.If) -> ast.stmt:  # noqa: N802
        test = node.test
        fails = any(isinstance(one, ast.Raise) or _fails(one) for one in node.body)
        if fails and isinstance(test, ast.Compare) and len(test.ops) == 1:
            sides = [test.left, test.comparators[0]]
            input_node, expected_node = reversed(sides) if self._expected(*sides) == "left" else sides
            op = {ast.NotEq: "==", ast.IsNot: "is", ast.NotIn: "in"}.get(type(test.ops[0]), "compared")
            key = key_of(node)
            self._note(key, op, expected_node)
            if op in _EXCLUDING:
                self._note(key, "input", input_node)
        return self.generic_visit(node)  # type: ignore[return-value]


def _fails(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and name_of(node.value.func) == "fail"


def _expectations(tree: ast.Module, sides: Mapping[str, Side]) -> Iterator[_Expectation]:
    functions = [function for _, function, _ in functions_of(tree)]
    for function in functions:
        collector = _Collector(function, sides, functions)
        for statement in function.body:
            collector.visit(statement)
        yield from collector.found


# ---------------------------------------------------------------------------------------------- where it is written


@dataclass(frozen=True)
class _Target:
    """A node that can be changed to change an expectation."""

    node: ast.AST
    case: int | None = None
    """The number of the case of a parametrised test; ``None`` if the node applies to all cases."""
    whole: bool = False
    """Whether the node is the whole expected value."""


class _Finder:
    """Finds where the expectations of a test are written: in its assertions, in names that they read, in its cases,
    and in arguments that it passes to helpers."""

    def __init__(self, tree: ast.Module, tests: Sequence[FunctionNode]) -> None:
        self.tree = tree
        self.functions = {_place(node): node for _, node, _ in functions_of(tree)}
        self.tests = {id(node) for node in tests}
        self.names_of_errors = [
            *_ERRORS,
            *sorted(
                {
                    ast.unparse(call.args[0])
                    for call in ast.walk(tree)
                    if isinstance(call, ast.Call)
                    and name_of(call.func) in ("raises", "assertRaises")
                    and call.args
                    and isinstance(call.args[0], ast.Name | ast.Attribute)
                }
            ),
        ]

    def targets(self, test: FunctionNode, one: _Expectation, places: Mapping[_Place, ast.AST]) -> Iterator[_Target]:
        """Yield the nodes that can be changed so that ``test`` expects something else at ``one``."""
        function = self.functions.get(one.function)
        if function is None:
            return
        if function is not test:
            # A helper's own expectations belong to all tests that call it, so change only what this test passes to it.
            if id(function) not in self.tests:
                yield from self._passed(test, function, one, places)
            return
        for place in (one.flip, one.silence):
            if place is not None and place in places:
                yield _Target(places[place], whole=True)
        for place in one.expected:
            if place in places:
                yield from self._written(cast(ast.expr, places[place]), test, whole=True)

    def literals_of(self, test: FunctionNode) -> list[Any]:
        """Return the literals of a test and of its cases."""
        roots: list[ast.AST] = list(test.body)
        for decorator in test.decorator_list:
            parametrised = parametrisation(decorator)
            roots += (case_rows(self.tree, parametrised[1]) or []) if parametrised else []
        nodes = [node for root in roots for node in ast.walk(root)]
        return [
            node.value
            for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes | int | float)
        ]

    def _passed(
        self, test: FunctionNode, helper: FunctionNode, expectation: _Expectation, places: Mapping[_Place, ast.AST]
    ) -> Iterator[_Target]:
        arguments = [
            arg.arg for arg in (*helper.args.posonlyargs, *helper.args.args) if arg.arg not in ("self", "cls")
        ]
        expected_names = {
            name.id
            for place in expectation.expected
            if place in places
            for name in ast.walk(places[place])
            if isinstance(name, ast.Name) and name.id in arguments
        }
        for call in ast.walk(test):
            if isinstance(call, ast.Call) and name_of(call.func) == helper.name:
                passed_arguments = dict(zip(arguments, call.args, strict=False))
                passed_arguments |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
                for name in expected_names & set(passed_arguments):
                    yield from self._written(passed_arguments[name], test)

    def _written(
        self, node: ast.expr, test: FunctionNode, depth: int = 0, *, case: int | None = None, whole: bool = False
    ) -> Iterator[_Target]:
        if whole or isinstance(node, ast.List | ast.Tuple):
            yield _Target(node, case, whole)
        for inner in _outside_of_calls(node):
            if isinstance(inner, ast.Constant) and (inner is not node or not whole):
                yield _Target(inner, case)
            elif isinstance(inner, ast.Name) and depth < 3:
                for value, number in self._values(inner.id, test):
                    yield from self._written(value, test, depth + 1, case=number, whole=inner is node and whole)

    def _values(self, name: str, test: FunctionNode) -> Iterator[tuple[ast.expr, int | None]]:
        """Yield the expressions assigned to a name that a test reads, with the case's number if it is a parameter."""
        for decorator in test.decorator_list:
            names, cases = parametrisation(decorator) or ([], None)
            rows = case_rows(self.tree, cases) if cases is not None and name in names else None
            for number, row in enumerate(rows or []):
                values: Sequence[ast.expr] = row.args if isinstance(row, ast.Call) else getattr(row, "elts", [])
                values = [row] if len(names) == 1 and not isinstance(row, ast.Call) else values
                if len(values) == len(names):
                    yield values[names.index(name)], number
        for body in (test.body, self.tree.body):
            assigned = list(_given_in(body, name, deep=body is test.body))
            yield from ((value, None) for value in assigned)
            if assigned:
                return


def _given_in(body: Sequence[ast.stmt], name: str, *, deep: bool) -> Iterator[ast.expr]:
    for node in (inner for statement in body for inner in (ast.walk(statement) if deep else [statement])):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _column(target, name, [node.value])
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield from _column(node.target, name, [node.value])
        elif isinstance(node, ast.For) and isinstance(node.iter, ast.List | ast.Tuple):
            yield from _column(node.target, name, node.iter.elts)


def _column(target: ast.expr, name: str, values: Sequence[ast.expr]) -> Iterator[ast.expr]:
    if isinstance(target, ast.Name):
        yield from (values if target.id == name else ())
        return
    for number, inner in enumerate(getattr(target, "elts", ())):
        if isinstance(inner, ast.Name) and inner.id == name:
            for value in values:
                if isinstance(value, ast.Tuple | ast.List) and len(value.elts) > number:
                    yield value.elts[number]


def _outside_of_calls(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes whose values appear in ``node``'s value. Skip called functions, subscripts, and the contents of
    f-strings and lambdas."""
    yield node
    for name, child in ast.iter_fields(node):
        if (isinstance(node, ast.Call) and name == "func") or (isinstance(node, ast.Subscript) and name == "slice"):
            continue
        if isinstance(node, ast.JoinedStr | ast.Lambda):
            continue
        for inner in child if isinstance(child, list) else [child]:
            if isinstance(inner, ast.AST):
                yield from _outside_of_calls(inner)


# --------------------------------------------------------------------------------------------------- what it becomes


class _WrongMaker:
    """Makes the wrong texts of a tree that is not changed any more."""

    def __init__(
        self, tree: ast.Module, rng: random.Random, base: Mapping[str, Sequence[Value]], errors: Sequence[str]
    ) -> None:
        self.tree, self.rng, self.base, self.errors = tree, rng, base, errors
        self.parents = {
            id(child): (parent, name)
            for parent in ast.walk(tree)
            for name, value in ast.iter_fields(parent)
            for child in (value if isinstance(value, list) else [value])
            if isinstance(child, ast.AST)
        }
        self.siblings: list[Any] = []
        """Literals that the test expects in other places."""
        self.literals: list[Any] = []
        """All literals of the test."""

    def wrongs(self, test: str, one: _Expectation, target: _Target) -> Iterator[Wrong]:
        node = target.node
        if one.op in ("truth", "negation") and isinstance(node, ast.expr):
            # The answer is yes or no, so the wrong one is base's.
            yield from self._made(test, one.op, True, [("base", _flipped(node))], node)
        elif one.op == "silence":
            yield from self._silenced(test, cast(ast.With, node))
        elif one.op == "raises":
            if isinstance(node, ast.Name | ast.Attribute):
                other_errors = [name for name in self.errors if name != ast.unparse(node)]
                new = ast.parse(self.rng.choice(other_errors), mode="eval").body
                yield from self._made(test, "raises", False, [("sibling", new)], node)
        elif one.op == "input":
            if isinstance(node, ast.Constant) and type(node.value) is int and node.value > 1:
                for size, number in (("smaller input", node.value // 2), ("larger input", node.value * 2 + 1)):
                    yield from self._made(test, size, True, [("input", ast.Constant(number))], node)
        elif isinstance(node, ast.expr):
            kind = {"==": "equality", "is": "equality", "count": "equality", "close": "nearness", "almost": "nearness"}
            excluding = one.op in _EXCLUDING
            yield from self._made(test, kind.get(one.op, one.op), excluding, self._other_values(one, target), node)

    def _other_values(self, expectation: _Expectation, target: _Target) -> Iterator[tuple[Origin, ast.expr]]:
        node = target.node
        answers = self.base.get(expectation.key, ())
        if target.whole and answers and (target.case is not None or len(answers) == 1):
            number = target.case or 0
            value = _expression(answers[number]) if number < len(answers) else None
            if value is not None and not isinstance(node, ast.Name):
                yield "base", value
        if isinstance(node, ast.Constant):
            near = _near(node.value, self.rng, self.literals)
            if near is not None:
                yield "near", ast.Constant(near)
            siblings = [
                literal for literal in self.siblings if type(literal) is type(node.value) and literal != node.value
            ]
            if siblings and target.whole:
                yield "sibling", ast.Constant(self.rng.choice(siblings))
        elif isinstance(node, ast.List | ast.Tuple) and len(node.elts) > 1:
            elements = list(node.elts)
            first = self.rng.randrange(len(elements) - 1)
            elements[first], elements[first + 1] = elements[first + 1], elements[first]
            yield "near", type(node)(elements, ast.Load())
            yield "near", type(node)(list(node.elts[:-1]), ast.Load())

    def _made(
        self, test: str, kind: str, excluding: bool, replacements: Iterable[tuple[Origin, ast.expr]], node: ast.expr
    ) -> Iterator[Wrong]:
        for origin, new in replacements:
            undo = self._replace(node, new)
            if undo is not None:
                yield Wrong(test, kind, excluding, origin, _text_of(self.tree))
                undo()

    def _silenced(self, test: str, node: ast.With) -> Iterator[Wrong]:
        """Replace a ``raises`` block with its statements, because base raises nothing."""
        parent, name = self.parents.get(id(node), (None, ""))
        body = getattr(parent, name, None)
        if isinstance(body, list) and node in body:
            number = body.index(node)
            body[number : number + 1] = node.body
            yield Wrong(test, "silence", True, "base", _text_of(self.tree))
            body[number : number + len(node.body)] = [node]

    def _replace(self, node: ast.AST, new: ast.AST) -> Callable[[], None] | None:
        parent, name = self.parents.get(id(node), (None, ""))
        if parent is None:
            return None
        value = getattr(parent, name)
        if not isinstance(value, list):
            setattr(parent, name, new)
            return lambda: setattr(parent, name, value)
        place = next((number for number, one in enumerate(value) if one is node), None)
        if place is None:
            return None
        value[place] = new

        def undo() -> None:
            value[place] = node

        return undo


def _text_of(tree: ast.Module) -> str:
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _flipped(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Attribute):
        return ast.Attribute(node.value, _OPPOSITE_OF.get(node.attr, node.attr), ast.Load())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return ast.Compare(node.left, [_FLIPPED[type(node.ops[0])]()], node.comparators)
    return ast.UnaryOp(ast.Not(), copy.copy(node))


def _expression(value: Value) -> ast.expr | None:
    """Return a recorded plain value as an expression, or ``None`` if it cannot be written as one."""
    match value:
        case ["none"]:
            return ast.Constant(None)
        case ["bool" | "int" | "str" as kind, content]:
            return ast.Constant({"bool": bool, "int": int, "str": str}[kind](content))
        case ["bytes", content]:
            return ast.Constant(bytes.fromhex(content))
        case ["float", content]:
            number = float.fromhex(content)
            return ast.Constant(number) if math.isfinite(number) else None
        case ["list" | "tuple" as kind, members]:
            elements = [one for one in map(_expression, members) if one is not None]
            make = ast.List if kind == "list" else ast.Tuple
            return make(elements, ast.Load()) if len(elements) == len(members) else None
        case ["dict", pairs]:
            keys = [one for key, _ in pairs if (one := _expression(key)) is not None]
            values = [one for _, item in pairs if (one := _expression(item)) is not None]
            return ast.Dict([*keys], values) if len(keys) == len(values) == len(pairs) else None
    return None


def _near(value: Any, rng: random.Random, literals: Sequence[Any]) -> Any:
    """Return a plausible other value of the same type, or ``None`` if there is none."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        siblings = [item for item in literals if type(item) is int and item != value and abs(item - value) < 10]
        return rng.choice([value + 1, value - 1 if value > 1 else value + 2, *siblings[:2]])
    if isinstance(value, float):
        return rng.choice([value + 1.0, value * 2 or 1.0, -value or 1.0])
    if isinstance(value, str):
        return near_text(value, rng, [item for item in literals if isinstance(item, str)])
    if isinstance(value, bytes):
        return near_text(value.decode("latin-1"), rng).encode("latin-1", "replace")
    return None


def near_text(text: str, rng: random.Random, others: Sequence[str] = ()) -> str:
    """Return a text similar to ``text``, preferably with the same words."""
    return rng.choice([new for _, new in near_texts(text, rng, others)])


def near_texts(text: str, rng: random.Random, others: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return texts similar to ``text``, each with the kind of difference: the ``order`` of two words, a ``gap`` in
    place of a word, or other ``words``, which come from ``others`` if possible."""
    parts = list(_PART.finditer(text))
    words = sorted({word for other in others for word in _PART.findall(other)} - {one[0] for one in parts})
    if len(parts) > _MAX_PARTS:  # every variant is a copy of the text
        start = rng.randrange(len(parts) - _MAX_PARTS)
        parts = parts[start : start + _MAX_PARTS]
    variants: list[tuple[str, str]] = []
    for one, two in itertools.pairwise(parts):
        if one[0] != two[0]:
            between = text[one.end() : two.start()]
            variants.append(("order", text[: one.start()] + two[0] + between + one[0] + text[two.end() :]))
            variants.append(("gap", text[: one.end()] + text[two.end() :]))
    for one in parts:
        same = [word for word in words if word.isdigit() == one[0].isdigit() and word.istitle() == one[0].istitle()]
        if same:
            variants.append(("words", text[: one.start()] + rng.choice(same) + text[one.end() :]))
    if parts and not variants:
        one = rng.choice(parts)
        variants.append(("words", text[: one.start()] + _other_part(one[0], rng) + text[one.end() :]))
    if not variants:
        variants = [("gap", text[:-1]), ("words", text + text[-1])] if len(text) > 1 else [("words", text + "0")]
    return variants


def _other_part(part: str, rng: random.Random) -> str:
    if part.isdigit() and part.isascii() and len(part) <= MAX_DIGITS:
        return str(int(part) + rng.choice((1, 2, 10)))
    if len(part) > 3:
        place = rng.randrange(1, len(part) - 2)
        if part[place] != part[place + 1]:
            return part[:place] + part[place + 1] + part[place] + part[place + 2 :]
    return part + part[-1] if len(part) < 3 else part[:-1]
