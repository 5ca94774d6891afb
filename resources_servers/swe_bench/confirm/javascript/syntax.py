"""Parses JavaScript and TypeScript into syntax trees and finds the tests in them."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from nemo_gym.contract.errors import VerifierError

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

Edit = tuple[int, int, str]
"""Start and end in bytes, and the new text."""

_GRAMMARS = {
    ".ts": ("tree_sitter_typescript", "language_typescript"),
    ".cts": ("tree_sitter_typescript", "language_typescript"),
    ".mts": ("tree_sitter_typescript", "language_typescript"),
    ".tsx": ("tree_sitter_typescript", "language_tsx"),
}
_SUITES = frozenset({"describe", "context", "suite", "fdescribe"})
_TESTS = frozenset({"it", "test", "specify", "fit"})
_TEST_PACKAGES = frozenset({"tape", "ava", "tap", "uvu", "node:test", "test"})
_MODIFIERS = frozenset({"test", "it", "only", "each", "concurrent", "skip", "serial", "failing", "todo", "cb"})
"""The names that may follow the root of a call that registers a test, as in ``it.only.each``."""
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "0": "\0", "\n": ""}
_COMPUTED = re.compile(r"(?:\.\*){2,}")
FUNCTIONS = frozenset({"arrow_function", "function_expression", "generator_function", "function"})
SCOPES = FUNCTIONS | {"function_declaration", "generator_function_declaration", "method_definition"}
_WORD = re.compile(r"[^\W\d_]+")
_SKIPPED = re.compile(r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`)|//[^\n]*|/\*.*?\*/""", re.DOTALL)
SELECTS_BY_TITLE = re.compile(
    r"\s(-g|-t|-f|-m|--grep|--fgrep|--match|--filter|--testNamePattern|--test-name-pattern)\b"
)
"""The options of test runners that select tests by title."""
_MAX_PARSED = 500_000
_TELLING = frozenset(
    {
        *("string_fragment", "regex_pattern", "property_identifier", "shorthand_property_identifier"),
        *("shorthand_property_identifier_pattern", "template_string", "jsx_text"),
    }
)
JAVASCRIPT_WORDS = frozenset(
    """
    after all and apply arguments array arraybuffer assert assign async at await be before bigint bind bool boolean
    buffer bytelength bytes call caller catch charat charcodeat class codepointat concat console const constructor
    contain contains copywithin create deep default delete describe done each endswith entries env eql equal equals
    error errors eval eventually every exec exist expect export exports extends false fill filter finally find
    findindex findlast flags flat flatmap float for foreach freeze from function get getdate getfullyear getmonth
    groups has hasown have http https if import in includes index indexof infinity input inspect instanceof is
    isarray isfinite isnan it iterator join json keys lastindex lastindexof length let localecompare log map match
    matchall max message min mock mocks module name nan never new next node not null number object of ok on only
    padend padstart parse parsefloat parseint pop promise properties property prototype proxy push put raw reduce
    reduceright reflect regexp reject rejects repeat replace replaceall require resolve resolves return reverse
    round same search set setter shift should size skip slice some sort source splice split stack startswith static
    stop strict string stringify substr substring super switch symbol test then this throw throws timeout to todate
    todo tofixed toisostring tojson tolocalestring tolowercase tostring touppercase trim trimend trimstart true
    truncate try type typeof types undefined unshift value valueof values warn weakmap weakset xhtml yield
    """.split()  # noqa: SIM905
)


@functools.cache
def _parser(suffix: str) -> Parser:
    module, function = _GRAMMARS.get(suffix, ("tree_sitter_javascript", "language"))
    try:
        tree_sitter: Any = importlib.import_module("tree_sitter")
        grammar: Any = importlib.import_module(module)
    except ImportError as error:
        raise VerifierError(
            f"controls of tests in JavaScript need a parser ({error}); install the extra 'swe-bench-javascript', or"
            " prepare with controls=off"
        ) from error
    parser: Parser = tree_sitter.Parser(tree_sitter.Language(getattr(grammar, function)()))
    return parser


@dataclass(frozen=True)
class Code:
    """A parsed file."""

    path: str
    data: bytes
    root: Node

    @classmethod
    def parse(cls, text: str, path: str) -> Code:
        """Raises:
        SyntaxError: the file cannot be parsed in its language.
        """
        data = text.encode("utf-8", "surrogatepass")
        root = _parser(PurePosixPath(path).suffix).parse(data).root_node
        if root.has_error:
            raise SyntaxError("its syntax is not understood")
        return cls(path, data, root)

    def text(self, node: Node) -> str:
        return self.data[node.start_byte : node.end_byte].decode("utf-8", "surrogatepass")

    def between(self, start: int, end: int) -> str:
        return self.data[start:end].decode("utf-8", "surrogatepass")

    def field(self, node: Node, name: str) -> str:
        """Return the text of a node's field; empty if it has no such field."""
        child = node.child_by_field_name(name)
        return self.text(child) if child is not None else ""

    def edited(self, edits: Iterable[Edit]) -> str:
        """Return the text with the edits applied. Of two overlapping edits, the outer one is applied."""
        out: list[str] = []
        at = 0
        for start, end, new in sorted(set(edits), key=lambda one: (one[0], -one[1])):
            if start >= at:
                out += [self.between(at, start), new]
                at = end
        return "".join([*out, self.between(at, len(self.data))])

    @property
    def is_module(self) -> bool:
        return any(node.type in ("import_statement", "export_statement") for node in self.root.children)


def walk(node: Node) -> Iterator[Node]:
    """Yield ``node`` and everything below it, in the order of the text."""
    pending = [node]
    while pending:
        current = pending.pop()
        yield current
        pending.extend(reversed(current.children))


def key_of(node: Node) -> str:
    return f"{node.start_point[0] + 1}.{node.start_point[1]}"


def arguments_of(call: Node) -> list[Node]:
    """Return the arguments of a call; none for a tagged template."""
    holder = call.child_by_field_name("arguments")
    if holder is None or holder.type != "arguments":
        return []
    return [one for one in holder.named_children if one.type != "comment"]


def bare(node: Node) -> Node:
    """Return the expression inside parentheses, after ``await``, or before a type."""
    while node.type in ("parenthesized_expression", "await_expression", "as_expression", "non_null_expression"):
        inner = [one for one in node.named_children if one.type != "comment"]
        if not inner:
            return node
        node = inner[0]
    return node


def names_in(code: Code, node: Node) -> set[str]:
    """Return the identifiers below ``node``."""
    kinds = ("identifier", "shorthand_property_identifier")
    return {code.text(one) for one in walk(node) if one.type in kinds}


def string_of(code: Code, node: Node) -> str | None:
    """Return the value of a string literal, or ``None`` for any other node."""
    if node.type not in ("string", "template_string"):
        return None
    out: list[str] = []
    for one in node.named_children:
        if one.type == "string_fragment":
            out.append(code.text(one))
        elif one.type == "escape_sequence":
            out.append(_unescaped(code.text(one)))
        else:
            return None
    return "".join(out)


def _unescaped(text: str) -> str:
    rest = text[1:]
    if rest[:1] in ("x", "u"):
        try:
            return chr(int(rest[1:].strip("{}"), 16))
        except ValueError:
            return text
    return _ESCAPES.get(rest, rest)


@dataclass(frozen=True)
class Test:
    """One call that registers a test."""

    __test__ = False

    call: Node
    body: Node
    """The test's function."""
    title: str
    """A regular expression for the title, with ``.*`` for computed parts."""
    written: bool
    """Whether the whole title is literal."""
    suites: tuple[str, ...]
    """Regular expressions for the titles of the enclosing suites."""
    key: str


def tests_of(code: Code) -> list[Test]:
    """Return every test whose function is written in the call that registers it."""
    makers = _TESTS | _imported_makers(code)
    found: list[Test] = []
    seen: dict[str, int] = {}

    def visit(node: Node, suites: tuple[str, ...]) -> None:
        inner = suites
        if node.type == "call_expression":
            given = arguments_of(node)
            name, each = _root_name(code, node)
            body = next((one for one in reversed(given) if _function_in(one) is not None), None)
            if name in makers and body is not None:
                function = _function_in(body)
                assert function is not None
                title = given[0] if given[0] != body else None
                pattern, written = (".*", False) if title is None else _title(code, title, each=each)
                shown = " > ".join([*suites, pattern])
                seen[shown] = seen.get(shown, 0) + 1
                key = "test:" + shown.replace("\\", "").replace("|", "/")
                key += f" #{seen[shown]}" if seen[shown] > 1 else ""
                found.append(Test(node, function, pattern, written, suites, key))
                inner = (*suites, pattern)
            elif name in _SUITES and body is not None:
                inner = (*suites, _title(code, given[0], each=each)[0])
        for child in node.children:
            visit(child, inner)

    visit(code.root, ())
    return found


def is_suite(code: Code, call: Node) -> bool:
    return _root_name(code, call)[0] in _SUITES and any(_function_in(one) for one in arguments_of(call))


def _imported_makers(code: Code) -> set[str]:
    """Return the names that a file imports from its test package, and ``t``, which registers subtests."""
    makers: set[str] = {"t"}
    for node in walk(code.root):
        source: Node | None = None
        if node.type == "import_statement":
            source = node.child_by_field_name("source")
            names = [one for one in node.named_children if one.type == "import_clause"]
        elif node.type == "variable_declarator":
            value = node.child_by_field_name("value")
            value = value and (value.child_by_field_name("object") if value.type == "member_expression" else value)
            if value is None or value.type != "call_expression" or not arguments_of(value):
                continue
            if code.field(value, "function") != "require":
                continue
            name = node.child_by_field_name("name")
            source, names = arguments_of(value)[0], [name] if name is not None else []
        else:
            continue
        package = string_of(code, source) if source is not None else None
        if package is None or package not in _TEST_PACKAGES:
            continue
        for holder in names:
            for one in walk(holder) if holder is not None else ():
                if one.type in ("identifier", "shorthand_property_identifier_pattern"):
                    makers.add(code.text(one))
    return makers - _SUITES - {"before", "after", "beforeEach", "afterEach", "mock"}


def _root_name(code: Code, call: Node) -> tuple[str, bool]:
    """Return the root name, such as ``it`` for ``it.only(…)`` and ``it.each(…)(…)`` and ``t`` for a subtest, and
    whether the call has the form of the second example."""
    function = call.child_by_field_name("function")
    each = False
    if function is not None and function.type == "call_expression":
        each = True
        function = function.child_by_field_name("function")
    names: list[str] = []
    while function is not None and function.type == "member_expression":
        names.append(code.field(function, "property"))
        function = function.child_by_field_name("object")
    if function is None or function.type != "identifier":
        return "", each
    root = code.text(function)
    # `t.test(…)` registers a test, `t.equal(…)` asserts.
    if not _MODIFIERS.issuperset(names):
        return "", each
    if root == "t" and not {"test", "it"} & set(names):
        return "", each
    if not each and "each" in names:
        return "", each
    return root, each


def _function_in(node: Node) -> Node | None:
    if node.type in FUNCTIONS:
        return node
    if node.type != "call_expression":
        return None
    # `it("…", wrapped(async () => …))`
    return next((found for one in arguments_of(node) if (found := _function_in(one)) is not None), None)


def _title(code: Code, node: Node, *, each: bool) -> tuple[str, bool]:
    text = string_of(code, node)
    if text is not None:
        pattern = re.escape(" ".join(text.split()))
        if each:
            pattern = _joined([re.sub(r"%[a-zA-Z#]|\\\$[\w.\\]+", ".*", pattern)])
        return pattern, not each
    if node.type == "template_string":
        parts = [re.escape(code.text(one)) if one.type == "string_fragment" else ".*" for one in node.named_children]
        return _joined(parts), False
    if node.type == "binary_expression":
        sides = [node.child_by_field_name(side) for side in ("left", "right")]
        return _joined(_title(code, side, each=each)[0] for side in sides if side is not None), False
    return ".*", False


def _joined(patterns: Iterable[str]) -> str:
    """Join the patterns of a title's parts. Computed parts that follow each other become one, because each would
    multiply the time of a search by the length of the text."""
    return _COMPUTED.sub(".*", "".join(patterns))


def choose(code: Code, ids: tuple[str, ...], touched: Collection[int] = ()) -> dict[str, tuple[str, ...]]:
    """Return test → the ids in ``ids`` that refer to it. Log parsers write ids in many ways: as the title alone, after
    the titles of its suites, as the file's path, or as an assertion's message. Ids that match none of the file's tests
    refer to the tests that contain the lines ``touched``."""
    tests = tests_of(code)
    ids_by_test: dict[str, list[str]] = {}
    for one in ids:
        text = " ".join(one.split())
        if text == code.path or text.endswith(f"/{code.path}"):
            matching_tests = tests
        else:
            named = [test for test in tests if _is_named(test, text)]
            matching_tests = (
                [test for test in named if test.written] or named or [t for t in tests if _says(code, t, text)]
            )
            matching_tests = matching_tests or [test for test in tests if not test.title.strip(".*")]
            matching_tests = matching_tests or _innermost(tests, touched)
        for test in matching_tests:
            ids_by_test.setdefault(test.key, []).append(one)
    return {key: tuple(names) for key, names in ids_by_test.items()}


def _innermost(tests: list[Test], lines: Collection[int]) -> list[Test]:
    """Return the tests that begin in ``lines``; if there are none, the innermost test around each line."""
    begun = [test for test in tests if test.call.start_point[0] + 1 in lines]
    if begun:
        return begun
    innermost: list[Test] = []
    for line in lines:
        around = [test for test in tests if test.call.start_point[0] < line <= test.call.end_point[0]]
        if around:
            innermost.append(min(around, key=lambda test: test.call.end_byte - test.call.start_byte))
    return list({test.key: test for test in innermost}.values())


def _is_named(test: Test, text: str) -> bool:
    match = re.search(f"(?:^|(?<=[\\s>.:/]))(?:{test.title})$", text)
    if match is None or not (test.title.strip(".*") or test.suites):
        return False
    before = text[: match.start()]
    for suite in test.suites:
        before = re.sub(suite, "", before, count=1) if suite.strip(".*") else before
    return not re.search(r"\w", before) or bool(re.search(r"\.[cm]?[jt]sx?\W*$", before))


def _says(code: Code, test: Test, text: str) -> bool:
    return any(
        (said := string_of(code, node)) is not None and " ".join(said.split()) == text for node in walk(test.body)
    )


# The words that stay unchanged when a test is relabelled


def words_of_code(text: str, path: str) -> set[str]:
    """Return the words that a program's behaviour may depend on: those in its strings, patterns and property names.
    Names of variables do not matter."""
    try:
        code = Code.parse(text, path) if len(text) <= _MAX_PARSED else None
    except (SyntaxError, RecursionError):
        code = None
    if code is None:
        parts = [_SKIPPED.sub(lambda match: match[1] or " ", text)]
    else:
        parts = [code.text(node) for node in walk(code.root) if node.type in _TELLING]
    return {word.lower() for part in parts for word in _WORD.findall(part)}
