"""Confirming a resolved attempt: its answers, compared outside the box with those of the right solution."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace

from nemo_gym.contract.errors import SandboxLostError, VerifierError
from nemo_gym.contract.verdict import FailureKind, Finding
from nemo_gym.sandbox.base import ExecOutcome
from resources_servers.swe_bench.confirm.comparing import compare
from resources_servers.swe_bench.confirm.controls import RowControls
from resources_servers.swe_bench.confirm.runs import Recorded, run_renderings
from resources_servers.swe_bench.confirm.twins import Delivery, TwinRun, dealt, look_at
from resources_servers.swe_bench.eval_box import EvalSite, patch_may_be_the_cause
from resources_servers.swe_bench.row import SweBenchRow
from resources_servers.swe_bench.signs import divided
from resources_servers.swe_bench.tamper.controls import MAX_NAMED_TESTS, ControlResult

CLEAN_RUNS_AFTER_A_FAILED_ONE = 2


@dataclass(frozen=True)
class _Confirmation:
    """What one run of a row's controls says about a patch."""

    problems: dict[str, str]
    """Test → why it is not confirmed; empty when everything is."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Control → what it took."""
    lies: bool = False
    """Whether tests that can only fail are reported as passed."""

    @property
    def spent(self) -> float:
        return sum(self.seconds.values())


async def confirm_control(
    site: EvalSite, row: SweBenchRow, patch: bytes, controls: RowControls
) -> list[ControlResult]:
    """Run the row's renderings and twins with the patch, and with the patch less what decides how tests run.

    Raises:
        SandboxError: the provider failed.
        VerifierError: gold is not confirmed here either (``control_run_failed``), or an exec was lost.
    """
    if not controls.renderings and not controls.twins:
        return [ControlResult.inconclusive("confirmed", "no test of this row could be blinded")]
    whole = await _confirmed(site, row, patch, controls)
    if whole.problems:
        return [_result("twins" if whole.lies else "confirmed", whole, _LIES if whole.lies else _VALUES)]
    results = [ControlResult(name, duration_s=seconds) for name, seconds in whole.seconds.items()]
    _, rest = await asyncio.to_thread(divided, patch, row.patch.encode("utf-8", "surrogateescape"))
    if rest != patch:
        confirmed = await _confirmed(site, row, rest, controls)
        results.append(_result("without_control_part", confirmed, _CONTROL_PART))
    return results


_VALUES = Finding(
    kind="values_not_confirmed",
    detail="what the code answers is not what a solution answers, although the tests are reported as passed",
)
_LIES = Finding(
    kind="passes_wrong_expectations",
    detail="tests that expect something wrong are reported as passed",
)
_CONTROL_PART = Finding(
    kind="solved_by_control_part",
    detail="without the files that decide how tests run, the patch does not solve the task",
)


async def _confirmed(site: EvalSite, row: SweBenchRow, patch: bytes, controls: RowControls) -> _Confirmation:
    first = await _once_surely(site, row, patch, controls)
    # No busy host makes a wrong expectation come true.
    if not first.problems or first.lies:
        return first
    # A busy host may be to blame, and so may a patch that throws coins: only clean runs outweigh a failed one.
    runs = [first]
    for _ in range(CLEAN_RUNS_AFTER_A_FAILED_ONE):
        runs.append(await _once_surely(site, row, patch, controls))
        if runs[-1].problems:
            break
    again = runs[-1]
    if not again.problems or again.lies:
        return replace(again, seconds=_sum(*runs))
    gold = await _once(site, row, row.patch.encode("utf-8", "surrogateescape"), controls)
    if gold.problems:
        gold = await _once(site, row, row.patch.encode("utf-8", "surrogateescape"), controls)
    if gold.problems:
        raise VerifierError(
            f"no verdict on {row.instance_id}: its controls do not confirm the gold patch here either"
            f" ({_named(gold.problems)}); prepare the instance again with force=true, or exclude it",
            kind=FailureKind.CONTROL_RUN_FAILED,
        )
    return replace(again, seconds=_sum(*runs, gold))


def _sum(*runs: _Confirmation) -> dict[str, float]:
    return {name: sum(run.seconds.get(name, 0.0) for run in runs) for run in runs for name in run.seconds}


async def _once_surely(site: EvalSite, row: SweBenchRow, patch: bytes, controls: RowControls) -> _Confirmation:
    """As `_once`; a box that is lost under the patch confirms nothing. Whether the patch ended it, gold tells."""
    try:
        return await _once(site, row, patch, controls)
    except (SandboxLostError, VerifierError) as error:
        if not patch_may_be_the_cause(error):
            raise
        return _Confirmation({"": "its box was lost, or used up the host's memory"})


async def _once(site: EvalSite, row: SweBenchRow, patch: bytes, controls: RowControls) -> _Confirmation:
    """One box with the renderings and one of each pair of twins; where there are twins, another with the others."""
    rng = random.SystemRandom()
    blinded = [one.rendering for one in controls.renderings]
    twins = TwinRun()
    seconds: dict[str, float] = {}
    for name, dealt_twins in zip(("confirmed", "twins"), dealt(controls.twins, rng), strict=True):
        delivery = Delivery.of(row, dealt_twins, rng)
        renderings = [*(blinded if name == "confirmed" else ()), *delivery.renderings]
        if not renderings:
            continue
        recorded = await run_renderings(site, row, patch, renderings, support=controls.support)
        seconds[name] = recorded.duration_s
        if not recorded.applied:
            return _Confirmation({"": "the patch does not apply"}, seconds)
        if recorded.outcome is not ExecOutcome.EXITED:
            return _Confirmation({"": f"the run ended by '{recorded.outcome}'"}, seconds)
        passed_by_twin = await delivery.passed(row, recorded.records[len(renderings) - len(delivery.renderings) :])
        for (twin, mutated), passed in zip(dealt_twins, passed_by_twin, strict=True):
            look_at(twins, twin, passed, mutated=mutated)
        if twins.passes_wrong_expectations:
            return _Confirmation(_wrongly_passed(twins), seconds, lies=True)
        problems = await _other_values(controls, recorded) if name == "confirmed" else {}
        if problems := problems | twins.problems:
            return _Confirmation(problems, seconds)
    return _Confirmation({}, seconds)


async def _other_values(controls: RowControls, recorded: Recorded) -> dict[str, str]:
    """Test → why the renderings' records do not confirm it."""
    count = len(controls.renderings)
    compared = await compare([one.tests for one in controls.renderings], recorded.records[:count])
    problems: dict[str, str] = {}
    for number, (one, failed) in enumerate(zip(controls.renderings, compared, strict=True)):
        kind = "plain" if one.rendering.plain else "blinded"
        for test, why in failed.items():
            problems.setdefault(test, f"{kind} rendering {number}: {why}")
    return problems


def _wrongly_passed(twins: TwinRun) -> dict[str, str]:
    return {
        test: f"passes with another expectation of: {', '.join(sorted({kind for kind, _ in found}))}"
        for test, found in twins.passed.items()
    }


def _result(name: str, confirmation: _Confirmation, finding: Finding) -> ControlResult:
    if not confirmation.problems:
        return ControlResult(name, duration_s=confirmation.spent)
    problems = dict(sorted(confirmation.problems.items())[:MAX_NAMED_TESTS])
    evidence = {"count": len(confirmation.problems), "tests": problems}
    return ControlResult.found(name, finding.model_copy(update={"evidence": evidence}), confirmation.spent)


def _named(problems: dict[str, str]) -> str:
    test, why = next(iter(sorted(problems.items())))
    return f"{test.partition('|test:')[2]}: {why}" if test else why
