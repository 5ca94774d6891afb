"""Where a chat template shows the texts of messages as they are, so that they can be put there without rendering.

The template is run once with texts that can be shown, joined to others and stored, and with which nothing else can be
done: whatever asks for a letter, a length or a comparison ends the attempt. What comes out therefore has the same form
around every text that is not empty, and is kept as the pieces between the texts.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from nemo_gym.gateway.tokens.template import ChatTemplate, jinja_environment, plain_json

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.compiler import Frame
    from jinja2.nodes import Concat, Operand

_FIELDS = ("content", "tool_call_id", "name")
_UNHARMED = frozenset({"string", "default", "d", "selectattr", "rejectattr", "items", "trim", "length", "count"})
"""Filters that pass a text on, or read it in a way that is seen."""


class InspectedError(Exception):
    """The template does more with a text than to show it."""


def _inspected(*_: Any, **__: Any) -> NoReturn:
    raise InspectedError


class _Opaque(str):
    """A text that can be shown and joined. It is true, as texts that are not empty are."""

    __slots__ = ()

    def __add__(self, other: str) -> str:
        return _joined((self, other))

    def __radd__(self, other: str) -> str:
        return _joined((other, self))

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return True


def _close() -> None:
    kept = {"__add__", "__new__", "__init__", "__str__", "__class__", "__doc__", "__getattribute__", "__setattr__"}
    kept |= {"__init_subclass__", "__subclasshook__", "__sizeof__", "__dir__", "__delattr__", "__getstate__"}
    for name in {*dir(str), "__rmod__", "__rmul__"} - kept:
        setattr(_Opaque, name, _inspected)


_close()


def _plain(text: str) -> str:
    """An ordinary string again."""
    return str.__str__("".join((text, "")))


def _joined(parts: Iterable[Any]) -> str:
    """As Jinja joins what a template writes; with an opaque text in it, the whole is opaque."""
    held = [*parts]
    whole = "".join(held)
    return str.__new__(_Opaque, whole) if any(type(part) is _Opaque for part in held) else whole


def _to_json(value: Any, *given: Any, **options: Any) -> str:
    text = plain_json(value, *given, **options)
    return str.__new__(_Opaque, text) if _holds_opaque(value) else text


def _holds_opaque(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_opaque, value.values()))
    return any(map(_holds_opaque, value)) if isinstance(value, list | tuple) else type(value) is _Opaque


class Pieces:
    """Rendered text with places for fields of messages."""

    __slots__ = ("_constants", "_places")

    def __init__(self, constants: Sequence[str], places: Sequence[tuple[int, str]]) -> None:
        self._constants = constants
        self._places = places

    def filled(self, shaped: Sequence[Mapping[str, Any]]) -> str | None:
        """With the texts of these messages; nothing where one is empty, or no text."""
        parts = [self._constants[0]]
        for (index, name), constant in zip(self._places, self._constants[1:], strict=True):
            value = shaped[index].get(name)
            if type(value) is not str or not value:
                return None
            parts += (value, constant)
        return "".join(parts)


class VerbatimTemplate:
    """A chat template that is watched while it renders."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._watching: Template | None = None

    def pieces(
        self,
        history: Sequence[Mapping[str, Any]],
        shaped: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        start: Callable[[str], int | None],
    ) -> Pieces | None:
        """What is written behind ``history``, with a place for each text of ``shaped``; ``start`` finds where that is.
        Nothing where the template looks into a text, or shows the date there."""
        word = secrets.token_hex(8)
        marks: dict[str, tuple[int, str]] = {}
        watched: list[dict[str, Any]] = []
        for index, message in enumerate(shaped):
            copy = dict(message)
            for name in _FIELDS:
                if name not in message:
                    continue
                if type(message[name]) is not str or not message[name]:
                    return None
                mark = f' \n{word}.{len(marks)}"<&\\\n '
                marks[mark] = (index, name)
                copy[name] = str.__new__(_Opaque, mark)
            watched.append(copy)
        day = str.__new__(_Opaque, f"{word}.day")
        try:
            text = self._rendered([*_nameless(history, word), *watched], tools, day)
        except InspectedError:
            return None
        begin = start(text)
        return None if begin is None else _cut(text[begin:], word, marks)

    def _rendered(self, messages: Sequence[Mapping[str, Any]], tools: Any, day: _Opaque) -> str:
        if self._watching is None:
            environment = _watching_environment()
            self._watching = environment.from_string(self._template.source)

        def strftime_now(_: str) -> str:
            return day

        variables = self._template.variables(messages, tools=tools, add_generation_prompt=True, now=datetime.now())
        return _plain(self._watching.render({**variables, "strftime_now": strftime_now}))


def _nameless(history: Sequence[Mapping[str, Any]], word: str) -> list[Mapping[str, Any]]:
    """History with opaque names and ids of calls: what is written behind them must not depend on them."""
    name = str.__new__(_Opaque, f"{word}.call")

    def named(call: Mapping[str, Any]) -> dict[str, Any]:
        return {**call, "id": name, "function": {**call["function"], "name": name}}

    return [
        {**message, "tool_calls": [*map(named, message["tool_calls"])]} if "tool_calls" in message else message
        for message in history
    ]


def _cut(text: str, word: str, marks: Mapping[str, tuple[int, str]]) -> Pieces | None:
    """The text around the marks, in the order in which they stand."""
    constants: list[str] = []
    places: list[tuple[int, str]] = []
    rest = text
    while True:
        found = [(at, mark) for mark in marks if (at := rest.find(mark)) >= 0]
        if not found:
            break
        at, mark = min(found)
        constants.append(rest[:at])
        places.append(marks[mark])
        rest = rest[at + len(mark) :]
    constants.append(rest)
    return None if any(word in constant for constant in constants) else Pieces(constants, places)


class _WatchingCalls:
    """Beside a sandbox: no function of a plain string gets an opaque one."""

    def call(self, context: Any, called: Any, /, *given: Any, **named: Any) -> Any:
        if type(getattr(called, "__self__", None)) is str and (_holds_opaque(given) or _holds_opaque(named)):
            raise InspectedError
        return super().call(context, called, *given, **named)  # type: ignore[misc]


def _watching_environment() -> Any:
    """The sandbox in which templates run, where joining keeps texts opaque and nothing else can be done with them."""
    from jinja2 import nodes
    from jinja2.compiler import CodeGenerator

    class Generator(CodeGenerator):
        def visit_Concat(self, node: Concat, frame: Frame) -> None:  # noqa: N802 - Jinja's own name
            self.write("environment.concat((")
            for part in node.nodes:
                self.write("str(")
                self.visit(part, frame)
                self.write("), ")
            self.write("))")

        def visit_Operand(self, node: Operand, frame: Frame) -> None:  # noqa: N802 - Jinja's own name
            super().visit_Operand(node, frame)
            if node.op in ("in", "notin") and isinstance(node.expr, nodes.Const) and isinstance(node.expr.value, str):
                raise InspectedError  # a string looks for another without asking it

    environment = jinja_environment(_WatchingCalls)
    environment.code_generator_class = Generator
    environment.concat = _joined  # type: ignore[method-assign]
    for name in environment.filters:
        if name not in _UNHARMED:
            environment.filters[name] = _inspected
    environment.filters["tojson"] = _to_json
    return environment
