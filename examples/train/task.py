"""The task: sums of three numbers by a calculator's tools, and demonstrations of it by somebody who errs.

    47 plus 38 minus 21  →  add(47, 38) = 85  →  subtract(85, 21) = 64  →  \\boxed{64}

Two calls in a row and an answer. The policy has to pick tools and to copy digits; it need not add. The operands of
held-out rows are in no demonstration and no training row, not as a value on the way either.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

OPERANDS = range(10, 100)
WIDE = range(100, 1000)
WIDE_SHARE = 0.3
"""Of operands in demonstrations and training rows: longer numbers have every pair of digits, so a policy that copies
digits has seen each pair, though not as a number."""
HELD_OUT_SHARE = 0.2
TOOLS = {"plus": "add", "minus": "subtract"}


@dataclass(frozen=True, slots=True)
class Errors:
    """How often a demonstration goes wrong, for each of its steps."""

    plus: float = 0.05
    """A plus is taken for a minus."""
    minus: float = 0.3
    """A minus is taken for a plus."""
    digit: float = 0.005
    """One digit of an argument is another. It stays small: a reward says nothing of which digit was wrong."""
    early: float = 0.7
    """The first result is given as the answer: most of the time, so the likeliest path is wrong."""


ERRORS = Errors()


@dataclass(frozen=True, slots=True)
class Sum:
    operands: tuple[int, int, int]
    signs: tuple[str, str]

    @property
    def values(self) -> tuple[int, int]:
        """After the first step, and after the second."""
        first = apply(TOOLS[self.signs[0]], self.operands[0], self.operands[1])
        return first, apply(TOOLS[self.signs[1]], first, self.operands[2])

    @property
    def question(self) -> str:
        (a, b, c), (first, second) = self.operands, self.signs
        return f"{a} {first} {b} {second} {c}"

    def row(self) -> dict[str, Any]:
        """A dataset row."""
        return {
            "task_id": self.question.replace(" ", "-"),
            "question": self.question,
            "expected_answer": str(self.values[1]),
        }


def apply(tool: str, a: int, b: int) -> int:
    return a + b if tool == "add" else a - b


def split_operands(seed: int) -> tuple[frozenset[int], frozenset[int]]:
    """Operands of training and those that are held out: disjoint."""
    shuffled = random.Random(f"operands:{seed}").sample(OPERANDS, len(OPERANDS))
    held_out = frozenset(shuffled[: round(len(OPERANDS) * HELD_OUT_SHARE)])
    return frozenset(OPERANDS) - held_out, held_out


def sums(
    operands: frozenset[int], draw: random.Random, *, never: frozenset[int] = frozenset(), wide: float = 0.0
) -> Iterator[Sum]:
    """Without end: sums of ``operands``, and of wide ones with the chance ``wide``. None has a negative value, or one
    in ``never``."""
    choice = sorted(operands)

    def operand() -> int:
        return draw.choice(WIDE) if draw.random() < wide else draw.choice(choice)

    while True:
        made = Sum(
            (operand(), operand(), operand()),
            (draw.choice(("plus", "minus")), draw.choice(("plus", "minus"))),
        )
        if min(made.values) >= 0 and never.isdisjoint(made.values):
            yield made


def distinct(source: Iterator[Sum], count: int) -> list[Sum]:
    found: dict[Sum, None] = {}
    while len(found) < count:
        found[next(source)] = None
    return list(found)


def demonstration(
    task: Sum, never: frozenset[int], draw: random.Random, errors: Errors = ERRORS
) -> list[dict[str, Any]]:
    """A conversation in the form of the chat template. It shows no value in ``never``: where an error leads to one,
    another conversation is drawn."""
    while True:
        messages, shown = _attempt(task, errors, draw)
        if never.isdisjoint(shown):
            return messages


def _attempt(task: Sum, errors: Errors, draw: random.Random) -> tuple[list[dict[str, Any]], set[int]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.question}]
    value, shown = task.operands[0], set()
    for step, (sign, operand) in enumerate(zip(task.signs, task.operands[1:], strict=True)):
        if step and draw.random() < errors.early:
            break
        tool = TOOLS[sign]
        if draw.random() < (errors.plus if sign == "plus" else errors.minus):
            tool = "subtract" if tool == "add" else "add"
        a, b = value, operand
        if draw.random() < errors.digit:
            a = _slip(a, draw)
        if draw.random() < errors.digit:
            b = _slip(b, draw)
        value = apply(tool, a, b)
        shown |= {a, b, value}
        arguments = f'{{"a":{a},"b":{b}}}'
        call = {"id": f"call_{step}", "type": "function", "function": {"name": tool, "arguments": arguments}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": f'{{"result":{value}}}'},
        ]
    messages.append({"role": "assistant", "content": f"\\boxed{{{value}}}"})
    return messages, shown


def _slip(number: int, draw: random.Random) -> int:
    text = str(abs(number))
    place = draw.randrange(len(text))
    other = draw.choice([digit for digit in "0123456789" if digit != text[place]])
    return int(text[:place] + other + text[place + 1 :]) * (-1 if number < 0 else 1)
