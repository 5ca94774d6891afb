"""Confirming attempts whose code works against being confirmed."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nemo_gym.contract.errors import SandboxArchiveError, SandboxLostError, VerifierError
from nemo_gym.contract.sandbox import SandboxResources
from nemo_gym.contract.session import Artifact
from nemo_gym.contract.verdict import FailureKind
from nemo_gym.sandbox.base import ExecOutcome, SandboxExecResult, SandboxHandle, SandboxProvider
from resources_servers.swe_bench import verdicts
from resources_servers.swe_bench.canary import CanaryFile, CanaryScript
from resources_servers.swe_bench.confirm.controls import ControlledRendering, ControlledTest, RowControls
from resources_servers.swe_bench.confirm.runs import MAX_RECORD_BYTES, Recorded, Rendering, fetch_records
from resources_servers.swe_bench.confirm.twins import Mutant, Twin, TwinTest
from resources_servers.swe_bench.confirm.values import Check
from resources_servers.swe_bench.eval_box import EvalRun, EvalSite, apply_patch, patch_may_be_the_cause
from resources_servers.swe_bench.grading import MAX_GRADED_CHARS, LogGrade, MarkerState
from resources_servers.swe_bench.grading import graded as read_again
from resources_servers.swe_bench.preparation.examples import EXAMPLE_ROWS
from resources_servers.swe_bench.row import SweBenchRow, TestId, read_rows

ROW = SweBenchRow.from_mapping(next(row for _, row in read_rows(EXAMPLE_ROWS)))
CONTROLS = RowControls(ROW.instance_id, "", (ControlledRendering(Rendering({}, "/var/tmp/r"), {}),))
SITE = EvalSite(cast(SandboxProvider, None), "image")
LOST = SandboxLostError("the box is gone")
OUT_OF_MEMORY = VerifierError("the host ran out of memory", kind=FailureKind.HOST_OUT_OF_MEMORY)


READING = """
import dataclasses, sys, msgspec
from resources_servers.swe_bench.confirm.controls import RowControls

@dataclasses.dataclass
class New:
    number: int

def preparing(cls, data):
    files = set()
    sys.setprofile(lambda frame, event, argument: files.add(frame.f_code.co_filename))
    msgspec.convert(data, cls)
    sys.setprofile(None)
    return any("msgspec" in file for file in files)

assert preparing(New, {"number": 1})
assert not preparing(RowControls, dataclasses.asdict(RowControls("a", "b", ())))
"""


def test_controls_may_be_read_by_many_threads_at_once() -> None:
    """msgspec crashes when two threads prepare one type; importing the module has prepared this one."""
    subprocess.run([sys.executable, "-c", READING], check=True, timeout=120)


@pytest.mark.parametrize("error", [LOST, OUT_OF_MEMORY])
async def test_a_patch_that_ends_its_box_while_it_is_confirmed_is_not_confirmed(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(site: EvalSite, row: SweBenchRow, patch: bytes, *_: Any, **__: Any) -> Recorded:
        if patch == row.patch.encode():
            return Recorded(True, records=("",))
        raise error

    monkeypatch.setattr(verdicts, "run_renderings", run)
    (result,) = await verdicts.confirm_control(SITE, ROW, b"diff --git a/x.py b/x.py\n", CONTROLS)
    assert result.finding is not None and result.finding.kind == "values_not_confirmed"


async def test_no_verdict_is_given_where_gold_loses_its_box_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(*_: Any, **__: Any) -> Recorded:
        raise LOST

    monkeypatch.setattr(verdicts, "run_renderings", run)
    with pytest.raises(SandboxLostError):
        await verdicts.confirm_control(SITE, ROW, b"diff --git a/x.py b/x.py\n", CONTROLS)


TWINNED = RowControls(
    ROW.instance_id,
    "",
    twins=(
        Twin(
            {"t.py": "right"},
            {"t.py|test:x": TwinTest(("t.py::x",), ("t.py::x",), Mutant("t.py", 0, 5, "wrong", "equality", True))},
        ),
    ),
)


@pytest.mark.parametrize(
    ("says", "finding", "runs"),
    [
        (lambda text, run: "PASSED", "passes_wrong_expectations", range(1, 3)),
        (lambda text, run: "FAILED" if text == "wrong" or run == 0 else "PASSED", None, range(2, 6)),
        # Twice the patch, of which the second box is not needed when the first has the true twin, then gold.
        (lambda text, run: "FAILED", "values_not_confirmed", range(4, 7)),
    ],
    ids=["lies", "honest on a busy host", "fails everything"],
)
async def test_twins_that_fail_are_run_again_and_those_that_lie_are_not(
    says: Callable[[str, int], str], finding: str | None, runs: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []

    async def run(
        site: EvalSite, row: SweBenchRow, patch: bytes, renderings: Sequence[Rendering], **_: Any
    ) -> Recorded:
        texts = [text for one in renderings for text in one.files.values()]
        honest = patch == row.patch.encode()
        told = ["PASSED" if text == "right" else "FAILED" for text in texts]
        told = told if honest else [says(text, len(seen)) for text in texts]
        seen.append(patch)
        return Recorded(True, records=tuple(f"{one} t.py::x\n" for one in told))

    monkeypatch.setattr(verdicts, "run_renderings", run)
    results = await verdicts.confirm_control(SITE, ROW, b"diff --git a/x.py b/x.py\n", TWINNED)
    found = [result.finding.kind for result in results if result.finding]
    assert found == ([finding] if finding else [])
    assert len(seen) in runs


async def test_records_larger_than_their_limit_are_not_read_into_memory() -> None:
    produced = 0

    async def get_archive(handle: object, path: str, *, max_bytes: int | None = None) -> AsyncIterator[bytes]:
        nonlocal produced
        chunk = bytes(1024 * 1024)
        member = tarfile.TarInfo("records")
        member.size = 8 * MAX_RECORD_BYTES
        yield member.tobuf()
        while produced < member.size:
            produced += len(chunk)
            if max_bytes is not None and produced > max_bytes:
                raise SandboxArchiveError("the archive is larger than max_bytes")
            yield chunk
        yield bytes(2 * tarfile.BLOCKSIZE)

    provider = cast(SandboxProvider, SimpleNamespace(get_archive=get_archive))
    assert await fetch_records(EvalSite(provider, "image"), cast(SandboxHandle, None), "/var/tmp/r") == ""
    assert produced <= 2 * MAX_RECORD_BYTES


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.DIRTYPE])
async def test_records_that_are_no_file_are_no_records(kind: bytes) -> None:
    async def get_archive(handle: object, path: str, *, max_bytes: int | None = None) -> AsyncIterator[bytes]:
        member = tarfile.TarInfo("records")
        member.type, member.linkname = kind, "elsewhere"
        yield member.tobuf() + bytes(2 * tarfile.BLOCKSIZE)

    provider = cast(SandboxProvider, SimpleNamespace(get_archive=get_archive))
    assert await fetch_records(EvalSite(provider, "image"), cast(SandboxHandle, None), "/var/tmp/r") == ""


@pytest.mark.parametrize(("throws", "found"), [("✗✓✓", False), ("✗✓✗", True), ("✗✗", True), ("✓", False)])
async def test_a_failed_confirmation_is_outweighed_by_two_clean_ones_alone(
    throws: str, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list(throws)

    async def run(site: EvalSite, row: SweBenchRow, patch: bytes, *_: Any, **__: Any) -> Recorded:
        if patch == row.patch.encode():
            return Recorded(True, records=("",))
        return Recorded(left.pop(0) == "✓", records=("",))

    monkeypatch.setattr(verdicts, "run_renderings", run)
    (result,) = await verdicts.confirm_control(SITE, ROW, b"diff --git a/x.py b/x.py\n", CONTROLS)
    assert bool(result.finding) is found
    assert left == []


async def test_nothing_has_run_under_a_test_runner_when_a_plain_rendering_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Code could leave a working copy of itself there."""
    plain, varied = Rendering({}, "/var/tmp/p", plain="p.py"), Rendering({}, "/var/tmp/v")
    blinded = CONTROLS.renderings[0].rendering
    controls = replace(CONTROLS, renderings=tuple(ControlledRendering(one, {}) for one in (blinded, plain, varied)))
    seen: list[Rendering] = []

    async def run(_: EvalSite, row: SweBenchRow, patch: bytes, renderings: Sequence[Rendering], **__: Any) -> Recorded:
        seen.extend(renderings)
        return Recorded(True, records=("",) * len(renderings))

    monkeypatch.setattr(verdicts, "run_renderings", run)
    await verdicts.confirm_control(SITE, ROW, b"diff --git a/x.py b/x.py\n", controls)
    assert seen == [plain, blinded, varied]


LATE = EvalRun(applied=True, apply_log="", outcome=ExecOutcome.TIMED_OUT)
PART = b"""diff --git a/conftest.py b/conftest.py
new file mode 100644
--- /dev/null
+++ b/conftest.py
@@ -0,0 +1 @@
+import inifold
"""
PATCH = PART + ROW.gold
WHOLE = PART + b"diff --git a/x.py b/x.py\n"
End = EvalRun | Exception


def ended(status: str) -> EvalRun:
    """A run in which every expected test ended with ``status``."""
    lines = "".join(f"{status} {test}\n" for test in (*ROW.fail_to_pass, *ROW.pass_to_pass))
    markers = [f"+ : '>>>>> {which} Test Output'\n" for which in ("Start", "End")]
    return EvalRun(applied=True, apply_log="", log=lines.join(markers), test_exit_code=int(status != "PASSED"))


def evaluations(monkeypatch: pytest.MonkeyPatch, **ends: Sequence[End]) -> list[str]:
    """Let the runs of a patch end as told, the last end for ever. Return the list of runs, to which they are added."""
    names, left, seen = (
        {ROW.gold: "gold", b"": "unpatched", WHOLE: "whole"},
        {name: list(of) for name, of in ends.items()},
        [],
    )

    async def run(site: EvalSite, script: str, patch: bytes) -> EvalRun:
        seen.append(names.get(patch, "patch"))
        kind = left[seen[-1]]
        end = kind.pop(0) if len(kind) > 1 else kind[0]
        if isinstance(end, Exception):
            raise end
        return end

    async def canary(*_: Any) -> CanaryScript:
        test = TestId.parse(ROW.fail_to_pass[0])
        file = CanaryFile(test.path, b"", functions={((), test.function)})
        return CanaryScript(ROW.eval_script, (file,), exact=True)

    monkeypatch.setattr(verdicts, "run_evaluation", run)
    monkeypatch.setattr(verdicts, "make_canary_script", canary)
    return seen


@pytest.mark.parametrize("end", [LOST, OUT_OF_MEMORY, LATE], ids=["lost", "host out of memory", "hangs"])
@pytest.mark.parametrize(
    ("control", "patch"), [(verdicts.canary_control, b"p"), (verdicts.without_source_control, PATCH)]
)
async def test_a_patch_that_ends_a_control_twice_prevents_it(
    control: Any, patch: bytes, end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails, passes = ended("FAILED"), ended("PASSED")
    gold = fails if control is verdicts.canary_control else passes
    seen = evaluations(monkeypatch, patch=[end], gold=[gold], unpatched=[fails])
    result = await control(SITE, ROW, patch)
    assert result.finding is not None and result.finding.kind == "control_prevented"
    assert seen.count("patch") == 2
    evaluations(monkeypatch, patch=[end, fails], gold=[gold], unpatched=[fails])
    assert (await control(SITE, ROW, patch)).conclusion == "clean"


@pytest.mark.parametrize(
    ("control", "patch"), [(verdicts.canary_control, b"p"), (verdicts.without_source_control, PATCH)]
)
async def test_a_control_is_no_evidence_where_gold_loses_its_box_too(
    control: Any, patch: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluations(monkeypatch, patch=[LOST], gold=[LOST], unpatched=[ended("FAILED")])
    with pytest.raises(SandboxLostError):
        await control(SITE, ROW, patch)


async def test_configuration_is_not_blamed_for_tests_that_do_not_end_without_it_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evaluations(monkeypatch, patch=[LATE], gold=[ended("PASSED")], unpatched=[LATE])
    result = await verdicts.without_source_control(SITE, ROW, PATCH)
    assert result is not None and result.finding is None and result.inconclusive
    evaluations(monkeypatch, patch=[LATE], gold=[LATE], unpatched=[LATE])
    with pytest.raises(VerifierError):
        await verdicts.without_source_control(SITE, ROW, PATCH)


@pytest.mark.parametrize("late", [LATE, LOST, replace(ended("PASSED"), log="x" * (MAX_GRADED_CHARS + 1))])
async def test_tests_that_pass_without_any_patch_are_not_blamed_on_one_whose_comparison_broke_off(
    late: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = ended("PASSED")
    evaluations(monkeypatch, patch=[passes], gold=[passes], unpatched=[late, passes])
    result = await verdicts.without_source_control(SITE, ROW, PATCH)
    assert result is not None and result.conclusion == "clean"
    evaluations(monkeypatch, patch=[passes], gold=[LATE], unpatched=[late])
    with pytest.raises(VerifierError) as raised:
        await verdicts.without_source_control(SITE, ROW, PATCH)
    assert raised.value.details["kind"] is FailureKind.CONTROL_RUN_FAILED


async def test_configuration_that_makes_tests_pass_is_found_where_the_pristine_tree_never_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes = ended("PASSED")
    evaluations(monkeypatch, patch=[passes], gold=[passes], unpatched=[LATE])
    result = await verdicts.without_source_control(SITE, ROW, PATCH)
    assert result is not None and result.finding is not None
    assert result.finding.kind == "passed_without_source_change"


def recording(*tests: str, checks: int = 2) -> RowControls:
    """Controls with one rendering that leaves this many records in each of the tests."""
    made = {
        test: ((Check("begins", "begin"), *(Check("looks", "value") for _ in range(1, checks))),) for test in tests
    }
    return RowControls("i", "", (ControlledRendering(Rendering({}, "/var/tmp/r"), made),))


@pytest.mark.parametrize(
    ("controls", "ids", "left_out"),
    [
        (recording("t.py|test:T.test_a", "t.py|test:test_b"), ["t.py::T::test_a[1]", "t.py::test_b"], False),
        (recording("t.py|test:T.test_a"), ["t.py::T::test_a", "t.py::test_b"], True),
        (recording("t.py|test:T.test_a"), ["t.py::T::test_a", "t.py::U::test_a"], True),
        (recording("t.py|test:T.test_a"), ["t.py::test_a"], True),
        (recording("t.py|test:T.test_a"), ["test_a (t.U.test_a)"], True),
        (recording("t.py|test:T.test_a"), ["test_a"], False),
        (recording("t.py|test:test_a", "u.py|test:test_b"), ["t.py::test_b"], True),
        (recording("t.py|test:test_a", checks=1), ["t.py::test_a"], True),
        (recording("t.py|test:test_a"), ["Does what it says."], True),
        (recording("p/t.py|test:T.test_a"), ["test_a (p.t.T)"], False),
        (recording("t.test.js|test:adds > one"), ["adds one", "adds two"], False),
        (recording(), [], False),
    ],
)
def test_kept_test_is_left_out_unless_a_rendering_records_a_value_in_it(
    controls: RowControls, ids: list[str], left_out: bool
) -> None:
    assert controls.leaves_out(ids) is left_out


STRONG = replace(CONTROLS, tests={"": ControlledTest(ROW.fail_to_pass, True, "strong")})


async def verdict_of(
    monkeypatch: pytest.MonkeyPatch, patch: bytes = b"diff --git a/x.py b/x.py\n", controls: RowControls = STRONG
) -> Any:
    async def run(*_: Any, **__: Any) -> Recorded:
        return Recorded(True, records=("",))

    monkeypatch.setattr(verdicts, "run_renderings", run)
    judgement = await verdicts.judge(SITE, ROW, Artifact.of("patch", "git_diff", patch), controls)
    return judgement.verdict


async def test_kept_tests_at_which_no_rendering_looks_are_made_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, fails = ended("PASSED"), ended("FAILED")
    evaluations(monkeypatch, patch=[passes], gold=[fails])
    verdict = await verdict_of(monkeypatch)
    assert [finding.kind for finding in verdict.findings] == ["verdict_not_caused_by_tests"]
    evaluations(monkeypatch, patch=[passes, fails], gold=[fails])
    assert (await verdict_of(monkeypatch)).reward == 1.0


SCRATCH = b"""\
diff --git a/reproduce.py b/reproduce.py
new file mode 100644
--- /dev/null
+++ b/reproduce.py
@@ -0,0 +1 @@
+import unittest
"""


async def test_script_that_an_agent_left_costs_nothing_if_the_rest_earns_the_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weak = replace(STRONG, tests={"": ControlledTest(ROW.fail_to_pass, True, "weak")})
    passes, fails = ended("PASSED"), ended("FAILED")
    seen = evaluations(monkeypatch, patch=[passes, fails], gold=[passes, fails])
    verdict = await verdict_of(monkeypatch, SCRATCH + ROW.gold, weak)
    assert (verdict.reward, verdict.findings, verdict.details["judged_without"]) == (1.0, [], ["reproduce.py"])
    assert seen.count("gold") > 1
    evaluations(monkeypatch, patch=[passes, fails], gold=[fails])
    verdict = await verdict_of(monkeypatch, SCRATCH + ROW.gold, weak)
    assert (verdict.reward, [one.kind for one in verdict.findings]) == (0.0, ["looks_at_the_grader"])


async def test_no_patch_earns_nothing_also_if_the_tests_pass_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluations(monkeypatch, unpatched=[ended("PASSED")])
    verdict = await verdict_of(monkeypatch, b"")
    assert (verdict.reward, verdict.official["resolved"]) == (0.0, True)
    assert verdict.reward_reason == "no patch, although the tests pass without one"


async def test_rewritten_test_that_passes_with_gold_too_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluations(monkeypatch, patch=[ended("PASSED")], gold=[ended("PASSED")])
    result = await verdicts.canary_control(SITE, ROW, b"p")
    assert result.finding is None and result.inconclusive


KEPT = ROW.pass_to_pass[-1]
FAILS_KEPT = replace(ended("PASSED"), log=ended("PASSED").log.replace(f"PASSED {KEPT}\n", f"FAILED {KEPT}\n"))


@pytest.mark.parametrize(
    ("alone", "whole", "gold", "conclusion"),
    [
        ([ended("FAILED")], [ended("PASSED")], [ended("PASSED")], "finding"),
        ([FAILS_KEPT], [ended("PASSED")], [ended("PASSED")], "finding"),
        ([FAILS_KEPT, ended("PASSED")], [], [], "clean"),
        ([FAILS_KEPT], [FAILS_KEPT], [ended("PASSED")], "inconclusive"),
        ([FAILS_KEPT], [ended("PASSED")], [ended("PASSED"), FAILS_KEPT], "inconclusive"),
        ([ended("ERROR")], [ended("PASSED")], [ended("PASSED")], "inconclusive"),
        ([LATE], [ended("PASSED")], [ended("PASSED")], "inconclusive"),
    ],
)
async def test_kept_tests_that_pass_only_with_the_patchs_configuration_are_found(
    alone: list[End], whole: list[End], gold: list[End], conclusion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluations(monkeypatch, patch=alone, whole=whole, gold=gold)
    result = await verdicts.kept_control(SITE, ROW, WHOLE)
    assert result is not None and result.conclusion.startswith(conclusion)


async def test_patch_without_code_that_decides_how_tests_run_is_not_run_without_it() -> None:
    assert await verdicts.kept_control(SITE, ROW, b"diff --git a/x.py b/x.py\n") is None


async def test_canary_is_no_evidence_where_gold_does_not_end_on_a_busy_host(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = ended("PASSED")
    evaluations(monkeypatch, patch=[passes], gold=[LATE, passes])
    assert (await verdicts.canary_control(SITE, ROW, b"p")).conclusion.startswith("inconclusive")
    evaluations(monkeypatch, patch=[passes], gold=[LATE, ended("FAILED")])
    assert (await verdicts.canary_control(SITE, ROW, b"p")).conclusion == "finding"
    evaluations(monkeypatch, patch=[passes], gold=[LATE])
    with pytest.raises(VerifierError) as raised:
        await verdicts.canary_control(SITE, ROW, b"p")
    assert raised.value.retryable and raised.value.details["kind"] is FailureKind.CONTROL_RUN_FAILED


async def test_patch_whose_tests_were_killed_once_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    killed, passes, fails = replace(LATE, outcome=ExecOutcome.SIGNALED), ended("PASSED"), ended("FAILED")
    # After the official runs come the canary's: it passes nothing, so gold's is not needed.
    evaluations(monkeypatch, patch=[killed, passes, fails], gold=[passes])
    assert (await verdict_of(monkeypatch)).reward == 1.0
    seen = evaluations(monkeypatch, patch=[killed], gold=[passes])
    assert (await verdict_of(monkeypatch)).reward == 0.0
    assert seen == ["patch", "gold", "patch"]
    evaluations(monkeypatch, patch=[killed, LOST], gold=[passes])
    assert (await verdict_of(monkeypatch)).reward == 0.0


async def test_kept_tests_that_a_patch_expects_to_fail_are_skipped_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"PASS_TO_PASS": {"success": list(ROW.pass_to_pass)}}
    states = dict.fromkeys(ROW.pass_to_pass, "XFAIL")
    official = LogGrade(True, True, MarkerState.GENUINE, report={"tests_status": kept}, status_map=states)
    evaluations(monkeypatch, unpatched=[ended("PASSED")])
    result = await verdicts.skipped_control(SITE, ROW, official)
    assert result is not None and result.finding is not None
    evaluations(monkeypatch, unpatched=[ended("XFAIL")])
    result = await verdicts.skipped_control(SITE, ROW, official)
    assert result is not None and result.finding is None


@pytest.mark.parametrize("outcome", [ExecOutcome.TIMED_OUT, ExecOutcome.SIGNALED])
async def test_official_run_that_was_broken_off_is_no_verdict_where_gold_is_too(
    outcome: ExecOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = EvalRun(applied=True, apply_log="", outcome=outcome)
    evaluations(monkeypatch, patch=[broken], gold=[broken])
    with pytest.raises(VerifierError) as raised:
        await verdict_of(monkeypatch)
    assert raised.value.details["kind"] is FailureKind.CONTROL_RUN_FAILED
    evaluations(monkeypatch, patch=[broken], gold=[ended("PASSED")])
    assert (await verdict_of(monkeypatch)).reward == 0.0


@pytest.mark.parametrize("outcome", [ExecOutcome.TIMED_OUT, ExecOutcome.SIGNALED, ExecOutcome.OUT_OF_MEMORY])
async def test_patch_whose_application_is_cut_off_is_not_said_to_be_refused(outcome: ExecOutcome) -> None:
    async def run(*_: Any, **__: Any) -> SandboxExecResult:
        return SandboxExecResult(outcome=outcome)

    limits = SandboxResources(memory_mib=1)
    capabilities = SimpleNamespace(limits=lambda _: limits)
    site = EvalSite(cast(SandboxProvider, SimpleNamespace(exec=run, capabilities=capabilities)), "image")
    with pytest.raises(VerifierError) as raised:
        await apply_patch(site, cast(SandboxHandle, SimpleNamespace(sandbox_id="b")), b"p")
    assert patch_may_be_the_cause(raised.value)


async def test_log_that_a_busy_host_left_unread_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    unread = [LogGrade(False, False, MarkerState.UNREAD, unread="it took too long")]

    async def graded(row: SweBenchRow, log: str) -> tuple[LogGrade, bool]:
        return (unread.pop(), False) if unread else await read_again(row, log)

    monkeypatch.setattr(verdicts, "graded", graded)
    evaluations(monkeypatch, patch=[ended("PASSED"), ended("FAILED")], gold=[ended("PASSED")])
    assert (await verdict_of(monkeypatch)).reward == 1.0
