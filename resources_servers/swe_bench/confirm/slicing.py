"""Removes from a test file what only the expected sides used: names, parameters, columns of parametrised cases."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Body = list[ast.stmt]


def definitions_of(tree: ast.Module) -> Iterator[tuple[tuple[str, ...], FunctionNode | ast.ClassDef, Body]]:
    """Yield, for every function and class at module or class level, the enclosing classes, the node, and the list that
    holds it."""

    def visit(
        body: Body, classes: tuple[str, ...]
    ) -> Iterator[tuple[tuple[str, ...], FunctionNode | ast.ClassDef, Body]]:
        for node in list(body):
            if isinstance(node, FunctionNode | ast.ClassDef):
                yield classes, node, body
            if isinstance(node, ast.ClassDef):
                yield from visit(node.body, (*classes, node.name))
            elif isinstance(node, ast.If | ast.Try | ast.With):
                for inner in ("body", "orelse", "finalbody"):
                    yield from visit(getattr(node, inner, []), classes)
                for handler in getattr(node, "handlers", []):
                    yield from visit(handler.body, classes)

    yield from visit(tree.body, ())


def functions_of(tree: ast.Module) -> Iterator[tuple[tuple[str, ...], FunctionNode, Body]]:
    """Yield the functions among the definitions."""
    for classes, node, body in definitions_of(tree):
        if not isinstance(node, ast.ClassDef):
            yield classes, node, body


def key_of_test(classes: Sequence[str], function: FunctionNode) -> str:
    """Return the key of a test: ``test:`` and its qualified name."""
    return "test:" + ".".join((*classes, function.name))


def loads_in(*nodes: ast.AST) -> Counter[str]:
    """Return how often each name is read in ``nodes`` and below."""
    return Counter(
        one.id
        for node in nodes
        for one in ast.walk(node)
        if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Store)
    )


def slice_away(tree: ast.Module, dropped: set[str]) -> None:
    """Remove from ``tree`` the definitions of ``dropped`` names that nothing reads any more.

    The names that the removed parts read are added to ``dropped``.
    """
    for _ in range(20):
        changed = False
        for _, function, _ in functions_of(tree):
            changed = _slice_function(function, dropped) or changed
            changed = _slice_cases(tree, function, dropped) or changed
            changed = _slice_parameters(tree, function, dropped) or changed
        if not (_slice_module(tree, dropped) or changed):
            return


def _slice_function(function: FunctionNode, dropped: set[str]) -> bool:
    loads = loads_in(function)
    kept = {name for node in ast.walk(function) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}

    def gone(target: ast.expr) -> bool:
        return isinstance(target, ast.Name) and target.id in dropped and not loads[target.id] and target.id not in kept

    cleaner = _Cleaner(gone, dropped)
    cleaner.clean(function)
    return cleaner.changed


class _Cleaner(ast.NodeTransformer):
    """Removes assignments and loop columns whose targets are gone."""

    def __init__(self, gone: Callable[[ast.expr], bool], dropped: set[str]) -> None:
        self.gone, self.dropped, self.changed = gone, dropped, False

    def clean(self, function: FunctionNode) -> None:
        self.generic_visit(function)
        if not function.body:
            function.body = [ast.Pass()]

    def _remove(self, *read: ast.AST | None) -> None:
        self.changed = True
        for node in read:
            if node is not None:
                self.dropped |= set(loads_in(node))

    def visit_Assign(self, node: ast.Assign) -> ast.stmt | None:
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            targets, values = node.targets[0].elts, node.value.elts
            left = [(t, v) for t, v in zip(targets, values, strict=False) if not self.gone(t)]
            if len(targets) == len(values) and 0 < len(left) < len(targets):
                self._remove(*(v for t, v in zip(targets, values, strict=True) if self.gone(t)))
                node.targets[0].elts, node.value.elts = [t for t, _ in left], [v for _, v in left]
                return node
        targets_flat = [one for t in node.targets for one in (t.elts if isinstance(t, ast.Tuple | ast.List) else [t])]
        if all(self.gone(target) for target in targets_flat):
            self._remove(node.value)
            return None
        return node

    def _one_target(self, node: Any) -> Any:
        if self.gone(node.target):
            self._remove(node.value)
            return None
        return node

    visit_AnnAssign = visit_AugAssign = _one_target  # noqa: N815

    def visit_For(self, node: ast.For) -> ast.stmt | None:
        self.generic_visit(node)
        if not node.body:
            node.body = [ast.Pass()]
        if isinstance(node.target, ast.Tuple) and isinstance(node.iter, ast.List | ast.Tuple | ast.Set):
            columns = [number for number, target in enumerate(node.target.elts) if not self.gone(target)]
            rows = [row for row in node.iter.elts if isinstance(row, ast.Tuple | ast.List)]
            same = len(rows) == len(node.iter.elts) and all(len(r.elts) == len(node.target.elts) for r in rows)
            if same and len(columns) < len(node.target.elts):
                for row in rows:
                    self._remove(*(one for number, one in enumerate(row.elts) if number not in columns))
                    row.elts = [row.elts[number] for number in columns]
                node.target.elts = [node.target.elts[number] for number in columns]
                self.changed = True
                if not columns:
                    node.target = ast.Name("_", ast.Store())
        elif isinstance(node.iter, ast.Call) and isinstance(node.target, ast.Tuple) and len(node.target.elts) == 2:
            source = node.iter.func
            shown = source.value if isinstance(source, ast.Attribute) and source.attr == "items" else None
            if isinstance(shown, ast.Dict) and self.gone(node.target.elts[1]):
                values = shown.values
                if any(not isinstance(one, ast.Constant) or one.value is not None for one in values):
                    self._remove(*values)
                    shown.values = [ast.Constant(None) for _ in values]
        return node

    def visit_With(self, node: ast.With) -> ast.stmt | None:
        self.generic_visit(node)
        if not node.body:
            if all(item.optional_vars is None or isinstance(item.optional_vars, ast.Name) for item in node.items):
                self._remove(*(item.context_expr for item in node.items))
                return None
            node.body = [ast.Pass()]
        return node

    def visit_If(self, node: ast.If) -> ast.stmt | None:
        self.generic_visit(node)
        if not node.body and not node.orelse:
            self._remove(node.test)
            return None
        node.body = node.body or [ast.Pass()]
        return node

    def _with_body(self, node: Any) -> Any:
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    visit_Try = visit_ExceptHandler = visit_FunctionDef = _with_body  # noqa: N815


def parametrisation(decorator: ast.expr) -> tuple[list[str], ast.expr] | None:
    """Return the argument names and values of ``pytest.mark.parametrize(…)``, or ``None`` for another decorator."""
    if not (isinstance(decorator, ast.Call) and _dotted(decorator.func).endswith("parametrize")):
        return None
    values = {one.arg: one.value for one in decorator.keywords}
    names = decorator.args[0] if decorator.args else values.get("argnames")
    cases = decorator.args[1] if len(decorator.args) > 1 else values.get("argvalues")
    if cases is None:
        return None
    if isinstance(names, ast.Constant) and isinstance(names.value, str):
        return [name.strip() for name in names.value.split(",") if name.strip()], cases
    if isinstance(names, ast.Tuple | ast.List):
        return [str(one.value) for one in names.elts if isinstance(one, ast.Constant)], cases
    return None


def case_rows(tree: ast.Module, cases: ast.expr) -> list[ast.expr] | None:
    """Return the rows of a parametrisation if they are written out, directly or under a module-level name."""
    if isinstance(cases, ast.Name):
        values = [
            node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == cases.id for t in node.targets)
        ]
        cases = values[0] if len(values) == 1 else cases
    return list(cases.elts) if isinstance(cases, ast.List | ast.Tuple) else None


def _slice_cases(tree: ast.Module, function: FunctionNode, dropped: set[str]) -> bool:
    changed = False
    loads = loads_in(*function.body)
    for decorator in function.decorator_list:
        parametrised = parametrisation(decorator)
        if parametrised is None:
            continue
        assert isinstance(decorator, ast.Call)
        decorator.keywords = [one for one in decorator.keywords if one.arg != "ids"]
        names, cases = parametrised
        gone = [name for name in names if name in dropped and not loads[name]]
        rows = case_rows(tree, cases)
        if not gone or rows is None:
            continue
        if isinstance(cases, ast.Name):
            dropped.add(cases.id)
        kept_columns = [number for number, name in enumerate(names) if name not in gone]
        new_rows: list[ast.expr] = []
        for row in rows:
            values = _case_values(row, len(names))
            if values is None:
                break
            for number, value in enumerate(values):
                if number not in kept_columns:
                    dropped |= set(loads_in(value))
            new_rows.append(_case([values[number] for number in kept_columns], row))
        else:
            label = ", ".join(names[number] for number in kept_columns) or "_ng_case"
            if not kept_columns:
                new_rows = [ast.Constant(number) for number in range(len(rows))]
                function.args.args.append(ast.arg("_ng_case"))
            decorator.args = [ast.Constant(label), ast.List(new_rows, ast.Load())]
            decorator.keywords = [one for one in decorator.keywords if one.arg not in ("argnames", "argvalues")]
            _remove_arguments(function, gone)
            changed = True
    return changed


def _case_values(row: ast.expr, count: int) -> list[ast.expr] | None:
    if isinstance(row, ast.Call) and _dotted(row.func).endswith("param"):
        values: list[ast.expr] = list(row.args)
    elif count == 1:
        values = [row]
    else:
        values = list(row.elts) if isinstance(row, ast.Tuple | ast.List) else []
    return values if len(values) == count else None


def _case(values: list[ast.expr], row: ast.expr) -> ast.expr:
    marks: list[ast.keyword] = []
    if isinstance(row, ast.Call):
        marks = [one for one in row.keywords if one.arg != "id"]
        if marks:
            return ast.Call(row.func, values, marks)
    return values[0] if len(values) == 1 else ast.Tuple(values, ast.Load())


def strip_ids(function: FunctionNode) -> None:
    """Remove explicit ids of cases, because they reveal what the cases are about."""
    for decorator in function.decorator_list:
        for node in ast.walk(decorator):
            if isinstance(node, ast.Call) and _dotted(node.func).endswith(("param", "parametrize")):
                node.keywords = [one for one in node.keywords if one.arg not in ("id", "ids")]


def _slice_parameters(tree: ast.Module, function: FunctionNode, dropped: set[str]) -> bool:
    """Remove helpers' parameters that only passed on an expectation, and the arguments that callers pass for them."""
    loads = loads_in(*function.body)
    arguments = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    gone = [name for name in arguments if name in dropped and not loads[name] and name not in ("self", "cls")]
    if not gone or function.args.vararg or function.args.kwarg:
        return False
    names = {name for decorator in function.decorator_list for name in (parametrisation(decorator) or ([], None))[0]}
    gone = [name for name in gone if name not in names]
    if not gone:
        return False
    if function.name.startswith("test"):
        # The parameter is a fixture that only made an expectation.
        _remove_arguments(function, gone)
        return True
    calls = list(_calls_of(tree, function.name))
    uses = sum(
        (isinstance(node, ast.Name) and node.id == function.name)
        or (isinstance(node, ast.Attribute) and node.attr == function.name)
        for node in ast.walk(tree)
    )
    if len(calls) != uses or any(isinstance(one, ast.Starred) for call in calls for one in call.args):
        return False
    bound = bool(arguments) and arguments[0] in ("self", "cls")
    for call in calls:
        positions = [arguments.index(name) - bound for name in gone]
        for number in positions:
            if 0 <= number < len(call.args):
                dropped |= set(loads_in(call.args[number]))
        call.args = [one for number, one in enumerate(call.args) if number not in positions]
        for keyword in call.keywords:
            if keyword.arg in gone:
                dropped |= set(loads_in(keyword.value))
        call.keywords = [one for one in call.keywords if one.arg not in gone]
    _remove_arguments(function, gone)
    return True


def _calls_of(tree: ast.Module, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            plain = isinstance(node.func, ast.Name) and node.func.id == name
            bound = (
                isinstance(node.func, ast.Attribute)
                and node.func.attr == name
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id in ("self", "cls")
            )
            if plain or bound:
                yield node


def _remove_arguments(function: FunctionNode, gone: Iterable[str]) -> None:
    gone = set(gone)
    arguments = function.args
    everything = [*arguments.posonlyargs, *arguments.args]
    without_default = len(everything) - len(arguments.defaults)
    defaults = [
        default
        for argument, default in zip(everything[without_default:], arguments.defaults, strict=True)
        if argument.arg not in gone
    ]
    arguments.posonlyargs = [one for one in arguments.posonlyargs if one.arg not in gone]
    arguments.args = [one for one in arguments.args if one.arg not in gone]
    arguments.defaults = defaults


def _slice_module(tree: ast.Module, dropped: set[str]) -> bool:
    loads = loads_in(tree)
    body: list[ast.stmt] = []
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if _annotated(node) else []  # type: ignore[attr-defined]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if names and len(names) == len(targets) and all(one in dropped and not loads[one] for one in names):
            dropped |= set(loads_in(node.value))  # type: ignore[attr-defined]
            continue
        body.append(node)
    changed = len(body) != len(tree.body)
    tree.body = body
    return changed


def _annotated(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and node.value is not None


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
