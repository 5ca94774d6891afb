"""Test cases of a verifier, as NeMo Gym's plugins write them: a JSONL file, run without a server.

A case's ``kind`` tells what is expected: ``full_reward`` and ``zero_reward`` the best or worst reward (or its
``expected_reward``), ``malformed`` an error that contains ``expected_error``. ``determinism`` is graded twice.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nemo_gym._util.suggest import validation_problems

CaseKind = Literal["full_reward", "zero_reward", "malformed", "determinism"]
Invocation = Callable[[Any, BaseModel], object | Awaitable[object]]
FiniteReward = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_TOLERANCE = 1e-9


class VerifierFixtureError(ValueError):
    """A fixture is invalid, or its verifier does not behave as a case expects."""


@dataclass(frozen=True, kw_only=True)
class VerifierFixture:
    """How to run an environment's cases."""

    server_factory: Callable[[], Any]
    request_model: type[BaseModel]
    cases_path: str | Path
    invoke: Invocation | None = None
    """Called instead of the server's ``verify(body)``."""
    reseed: Invocation | None = None
    """Called before the second grading of a case."""


class VerifierFixtureCase(BaseModel):
    model_config = ConfigDict(extra="forbid", str_strip_whitespace=True)

    name: str = Field(min_length=1)
    kind: CaseKind
    request: dict[str, Any]
    expected_reward: FiniteReward | None = None
    expected_error: str | None = None

    @model_validator(mode="after")
    def _expects_one_thing(self) -> VerifierFixtureCase:
        if self.kind == "malformed":
            if not self.expected_error or self.expected_reward is not None:
                raise ValueError("a malformed case names 'expected_error' and no 'expected_reward'")
        elif self.expected_error is not None:
            raise ValueError(f"a {self.kind} case names no 'expected_error'")
        return self


@dataclass(frozen=True)
class VerifierFixtureResult:
    name: str
    kind: CaseKind
    observed_rewards: tuple[float, ...] = ()


def load_verifier_fixture(path: str | Path) -> list[VerifierFixtureCase]:
    """Load the cases of a JSONL file. Raises `VerifierFixtureError` naming the line."""
    cases: list[VerifierFixtureCase] = []
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise VerifierFixtureError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                cases.append(VerifierFixtureCase.model_validate_json(line))
            except ValidationError as error:
                raise VerifierFixtureError(f"{path}, line {number}: {validation_problems(error)}") from error
    names = [case.name for case in cases]
    if twice := {name for name in names if names.count(name) > 1}:
        raise VerifierFixtureError(f"{path}: names of cases must be unique; twice: {', '.join(sorted(twice))}")
    if missing := {"full_reward", "zero_reward", "malformed"} - {case.kind for case in cases}:
        raise VerifierFixtureError(f"{path} has no case of kind {', '.join(sorted(missing))}")
    return cases


async def exercise_verifier_fixture(
    fixture: VerifierFixture,
    *,
    reward_range: Sequence[float],
    higher_is_better: bool = True,
    determinism: str | Enum,
    update_expected: bool = False,
) -> tuple[VerifierFixtureResult, ...]:
    """Run every case. Raises `VerifierFixtureError` for the first that fails.

    Args:
        reward_range: the lowest and the highest reward that the verifier gives.
        determinism: ``deterministic`` and ``seeded`` verifiers grade every case twice, with equal results.
        update_expected: write the observed rewards into the file instead of comparing them.
    """
    low, high = reward_range
    best, worst = (high, low) if higher_is_better else (low, high)
    twice = str(determinism.value if isinstance(determinism, Enum) else determinism) in ("deterministic", "seeded")
    cases = load_verifier_fixture(fixture.cases_path)
    results = []
    for case in cases:
        if case.kind == "malformed":
            await _expect_error(fixture, case)
            results.append(VerifierFixtureResult(case.name, case.kind))
            continue
        rewards = [await _reward(fixture, case, reseed=False)]
        if case.kind == "determinism" or twice:
            rewards.append(await _reward(fixture, case, reseed=True))
            if not math.isclose(*rewards, abs_tol=_TOLERANCE):
                raise VerifierFixtureError(f"case '{case.name}' was graded {rewards[0]:g}, then {rewards[1]:g}")
        if not low - _TOLERANCE <= rewards[0] <= high + _TOLERANCE:
            raise VerifierFixtureError(f"case '{case.name}': reward {rewards[0]:g} is outside of {low:g} to {high:g}")
        bound = {"full_reward": best, "zero_reward": worst if low <= 0 <= high and worst != 0 else 0.0}.get(case.kind)
        expected = (
            rewards[0] if update_expected else (case.expected_reward if case.expected_reward is not None else bound)
        )
        if expected is not None and not math.isclose(rewards[0], expected, abs_tol=_TOLERANCE):
            raise VerifierFixtureError(f"case '{case.name}': expected reward {expected:g}, got {rewards[0]:g}")
        if update_expected:
            case.expected_reward = rewards[0]
        results.append(VerifierFixtureResult(case.name, case.kind, (rewards[0],)))
    if update_expected:
        text = "".join(json.dumps(case.model_dump(exclude_none=True)) + "\n" for case in cases)
        Path(fixture.cases_path).write_text(text, encoding="utf-8")
    return tuple(results)


async def _reward(fixture: VerifierFixture, case: VerifierFixtureCase, *, reseed: bool) -> float:
    try:
        body = fixture.request_model.model_validate(case.request)
    except ValidationError as error:
        raise VerifierFixtureError(f"case '{case.name}': {validation_problems(error)}") from error
    server = fixture.server_factory()
    if reseed and fixture.reseed is not None:
        await _awaited(fixture.reseed(server, body))
    result = await _awaited(fixture.invoke(server, body) if fixture.invoke is not None else server.verify(body))
    reward = result.get("reward") if isinstance(result, dict) else getattr(result, "reward", None)
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise VerifierFixtureError(f"case '{case.name}': the verifier gave no finite reward, but {reward!r}")
    return float(reward)


async def _expect_error(fixture: VerifierFixture, case: VerifierFixtureCase) -> None:
    try:
        await _reward(fixture, case, reseed=False)
    except Exception as error:
        # A plugin's verifier may raise anything; the case checks the error's text.
        if case.expected_error is None or case.expected_error not in str(error):
            raise VerifierFixtureError(
                f"case '{case.name}': expected an error with '{case.expected_error}', got {error}"
            ) from error
        return
    raise VerifierFixtureError(f"case '{case.name}' is malformed, and the verifier took it")


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
