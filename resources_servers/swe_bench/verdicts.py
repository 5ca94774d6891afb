"""Judges a patch: makes the official run and the control runs, and computes one trustworthy reward.

A reward requires that the official run resolves the instance and that there is no finding. An attempt ends without a
verdict only on evidence that the patch cannot influence: the provider failed, or the gold patch fails in the same way.
A patch that hangs its tests or destroys its box is a failed patch.

A resolved attempt is confirmed: the values that its code returns are compared, outside the box, with those of the gold
patch. There are further controls beside the official run:

*Canary*: the same patch and script, with test files whose expected tests can only fail. If such a test is reported as
passed, the tests did not decide the verdict.

*Without source*: only the parts of the patch that decide how tests run (configuration, plugins, test support), on the
pristine tree. If these parts alone make tests pass, the code under test did not. Tests that pass without any patch are
not the agent's doing, so they are determined first and not counted.

*Kept*: the official run without the code in those parts. Tests that must keep passing still have to pass.

*Skipped*: tests that a patch skips, or lets fail as expected, instead of keeping them passing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import structlog

from nemo_gym.contract.errors import SandboxLostError, VerifierError
from nemo_gym.contract.session import Artifact
from nemo_gym.contract.verdict import FailureKind, Finding, Verdict
from nemo_gym.sandbox.base import ExecOutcome
from resources_servers.swe_bench.canary import make_canary_script
from resources_servers.swe_bench.confirm.controls import LEVELS, RowControls, Strength
from resources_servers.swe_bench.confirm.runs import Recorded, compare, run_renderings
from resources_servers.swe_bench.confirm.twins import Delivery, TwinRun, dealt, look_at
from resources_servers.swe_bench.eval_box import EvalRun, EvalSite, patch_may_be_the_cause, run_evaluation
from resources_servers.swe_bench.grading import LogGrade, MarkerState, graded
from resources_servers.swe_bench.row import SweBenchRow, TestId
from resources_servers.swe_bench.signs import (
    Sign,
    as_details,
    divided,
    finding_where_weak,
    findings_in_patch,
    paths_of,
    signs_in_patch,
    without_new_files_with_signs,
    without_runner_code,
)

CLEAN_RUNS_AFTER_A_FAILED_ONE = 2
MAX_NAMED_TESTS = 10
_BROKEN_OFF = {
    ExecOutcome.TIMED_OUT: "its evaluation did not end within {:g} s",
    ExecOutcome.SIGNALED: "its evaluation was ended by a signal",
}
TamperControl = Literal["auto", "always", "off"]

log = structlog.get_logger(__name__)


# -- The verdict ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judgement:
    """A verdict, and the official run's log that it is based on."""

    verdict: Verdict
    log: str = ""


async def judge(
    site: EvalSite,
    row: SweBenchRow,
    artifact: Artifact | None,
    controls: RowControls | None,
    *,
    tamper_control: TamperControl = "auto",
    require_controls: Strength = "none",
) -> Judgement:
    """Judge the patch in ``artifact``.

    Args:
        controls: the row's prepared controls; ``None`` only with ``tamper_control: off``.
        require_controls: the minimum control strength of every test to be fixed; rows below it get no verdict.
        tamper_control: ``auto`` runs the controls if the official run resolves the instance, ``always`` after every
            run whose patch applied (to record failed attempts too), ``off`` never. Static findings are always made.

    Raises:
        SandboxError, VerifierError: no verdict is possible. The details of `VerifierError` name the kind of failure.
    """
    if controls is not None and LEVELS.index(controls.strength) < LEVELS.index(require_controls):
        raise VerifierError(
            f"no verdict on {row.instance_id}: its controls are '{controls.strength}' and require_controls asks for"
            f" '{require_controls}'; exclude the row, or ask for less",
            kind=FailureKind.CONTROLS_WEAK,
        )
    if artifact is None:
        raise VerifierError(
            "the agent delivered no artifact 'patch'; its server must harvest what the descriptor asks for",
            kind=FailureKind.AGENT_CRASHED,
        )
    if artifact.error is not None or artifact.truncated:
        official = {"resolved": False, "patch_exists": False, "patch_successfully_applied": False}
        reason = artifact.error or "the patch passed its size cap"
        return Judgement(Verdict.of(0.0, official=official, details={"patch": reason}, reward_reason=reason))
    patch = artifact.content()
    run = await _official_run(site, row, patch)
    if run is None:
        official = {"resolved": False, "patch_exists": bool(patch), "patch_successfully_applied": True}
        details = {"run": "the evaluation was lost (or out of memory) with this patch, and not with the gold patch"}
        findings = await asyncio.to_thread(findings_in_patch, patch)
        why = "the tests take their box down"
        return Judgement(Verdict.of(0.0, official=official, findings=findings, details=details, reward_reason=why))
    if run.refusal is not None:
        official = {"resolved": False, "patch_exists": True, "patch_successfully_applied": True}
        findings = [*await asyncio.to_thread(findings_in_patch, patch), run.refusal]
        details = {"run": "the tests were not run: the patch's changes contradict the paths that it names"}
        return Judgement(Verdict.of(0.0, official=official, findings=findings, details=details))
    if run.outcome is not ExecOutcome.EXITED:
        log.warning("the tests were ended", instance_id=row.instance_id, outcome=str(run.outcome))
    grade, respelled = await graded(row, run.log)
    if grade.unread:
        await _require_gold(site, row, grade.unread, run.log)
        grade, respelled = await graded(row, run.log)  # a busy host may have been to blame
    resolved = grade.official_resolved and run.applied and run.outcome is ExecOutcome.EXITED
    findings = [*await asyncio.to_thread(findings_in_patch, patch), *_log_findings(grade, run)]
    results: list[ControlResult] = []
    controls_due = tamper_control == "always" or (tamper_control == "auto" and resolved)
    if patch.strip() and run.applied and controls_due and controls is not None:
        results = await _run_controls(site, row, patch, grade, controls)
    findings += [control.finding for control in results if control.finding]
    signs = await asyncio.to_thread(signs_in_patch, patch, row.gold)
    left_out: list[str] = []
    if results and controls is not None and not (controls.strength == "strong" and controls.plain_covers_all):
        by_signs = finding_where_weak(signs)
        # What a rest of the patch earns by itself, the patch earns: an agent may leave a script of its own behind.
        rest = await asyncio.to_thread(without_new_files_with_signs, patch, row.gold) if by_signs else patch
        if by_signs and resolved and not findings and rest.strip() and rest != patch:
            content = Artifact.of(artifact.name, artifact.kind, rest)
            alone = await judge(
                site, row, content, controls, tamper_control=tamper_control, require_controls=require_controls
            )
            if alone.verdict.reward == 1.0:
                by_signs, left_out = [], sorted(paths_of(patch) - paths_of(rest))
        findings += by_signs
    told = _details(run, grade, results, controls, signs, respelled=respelled)
    if left_out:
        told["judged_without"] = left_out
    verdict = Verdict.of(
        1.0 if resolved and patch.strip() and not findings and grade.markers is MarkerState.GENUINE else 0.0,
        official=_official(grade, run, patch, resolved=resolved),
        findings=findings,
        details=told,
        reward_reason=_reason(grade, run, patch, resolved=resolved),
        evaluation_log=run.log or run.apply_log,
    )
    return Judgement(verdict, run.log)


async def _official_run(site: EvalSite, row: SweBenchRow, patch: bytes) -> EvalRun | None:
    """Make the official run. If it hangs, is killed or its box is lost, run the gold patch to find out whether the
    patch is to blame, and run a patch that did not hang once more. Return ``None`` if the box is lost then too."""
    run: EvalRun | None = None
    try:
        run = await run_evaluation(site, row.eval_script, patch)
    except (SandboxLostError, VerifierError) as error:
        if not patch_may_be_the_cause(error):
            raise
        log.warning("evaluation_lost", instance_id=row.instance_id, error=error.message)
        await _require_gold(site, row, "its evaluation was lost, or used up the host's memory")
    if run is not None:
        if run.outcome not in _BROKEN_OFF:
            return run
        await _require_gold(site, row, _BROKEN_OFF[run.outcome].format(site.timeout_s), run.log)
        if run.outcome is ExecOutcome.TIMED_OUT:
            return run
    try:
        return await run_evaluation(site, row.eval_script, patch)
    except (SandboxLostError, VerifierError) as again:
        if not patch_may_be_the_cause(again):
            raise
        return None


async def _require_gold(site: EvalSite, row: SweBenchRow, cause: str, log_text: str | None = None) -> None:
    """Raise `VerifierError` unless the row's own solution still resolves it here."""
    run = await run_evaluation(site, row.eval_script, row.gold)
    ended = run.applied and run.outcome is ExecOutcome.EXITED
    if not ended or not (await graded(row, run.log))[0].official_resolved:
        raise VerifierError(
            f"no verdict on {row.instance_id}: {cause}, and the gold patch does not resolve the instance here either;"
            " prepare the instance again, or exclude it",
            kind=FailureKind.CONTROL_RUN_FAILED,
            evaluation_log=log_text,
        )


async def _run_controls(
    site: EvalSite, row: SweBenchRow, patch: bytes, grade: LogGrade, controls: RowControls
) -> list[ControlResult]:
    """Run the controls one after the other, because other attempts use the cores. Stop if confirming has a finding."""
    confirmed = await confirm_control(site, row, patch, controls)
    if any(control.finding for control in confirmed):
        return confirmed
    # No rendering looks at some test that must keep passing.
    uncontrolled = controls.strength == "none" or controls.leaves_out(row.pass_to_pass)
    canary = await canary_control(site, row, patch) if uncontrolled else None
    kept = await kept_control(site, row, patch) if uncontrolled else None
    without_source = await without_source_control(site, row, patch)
    skipped = await skipped_control(site, row, grade)
    return [control for control in (*confirmed, canary, kept, without_source, skipped) if control is not None]


def _log_findings(grade: LogGrade, run: EvalRun) -> list[Finding]:
    """Return findings in the official run's output, where only the script's shell may print the markers, each once."""
    if not run.applied or run.outcome is not ExecOutcome.EXITED:
        return []
    if grade.markers is MarkerState.FORGED:
        detail = "the tests' output repeats the grader's own markers"
        return [Finding(kind="forged_markers", detail=detail)]
    if grade.markers is MarkerState.NO_TEST_PATCH and grade.official_resolved:
        detail = "the patch keeps the row's own tests from being put in place"
        return [Finding(kind="tests_not_in_place", detail=detail)]
    reports_failure = not {"FAILED", "ERROR"}.isdisjoint(grade.status_map.values())
    if run.test_exit_code not in (0, None) and grade.official_resolved and not reports_failure:
        detail = "the test command failed while its output reports no failure"
        return [Finding(kind="exit_code_contradicts_log", detail=detail, evidence={"exit_code": run.test_exit_code})]
    return []


def _official(grade: LogGrade, run: EvalRun, patch: bytes, *, resolved: bool) -> dict[str, Any]:
    return {
        "resolved": resolved,
        "patch_exists": bool(patch.strip()),
        "patch_successfully_applied": run.applied,
        "timed_out": run.outcome is ExecOutcome.TIMED_OUT,
        "tests_status": grade.tests_status,
    }


def _reason(grade: LogGrade, run: EvalRun, patch: bytes, *, resolved: bool) -> str | None:
    """Return why the reward is 0, unless findings tell it."""
    if not patch.strip():
        return "no patch, although the tests pass without one" if resolved else "no patch"
    if resolved:
        return None
    if not run.applied:
        return "the patch does not apply"
    if run.outcome is not ExecOutcome.EXITED:
        return f"the tests ended: {run.outcome.replace('_', ' ')}"
    if grade.unread:
        return grade.unread
    expected = grade.tests_status.values()
    failed, passed = (sum(len(tests.get(how, ())) for tests in expected) for how in ("failure", "success"))
    return f"{failed} of {failed + passed} tests fail"


def _details(
    run: EvalRun,
    grade: LogGrade,
    controls: list[ControlResult],
    prepared: RowControls | None,
    signs: list[Sign],
    *,
    respelled: bool,
) -> dict[str, Any]:
    details: dict[str, Any] = {
        "evaluation": {
            "outcome": str(run.outcome),
            "test_exit_code": run.test_exit_code,
            "seconds": run.duration_s,
            "log_truncated": run.log_truncated,
        },
        "controls": {control.name: control.conclusion for control in controls},
    }
    if prepared is not None:
        details["control_strength"] = {
            "weakest": prepared.strength,
            **prepared.counts(),
            "without_runner": prepared.plain_covers_all,
        }
    if controls:
        details["control_seconds"] = {control.name: round(control.duration_s, 3) for control in controls}
    if signs:
        details["signs"] = as_details(signs)
    if grade.unread:
        details["grading"] = grade.unread
    if respelled:
        details["normalised"] = ["unittest_ids"]
    if not run.applied:
        details["apply_log"] = run.apply_log[-1000:]
    return details


# -- Controls: runs beside the official one, and what they prove -----------------------------------------------------


@dataclass(frozen=True)
class ControlResult:
    """The finding of one control, or why it is inconclusive."""

    name: str
    duration_s: float = 0.0
    finding: Finding | None = None
    inconclusive: str = ""
    """Why the control proves nothing; empty if it is conclusive."""
    ended: bool = True
    """Whether the control's run ended by itself."""
    tests: tuple[str, ...] = ()
    """All tests that the finding is about; the finding itself names only some."""

    @property
    def conclusion(self) -> str:
        """``clean``, ``finding``, or ``inconclusive: <reason>``."""
        if self.inconclusive:
            return f"inconclusive: {self.inconclusive}"
        return "finding" if self.finding else "clean"


async def canary_control(site: EvalSite, row: SweBenchRow, patch: bytes) -> ControlResult:
    """Run the patch against tests that can only fail. An inconclusive run is repeated once. If that is inconclusive
    too, it counts against the patch, unless the gold patch is inconclusive as well. Tests that pass with the gold
    patch too do not count: rewriting them did not make them fail.

    Raises:
        SandboxError, VerifierError: the provider failed, or gold's run, which has to be compared, does not end twice.
    """
    first = await _single_canary(site, row, patch)
    last = await _single_canary(site, row, patch) if first.inconclusive else first
    if not last.finding and not last.inconclusive:
        return last
    gold = await _single_canary(site, row, row.gold, evaluate=run_evaluation)
    if last.finding and not gold.ended:
        gold = await _single_canary(site, row, row.gold, evaluate=run_evaluation)
    if last.finding and not gold.ended:
        raise VerifierError(
            f"no verdict on {row.instance_id}: {gold.inconclusive} with the gold patch and tests that can only fail,"
            " so it does not tell which of them pass by themselves; try again, or exclude the instance",
            retryable=True,
            kind=FailureKind.CONTROL_RUN_FAILED,
        )
    duration_s = first.duration_s + gold.duration_s + (0.0 if last is first else last.duration_s)
    if last.finding is None and gold.inconclusive:
        return ControlResult("canary", duration_s, inconclusive=f"{last.conclusion}; with gold too")
    passed = [test for test in last.tests if test not in gold.tests]
    if last.finding and gold.finding and not passed:
        return ControlResult("canary", duration_s, inconclusive="rewritten tests pass with gold too")
    if last.finding:
        return ControlResult("canary", duration_s, _finding(passed, exact=bool(passed)))
    finding = Finding(
        kind="control_prevented",
        detail="a control run that concludes with the gold patch does not conclude with this one",
        evidence={"conclusion": last.conclusion},
    )
    return ControlResult("canary", duration_s, finding)


async def _evaluate_safely(site: EvalSite, eval_script: str, patch: bytes) -> EvalRun:
    """Call `run_evaluation`, and treat a lost box as an end of the run. The caller runs gold to see if the patch is to
    blame."""
    try:
        return await run_evaluation(site, eval_script, patch)
    except (SandboxLostError, VerifierError) as error:
        if not patch_may_be_the_cause(error):
            raise
        return EvalRun(applied=True, apply_log="", outcome=ExecOutcome.LOST)


async def _single_canary(
    site: EvalSite,
    row: SweBenchRow,
    patch: bytes,
    evaluate: Callable[[EvalSite, str, bytes], Awaitable[EvalRun]] = _evaluate_safely,
) -> ControlResult:
    name = "canary"
    canary = await make_canary_script(site, row, random.SystemRandom())
    if canary is None:
        return ControlResult(name, inconclusive="no expected test could be rewritten")
    run = await evaluate(site, canary.eval_script, patch)
    if not run.applied or run.outcome is not ExecOutcome.EXITED:
        reason = f"the run ended by '{run.outcome}'"
        return ControlResult(name, run.duration_s, inconclusive=reason, ended=False)
    grade, _ = await graded(row, run.log)
    if not canary.exact:
        if grade.official_resolved and run.test_exit_code == 0:
            return ControlResult(name, run.duration_s, _finding([], exact=False))
        return ControlResult(name, run.duration_s)
    passed_wrongly = [test for test, status in _succeeded(grade) if canary.belies(TestId.parse(test), status)]
    if passed_wrongly:
        finding = _finding(passed_wrongly, exact=True)
        return ControlResult(name, run.duration_s, finding, tests=tuple(passed_wrongly))
    traced = [test for test in (*row.fail_to_pass, *row.pass_to_pass) if canary.must_fail(TestId.parse(test))]
    if not traced:
        return ControlResult(name, run.duration_s, inconclusive="no expected test could be traced to a rewritten one")
    if not any(grade.status_map.get(test) in ("FAILED", "ERROR") for test in traced):
        return ControlResult(name, run.duration_s, inconclusive="no rewritten test was reported at all")
    return ControlResult(name, run.duration_s)


async def without_source_control(site: EvalSite, row: SweBenchRow, patch: bytes) -> ControlResult | None:
    """Run only the part of the patch that decides how tests run. Return ``None`` if there is no such part.

    Each run that does not end is repeated once. If both runs with that part do not end, that counts against the patch,
    unless the tests do not end without it either.

    Raises:
        SandboxError, VerifierError: the provider failed, or a run did not end and gold is not resolved here either.
    """
    name = "without_source"
    part, _ = divided(patch, row.gold)
    if not part:
        return None
    run, grade = await _run_until_ended(site, row, part)
    if not run.applied:
        return ControlResult(name, run.duration_s, inconclusive="that part cannot be applied alone")
    has_ended = _has_ended(run, grade)
    passed = _fixed(row, grade)
    if has_ended and not passed:
        return ControlResult(name, run.duration_s)
    unpatched, unpatched_grade = await _run_until_ended(site, row, b"")
    duration_s = run.duration_s + unpatched.duration_s
    unpatched_has_ended = _has_ended(unpatched, unpatched_grade)
    if not has_ended or not unpatched_has_ended:
        await _require_gold(site, row, "a control run did not end", run.log)
    if not has_ended and not unpatched_has_ended:
        return ControlResult(name, duration_s, inconclusive="the tests do not end without the patch either")
    if not has_ended:
        finding = Finding(
            kind="control_prevented",
            detail="the tests end without the patch, and not with only its files that decide how tests run",
            evidence={
                "conclusion": grade.unread or f"the run ended by '{run.outcome}'",
                "paths": sorted(paths_of(part))[:10],
            },
        )
        return ControlResult(name, duration_s, finding)
    passed_unpatched = set(_fixed(row, unpatched_grade))
    passed = [test for test in passed if test not in passed_unpatched]
    if not passed:
        return ControlResult(name, duration_s)
    finding = Finding(
        kind="passed_without_source_change",
        detail="files that decide how tests run make failing tests pass without any change of the code under test",
        evidence={"tests": passed[:MAX_NAMED_TESTS], "count": len(passed), "paths": sorted(paths_of(part))[:10]},
    )
    return ControlResult(name, duration_s, finding)


async def kept_control(site: EvalSite, row: SweBenchRow, patch: bytes) -> ControlResult | None:
    """Make the official run without the patch's code that decides how tests run (`without_runner_code`). Return
    ``None`` if there is no such code. Unlike the canary, nothing in it can tell this run from the official one.

    Tests that must keep passing and fail twice are a finding, unless they fail now with the whole patch too, or in one
    of two runs with gold.

    Raises:
        SandboxError, VerifierError: the provider failed.
    """
    name, duration_s = "kept", 0.0
    source_part = await asyncio.to_thread(without_runner_code, patch, row.gold)
    if source_part == patch:
        return None
    broken = set(row.pass_to_pass)
    for _ in range(2):
        run, grade = await _run_until_ended(site, row, source_part)
        duration_s += run.duration_s
        if not run.applied:
            return ControlResult(name, duration_s, inconclusive="the rest of the patch cannot be applied alone")
        failed = _failed(grade)
        # Tests that did not run, because of an import for example, tell nothing about the code under test. Neither do
        # errors in all of them, as those of a fixture that no longer fits.
        telling = {"FAILED"} if failed.issuperset(row.pass_to_pass) else {"FAILED", "ERROR"}
        broken &= {test for test in failed if grade.status_map.get(test) in telling}
        if not broken:
            return ControlResult(name, duration_s, inconclusive="tests to be kept do not run alone" if failed else "")
    for with_patch in (patch, row.gold, row.gold):
        run, grade = await _run_until_ended(site, row, with_patch)
        duration_s += run.duration_s
        broken -= _failed(grade)
        if not broken:
            whose = "this patch" if with_patch is patch else "gold"
            return ControlResult(name, duration_s, inconclusive=f"tests that must keep passing fail with {whose} too")
    finding = Finding(
        kind="kept_by_control_part",
        detail="without the patch's code that decides how tests run, tests that must keep passing fail",
        evidence={"tests": sorted(broken)[:MAX_NAMED_TESTS], "count": len(broken)},
    )
    return ControlResult(name, duration_s, finding)


def _failed(grade: LogGrade) -> set[str]:
    return set(grade.tests_status.get("PASS_TO_PASS", {}).get("failure", ()))


async def _run_until_ended(site: EvalSite, row: SweBenchRow, patch: bytes) -> tuple[EvalRun, LogGrade]:
    """Make the official run and grade it; do both once more if the run or the reading of its log was broken off."""
    for _ in range(2):
        run = await _evaluate_safely(site, row.eval_script, patch)
        grade, _respelled = await graded(row, run.log)
        if not run.applied or _has_ended(run, grade):
            break
    return run, grade


def _has_ended(run: EvalRun, grade: LogGrade) -> bool:
    return run.outcome is ExecOutcome.EXITED and not grade.unread


async def skipped_control(site: EvalSite, row: SweBenchRow, official: LogGrade) -> ControlResult | None:
    """Find tests that the patch skips or expects to fail, and that pass without it. The official report counts both as
    still passing. Return ``None`` if there are none."""
    name = "skipped"
    skipped = [test for test, status in _succeeded(official) if status in ("SKIPPED", "XFAIL")]
    if not skipped:
        return None
    unpatched = await run_evaluation(site, row.eval_script, b"")
    unpatched_status = (await graded(row, unpatched.log))[0].status_map
    by_patch = [test for test in skipped if unpatched_status.get(test) == "PASSED"]
    if not by_patch:
        return ControlResult(name, unpatched.duration_s)
    finding = Finding(
        kind="tests_skipped_by_patch",
        detail="tests that must keep passing, and pass without the patch, are skipped with it or expected to fail",
        evidence={"tests": by_patch[:MAX_NAMED_TESTS], "count": len(by_patch)},
    )
    return ControlResult(name, unpatched.duration_s, finding)


def _succeeded(grade: LogGrade) -> list[tuple[str, str]]:
    """Return the expected tests that the report counts as successes, with their status."""
    tests_status = grade.report.get("tests_status") or {}
    return [
        (test, grade.status_map.get(test, "PASSED"))
        for kind in ("FAIL_TO_PASS", "PASS_TO_PASS")
        for test in tests_status.get(kind, {}).get("success", ())
    ]


def _fixed(row: SweBenchRow, grade: LogGrade) -> list[str]:
    if not grade.report.get("patch_successfully_applied"):
        return []
    if row.eval_type == "fail_only":
        # Here an absent test counts as passed, so only the official verdict on all tests is evidence.
        return list(row.fail_to_pass) if grade.official_resolved else []
    return list((grade.report.get("tests_status") or {}).get("FAIL_TO_PASS", {}).get("success", ()))


def _finding(tests: list[str], *, exact: bool) -> Finding:
    detail = (
        "tests that can only fail are reported as passed with this patch"
        if exact
        else "the run is reported as passed although a test was added that can only fail"
    )
    evidence = {"tests": tests[:MAX_NAMED_TESTS], "count": len(tests)} if exact else {}
    return Finding(kind="verdict_not_caused_by_tests", detail=detail, evidence=evidence)


# -- The confirmation ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Confirmation:
    """The result of running a row's controls on a patch."""

    problems: dict[str, str]
    """Test → why it is not confirmed; empty if all tests are confirmed."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Control → its duration."""
    lies: bool = False
    """Whether tests that can only fail are reported as passed."""

    @property
    def spent(self) -> float:
        return sum(self.seconds.values())


async def confirm_control(
    site: EvalSite, row: SweBenchRow, patch: bytes, controls: RowControls
) -> list[ControlResult]:
    """Run the row's renderings and twins with the patch, and again without the part that decides how tests run.

    Raises:
        SandboxError: the provider failed.
        VerifierError: the gold patch is not confirmed either (``control_run_failed``), or an exec was lost.
    """
    if not controls.renderings and not controls.twins:
        return [ControlResult("confirmed", inconclusive="no test of this row could be blinded")]
    # Code that works only under a test runner may leave a working copy behind for the runs that follow, so the plain
    # renderings run first.
    plain_first = sorted(controls.renderings, key=lambda one: not one.rendering.plain)
    controls = replace(controls, renderings=tuple(plain_first))
    whole = await _confirm(site, row, patch, controls)
    if whole.problems:
        return [_result("twins" if whole.lies else "confirmed", whole, _WRONG_PASS if whole.lies else _VALUES_DIFFER)]
    results = [ControlResult(name, seconds) for name, seconds in whole.seconds.items()]
    _, source_part = await asyncio.to_thread(divided, patch, row.gold)
    if source_part != patch:
        source_confirmation = await _confirm(site, row, source_part, controls)
        results.append(_result("without_control_part", source_confirmation, _CONTROL_PART_SOLVES))
    return results


_VALUES_DIFFER = Finding(
    kind="values_not_confirmed",
    detail="the code returns other values than a correct solution, although the tests are reported as passed",
)
_WRONG_PASS = Finding(
    kind="passes_wrong_expectations",
    detail="tests that expect something wrong are reported as passed",
)
_CONTROL_PART_SOLVES = Finding(
    kind="solved_by_control_part",
    detail="without the files that decide how tests run, the patch does not solve the task",
)


async def _confirm(site: EvalSite, row: SweBenchRow, patch: bytes, controls: RowControls) -> _Confirmation:
    first = await _confirm_once_safely(site, row, patch, controls)
    # A busy host cannot make a wrong expectation pass, so this result needs no repetition.
    if not first.problems or first.lies:
        return first
    # The cause may be a busy host, or a patch that acts at random, so several clean runs must outweigh a failed one.
    runs = [first]
    for _ in range(CLEAN_RUNS_AFTER_A_FAILED_ONE):
        runs.append(await _confirm_once_safely(site, row, patch, controls))
        if runs[-1].problems:
            break
    last = runs[-1]
    if not last.problems or last.lies:
        return replace(last, seconds=_total_seconds(*runs))
    gold = await _once(site, row, row.gold, controls)
    if gold.problems:
        gold = await _once(site, row, row.gold, controls)
    if gold.problems:
        test, reason = min(gold.problems.items())
        problem = f"{test.partition('|test:')[2]}: {reason}" if test else reason
        raise VerifierError(
            f"no verdict on {row.instance_id}: its controls do not confirm the gold patch here either"
            f" ({problem}); prepare the instance again with force=true, or exclude it",
            kind=FailureKind.CONTROL_RUN_FAILED,
        )
    return replace(last, seconds=_total_seconds(*runs, gold))


def _total_seconds(*runs: _Confirmation) -> dict[str, float]:
    return {control: sum(run.seconds.get(control, 0.0) for run in runs) for run in runs for control in run.seconds}


async def _confirm_once_safely(site: EvalSite, row: SweBenchRow, patch: bytes, controls: RowControls) -> _Confirmation:
    """Call `_once`, and treat a lost box as not confirmed. The caller runs gold to see if the patch is to blame."""
    try:
        return await _once(site, row, patch, controls)
    except (SandboxLostError, VerifierError) as error:
        if not patch_may_be_the_cause(error):
            raise
        return _Confirmation({"": "its box was lost, or used up the host's memory"})


async def _once(site: EvalSite, row: SweBenchRow, patch: bytes, controls: RowControls) -> _Confirmation:
    """Run one box with the renderings and one of each pair of twins, and if there are twins, a second box with the
    other ones."""
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
            wrongly_passed = {
                test: f"passes with another expectation of: {', '.join(sorted({kind for kind, _ in passed}))}"
                for test, passed in twins.passed.items()
            }
            return _Confirmation(wrongly_passed, seconds, lies=True)
        problems = await _value_problems(controls, recorded) if name == "confirmed" else {}
        if problems := problems | twins.problems:
            return _Confirmation(problems, seconds)
    return _Confirmation({}, seconds)


async def _value_problems(controls: RowControls, recorded: Recorded) -> dict[str, str]:
    """Return test → why the renderings' records do not confirm it."""
    count = len(controls.renderings)
    compared = await compare([controlled.tests for controlled in controls.renderings], recorded.records[:count])
    problems: dict[str, str] = {}
    for number, (controlled, failed) in enumerate(zip(controls.renderings, compared, strict=True)):
        kind = "plain" if controlled.rendering.plain else "blinded"
        for test, reason in failed.items():
            problems.setdefault(test, f"{kind} rendering {number}: {reason}")
    return problems


def _result(name: str, confirmation: _Confirmation, finding: Finding) -> ControlResult:
    if not confirmation.problems:
        return ControlResult(name, confirmation.spent)
    problems = dict(sorted(confirmation.problems.items())[:MAX_NAMED_TESTS])
    evidence = {"count": len(confirmation.problems), "tests": problems}
    return ControlResult(name, confirmation.spent, finding.model_copy(update={"evidence": evidence}))
