"""Splits assertions into two expressions: the value that the code under test computes, and the expected value."""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from resources_servers.swe_bench.confirm.labels import name_of, random_name

Side = Literal["left", "right"]
Mode = Literal["discover", "blind"]

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
_TWO_SIDED = {
    "assertEqual": "==",
    "assertEquals": "==",
    "assertNotEqual": "!=",
    "assertIs": "is",
    "assertIsNot": "is not",
    "assertIn": "in",
    "assertNotIn": "not in",
    "assertLess": "<",
    "assertLessEqual": "<=",
    "assertGreater": ">",
    "assertGreaterEqual": ">=",
    "assertListEqual": "==",
    "assertTupleEqual": "==",
    "assertDictEqual": "==",
    "assertSetEqual": "==",
    "assertSequenceEqual": "==",
    "assertMultiLineEqual": "==",
    "assertCountEqual": "count",
    "assertItemsEqual": "count",
    "assertAlmostEqual": "almost",
    "assertRegex": "matches",
    "assertRegexpMatches": "matches",
    "assertNotRegex": "not matches",
    "assertIsInstance": "isinstance",
    "assertNotIsInstance": "not isinstance",
    "assert_equal": "==",
    "assert_array_equal": "==",
    "assert_almost_equal": "close",
    "assert_array_almost_equal": "close",
    "assert_allclose": "close",
}
_ONE_SIDED = {"assertTrue": "truth", "assertFalse": "false", "assertIsNone": "is", "assertIsNotNone": "is not"}
_RAISES = {"raises": "", "assertRaises": "", "assertRaisesRegex": "matches", "assertRaisesMessage": "in"}
# fmt: off
_PURE_CALLS = frozenset([
    "bool", "bytes", "bytearray", "complex", "dedent", "dict", "Decimal", "date", "datetime", "float", "format",
    "frozenset", "int", "join", "len", "list", "lstrip", "lower", "range", "replace", "rstrip", "set", "sorted",
    "split", "splitlines", "str", "strip", "timedelta", "tuple", "upper", "encode", "decode", "approx", "array",
    "DataFrame", "Series", "zip", "getvalue",
])
# fmt: on
_EXPECTING = ("expect", "want", "desired", "correct", "golden", "target")


@dataclass
class Probe:
    """One place where a rendering records values."""

    key: str
    """Its place in the pristine file: ``<line>.<column>[.<part>]``."""
    op: str
    expected: Side | None
    """The side that certainly has the expected value. If ``None``, the answers of gold and base decide."""
    extra: float | None = None
    """The tolerance of an approximate comparison."""


@dataclass
class Blinding:
    """How one rendering of a file writes its probes."""

    mode: Mode
    rng: random.Random
    path: str
    dropped_sides: Mapping[str, Side]
    """Key → the side with the expected value, as discovery decided it."""
    probes: dict[str, Probe] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    """Key → the site's name in the rendering."""

    def token(self, key: str) -> str:
        """Return the name of a key's site, which tells nothing about the site if the rendering is blind."""
        if key not in self.tokens:
            self.tokens[key] = random_name(self.rng) if self.mode == "blind" else f"{self.path}|{key}"
        return self.tokens[key]


@dataclass
class PythonBlinding(Blinding):
    dropped: set[str] = field(default_factory=set)
    """The names that removed expressions used."""

    def call(self, helper: str, key: str, *arguments: ast.expr) -> ast.Call:
        return ast.Call(ast.Name(f"_ng_{helper}", ast.Load()), [ast.Constant(self.token(key)), *arguments], [])

    def leave_out(self, *expressions: ast.AST) -> None:
        for expression in expressions:
            self.dropped |= {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}


def likely_side(names_left: Iterable[str], names_right: Iterable[str]) -> Side | None:
    """Return the side whose names say that it holds the expected value; ``None`` if both or neither do."""
    left, right = (
        any(word in name.lower() for name in names for word in _EXPECTING) for names in (names_left, names_right)
    )
    return None if left == right else "left" if left else "right"


class AssertionRewriter(ast.NodeTransformer):
    """Replaces every assertion of a function by probes.

    Args:
        constants: names that stand for constants in this function.
    """

    def __init__(self, blinding: PythonBlinding, constants: Iterable[str]) -> None:
        self.blinding = blinding
        self.constants = set(constants)
        self._caught: set[str] = set()

    # ------------------------------------------------------------------------------------------------ statements

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        if node.msg is not None:
            self.blinding.leave_out(node.msg)
        return self._statements(node, self._parts(node.test, key_of(node)))

    def visit_Expr(self, node: ast.Expr) -> ast.stmt | list[ast.stmt]:
        call = node.value
        if isinstance(call, ast.Call):
            parts = self._asserting_call(call, key_of(node))
            if parts is not None:
                return self._statements(node, parts)
        self.generic_visit(node)
        return node

    def visit_With(self, node: ast.With) -> ast.stmt:
        node.items = [self._with_item(item) for item in node.items]
        return self.generic_visit(node)  # type: ignore[return-value]

    visit_AsyncWith = visit_With  # type: ignore[assignment]  # noqa: N815

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        name = name_of(node.func)
        if name in ("raises", "assertRaises") and len(node.args) > 1:
            key = key_of(node)
            self._probe(key, "raises", "right")
            inner = ast.Call(node.args[1], node.args[2:], [one for one in node.keywords if one.arg != "match"])
            nothing = ast.arguments([], [], None, [], [], None, [])
            call = self.blinding.call("call", key, ast.Lambda(nothing, inner))
            if self.blinding.mode == "discover":
                call.args.append(node.args[0])
            return call
        return node

    # --------------------------------------------------------------------------------------------------- helpers

    def _statements(self, node: ast.stmt, parts: list[ast.expr]) -> list[ast.stmt]:
        return [ast.copy_location(ast.Expr(part), node) for part in parts]

    def _parts(self, test: ast.expr, key: str) -> list[ast.expr]:
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            return [part for number, value in enumerate(test.values) for part in self._parts(value, f"{key}.{number}")]
        if isinstance(test, ast.Compare):
            sides = [test.left, *test.comparators]
            pairs = zip(sides, sides[1:], test.ops, strict=False)
            return [
                self._two(f"{key}.{number}" if len(test.ops) > 1 else key, _COMPARISONS[type(op)], left, right)
                for number, (left, right, op) in enumerate(pairs)
            ]
        negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        inner = test.operand if isinstance(test, ast.UnaryOp) and negated else test
        if isinstance(inner, ast.Call):
            name = name_of(inner.func)
            if name == "isinstance" and len(inner.args) == 2:
                return [self._two(key, "not isinstance" if negated else "isinstance", *inner.args)]
            if name in ("startswith", "endswith") and len(inner.args) == 1 and isinstance(inner.func, ast.Attribute):
                return [self._two(key, f"not {name}" if negated else name, inner.func.value, inner.args[0])]
        self._probe(key, "false" if negated else "truth", None)
        return [self.blinding.call("truth", key, self.visit(inner))]

    def _asserting_call(self, call: ast.Call, key: str) -> list[ast.expr] | None:
        name = name_of(call.func)
        if name == "match" and isinstance(call.func, ast.Attribute) and len(call.args) == 1:
            holder = call.func.value
            if isinstance(holder, ast.Name) and holder.id in self._caught:
                message = ast.Call(ast.Name("str", ast.Load()), [ast.Attribute(holder, "value", ast.Load())], [])
                return [self._two(key, "matches", message, call.args[0], expected="right")]
            return None
        if name in _ONE_SIDED and call.args:
            op = _ONE_SIDED[name]
            self.blinding.leave_out(*call.args[1:])
            if name == "assertTrue":
                return self._parts(call.args[0], key)
            if op == "false":
                self._probe(key, "false", None)
                return [self.blinding.call("truth", key, self.visit(call.args[0]))]
            return [self._two(key, op, call.args[0], ast.Constant(None), expected="right")]
        if name in _TWO_SIDED and len(call.args) >= 2:
            self.blinding.leave_out(*call.args[2:], *(one.value for one in call.keywords))
            left, right = call.args[:2]
            op, extra = _nearness(name, call, _TWO_SIDED[name])
            return [self._two(key, op, left, right, extra=extra)]
        if name.startswith("assert") and len(call.args) >= 2 and not name.startswith("assert_called"):
            # An unknown assertion method: record its two sides, and compare them only if gold's sides are equal.
            return [self._two(key, "like", *call.args[:2])]
        return None

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
        if op == "==":
            for side in (left, right):
                if isinstance(side, ast.Call) and name_of(side.func) == "approx":
                    op, extra = _nearness("approx", side, "close")
                    if side.args:
                        left, right = (side.args[0], right) if side is left else (left, side.args[0])
        if op.endswith(("isinstance", "with", "matches")):
            expected = "right"
        expected = expected or self._expected(left, right)
        self._probe(key, op, expected, extra)
        left, right = self.visit(copy.deepcopy(left)), self.visit(copy.deepcopy(right))
        if op.endswith("isinstance"):
            left = ast.Call(ast.Name("type", ast.Load()), [left], [])
        if self.blinding.mode == "discover":
            return self.blinding.call("put", key, left, right)
        dropped = self.blinding.dropped_sides.get(key, expected or "right")
        self.blinding.leave_out(left if dropped == "left" else right)
        return self.blinding.call("put", key, right if dropped == "left" else left)

    def _with_item(self, item: ast.withitem) -> ast.withitem:
        call = item.context_expr
        if not isinstance(call, ast.Call):
            return item
        name = name_of(call.func)
        if name == "subTest":
            self.blinding.leave_out(*call.args, *(one.value for one in call.keywords))
            call.args, call.keywords = [], []
            return item
        if name not in _RAISES or len(call.args) > 2:
            return item
        key = key_of(call)
        pattern = [one.value for one in call.keywords if one.arg in ("match", "expected_regex", "expected_message")]
        expected = [*call.args, *pattern]
        if isinstance(item.optional_vars, ast.Name):
            self._caught.add(item.optional_vars.id)
        kind = _RAISES[name] or ("matches" if len(expected) > 1 else "")
        self._probe(key, f"raises {kind}".strip(), "right")
        if self.blinding.mode == "discover":
            item.context_expr = self.blinding.call("catch", key, *expected)
        else:
            self.blinding.leave_out(*expected)
            item.context_expr = self.blinding.call("catch", key)
        return item

    def _probe(self, key: str, op: str, expected: Side | None, extra: float | None = None) -> None:
        self.blinding.probes[key] = Probe(key, op, expected, extra)

    def _expected(self, left: ast.expr, right: ast.expr) -> Side | None:
        constant_left, constant_right = (is_constant(side, self.constants) for side in (left, right))
        if constant_right and not constant_left:
            return "right"
        if constant_left and not constant_right:
            return "left"
        return likely_side(_names_of(left), _names_of(right)) or ("right" if constant_left else None)


def is_constant(node: ast.expr, names: Collection[str]) -> bool:
    """Whether an expression is a constant that no code of the product computes. ``names`` stand for constants."""
    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, ast.Name):
        return node.id in names
    inside: list[ast.expr]
    if isinstance(node, ast.Call):
        inside = [*node.args, *(one.value for one in node.keywords)]
        if isinstance(node.func, ast.Attribute) and not isinstance(node.func.value, ast.Name):
            inside.append(node.func.value)
        return name_of(node.func) in _PURE_CALLS and all(is_constant(one, names) for one in inside)
    if isinstance(
        node, ast.Tuple | ast.List | ast.Set | ast.Dict | ast.UnaryOp | ast.BinOp | ast.JoinedStr | ast.FormattedValue
    ):
        inside = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    elif isinstance(node, ast.Starred):
        inside = [node.value]
    elif isinstance(node, ast.Subscript):
        inside = [node.value, node.slice]
    else:
        return False
    return all(is_constant(one, names) for one in inside)


def _nearness(name: str, call: ast.Call, op: str) -> tuple[str, float | None]:
    """Return the operator and the tolerance of an approximate comparison. The tolerance of ``almost`` is absolute,
    that of ``close`` relative."""
    values = {one.arg: one.value for one in call.keywords}
    for argument in ("delta", "abs", "atol", "rel", "rtol"):
        value = values.get(argument)
        if isinstance(value, ast.Constant) and isinstance(value.value, int | float) and value.value:
            return "close" if argument in ("rel", "rtol") else "almost", float(value.value)
    places = values.get("places", values.get("decimal", call.args[2] if len(call.args) > 2 else None))
    if name == "assert_allclose" and isinstance(places, ast.Constant) and isinstance(places.value, float):
        return "close", places.value
    if op in ("close", "almost") and isinstance(places, ast.Constant) and isinstance(places.value, int):
        return "almost", float(10**-places.value)
    return op, None


def _names_of(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def key_of(node: ast.expr | ast.stmt) -> str:
    """Return the key of an assertion: its place in the pristine file."""
    return f"{node.lineno}.{node.col_offset}"
