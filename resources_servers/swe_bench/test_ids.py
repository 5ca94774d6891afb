"""Test ids in the spellings that SWE-bench rows use, and which test function stands behind one.

Until 3.10 ``unittest`` prints ``test_x (module.Class)``; from 3.11 on ``test_x (module.Class.test_x)``. Rows carry the
form of the Python their logs were made with. A run of ours on another Python is brought to the rows' form here, and
says so; stored logs are never touched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_LONG = re.compile(r"\b(?P<test>test\w*) \((?P<owner>[\w.]+)\.(?P=test)\)")
_SHORT = re.compile(r"\b(?P<test>test\w*) \((?P<owner>[\w.]+)\)")


def spelled_as_expected(log: str, expected: Iterable[str]) -> tuple[str, bool]:
    """``log`` with unittest ids in the form that ``expected`` has, and whether anything was changed. Ids that are
    expected as they stand are kept."""
    wanted = set(expected)
    changed = False

    def shorten(match: re.Match[str]) -> str:
        nonlocal changed
        short = f"{match['test']} ({match['owner']})"
        if match[0] in wanted or short not in wanted:
            return match[0]
        changed = True
        return short

    def lengthen(match: re.Match[str]) -> str:
        nonlocal changed
        long = f"{match['test']} ({match['owner']}.{match['test']})"
        if match[0] in wanted or long not in wanted:
            return match[0]
        changed = True
        return long

    return _SHORT.sub(lengthen, _LONG.sub(shorten, log)), changed


_UNITTEST = re.compile(r"^(?P<name>\w+) \((?P<owner>[\w.]+)\)$")


@dataclass(frozen=True)
class TestId:
    """A test id taken apart. What an id does not say is empty."""

    __test__ = False

    function: str = ""
    classes: tuple[str, ...] = ()
    path: str = ""
    """Of the file, as pytest gives it."""
    module: str = ""
    """Dotted, as unittest gives it."""
    docstring: str = ""
    """First line of the function's docstring, which Django prints in place of a name."""

    @classmethod
    def parse(cls, text: str) -> TestId:
        """``path::Class::test[param]``, ``test (module.Class)``, ``test (module.Class.test)``, a bare name, or else a
        docstring."""
        if "::" in text:
            path, *classes, function = text.split("[", 1)[0].split("::")
            return cls(function=function.strip(), classes=tuple(classes), path=path)
        if match := _UNITTEST.match(text):
            owner = match["owner"].removesuffix(f".{match['name']}")
            module, _, klass = owner.rpartition(".")
            return cls(function=match["name"], classes=(klass,), module=module)
        if text.isidentifier():
            return cls(function=text)
        return cls(docstring=text.strip())

    def may_be_in(self, path: str) -> bool:
        """Whether a file can be the one the id means; an id that names none may be in any."""
        if self.path:
            return path == self.path
        dotted = path.removesuffix(".py").replace("/", ".")
        return not self.module or dotted == self.module or dotted.endswith(f".{self.module}")
