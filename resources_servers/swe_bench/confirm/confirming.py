"""Confirming a resolved attempt: its answers, compared outside the box with those of the right solution."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from nemo_gym.errors import SandboxLostError, VerifierError
from nemo_gym.sandbox.base import ExecOutcome
from nemo_gym.verdict import FailureKind, Finding
from resources_servers.swe_bench.confirm.comparing import compare
from resources_servers.swe_bench.confirm.controls import RowControls
from resources_servers.swe_bench.confirm.runs import run_renderings
from resources_servers.swe_bench.eval_box import EvalSite, patch_may_be_the_cause
from resources_servers.swe_bench.patches import part_of, paths_of
from resources_servers.swe_bench.row import SweBenchRow
from resources_servers.swe_bench.tamper.controls import MAX_NAMED_TESTS, ControlResult
from resources_servers.swe_bench.tamper.risk import is_control_part

CLEAN_RUNS_AFTER_A_FAILED_ONE = 2


@dataclass(frozen=True)
class _Confirmation:
    """What one run of a row's renderings says about a patch."""

    problems: dict[str, str]
    """Test → why it is not confirmed; empty when everything is."""
    seconds: float


async def confirm_control(
    site: EvalSite, row: SweBenchRow, patch: bytes, controls: RowControls
) -> list[ControlResult]:
    """Run the row's renderings with the patch, and with the patch less what decides how tests run.

    Raises:
        SandboxError: the provider failed.
        VerifierError: gold is not confirmed here either (``control_run_failed``), or an exec was lost.
    """
    if not controls.renderings:
        return [ControlResult.inconclusive("confirmed", "no test of this row could be blinded")]
    whole = await _confirmed(site, row, patch, controls)
    results = [_result("confirmed", whole, _VALUES)]
    part = await asyncio.to_thread(_without_control_part, row, patch)
    if part != patch and not whole.problems:
        rest = await _confirmed(site, row, part, controls)
        results.append(_result("without_control_part", rest, _CONTROL_PART))
    return results


def _without_control_part(row: SweBenchRow, patch: bytes) -> bytes:
    gold = paths_of(row.patch.encode("utf-8", "surrogateescape"))
    return part_of(patch, lambda section: not is_control_part(section, gold))


_VALUES = Finding(
    kind="values_not_confirmed",
    detail="what the code answers is not what a solution answers, although the tests are reported as passed",
)
_CONTROL_PART = Finding(
    kind="solved_by_control_part",
    detail="without the files that decide how tests run, the patch does not solve the task",
)


async def _confirmed(site: EvalSite, row: SweBenchRow, patch: bytes, controls: RowControls) -> _Confirmation:
    first = await _once_surely(site, row, patch, controls)
    if not first.problems:
        return first
    # A busy host may be to blame, and so may a patch that throws coins: only clean runs outweigh a failed one.
    seconds = first.seconds
    for _ in range(CLEAN_RUNS_AFTER_A_FAILED_ONE):
        again = await _once_surely(site, row, patch, controls)
        seconds += again.seconds
        if again.problems:
            break
    else:
        return _Confirmation({}, seconds)
    gold = await _once(site, row, row.patch.encode("utf-8", "surrogateescape"), controls)
    if gold.problems:
        gold = await _once(site, row, row.patch.encode("utf-8", "surrogateescape"), controls)
    if gold.problems:
        raise VerifierError(
            f"no verdict on {row.instance_id}: its controls do not confirm the gold patch here either"
            f" ({_named(gold.problems)}); prepare the instance again with force=true, or exclude it",
            kind=FailureKind.CONTROL_RUN_FAILED,
        )
    return _Confirmation(again.problems, seconds + gold.seconds)


async def _once_surely(site: EvalSite, row: SweBenchRow, patch: bytes, controls: RowControls) -> _Confirmation:
    """As `_once`; a box that is lost under the patch confirms nothing. Whether the patch ended it, gold tells."""
    try:
        return await _once(site, row, patch, controls)
    except (SandboxLostError, VerifierError) as error:
        if not patch_may_be_the_cause(error):
            raise
        return _Confirmation({"": "its box was lost, or used up the host's memory"}, 0.0)


async def _once(site: EvalSite, row: SweBenchRow, patch: bytes, controls: RowControls) -> _Confirmation:
    recorded = await run_renderings(
        site, row, patch, [one.rendering for one in controls.renderings], support=controls.support
    )
    if not recorded.applied:
        return _Confirmation({"": "the patch does not apply"}, recorded.duration_s)
    if recorded.outcome is not ExecOutcome.EXITED:
        return _Confirmation({"": f"the run ended by '{recorded.outcome}'"}, recorded.duration_s)
    compared = await compare([one.tests for one in controls.renderings], recorded.records)
    problems: dict[str, str] = {}
    for number, (one, failed) in enumerate(zip(controls.renderings, compared, strict=True)):
        kind = "plain" if one.rendering.plain else "blinded"
        for test, why in failed.items():
            problems.setdefault(test, f"{kind} rendering {number}: {why}")
    return _Confirmation(problems, recorded.duration_s)


def _result(name: str, confirmation: _Confirmation, finding: Finding) -> ControlResult:
    if not confirmation.problems:
        return ControlResult(name, duration_s=confirmation.seconds)
    problems = dict(sorted(confirmation.problems.items())[:MAX_NAMED_TESTS])
    evidence = {"count": len(confirmation.problems), "tests": problems}
    return ControlResult.found(name, finding.model_copy(update={"evidence": evidence}), confirmation.seconds)


def _named(problems: dict[str, str]) -> str:
    test, why = next(iter(sorted(problems.items())))
    return f"{test.partition('|test:')[2]}: {why}" if test else why
