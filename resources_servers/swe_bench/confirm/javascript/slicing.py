"""Removes from a test file what only the expected sides used: constants, columns of tables, arguments of helpers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from resources_servers.swe_bench.confirm.javascript.syntax import (
    FUNCTIONS,
    Code,
    Edit,
    arguments_of,
    bare,
    string_of,
    walk,
)

if TYPE_CHECKING:
    from tree_sitter import Node

_NOTHING = "undefined"
_ROUNDS = 20
_ITERATING = frozenset({"forEach", "map", "each"})


class _Dropped:
    """The names and properties that the removed expressions read."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.parts: set[tuple[str, str]] = set()
        """``(owner, property)`` pairs."""
        self.tables: set[str] = set()
        """Names of the objects in subscript expressions."""
        self.looking = ""
        """The name, or ``owner.property``, whose values are being removed."""
        self.reached: set[str] = set()
        """The values of ``looking`` for which values were found."""

    def add(self, code: Code, node: Node) -> None:
        for one in walk(node):
            if one.type in ("identifier", "shorthand_property_identifier"):
                self.names.add(code.text(one))
            owner = one.child_by_field_name("object")
            if owner is None or owner.type != "identifier":
                continue
            if one.type == "member_expression":
                self.parts.add((code.text(owner), code.field(one, "property")))
            elif one.type == "subscript_expression":
                self.tables.add(code.text(owner))


def slice_away(
    text: str, path: str, source: Code, left_out: Iterable[Node], property_name: Callable[[str], str]
) -> str:
    """Return ``text``, a rendering of ``source``, without definitions that only the ``left_out`` expressions used.

    Args:
        property_name: returns the rendering's name for a property of the source.

    Raises:
        ValueError: an expectation of a test would stay in the file.
    """
    dropped = _Dropped()
    for node in left_out:
        dropped.add(source, node)
    dropped.parts = {(owner, property_name(part)) for owner, part in dropped.parts}
    for _ in range(_ROUNDS):
        code = Code.parse(text, path)
        edits = list(_edits(code, dropped))
        if not edits:
            break
        text = code.edited(edits)
    _refuse_leftovers(Code.parse(text, path), dropped)
    return text


def _refuse_leftovers(code: Code, dropped: _Dropped) -> None:
    reads, parts = _reads(code), _part_reads(code)
    for node in walk(code.root):
        name = code.text(node) if node.type in ("identifier", "shorthand_property_identifier_pattern") else ""
        if not name or not _iterates(code, node):
            continue
        stays = _gone(name, dropped, reads) and name not in dropped.reached
        stays = stays or any(
            owner == name and not parts[part] and f"{owner}.{part}" not in dropped.reached
            for owner, part in dropped.parts
        )
        if stays:
            raise ValueError(f"what its cases expect ({name}) cannot be taken out")
    for name in dropped.tables:
        if reads[name] and any(
            node.type == "variable_declarator"
            and code.field(node, "name") == name
            and (value := node.child_by_field_name("value")) is not None
            and bare(value).type == "object"
            for node in walk(code.root)
        ):
            raise ValueError(f"its table of expectations ({name}) cannot be taken out")


def _iterates(code: Code, name: Node) -> bool:
    """Whether a binding iterates over cases, in ``for … of``, ``forEach``, ``map`` or ``it.each``."""
    node, above = name, name.parent
    while above is not None and above.type.endswith(("_pattern", "_parameter")):
        node, above = above, above.parent
    if above is None or (node == name and not _is_binding(name)):
        return False
    if above.type == "for_in_statement":
        return above.child_by_field_name("left") == node
    function = above.parent if above.type == "formal_parameters" else above
    if function is None or function.type not in FUNCTIONS or function.child_by_field_name("body") == node:
        return False
    call = function.parent.parent if function.parent is not None and function.parent.type == "arguments" else None
    callee = call.child_by_field_name("function") if call is not None else None
    if callee is None:
        return False
    return callee.type == "call_expression" or code.field(callee, "property") in _ITERATING


def _edits(code: Code, dropped: _Dropped) -> Iterator[Edit]:
    reads, parts = _reads(code), _part_reads(code)
    for node in walk(code.root):
        if node.type in ("variable_declarator", "function_declaration"):
            name = node.child_by_field_name("name")
            if name is not None and name.type == "identifier" and _gone(code.text(name), dropped, reads):
                yield from _remove(code, node, dropped)
        elif node.type in ("identifier", "shorthand_property_identifier_pattern"):
            if _gone(code.text(node), dropped, reads):
                dropped.looking = code.text(node)
                yield from _empty_column(code, node, dropped)
        elif node.type == "expression_statement" and node.named_children:
            target = node.named_children[0].child_by_field_name("left")
            if (
                node.named_children[0].type == "assignment_expression"
                and target is not None
                and target.type == "identifier"
                and _gone(code.text(target), dropped, reads)
            ):
                value = node.named_children[0].child_by_field_name("right")
                if value is not None:
                    dropped.add(code, value)
                yield node.start_byte, node.end_byte, ";"
    for owner, part in sorted(dropped.parts):
        if parts[part] == 0:
            dropped.looking = f"{owner}.{part}"
            yield from _empty_property(code, owner, part, dropped)


def _gone(name: str, dropped: _Dropped, reads: Counter[str]) -> bool:
    return name in dropped.names and not reads[name]


def _reads(code: Code) -> Counter[str]:
    """Return how often each name is read. Declarations and assignments do not count."""
    counts: Counter[str] = Counter()
    for node in walk(code.root):
        if node.type == "shorthand_property_identifier" or (node.type == "identifier" and not _is_binding(node)):
            counts[code.text(node)] += 1
    return counts


def _is_binding(node: Node) -> bool:
    above = node.parent
    if above is None:
        return False
    if above.type in ("variable_declarator", "function_declaration", "class_declaration"):
        return above.child_by_field_name("name") == node
    if above.type in (
        "array_pattern",
        "formal_parameters",
        "rest_pattern",
        "required_parameter",
        "optional_parameter",
    ):
        return True
    if above.type == "pair_pattern":
        return above.child_by_field_name("value") == node
    if above.type in ("assignment_pattern", "for_in_statement", "assignment_expression"):
        return above.child_by_field_name("left") == node
    return above.type == "arrow_function" and above.child_by_field_name("parameter") == node


def _part_reads(code: Code) -> Counter[str]:
    counts: Counter[str] = Counter()
    for node in walk(code.root):
        if node.type == "member_expression":
            counts[code.field(node, "property")] += 1
        elif node.type == "shorthand_property_identifier_pattern":
            counts[code.text(node)] += 1
    return counts


def _remove(code: Code, node: Node, dropped: _Dropped) -> Iterator[Edit]:
    dropped.add(code, node)
    holder = node.parent
    if node.type == "variable_declarator" and holder is not None:
        others = [one for one in holder.named_children if one.type == "variable_declarator"]
        if len(others) > 1:
            place = others.index(node)
            start = node.start_byte if place == 0 else others[place - 1].end_byte
            yield start, others[1].start_byte if place == 0 else node.end_byte, ""
            return
        if holder.parent is not None and holder.parent.type in ("export_statement", "for_statement"):
            return
        node = holder
    yield node.start_byte, node.end_byte, ";"


# -------------------------------------------------------------------------------------------------- tables and helpers


def _empty_column(code: Code, name: Node, dropped: _Dropped) -> Iterator[Edit]:
    """Yield edits that remove the values of a parameter or of a part of a pattern, at the places they come from."""
    steps: list[int | str] = []
    node: Node = name
    above = node.parent
    while above is not None and above.type in (
        "array_pattern",
        "object_pattern",
        "pair_pattern",
        "assignment_pattern",
        "object_assignment_pattern",
        "required_parameter",
    ):
        if above.type == "array_pattern":
            steps.insert(0, _place(above, node))
        elif above.type == "object_pattern":
            key = node.child_by_field_name("key") if node.type == "pair_pattern" else name
            steps.insert(0, code.text(key if key is not None else name))
        node, above = above, above.parent
    yield from _empty_binding(code, node, steps, dropped)


def _empty_binding(code: Code, node: Node, steps: list[int | str], dropped: _Dropped) -> Iterator[Edit]:
    """Yield edits that remove the values that reach a binding, or only the parts of them that ``steps`` lead to."""
    above = node.parent
    if above is None:
        return
    if above.type == "formal_parameters" and above.parent is not None:
        yield from _empty_argument(code, above.parent, _place(above, node), steps, dropped)
    elif above.type == "arrow_function" and node == above.child_by_field_name("parameter"):
        yield from _empty_argument(code, above, 0, steps, dropped)
    elif above.type == "for_in_statement" and steps:
        table = above.child_by_field_name("right")
        if table is not None:
            yield from _empty_rows(code, table, steps, dropped)
    elif above.type == "variable_declarator" and steps:
        value = above.child_by_field_name("value")
        if value is not None:
            yield from _empty_at(code, _resolved(code, value), steps, dropped)


def _empty_argument(
    code: Code, function: Node, place: int, steps: list[int | str], dropped: _Dropped
) -> Iterator[Edit]:
    """Yield edits that remove what calls of a function pass for one of its parameters."""
    above = function.parent
    if function.type in FUNCTIONS and above is not None and above.type == "arguments":
        call = above.parent
        callee = call.child_by_field_name("function") if call is not None else None
        if callee is None:
            return
        if callee.type == "call_expression":  # it.each(rows)("…", (one, expected) => …)
            tables = arguments_of(callee)
            if tables:
                yield from _empty_rows(code, tables[0], [place, *steps], dropped, flat=place == 0 and not steps)
        elif callee.type == "member_expression":
            table = callee.child_by_field_name("object")
            if table is not None and code.field(callee, "property") in _ITERATING and place == 0 and steps:
                yield from _empty_rows(code, table, steps, dropped)
        return
    name = function.child_by_field_name("name")
    if name is None and above is not None and above.type == "variable_declarator":
        name = above.child_by_field_name("name")
    if name is None:
        return
    for call in walk(code.root):
        callee = call.child_by_field_name("function") if call.type == "call_expression" else None
        if callee is None or callee.type != "identifier" or code.text(callee) != code.text(name):
            continue
        given = arguments_of(call)
        if place < len(given):
            yield from _empty_at(code, given[place], steps, dropped)


def _empty_rows(
    code: Code, table: Node, steps: list[int | str], dropped: _Dropped, *, flat: bool = False
) -> Iterator[Edit]:
    table = bare(table)
    entries = table.type == "call_expression" and code.text(table).startswith("Object.entries")
    if entries:
        inner = arguments_of(table)
        whole = _resolved(code, inner[0]) if inner else table
        if steps[0] == 1 and whole.type == "object":
            for pair in whole.named_children:
                value = pair.child_by_field_name("value") if pair.type == "pair" else None
                if value is not None:
                    yield from _empty_at(code, value, steps[1:], dropped)
        return
    whole = _resolved(code, table)
    if whole.type != "array":
        return
    for row in whole.named_children:
        if row.type != "comment":
            yield from _empty_at(code, row, [] if flat and bare(row).type != "array" else steps, dropped)


def _empty_at(code: Code, node: Node, steps: list[int | str], dropped: _Dropped) -> Iterator[Edit]:
    node = bare(node)
    if not steps:
        dropped.reached.add(dropped.looking)
        if code.text(node) != _NOTHING:
            dropped.add(code, node)
            yield node.start_byte, node.end_byte, _NOTHING
        return
    first, *rest = steps
    if node.type == "array" and isinstance(first, int):
        items = [one for one in node.named_children if one.type != "comment"]
        if first < len(items) and not any(one.type == "spread_element" for one in items[: first + 1]):
            yield from _empty_at(code, items[first], rest, dropped)
    elif node.type == "object" and isinstance(first, str):
        for pair in node.named_children:
            key = pair.child_by_field_name("key") if pair.type == "pair" else None
            value = pair.child_by_field_name("value") if pair.type == "pair" else None
            if key is not None and value is not None and first in (code.text(key), string_of(code, key)):
                yield from _empty_at(code, value, rest, dropped)


def _empty_property(code: Code, owner: str, part: str, dropped: _Dropped) -> Iterator[Edit]:
    """Yield edits that remove the values of ``owner.part``, if ``owner`` is a constant or iterates over a table."""
    for node in walk(code.root):
        if node.type == "identifier" and code.text(node) == owner and _is_binding(node):
            yield from _empty_binding(code, node, [part], dropped)


def _place(holder: Node, node: Node) -> int:
    """Return the index of an element in a pattern or list, counting holes."""
    number = 0
    for one in holder.children:
        if one == node:
            return number
        if one.type == ",":
            number += 1
    return number


def _resolved(code: Code, node: Node) -> Node:
    """Return the value of a name that is declared once; any other node unchanged."""
    node = bare(node)
    if node.type != "identifier":
        return node
    values = [
        value
        for one in walk(code.root)
        if one.type == "variable_declarator"
        and code.field(one, "name") == code.text(node)
        and (value := one.child_by_field_name("value")) is not None
    ]
    return bare(values[0]) if len(values) == 1 else node


def leaves_expectations(code: Code) -> bool:
    """Whether the file holds a table from which this module cannot remove columns."""
    return any(
        node.type == "call_expression"
        and (given := node.child_by_field_name("arguments")) is not None
        and given.type == "template_string"
        and code.field(node, "function").endswith(".each")
        for node in walk(code.root)
    )
