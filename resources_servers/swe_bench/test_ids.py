"""Test ids in the spellings that SWE-bench rows use, and the test functions that they name.

Until Python 3.10 ``unittest`` prints ``test_x (module.Class)``; from 3.11 on ``test_x (module.Class.test_x)``. A row
has the form of the Python version that made its logs. If our own run uses another version, its log is converted to the
row's form, and the verdict's details record this. The official verdict on a stored log is computed from its unchanged
text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_LONG = re.compile(r"\b(?P<test>test\w*) \((?P<owner>[\w.]+)\.(?P=test)\)")
_SHORT = re.compile(r"\b(?P<test>test\w*) \((?P<owner>[\w.]+)\)")


def spelled_as_expected(log: str, expected: Iterable[str]) -> tuple[str, bool]:
    """Return ``log`` with its unittest ids in the form used in ``expected``, and whether anything changed. Ids that
    are in ``expected`` already are kept."""
    expected_ids = set(expected)
    any_changed = False

    def spelled(match: re.Match[str], other: str) -> str:
        nonlocal any_changed
        if match[0] in expected_ids or other not in expected_ids:
            return match[0]
        any_changed = True
        return other

    log = _LONG.sub(lambda match: spelled(match, f"{match['test']} ({match['owner']})"), log)
    log = _SHORT.sub(lambda match: spelled(match, f"{match['test']} ({match['owner']}.{match['test']})"), log)
    return log, any_changed


_UNITTEST = re.compile(r"^(?P<name>\w+) \((?P<owner>[\w.]+)\)$")


@dataclass(frozen=True)
class TestId:
    """A parsed test id. Fields that the id does not contain are empty."""

    __test__ = False

    function: str = ""
    classes: tuple[str, ...] = ()
    path: str = ""
    """The file's path, as pytest prints it."""
    module: str = ""
    """The dotted module name, as unittest prints it."""
    docstring: str = ""
    """The first line of the function's docstring, which Django prints in place of a name."""

    @classmethod
    def parse(cls, text: str) -> TestId:
        """Parse ``path::Class::test[param]``, ``test (module.Class)``, ``test (module.Class.test)`` or a bare name.
        Any other text is taken as a docstring."""
        if "::" in text:
            path, *classes, function = text.split("[", 1)[0].split("::")
            return cls(function=function.strip(), classes=tuple(classes), path=path)
        if match := _UNITTEST.match(text):
            owner = match["owner"].removesuffix(f".{match['name']}")
            module, _, class_name = owner.rpartition(".")
            return cls(function=match["name"], classes=(class_name,), module=module)
        if text.isidentifier():
            return cls(function=text)
        return cls(docstring=text.strip())

    def may_be_in(self, path: str) -> bool:
        """Whether the test may be in the file ``path``. An id without a file or module may be in any file."""
        if self.path:
            return path == self.path
        dotted = path.removesuffix(".py").replace("/", ".")
        return not self.module or dotted == self.module or dotted.endswith(f".{self.module}")
