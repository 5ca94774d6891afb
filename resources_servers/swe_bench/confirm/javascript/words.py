"""Words that keep their meaning when a test in JavaScript is relabelled."""

from __future__ import annotations

import re

_WORD = re.compile(r"[^\W\d_]+")
_SKIPPED = re.compile(r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`)|//[^\n]*|/\*.*?\*/""", re.DOTALL)
SELECTS_BY_TITLE = re.compile(
    r"\s(-g|-t|-f|-m|--grep|--fgrep|--match|--filter|--testNamePattern|--test-name-pattern)\b"
)
"""Options of test runners."""
JAVASCRIPT_WORDS = frozenset(
    """
    abstract after all and any apply args arguments array arraybuffer arrow assert assign async at await be been
    before bigint bind bool boolean buffer byte bytelength bytes call callback caller catch char charat charcodeat
    class clear clone code codepointat column com common concat console const constructor contain contains context
    copy copywithin count create data date debug deep default define delete describe description dirname done each
    else empty encode end ends endswith entries env eql equal equals error errors eval eventually every exec exist
    exit expect export exports extends false file filename fill filter finally find findindex findlast first flags
    flat flatmap float fn for foreach freeze from function generator get getdate getfullyear getmonth getter global
    groups has hasown have height href html http https id if ignore import in include includes index indexof
    infinity input inspect instance instanceof int integer is isarray isfinite isnan it iterator itself join json
    key keys kind last lastindex lastindexof length let line lines list locale localecompare log main map match
    matchall max message method methods min mock mocks module name names nan native never new next node nodes none
    not now null number object of ok on once only options or org out output own padend padstart params parse
    parsefloat parseint path pattern pending pop pos position process promise prop properties property proto
    prototype proxy push put raise raw read reduce reduceright ref reflect regexp reject rejects repeat replace
    replaceall require resolve resolves result return reverse root round row run same search self set setter shift
    should size skip slice some sort source splice split src stack start starts startswith state static status
    stderr stdin stdout stop strict string stringify style sub substr substring super switch symbol tag target test
    text then this throw throws time timeout to todate todo tofixed toisostring tojson tolocalestring tolowercase
    tostring touppercase trim trimend trimstart true truncate try type typeof types uint undefined unshift url use
    utf util valid value valueof values var version void warn weakmap weakset where while width with www xhtml
    yield
    """.split()  # noqa: SIM905
)


def words_of_code(text: str) -> set[str]:
    """Words that a program's behaviour may depend on: those in its strings and names, not in its comments."""
    code = _SKIPPED.sub(lambda match: match[1] or " ", text)
    return {word.lower() for word in _WORD.findall(code)}
