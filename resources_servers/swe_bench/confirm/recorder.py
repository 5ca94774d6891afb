"""The recorder of a rendering: records values in the box, with the methods of Python's own base types.

This file is pasted into test files, with every name that starts with ``_ng_`` replaced by a random one. It runs on
Python 3.6 and later, imports nothing from this suite, and never calls ``__eq__`` or ``__repr__`` of a recorded value.
"""

import collections as _ng_collections
import itertools as _ng_itertools
import json as _ng_json
import os as _ng_os
import sys as _ng_sys

_ng_PATH = "@PATH@"
_ng_MAX_TEXT = 200000
_ng_MAX_ITEMS = 20000


def _ng_mro(kind):
    names = []
    for one in type.__dict__["__mro__"].__get__(kind):
        module = type.__getattribute__(one, "__module__")
        qualname = type.__dict__["__qualname__"].__get__(one)
        found = _ng_sys.modules.get(module) if type(module) is str else None
        for part in qualname.split("."):
            found = vars(found).get(part) if type(found) is type(_ng_sys) or _ng_base(type(found)) is type else None
        # Mark a class that only has the name of another class.
        borne = _ng_base(type(found)) is type and found is not one
        names.append("%s.%s%s" % (module, qualname, "!" if borne else ""))
    return names


def _ng_aliases(kinds):
    """Return the test file's own names for these classes, collected by identity when the first test begins."""
    if not _ng_NAMED:
        _ng_look(_ng_GLOBALS, "", 0)
    return sorted({name for one in kinds for name in _ng_NAMED.get(id(one), ())})


def _ng_look(names, prefix, depth):
    for name, value in list(names.items()):
        if name.startswith("_"):
            continue
        if _ng_base(type(value)) is type:
            _ng_NAMED.setdefault(id(value), []).append(prefix + name)
        elif type(value) is type(_ng_sys) and depth < 2 and (not depth or value.__name__.startswith(prefix)):
            _ng_look(vars(value), value.__name__ + ".", depth + 1)


_ng_GLOBALS = globals()
_ng_NAMED = {}


def _ng_base(kind):
    for one in type.__dict__["__mro__"].__get__(kind):
        if one in _ng_PLAIN:
            return one
    return None


def _ng_encode(value, depth, left):
    kind = type(value)
    base = _ng_base(kind)
    plain = _ng_encode_as(value, kind, base, depth, left)
    if base is None or base is kind or base is type or plain[0] in ("cut", "object", "error"):
        return plain
    # The value's class is derived from a plain type: record the plain value and the object's text.
    return ["as", plain, _ng_said(value)]


def _ng_encode_as(value, kind, base, depth, left):
    left[0] -= 1
    if depth > 12 or left[0] < 0:
        return ["cut"]
    if value is None:
        return ["none"]
    if base is bool:
        return ["bool", value is True]
    if base is int:
        return ["int", str(int.__add__(value, 0))] if int.bit_length(value) < 13000 else ["cut"]
    if base is float:
        return ["float", float.hex(value)]
    if base is complex:
        return ["complex", float.hex(value.real), float.hex(value.imag)]
    if base is str:
        text = str.__add__(value, "")
        return ["str", text] if len(text) <= _ng_MAX_TEXT else ["cut"]
    if base is bytes or base is bytearray:
        text = bytes(bytearray.__getitem__(value, slice(None))) if base is bytearray else bytes.__add__(value, b"")
        return ["bytes", text.hex()] if len(text) <= _ng_MAX_TEXT else ["cut"]
    if base is list or base is tuple:
        return [base.__name__, [_ng_encode(one, depth + 1, left) for one in base.__iter__(value)]]
    if base is set or base is frozenset or issubclass(kind, _ng_VIEWS):
        return ["set", [_ng_encode(one, depth + 1, left) for one in (base or kind).__iter__(value)]]
    if base is dict or kind is _ng_PROXY:
        pairs = (base or kind).items(value)
        return ["dict", [[_ng_encode(k, depth + 1, left), _ng_encode(v, depth + 1, left)] for k, v in pairs]]
    if base in _ng_USER and not issubclass(kind, BaseException):
        # What these show is theirs to define: a list of errors may hold objects and show their messages, and the
        # members of a ring never end.
        try:
            if base is _ng_USER[0]:
                held = list(_ng_itertools.islice(value, len(value)))
            else:
                held = {key: value[key] for key in value}
        except Exception:
            return _ng_encode_other(value, kind, depth, left)
        return _ng_encode_as(held, type(held), type(held), depth, left)
    if base is range or base is slice:
        return [base.__name__, [_ng_encode(one, depth + 1, left) for one in (value.start, value.stop, value.step)]]
    if base is type:
        return ["type", _ng_mro(value), _ng_aliases((value,)), _ng_aliases(type.__dict__["__mro__"].__get__(value))]
    return _ng_encode_other(value, kind, depth, left)


def _ng_encode_other(value, kind, depth, left):
    names = _ng_mro(kind)
    for name in names:
        if name in ("decimal.Decimal", "fractions.Fraction"):
            return ["number", str(value)]
        if name in ("numpy.ndarray", "numpy.generic"):
            numpy = _ng_sys.modules.get("numpy")
            plain = numpy.ndarray.tolist(value) if name == "numpy.ndarray" else numpy.generic.item(value)
            if type(plain) is not kind:
                return ["array", _ng_encode(plain, depth + 1, left)]
        if name in ("datetime.date", "datetime.time", "datetime.timedelta", "uuid.UUID", "pathlib.PurePath"):
            return ["text", name, str(value)[:_ng_MAX_TEXT]]
    if "builtins.BaseException" in names:
        return ["error", names, _ng_said(value), _ng_aliases(type.__dict__["__mro__"].__get__(kind))]
    return ["object", names, _ng_told(value, kind)]


def _ng_told(value, kind):
    """Return an object's text, and its ``to_dict()`` values if it has them, because a table's text omits much."""
    said = _ng_said(value)
    if said is None or not callable(getattr(kind, "to_dict", None)):
        return said
    try:
        return (said + "\n" + _ng_json.dumps(_ng_encode(kind.to_dict(value), 1, [_ng_MAX_ITEMS])))[:_ng_MAX_TEXT]
    except BaseException:
        return said


def _ng_said(value):
    try:
        text = str(value)
        return str.__add__(text, "")[:_ng_MAX_TEXT]
    except BaseException:
        return None


_ng_VIEWS = (type({}.keys()), type({}.items()))
_ng_PROXY = type(type.__dict__)
_ng_USER = (_ng_collections.UserList, _ng_collections.UserDict)
_ng_PLAIN = (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, range, slice, type)
_ng_PLAIN += _ng_USER


def _ng_write(record):
    line = (_ng_json.dumps(record) + "\n").encode("ascii")
    handle = _ng_os.open(_ng_PATH, _ng_os.O_WRONLY | _ng_os.O_CREAT | _ng_os.O_APPEND, 0o666)
    try:
        _ng_os.write(handle, line)
    finally:
        _ng_os.close(handle)


def _ng_put(site, *values):
    """Record values at a site and return the first. Without values, this marks the start of a test."""
    if not values:
        _ng_aliases(())
    left = [_ng_MAX_ITEMS]
    _ng_write([site, [_ng_encode(one, 0, left) for one in values]])
    return values[0] if values else None


def _ng_truth(site, value):
    try:
        answer = bool(value)
    except BaseException as error:
        answer = _ng_mro(type(error))[0]
    _ng_write([site, [_ng_encode(value, 0, [_ng_MAX_ITEMS]), ["truth", answer]]])
    return value


class _ng_catch:
    """Replaces ``pytest.raises`` and ``assertRaises``: records what was raised and lets the test continue."""

    def __init__(self, site, *expected):
        self.site, self.expected = site, expected
        self.value = self.exception = self.type = self.tb = None

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        if kind is not None and not issubclass(kind, (Exception, SystemExit)):
            return False
        self.value = self.exception = value
        self.type, self.tb = kind, traceback
        _ng_put(self.site, value, *self.expected)
        return True

    @property
    def typename(self):
        return self.type.__name__

    @property
    def excinfo(self):
        return self

    def exconly(self, tryshort=False):
        return "%s: %s" % (self.type.__name__, self.value)

    def __str__(self):
        return str(self.value)


def _ng_call(site, call, *expected, **named):
    """Replace ``assertRaises(Error, function, …)``: run the call and record what it raises."""
    with _ng_catch(site, *expected) as caught:
        call()
    return caught
