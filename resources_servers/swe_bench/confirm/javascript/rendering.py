"""Renders a JavaScript test file: chosen tests in other words and another layout, with probes in place of
assertions."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from resources_servers.swe_bench.confirm.assertions import Blinding
from resources_servers.swe_bench.confirm.javascript.assertions import Assertions
from resources_servers.swe_bench.confirm.javascript.slicing import leaves_expectations, slice_away
from resources_servers.swe_bench.confirm.javascript.syntax import (
    FUNCTIONS,
    SCOPES,
    Code,
    Edit,
    Test,
    arguments_of,
    is_suite,
    string_of,
    tests_of,
    walk,
)
from resources_servers.swe_bench.confirm.labels import MAX_DIGITS, Labels, random_name, tokens_of_text
from resources_servers.swe_bench.confirm.rendering import Chosen, Order, Rendered

if TYPE_CHECKING:
    from tree_sitter import Node

_HERE = Path(__file__).parent
_HELPER = re.compile(r"_ng_\w+")
_HELPERS = (
    *("begin", "end", "put", "alike", "truth", "thrown", "checked", "quiet", "settled", "rejected", "later"),
    *("failing", "pattern", "types", "klass", "called", "part", "calls", "title"),
)
_PRAGMA = re.compile(r"@(jest|vitest)-|@jsx|@ts-|@flow|istanbul|c8 ignore")
_PATH_CALL = re.compile(r"require|resolve|\bjoin$|readFile|readdir|existsSync|fixture|[mM]ock$|import", re.IGNORECASE)
_OPAQUE = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]")
"""The parts of a regular expression that are not relabelled: escapes and character classes."""
_NEEDS_RUNNER = re.compile(r"\b(jest|vi|jasmine|sinon|cy|browser)\.|from ['\"]@?(jest|vitest|ava)\b|['\"]ava['\"]")


def render_javascript(source: str, chosen: Chosen, order: Order) -> Rendered | None:
    """Render one file. Return ``None`` if nothing in it can be rendered.

    Raises:
        SyntaxError: the file cannot be parsed in its language.
        ValueError: the expectations of its tests cannot be removed.
        VerifierError: no parser is installed.
    """
    if order.plain and (_NEEDS_RUNNER.search(source) or not order.path.endswith((".js", ".cjs", ".mjs"))):
        return None
    code = Code.parse(source, order.path)
    every = tests_of(code)
    tests = [test for test in every if test.key in chosen.names]
    if not tests:
        return None
    if leaves_expectations(code):
        raise ValueError("its cases are a table in a template")
    writer = _Writer(code, order, every, tests)
    text = writer.emit(code.root)
    blind = order.mode == "blind"
    if blind:
        text = slice_away(text, code.path, code, writer.assertions.dropped, writer.property_name)
        text = _other_names(text, code.path, order.rng)
        text = _other_order(text, code.path, order.rng)
        text = re.sub(r"\n\s*\n+", "\n", text)
    source_text, beside = _with_recorder(code, text, order)
    Code.parse(source_text, code.path)
    whole, by_test = _tokens(code, tests, writer.titles)
    return Rendered(
        source_text,
        {f"{order.path}|{key}": probe for key, probe in writer.blinding.probes.items()},
        {token: f"{order.path}|{key}" for key, token in writer.blinding.tokens.items()},
        whole,
        by_test,
        beside,
    )


class _Writer:
    """Writes a copy of a file with the changes of a rendering."""

    def __init__(self, code: Code, order: Order, every: Iterable[Test], chosen: Collection[Test]) -> None:
        self.code, self.order = code, order
        self.blinding = Blinding(order.mode, order.rng, order.path, order.dropped_sides)
        self.assertions = Assertions(code, self.blinding, chosen)
        self._bodies = {test.body.id: test for test in chosen}
        self._gone = _unchosen(code, every, chosen)
        self.titles = {
            given[0].id
            for node in walk(code.root)
            if node.type == "call_expression"
            and (is_suite(code, node) or any(test.call == node for test in every))
            and (given := arguments_of(node))
            and given[0].type not in FUNCTIONS
        }
        self._fixed_names = _fixed_names(code)

    def emit(self, node: Node) -> str:
        if node.id in self._gone:
            return "undefined" if node.type != "expression_statement" else ";"
        if node.id in self._bodies:
            return self._body(self._bodies[node.id])
        if node.id in self.titles and self.order.mode == "blind" and not self.order.keeps_titles:
            return f'_ng_title("{random_name(self.order.rng)}")'
        if node.type == "comment":
            return self._comment(self.code.text(node))
        if node.type == "call_expression" and is_path_call(self.code, node):
            return self.code.text(node)
        if node.type in ("import_statement", "export_statement") and node.child_by_field_name("source") is not None:
            return self.code.text(node)
        probes = self.assertions.rewrite(node, self.emit)
        if probes is not None:
            return probes
        if not node.children:
            return self._leaf(node)
        return self._children(node)

    def _children(self, node: Node, *, start: int | None = None, end: int | None = None) -> str:
        at = node.start_byte if start is None else start
        last = node.end_byte if end is None else end
        out: list[str] = []
        for child in node.children:
            if child.start_byte < at or child.end_byte > last:
                continue
            out += [self.code.between(at, child.start_byte), self.emit(child)]
            at = child.end_byte
        return "".join([*out, self.code.between(at, last)])

    def _leaf(self, node: Node) -> str:
        text = self.code.text(node)
        labels = self._labels
        if labels is None:
            return text
        if node.type == "string_fragment":
            return labels.text(text)
        if node.type == "regex_pattern":
            return relabelled_pattern(labels, text)
        if node.type == "number" and text.isdigit():
            return labels.map.get(text, text)
        return self.property_name(text) if node.type == "property_identifier" else text

    @property
    def _labels(self) -> Labels | None:
        """The order's labels. A `Variation` is ignored, because it applies to Python data only."""
        return self.order.labels if isinstance(self.order.labels, Labels) else None

    def property_name(self, name: str) -> str:
        """Return a property's name in the rendering."""
        labels = self._labels
        return name if labels is None or name in self._fixed_names else labels.text(name)

    def _body(self, test: Test) -> str:
        body = test.body.child_by_field_name("body")
        assert body is not None
        begin = f"_ng_begin({self.assertions.site(test.key)}); try {{"
        close = "} finally { _ng_end(); }"
        head = self._children(test.body, end=body.start_byte)
        if body.type == "statement_block":
            inner = self._children(body, start=body.start_byte + 1, end=body.end_byte - 1)
            return f"{head}{{ {begin} {inner}\n{close} }}"
        is_async = any(one.type == "async" for one in test.body.children)
        return f"{head}{{ {begin} return {'await ' if is_async else ''}({self.emit(body)}); {close} }}"

    def _comment(self, text: str) -> str:
        if self.order.mode == "discover" or _PRAGMA.search(text):
            return text
        return "\n" if "\n" in text else ""


def _unchosen(code: Code, every: Iterable[Test], chosen: Collection[Test]) -> set[int]:
    """Return the ids of nodes that no rendering needs: tests that are not chosen, and suites of only such tests."""
    chosen_calls = [test.call for test in chosen]

    def is_near(node: Node) -> bool:
        return any(
            (call_node.start_byte <= node.start_byte and node.end_byte <= call_node.end_byte)
            or (node.start_byte <= call_node.start_byte and call_node.end_byte <= node.end_byte)
            for call_node in chosen_calls
        )

    calls = [test.call for test in every]
    suites = [
        node
        for node in walk(code.root)
        if node.type == "call_expression"
        and is_suite(code, node)
        and any(node.start_byte <= call_node.start_byte and call_node.end_byte <= node.end_byte for call_node in calls)
    ]
    unchosen_ids: set[int] = set()
    for call in [*calls, *suites]:
        if is_near(call):
            continue
        node = call
        while node.parent is not None and node.parent.type in (
            "member_expression",
            "call_expression",
            "await_expression",
        ):
            if node.parent.type == "call_expression" and node.parent.child_by_field_name("function") != node:
                break
            node = node.parent
        if node.parent is not None and node.parent.type == "expression_statement":
            node = node.parent
        unchosen_ids.add(node.id)
    return unchosen_ids


def is_path_call(code: Code, call: Node) -> bool:
    """Whether a call's strings name files."""
    function = call.child_by_field_name("function")
    if function is None or function.type not in ("identifier", "member_expression", "import"):
        return False
    holder = function.child_by_field_name("object")
    if holder is not None and code.text(function).endswith(".join") and code.text(holder) not in ("path", "p"):
        return False
    return bool(_PATH_CALL.search(code.text(function))) and all(
        one.type in ("string", "identifier", "member_expression") for one in arguments_of(call)
    )


def _fixed_names(code: Code) -> set[str]:
    """Return the names that are not renamed as properties, because they are names of variables as well."""
    kinds = ("shorthand_property_identifier", "shorthand_property_identifier_pattern", "identifier")
    return {code.text(node) for node in walk(code.root) if node.type in kinds}


def relabelled_pattern(labels: Labels, pattern: str) -> str:
    out: list[str] = []
    at = 0
    for match in _OPAQUE.finditer(pattern):
        out += [labels.text(pattern[at : match.start()]), match[0]]
        at = match.end()
    return "".join([*out, labels.text(pattern[at:])])


def _tokens(code: Code, tests: Iterable[Test], titles: set[int]) -> tuple[set[str], dict[str, set[str]]]:
    """Return the words (lower case) and numbers in the data that the tests may use: of all tests, and of each test."""
    by_place: list[tuple[int, str]] = []

    def visit(node: Node) -> None:
        if node.id in titles or node.type in ("import_statement", "comment"):
            return
        if node.type == "call_expression" and is_path_call(code, node):
            return
        is_key = node.type == "property_identifier" and node.parent is not None and node.parent.type == "pair"
        if node.type == "string_fragment" or is_key:
            by_place.extend((node.start_byte, token) for token in tokens_of_text(code.text(node)))
        elif node.type == "number" and _is_changed(token := code.text(node)):
            by_place.append((node.start_byte, token))
        for child in node.children:
            visit(child)

    visit(code.root)
    every = tests_of(code)
    outside = {
        token
        for place, token in by_place
        if not any(test.body.start_byte <= place < test.body.end_byte for test in every)
    }
    by_test = {
        test.key: outside | {token for place, token in by_place if test.body.start_byte <= place < test.body.end_byte}
        for test in tests
    }
    return outside.union(*by_test.values()), by_test


def _is_changed(number: str) -> bool:
    return number.isdigit() and len(number) <= MAX_DIGITS and int(number) > 1


# ---------------------------------------------------------------------------------------------- names, order, recorder


def _other_names(text: str, path: str, rng: random.Random) -> str:
    """Give the variables of each test other names."""
    code = Code.parse(text, path)
    fixed = {
        code.text(node)
        for node in walk(code.root)
        if node.type in ("shorthand_property_identifier", "shorthand_property_identifier_pattern")
    }
    declared: dict[str, int] = {}
    for node in walk(code.root):
        name = node.child_by_field_name("name") if node.type in ("variable_declarator", *SCOPES) else None
        if name is not None and name.type == "identifier":
            declared[code.text(name)] = declared.get(code.text(name), 0) + 1
        elif node.type == "identifier" and node.parent is not None and node.parent.type.endswith("parameters"):
            declared[code.text(node)] = declared.get(code.text(node), 0) + 2
    edits: list[Edit] = []
    for body in _test_bodies(code):
        body_names = {
            code.text(name)
            for node in walk(body)
            if node.type == "variable_declarator"
            and (name := node.child_by_field_name("name")) is not None
            and name.type == "identifier"
        }
        outside = {
            code.text(node)
            for node in walk(code.root)
            if node.type == "variable_declarator" and not (body.start_byte <= node.start_byte < body.end_byte)
            for node in node.children[:1]
        }
        new_names = {
            name: random_name(rng) for name in sorted(body_names - fixed - outside) if declared.get(name, 0) < 2
        }
        edits += [
            (node.start_byte, node.end_byte, new_names[code.text(node)])
            for node in walk(body)
            if node.type == "identifier" and code.text(node) in new_names
        ]
    return code.edited(edits)


def _other_order(text: str, path: str, rng: random.Random) -> str:
    """Shuffle the tests of each suite among their places."""
    code = Code.parse(text, path)
    groups: dict[int, list[Node]] = {}
    for body in _test_bodies(code):
        node: Node | None = body
        while node is not None and node.type != "expression_statement":
            node = node.parent
        if node is not None and node.parent is not None:
            groups.setdefault(node.parent.id, []).append(node)
    edits: list[Edit] = []
    for nodes in groups.values():
        places = list({node.id: node for node in nodes}.values())
        texts = [code.text(node) for node in places]
        rng.shuffle(texts)
        edits += [(node.start_byte, node.end_byte, new) for node, new in zip(places, texts, strict=True)]
    return code.edited(edits)


def _test_bodies(code: Code) -> list[Node]:
    return [
        node
        for node in walk(code.root)
        if node.type in FUNCTIONS and code.field(node, "body").startswith("{ _ng_begin(")
    ]


@functools.cache
def _script(name: str) -> str:
    lines = (_HERE / name).read_text(encoding="utf-8").split("\n")
    return "\n".join(line for line in lines if not line.lstrip().startswith("//"))


def _with_recorder(code: Code, text: str, order: Order) -> tuple[str, dict[str, str]]:
    """Return the file with the recorder before it. If the file is a module, it imports the recorder from a second
    file, which is returned as path → text."""
    script = _script("recorder.js")
    driver = _script("driver.js") if order.plain else ""
    names = ", ".join(f"{name}: _ng_{name}" for name in _HELPERS)
    setup = f"const {{ {names} }} = _ng_make(_ng_fs, '{order.records_path}');"
    suffix = PurePosixPath(code.path).suffix
    unchecked = "// @ts-nocheck\n" if suffix in (".ts", ".tsx", ".mts", ".cts") else ""
    head, rest = _prologue(text)
    if code.is_module:
        name = random_name(order.rng) if order.mode == "blind" else "discovery"
        module = f"{unchecked}import * as _ng_fs from 'fs';\n{script}\nexport {setup}\n{driver}\n"
        imported = f"import {{ {', '.join(f'_ng_{name}' for name in _HELPERS)} }} from './{name}{_ending(code)}';\n"
        main_text, module = _renamed(unchecked + head + imported + rest, module, order)
        return main_text, {str(PurePosixPath(code.path).with_name(name + suffix)): module}
    prelude = f"const _ng_fs = require('fs');\n{script}\n{setup}\n{driver}\n"
    return _renamed(unchecked + head + prelude + rest, "", order)[0], {}


def _renamed(text: str, module: str, order: Order) -> tuple[str, str]:
    found = sorted(set(_HELPER.findall(text)) | set(_HELPER.findall(module)))
    names = {name: f"_{random_name(order.rng)}" for name in found}
    return _HELPER.sub(lambda match: names[match[0]], text), _HELPER.sub(lambda match: names[match[0]], module)


def _prologue(text: str) -> tuple[str, str]:
    """Split the text after the lines that must stay first: the shebang, comments such as pragmas, ``"use strict"``."""
    match = re.match(r"""(?:\s|#![^\n]*\n|//[^\n]*\n|/\*.*?\*/|(['"])use strict\1;?)*""", text, re.DOTALL)
    end = match.end() if match else 0
    return text[:end] + ("\n" if end else ""), text[end:]


def _ending(code: Code) -> str:
    """Return the suffix with which a file imports modules beside it; empty if it uses none."""
    own_suffix = PurePosixPath(code.path).suffix
    if own_suffix in (".js", ".mjs", ".cjs", ".jsx"):
        return own_suffix
    sources = [
        string_of(code, source) or ""
        for node in code.root.children
        if node.type == "import_statement" and (source := node.child_by_field_name("source")) is not None
    ]
    suffixes = [PurePosixPath(source).suffix for source in sources if source.startswith(".")]
    return next((suffix for suffix in suffixes if suffix in (".js", ".ts", ".mjs", ".tsx")), "")
