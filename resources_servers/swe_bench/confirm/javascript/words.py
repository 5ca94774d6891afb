"""The words that stay unchanged when a JavaScript test is relabelled."""

from __future__ import annotations

import re

from resources_servers.swe_bench.confirm.javascript.syntax import Code, walk

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
