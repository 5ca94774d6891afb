"""The task: sums of three numbers with a calculator's tools, and demonstrations that contain errors.

    47 plus 38 minus 21  →  add(47, 38) = 85  →  subtract(85, 21) = 64  →  \\boxed{64}

A solution is two calls in a row and an answer. The policy has to choose tools and copy digits; it need not add. No
demonstration and no training row contains an operand of the held-out rows, not even as an intermediate value.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

OPERANDS = range(10, 100)
WIDE = range(100, 1000)
WIDE_SHARE = 0.3
"""Share of `WIDE` operands in demonstrations and training rows. They contain every pair of digits, so a policy that
copies digits has seen the pairs of held-out operands too, though not as numbers."""
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
    """One digit of an argument is wrong. Kept small, because a reward does not tell which digit was wrong."""
    early: float = 0.7
    """The first result is given as the answer. This is the usual case, so that the likeliest path is wrong."""


ERRORS = Errors()


@dataclass(frozen=True, slots=True)
class Sum:
    operands: tuple[int, int, int]
    signs: tuple[str, str]

    @property
    def values(self) -> tuple[int, int]:
        """The values after the first and after the second step."""
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
    """Return two disjoint sets: the operands of training and the held-out operands."""
    shuffled = random.Random(f"operands:{seed}").sample(OPERANDS, len(OPERANDS))
    held_out = frozenset(shuffled[: round(len(OPERANDS) * HELD_OUT_SHARE)])
    return frozenset(OPERANDS) - held_out, held_out


def sums(
    operands: frozenset[int], draw: random.Random, *, never: frozenset[int] = frozenset(), wide: float = 0.0
) -> Iterator[Sum]:
    """Yield sums without end. Each operand is from `WIDE` with probability ``wide``, else from ``operands``. No value
    is negative or in ``never``."""
    choice = sorted(operands)

    def operand() -> int:
        return draw.choice(WIDE) if draw.random() < wide else draw.choice(choice)

    while True:
        candidate = Sum(
            (operand(), operand(), operand()),
            (draw.choice(("plus", "minus")), draw.choice(("plus", "minus"))),
        )
        if min(candidate.values) >= 0 and never.isdisjoint(candidate.values):
            yield candidate


def distinct(source: Iterator[Sum], count: int) -> list[Sum]:
    found: dict[Sum, None] = {}
    while len(found) < count:
        found[next(source)] = None
    return list(found)


def demonstration(
    task: Sum, never: frozenset[int], draw: random.Random, errors: Errors = ERRORS
) -> list[dict[str, Any]]:
    """Return a conversation in the form of the chat template. It shows no value in ``never``: if an error leads to
    such a value, another conversation is drawn."""
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
            a = _with_wrong_digit(a, draw)
        if draw.random() < errors.digit:
            b = _with_wrong_digit(b, draw)
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


def _with_wrong_digit(number: int, draw: random.Random) -> int:
    text = str(abs(number))
    place = draw.randrange(len(text))
    other = draw.choice([digit for digit in "0123456789" if digit != text[place]])
    return int(text[:place] + other + text[place + 1 :]) * (-1 if number < 0 else 1)
