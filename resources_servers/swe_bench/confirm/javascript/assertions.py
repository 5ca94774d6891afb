"""Splits assertions of JavaScript test packages into the value that the code computes and the expected value.

Supported are ``assert`` (Node's and chai's), methods of a test's own argument (tape, tap, ava), and chains of
``expect`` and ``should`` (jest, vitest, jasmine, chai).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resources_servers.swe_bench.confirm.assertions import Blinding, Probe, Side, likely_side
from resources_servers.swe_bench.confirm.javascript.syntax import (
    FUNCTIONS,
    Code,
    Test,
    arguments_of,
    bare,
    key_of,
    names_in,
    string_of,
    walk,
)

if TYPE_CHECKING:
    from tree_sitter import Node

_NEGATED = {
    "==": "!=",
    "!=": "==",
    "in": "not in",
    "not in": "in",
    "matches": "not matches",
    "not matches": "matches",
    "<": ">=",
    ">=": "<",
    ">": "<=",
    "<=": ">",
    "isinstance": "not isinstance",
    "not isinstance": "isinstance",
    "truth": "false",
    "false": "truth",
}
_COMPARISONS = {"===": "==", "==": "==", "!==": "!=", "!=": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
# fmt: off
_EQUAL = (
    "equal", "equals", "strictEqual", "looseEqual", "deepEqual", "deepEquals", "deepStrictEqual", "deepLooseEqual",
    "strictDeepEqual", "partialDeepStrictEqual", "is", "same", "strictSame", "eq", "eql", "eqls", "isEqual",
    "isEquivalent", "isDeep", "be", "toBe", "toEqual", "toStrictEqual", "toBeEqual", "isDeepStrictEqual",
)
_UNEQUAL = (
    "notEqual", "notEquals", "notStrictEqual", "notDeepEqual", "notDeepStrictEqual", "notLooseEqual",
    "notDeepLooseEqual", "not", "isNot", "notSame", "strictNotSame", "isNotEqual", "isInequivalent",
)
_TWO_SIDED: dict[str, str] = {
    **dict.fromkeys(_EQUAL, "=="), **dict.fromkeys(_UNEQUAL, "!="),
    "match": "matches", "matches": "matches", "regex": "matches", "toMatch": "matches",
    "notMatch": "not matches", "doesNotMatch": "not matches", "notRegex": "not matches",
    "toContain": "in", "toContainEqual": "in", "include": "in", "includes": "in", "contain": "in", "contains": "in",
    "notInclude": "not in", "notIncludes": "not in", "doesNotInclude": "not in", "string": "in",
    "toMatchObject": "has", "like": "has", "containSubset": "has", "has": "has", "hasStrict": "has",
    "members": "count", "sameMembers": "count", "sameDeepMembers": "count", "toHaveSameMembers": "count",
    "greaterThan": ">", "above": ">", "gt": ">", "isAbove": ">", "toBeGreaterThan": ">",
    "least": ">=", "gte": ">=", "isAtLeast": ">=", "toBeGreaterThanOrEqual": ">=",
    "lessThan": "<", "below": "<", "lt": "<", "isBelow": "<", "toBeLessThan": "<",
    "most": "<=", "lte": "<=", "isAtMost": "<=", "toBeLessThanOrEqual": "<=",
    "toHaveLength": "length", "lengthOf": "length", "length": "length", "toHaveSize": "size",
    "toBeCloseTo": "digits", "closeTo": "delta", "approximately": "delta",
    "a": "called", "an": "called", "typeOf": "called", "type": "called", "toBeTypeOf": "called",
    **dict.fromkeys(("instanceof", "instanceOf", "toBeInstanceOf", "isInstanceOf"), "isinstance"),
    "property": "part", "toHaveProperty": "part", "propertyVal": "part",
    "toHaveBeenCalledWith": "called with", "toBeCalledWith": "called with", "calledWith": "called with",
    "toHaveBeenCalledTimes": "call count", "toBeCalledTimes": "call count", "callCount": "call count",
}
_ONE_SIDED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("ok", "isOk", "truthy", "assert", "toBeTruthy"), ("truth", "")),
    **dict.fromkeys(("notOk", "isNotOk", "falsy", "toBeFalsy", "error", "ifError", "ifErr"), ("false", "")),
    **dict.fromkeys(("true", "isTrue", "toBeTrue"), ("==", "true")),
    **dict.fromkeys(("false", "isFalse", "toBeFalse"), ("==", "false")),
    **dict.fromkeys(("null", "isNull", "toBeNull"), ("==", "null")),
    **dict.fromkeys(("undefined", "isUndefined", "toBeUndefined"), ("==", "undefined")),
    **dict.fromkeys(("NaN", "isNaN", "toBeNaN"), ("==", "NaN")),
    **dict.fromkeys(("exist", "exists", "isDefined", "toBeDefined", "isNotNull"), ("!=", "undefined")),
    **dict.fromkeys(("empty", "isEmpty"), ("empty", "0")),
    **dict.fromkeys(("toHaveBeenCalled", "toBeCalled", "called"), ("was called", "0")),
}
_THROWS = {"throws": True, "throw": True, "Throw": True, "toThrow": True, "toThrowError": True, "doesNotThrow": False,
           "notThrows": False, "notThrow": False}
_REJECTS = {"rejects": True, "throwsAsync": True, "isRejected": True, "rejectedWith": True, "rejected": True,
            "toBeRejected": True, "toBeRejectedWith": True, "toBeRejectedWithError": True, "doesNotReject": False,
            "notThrowsAsync": False}
_NOISE = frozenset([
    "to", "be", "been", "is", "that", "which", "and", "has", "have", "with", "at", "of", "same", "but", "does",
    "still", "also", "deep", "nested", "own", "ordered", "any", "all", "a", "an", "include", "contain",
    "fulfilled", "become",
])
_ASSERT_PACKAGES = frozenset([
    "assert", "assert/strict", "node:assert", "node:assert/strict", "chai", "uvu/assert", "power-assert",
])
_RUNNERS_WITH_PASS = frozenset(["tape", "tap", "ava", "blue-tape", "tape-catch"])
_RUNNERS_WITH_ARGUMENT = _RUNNERS_WITH_PASS | {"node:test", "qunit", "test", "uvu"}
_NO_ASSERTIONS = frozenset([
    "end", "plan", "comment", "pass", "fail", "test", "teardown", "beforeEach", "afterEach", "before", "after",
    "timeout", "log", "diagnostic", "skip", "todo", "context", "mock", "assertions", "hasAssertions", "any",
    "anything", "extend", "use", "addSnapshotSerializer", "objectContaining", "arrayContaining", "stringMatching",
    "stringContaining", "soft", "on", "once", "runOnly", "waitFor", "capture", "intercept", "stub", "testdir",
])
# fmt: on
_LITERALS = frozenset({"number", "regex", "true", "false", "null", "undefined"})
Emit = Callable[["Node"], str]


@dataclass(frozen=True)
class _Operand:
    text: str
    node: Node | None = None


class Assertions:
    """Replaces the assertions of one file by probes."""

    def __init__(self, code: Code, blinding: Blinding, tests: Iterable[Test]) -> None:
        self.code, self.blinding = code, blinding
        self.dropped: list[Node] = []
        """Expressions that were left out."""
        packages = _packages(code)
        self._objects = {"assert"} | {name for name, (package, one) in packages.items() if not one}
        self._objects |= {name for name, (_, one) in packages.items() if one in ("assert", "strict")}
        self._functions = {name: one for name, (_, one) in packages.items() if one not in ("", "assert", "expect")}
        self._chai = any(package == "chai" for package, _ in packages.values())
        used = {string_of(code, node) for node in walk(code.root) if node.type == "string"}
        given = {_first_parameter(code, test.body) for test in tests} - {""}
        self._testers = given if used & _RUNNERS_WITH_ARGUMENT else given & {"t", "assert"}
        self._with_pass = bool(used & _RUNNERS_WITH_PASS)
        self._ava = "ava" in used
        self._constants = _constants(code)

    def rewrite(self, node: Node, emit: Emit) -> str | None:
        """Return the probes that replace an assertion, or ``None`` for a node that is not an assertion."""
        if node.type not in ("call_expression", "member_expression"):
            return None
        key = key_of(node)
        chain = _chain(self.code, node)
        if chain is not None:
            subject, parts = chain
            return self._expectation(key, subject, parts, emit)
        if node.type != "call_expression":
            return None
        function = node.child_by_field_name("function")
        assert function is not None
        given = arguments_of(node)
        name, tester = self._asserted(function)
        if name is None or name in _NO_ASSERTIONS or (not given and name not in _ONE_SIDED):
            return None
        found = self._assertion(key, name, given, emit)
        if found is None:
            return None
        return f"({found}, {tester}.pass())" if tester and self._with_pass else found

    def _asserted(self, function: Node) -> tuple[str | None, str]:
        """Return the name of the assertion that ``function`` is, or ``None``, and the test's argument if it is a
        method of that argument."""
        if function.type == "identifier":
            text = self.code.text(function)
            return ("ok" if text in self._objects else self._functions.get(text)), ""
        if function.type != "member_expression":
            return None, ""
        owner, name = self.code.field(function, "object"), self.code.field(function, "property")
        if owner.removesuffix(".strict") in self._objects or owner.split(".")[-1] in ("assert", "strict"):
            return name, ""
        if owner.removesuffix(".not") in self._testers:
            return name, owner.removesuffix(".not")
        return None, ""

    # ------------------------------------------------------------------------------------------------- the two forms

    def _assertion(self, key: str, name: str, given: Sequence[Node], emit: Emit) -> str | None:
        if name in _THROWS or name in _REJECTS:
            wanted = list(given[1:3] if self._chai else given[1:2])
            if wanted and not self._chai and string_of(self.code, wanted[0]) is not None:
                wanted = []
            return self._failure(key, name, emit(given[0]), wanted, emit)
        if name in ("true", "false") and not self._ava and not self._chai:
            name = "ok" if name == "true" else "notOk"
        if name in _ONE_SIDED:
            op, literal = _ONE_SIDED[name]
            if op in ("truth", "false"):
                return self._truth(key, given[0], emit, negated=op == "false")
            return self._one(key, op, emit(given[0]), literal, negated=False)
        if name in _TWO_SIDED and len(given) > 1:
            truth = self.code.text(given[1])
            compares = bare(given[0]).type in ("binary_expression", "unary_expression")
            if _TWO_SIDED[name] == "==" and truth in ("true", "false") and compares:
                return self._truth(key, given[0], emit, negated=truth == "false")
            return self._named(key, name, _Operand(emit(given[0]), given[0]), given[1:], emit, negated=False)
        return self._alike(key, emit(given[0])) if given else None

    def _expectation(
        self, key: str, subject: Node | None, parts: Sequence[tuple[str, list[Node] | None]], emit: Emit
    ) -> str | None:
        if subject is None:
            return None
        names = [name for name, _ in parts]
        negated = "not" in names or "never" in names
        later = "resolves" in names or "eventually" in names
        failing = "rejects" in names
        ends = [
            (name, given)
            for number, (name, given) in enumerate(parts)
            if name not in ("not", "never", "resolves", "rejects", "eventually", "withContext")
            and (given is not None or (name not in _NOISE and (name in _ONE_SIDED or number == len(parts) - 1)))
        ]
        if not ends:
            return None
        text = emit(subject)
        if failing and ends[0][0] in _THROWS:
            return self._failure(key, "rejects", text, ends[0][1] or [], emit)
        holder = _Operand("_ng_v", subject) if later or failing or len(ends) > 1 else _Operand(text, subject)
        probes: list[str] = []
        for number, (name, given) in enumerate(ends):
            one_key = f"{key}.{number}" if len(ends) > 1 else key
            probes.append(self._end(one_key, name, holder, given, emit, negated=negated))
            if name in ("property",) and given:
                holder = _Operand(f"_ng_part({holder.text}, {emit(given[0])})")
        whole = probes[0] if len(probes) == 1 else f"({', '.join(probes)})"
        if later or failing:
            return f"_ng_{'later' if later else 'failing'}({text}, async (_ng_v) => {whole})"
        return f"((_ng_v) => {whole})({text})" if len(ends) > 1 else whole

    def _end(
        self, key: str, name: str, subject: _Operand, given: list[Node] | None, emit: Emit, *, negated: bool
    ) -> str:
        """Return the probe of one assertion in a chain."""
        if name in _THROWS or name in _REJECTS:
            if negated:
                name = "doesNotThrow" if name in _THROWS else "doesNotReject"
            return self._failure(key, name, subject.text, given or [], emit)
        if name in _ONE_SIDED and not given:
            op, literal = _ONE_SIDED[name]
            if op in ("truth", "false"):
                if subject.node is not None and subject.text != "_ng_v":
                    return self._truth(key, subject.node, emit, negated=(op == "false") is not negated)
                return self._plain_truth(key, _NEGATED[op] if negated else op, subject.text)
            return self._one(key, op, subject.text, literal, negated=negated)
        if name in _TWO_SIDED and given:
            return self._named(key, name, subject, given, emit, negated=negated)
        return self._alike(key, subject.text, given or [])

    # ------------------------------------------------------------------------------------------------------- probes

    def _named(
        self, key: str, name: str, subject: _Operand, given: Sequence[Node], emit: Emit, *, negated: bool
    ) -> str:
        op, text, right = _TWO_SIDED[name], subject.text, _Operand(emit(given[0]), given[0])
        extra: float | None = None
        sure: Side | None = None
        if op == "matches" or op == "not matches":
            right, sure = _Operand(f"_ng_pattern({right.text})", given[0]), "right"
        elif op == "isinstance":
            subject, right = _Operand(f"_ng_types({text})"), _Operand(f"_ng_klass({right.text})", given[0])
            sure = "right"
        elif op == "called":
            subject, op, sure = _Operand(f"_ng_called({text})"), "==", "right"
        elif op in ("length", "size"):
            size = f"({text}).length" if op == "length" else f"(({text}).length ?? ({text}).size)"
            subject, op = _Operand(size, subject.node), "=="
        elif op == "digits":
            digits = self._number(given[1]) if len(given) > 1 else 2.0
            op, extra = "almost", 0.5 * 10 ** -(digits if digits is not None else 2.0)
        elif op == "delta":
            op, extra = "almost", self._number(given[1]) if len(given) > 1 else None
        elif op == "part":
            part = f"_ng_part({text}, {right.text})"
            if len(given) < 2:
                return self._one(key, "!=", part, "undefined", negated=negated)
            subject, right, op = _Operand(part), _Operand(emit(given[1]), given[1]), "=="
        elif op == "call count":
            subject, op = _Operand(f"_ng_calls({text}).length"), "=="
        elif op == "called with":
            op, all_given = "in", "[" + ", ".join(emit(one) for one in given) + "]"
            subject, right = _Operand(f"_ng_calls({text})"), _Operand(all_given, given[0])
            self.dropped += given[1:]
        if negated:
            if op not in _NEGATED:
                return self._alike(key, subject.text, given)
            op = _NEGATED[op]
        if op in ("in", "not in"):
            return self._two(key, op, right, subject, sure="left")
        return self._two(key, op, subject, right, sure=sure, extra=extra)

    def _one(self, key: str, op: str, text: str, literal: str, *, negated: bool) -> str:
        if op == "empty":
            text, op = f"Object.keys({text}).length", "=="
        elif op == "was called":
            text, op = f"_ng_calls({text}).length", "!="
        return self._two(key, _NEGATED[op] if negated else op, _Operand(text), _Operand(literal), sure="right")

    def _truth(self, key: str, node: Node, emit: Emit, *, negated: bool) -> str:
        inner = bare(node)
        awaited = any(one.type == "await_expression" for one in walk(node))
        if inner.type == "unary_expression" and self.code.text(inner).startswith("!") and not awaited:
            argument = inner.child_by_field_name("argument")
            if argument is not None:
                return self._truth(key, argument, emit, negated=not negated)
        if inner.type == "binary_expression" and not awaited:
            left, right = inner.child_by_field_name("left"), inner.child_by_field_name("right")
            assert left is not None and right is not None
            operator = self.code.field(inner, "operator")
            if operator == "&&" and not negated:
                parts = [self._truth(f"{key}.{n}", one, emit, negated=False) for n, one in enumerate((left, right))]
                return f"({', '.join(parts)})"
            if operator in _COMPARISONS:
                op = _COMPARISONS[operator]
                sides = _Operand(emit(left), left), _Operand(emit(right), right)
                return self._two(key, _NEGATED[op] if negated else op, *sides)
            if operator == "instanceof":
                kinds = _Operand(f"_ng_types({emit(left)})"), _Operand(f"_ng_klass({emit(right)})", right)
                return self._two(key, "not isinstance" if negated else "isinstance", *kinds, sure="right")
        if inner.type == "call_expression" and not awaited:
            found = self._asking_call(key, inner, emit, negated=negated)
            if found is not None:
                return found
        return self._plain_truth(key, "false" if negated else "truth", emit(node))

    def _asking_call(self, key: str, call: Node, emit: Emit, *, negated: bool) -> str | None:
        function, given = call.child_by_field_name("function"), arguments_of(call)
        if function is None or function.type != "member_expression" or not given:
            return None
        holder, name = function.child_by_field_name("object"), self.code.field(function, "property")
        assert holder is not None
        subject, first = _Operand(emit(holder), holder), _Operand(emit(given[0]), given[0])
        if name == "includes" and len(given) == 1:
            return self._two(key, "not in" if negated else "in", first, subject, sure="left")
        if name in ("startsWith", "endsWith") and len(given) == 1:
            op = name.lower()
            return self._two(key, f"not {op}" if negated else op, subject, first, sure="right")
        if name == "test" and holder.type == "regex":
            pattern = _Operand(f"_ng_pattern({subject.text})", holder)
            return self._two(key, "not matches" if negated else "matches", first, pattern, sure="right")
        if name in ("isEqual", "isDeepStrictEqual", "deepEqual") and len(given) == 2:
            return self._two(key, "!=" if negated else "==", first, _Operand(emit(given[1]), given[1]))
        return None

    def _plain_truth(self, key: str, op: str, text: str) -> str:
        self.blinding.probes[key] = Probe(key, op, None)
        return f"_ng_truth({self.site(key)}, {text})"

    def _alike(self, key: str, text: str, dropped: Sequence[Node] = ()) -> str:
        """Return the probe of an assertion without a rule. Gold's answer is the expected one."""
        self.blinding.probes[key] = Probe(key, "like", "right")
        self.dropped += dropped
        helper = "alike" if self.blinding.mode == "discover" else "put"
        return f"_ng_{helper}({self.site(key)}, {text})"

    def _failure(self, key: str, name: str, text: str, wanted: Sequence[Node], emit: Emit) -> str:
        rejects = name in _REJECTS
        if not (_REJECTS if rejects else _THROWS)[name]:
            self.dropped += wanted
            self.blinding.probes[key] = Probe(key, "==", "right")
            both = "true" if self.blinding.mode == "discover" else "false"
            return f"_ng_{'settled' if rejects else 'quiet'}({self.site(key)}, {text}, {both})"
        self.blinding.probes[key] = Probe(key, "raises matches", "right")
        if wanted and wanted[0].type in FUNCTIONS:
            self.blinding.probes[key] = Probe(key, "raises", "right")
            check = emit(wanted[0])
            if rejects:
                return f"_ng_rejected({self.site(key)}, {text}, undefined, {check})"
            return f"_ng_checked({self.site(key)}, {text}, {check})"
        expected = ""
        if self.blinding.mode == "discover":
            expected = ", [" + ", ".join(emit(one) for one in wanted) + "]"
        else:
            self.dropped += wanted
        return f"_ng_{'rejected' if rejects else 'thrown'}({self.site(key)}, {text}{expected})"

    def _two(
        self,
        key: str,
        op: str,
        left: _Operand,
        right: _Operand,
        *,
        sure: Side | None = None,
        extra: float | None = None,
    ) -> str:
        expected = sure or self._expected(left.node, right.node)
        self.blinding.probes[key] = Probe(key, op, expected, extra)
        if self.blinding.mode == "discover":
            values = f"{left.text}, {right.text}"
        else:
            dropped = self.blinding.dropped_sides.get(key, expected or "right")
            kept, gone = (right, left) if dropped == "left" else (left, right)
            if gone.node is not None:
                self.dropped.append(gone.node)
            values = kept.text
        return f"_ng_put({self.site(key)}, {values})"

    def site(self, key: str) -> str:
        return json.dumps(self.blinding.token(key), ensure_ascii=False)

    # ------------------------------------------------------------------------------------------------ small parts

    def _number(self, node: Node) -> float | None:
        try:
            return abs(float(self.code.text(node)))
        except ValueError:
            return None

    def _expected(self, left: Node | None, right: Node | None) -> Side | None:
        if left is None or right is None:
            return None
        constant_left, constant_right = (is_constant(self.code, one, self._constants) for one in (left, right))
        if constant_right is not constant_left:
            return "right" if constant_right else "left"
        likely = likely_side(names_in(self.code, left), names_in(self.code, right))
        return likely or ("right" if constant_left else None)


def is_constant(code: Code, node: Node, names: Iterable[str] = ()) -> bool:
    """Whether an expression is a constant that no code of the product computes."""
    node = bare(node)
    if node.type in _LITERALS:
        return True
    if node.type == "identifier":
        return code.text(node) in names or code.text(node) in ("undefined", "NaN", "Infinity")
    if node.type in ("string", "template_string"):
        inner = [one for one in node.named_children if one.type == "template_substitution"]
        return all(is_constant(code, one.named_children[0], names) for one in inner if one.named_children)
    if node.type in ("array", "object", "unary_expression", "binary_expression", "spread_element"):
        return all(is_constant(code, one, names) for one in node.named_children if one.type != "comment")
    if node.type == "pair":
        value = node.child_by_field_name("value")
        return value is not None and is_constant(code, value, names)
    if node.type == "shorthand_property_identifier":
        return code.text(node) in names
    if node.type in ("new_expression", "call_expression"):
        function = node.child_by_field_name("function") or node.child_by_field_name("constructor")
        if function is None:
            return False
        given = arguments_of(node)
        if function.type == "member_expression":
            holder = function.child_by_field_name("object")
            pure = holder is not None and (is_constant(code, holder, names) or code.text(holder) == "expect")
        else:
            pure = code.text(function) in ("Date", "Map", "Set", "Error", "RegExp", "BigInt", "Symbol", "String")
        return pure and all(is_constant(code, one, names) for one in given)
    return False


def _constants(code: Code) -> set[str]:
    """Return the names that are assigned exactly once, with a constant."""
    values: dict[str, list[Node | None]] = {}
    for node in walk(code.root):
        if node.type == "variable_declarator":
            name = node.child_by_field_name("name")
            if name is not None and name.type == "identifier":
                values.setdefault(code.text(name), []).append(node.child_by_field_name("value"))
        elif node.type in ("assignment_expression", "augmented_assignment_expression"):
            target = node.child_by_field_name("left")
            if target is not None and target.type == "identifier":
                values.setdefault(code.text(target), []).append(None)
    constant_names: set[str] = set()
    for _ in range(3):
        constant_names |= {
            name
            for name, assigned in values.items()
            if len(assigned) == 1 and assigned[0] is not None and is_constant(code, assigned[0], constant_names)
        }
    return constant_names


def _packages(code: Code) -> dict[str, tuple[str, str]]:
    """Return name → the assertion package that it comes from and its name there (empty for the whole package)."""
    imported: dict[str, tuple[str, str]] = {}
    for node in walk(code.root):
        if node.type == "import_statement":
            source = node.child_by_field_name("source")
            package = string_of(code, source) if source is not None else None
            if package not in _ASSERT_PACKAGES:
                continue
            for one in walk(node):
                if one.type == "import_specifier":
                    part = code.field(one, "name")
                    imported[code.field(one, "alias") or part] = (package, part)
                elif one.type in ("import_clause", "namespace_import"):
                    for child in one.named_children:
                        if child.type == "identifier":
                            imported[code.text(child)] = (package, "")
        elif node.type == "variable_declarator":
            name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
            if name is None or value is None:
                continue
            part = ""
            if value.type == "member_expression":
                part = code.field(value, "property")
                value = value.child_by_field_name("object") or value
            if value.type == "identifier" and code.text(value) in imported and name.type == "object_pattern":
                package = imported[code.text(value)][0]
            else:
                if code.field(value, "function") != "require" or not arguments_of(value):
                    continue
                package = string_of(code, arguments_of(value)[0])
            if package not in _ASSERT_PACKAGES:
                continue
            if name.type == "identifier":
                imported[code.text(name)] = (package, "" if part == "strict" else part)
            for one in name.named_children if name.type == "object_pattern" else ():
                if one.type == "shorthand_property_identifier_pattern":
                    imported[code.text(one)] = (package, code.text(one))
                elif one.type == "pair_pattern":
                    imported[code.field(one, "value")] = (package, code.field(one, "key"))
    return imported


def _first_parameter(code: Code, function: Node) -> str:
    one = function.child_by_field_name("parameter")
    if one is None:
        holder = function.child_by_field_name("parameters")
        inner = [child for child in holder.named_children if child.type != "comment"] if holder is not None else []
        one = inner[0] if inner else None
    if one is not None and one.type == "required_parameter":
        one = one.child_by_field_name("pattern")
    return code.text(one) if one is not None and one.type == "identifier" else ""


def _chain(code: Code, node: Node) -> tuple[Node | None, list[tuple[str, list[Node] | None]]] | None:
    """Parse ``expect(subject).a.b(…)`` or ``subject.should.a(…)``. Return the subject, and each name with its
    arguments (``None`` if it is not called)."""
    parts: list[tuple[str, list[Node] | None]] = []
    current = node
    while True:
        given: list[Node] | None = None
        if current.type == "call_expression":
            function = current.child_by_field_name("function")
            if code.field(current, "function") in ("expect", "expectAsync", "chai.expect", "expect.soft"):
                inside = arguments_of(current)
                return (inside[0] if inside else None), parts[::-1]
            if function is None or function.type != "member_expression":
                return None
            given, current = arguments_of(current), function
        if current.type != "member_expression":
            return None
        holder, name = current.child_by_field_name("object"), code.field(current, "property")
        if holder is None or not name:
            return None
        if name == "should" and given is None and parts and code.text(holder) not in ("chai", "this"):
            return holder, parts[::-1]
        parts.append((name, given))
        current = holder
