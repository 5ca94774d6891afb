"""One evaluation in a fresh box: apply a patch as data, run the row's evaluation script, keep what it printed.

The steps are the official harness's: four ways to apply, from strict to lenient, on a clean tree each time; then the
script, which puts the row's own test files in place last. Nothing from an earlier box is used but the patch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from nemo_gym.errors import SandboxLostError, VerifierError
from nemo_gym.sandbox.archive import END_OF_ARCHIVE, pack_bytes
from nemo_gym.sandbox.base import (
    ExecOutcome,
    NetworkPolicy,
    SandboxExecResult,
    SandboxHandle,
    SandboxProvider,
    SandboxResources,
    SandboxSpec,
)
from nemo_gym.sandbox.facade import AsyncSandbox, keep_renewed
from nemo_gym.verdict import FailureKind
from resources_servers.swe_bench import harness

TESTBED = "/testbed"
INPUTS = "/var/tmp/ng-eval"
APPLY_COMMANDS = (
    ("git", "apply", "--verbose"),
    ("git", "apply", "--verbose", "--3way"),
    ("git", "apply", "--verbose", "--reject"),
    ("patch", "--batch", "--forward", "--fuzz=5", "-p1", "-i"),
)
APPLY_TIMEOUT_S = 300.0
MAX_LOG_BYTES = 64 * 1024 * 1024
_EXIT_VARIABLE = "SWEBENCH_TEST_EXIT_CODE"


@dataclass(frozen=True)
class EvalSite:
    """Where evaluations of one row happen."""

    provider: SandboxProvider
    image: str
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: SandboxResources = field(default_factory=SandboxResources)
    provider_options: Mapping[str, object] = field(default_factory=dict)
    timeout_s: float = 1800.0
    """Seconds the evaluation script may take."""
    lease_s: float = 120.0
    """How long a box outlives its owner when that is killed."""


@dataclass(frozen=True)
class EvalRun:
    """What one evaluation did."""

    applied: bool
    apply_log: str
    """What the last way of applying said."""
    log: str = ""
    """The script's output, standard error merged in."""
    outcome: ExecOutcome = ExecOutcome.EXITED
    test_exit_code: int | None = None
    """Of the test command, as the script's shell saw it; not taken from the log."""
    log_truncated: bool = False
    duration_s: float = 0.0


async def run_evaluation(site: EvalSite, eval_script: str, patch: bytes) -> EvalRun:
    """Evaluate ``patch`` in a box made for it and destroyed after it.

    What the patch causes (it does not apply, the tests hang or eat all memory) is in the result.

    Raises:
        SandboxError: the provider failed.
        VerifierError: an exec was lost, or this host ran out of memory; ``details['kind']`` says which.
    """
    async with evaluation_box(site) as handle:
        inputs = {"patch.diff": patch, "eval.sh": instrumented(eval_script).encode("utf-8", "surrogateescape")}
        await site.provider.put_archive(handle, INPUTS, archive_of(inputs))
        applied, apply_log = await apply_patch(site, handle, patch)
        if not applied:
            return EvalRun(applied=False, apply_log=apply_log)
        started = time.monotonic()
        result = await exec_in(
            site,
            handle,
            ["/bin/bash", f"{INPUTS}/eval.sh"],
            timeout_s=site.timeout_s,
            max_output_bytes=MAX_LOG_BYTES,
        )
        log = result.stdout_bytes.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
        return EvalRun(
            applied=True,
            apply_log=apply_log,
            log=log,
            outcome=result.outcome,
            test_exit_code=_exit_code(result),
            log_truncated=result.stdout_truncated,
            duration_s=round(time.monotonic() - started, 3),
        )


def split_script(eval_script: str) -> tuple[str, str, str]:
    """The script before its start marker, the test command between the markers, and the rest, markers left out.

    Raises:
        VerifierError: the script does not have both markers, each once on a line of its own.
    """
    module = harness.grading()
    lines = eval_script.split("\n")
    starts = [number for number, line in enumerate(lines) if module.START_TEST_OUTPUT in line]
    ends = [number for number, line in enumerate(lines) if module.END_TEST_OUTPUT in line]
    if len(starts) != 1 or len(ends) != 1 or starts[0] > ends[0]:
        raise VerifierError("the row's eval_script does not print its start and end markers once each")
    start, end = starts[0], ends[0]
    return "\n".join(lines[:start]), "\n".join(lines[start + 1 : end]), "\n".join(lines[end + 1 :])


def instrumented(eval_script: str) -> str:
    """The script with the test command's exit code recorded as the official harness records it, and returned as the
    script's own, where graded code cannot print over it."""
    module = harness.grading()
    split_script(eval_script)
    lines: list[str] = []
    for line in eval_script.split("\n"):
        if module.END_TEST_OUTPUT in line:
            lines += [f"{_EXIT_VARIABLE}=$?", line, f'echo "{module.TEST_EXIT_CODE}: ${_EXIT_VARIABLE}"']
            continue
        lines.append(line)
    return "\n".join(lines).rstrip("\n") + f"\nexit ${_EXIT_VARIABLE}\n"


async def apply_patch(site: EvalSite, handle: SandboxHandle, patch: bytes) -> tuple[bool, str]:
    if not patch.strip():
        return True, ""
    said = ""
    for attempt, command in enumerate(APPLY_COMMANDS):
        if attempt:
            # A failed way, notably --reject, leaves part of the patch behind.
            await exec_in(site, handle, "git checkout -- . ; git clean -fd", timeout_s=APPLY_TIMEOUT_S)
        result = await exec_in(site, handle, [*command, f"{INPUTS}/patch.diff"], timeout_s=APPLY_TIMEOUT_S)
        said = result.stdout_bytes[-4000:].decode("utf-8", "replace")
        if result.ok:
            return True, said
    check = ["git", "apply", "--check", "--reverse", f"{INPUTS}/patch.diff"]
    return (await exec_in(site, handle, check, timeout_s=APPLY_TIMEOUT_S)).ok, said


async def exec_in(
    site: EvalSite,
    handle: SandboxHandle,
    command: str | list[str],
    *,
    timeout_s: float,
    stdin: bytes | None = None,
    max_output_bytes: int = 1024 * 1024,
) -> SandboxExecResult:
    result = await site.provider.exec(
        handle,
        command,
        cwd=TESTBED,
        timeout_s=timeout_s,
        stdin=stdin,
        merge_stderr=True,
        max_output_bytes=max_output_bytes,
    )
    if result.outcome is ExecOutcome.LOST:
        raise VerifierError(f"evaluation box {handle.sandbox_id} was lost", retryable=True, kind=FailureKind.EXEC_LOST)
    if result.outcome is ExecOutcome.OUT_OF_MEMORY and site.resources.memory_mib is None:
        # Without a limit of its own the box was killed for the whole host's want, which others may have caused.
        raise VerifierError(
            "the host ran out of memory during an evaluation; set a memory limit for evaluation boxes",
            retryable=True,
            kind=FailureKind.HOST_OUT_OF_MEMORY,
        )
    return result


def patch_may_be_the_cause(error: SandboxLostError | VerifierError) -> bool:
    """A patch can end its box, and without a limit of its own it can use up the host's memory."""
    kinds = (FailureKind.EXEC_LOST, FailureKind.HOST_OUT_OF_MEMORY)
    return isinstance(error, SandboxLostError) or error.details.get("kind") in kinds


@contextlib.asynccontextmanager
async def evaluation_box(site: EvalSite) -> AsyncIterator[SandboxHandle]:
    """A fresh box, destroyed when the block ends, also by cancellation."""
    spec = SandboxSpec(
        image=site.image,
        ttl_s=site.lease_s,
        workdir=TESTBED,
        env=dict(site.env),
        resources=site.resources,
        provider_options=dict(site.provider_options),
        network=NetworkPolicy.NONE,
        metadata=dict(site.labels),
    )
    async with AsyncSandbox(site.provider, spec) as sandbox, keep_renewed(site.provider, sandbox.handle, site.lease_s):
        yield sandbox.handle


def _exit_code(result: SandboxExecResult) -> int | None:
    return result.return_code if result.outcome is ExecOutcome.EXITED else None


async def archive_of(files: Mapping[str, bytes]) -> AsyncIterator[bytes]:
    for name, content in files.items():
        yield pack_bytes(name, content)[: -len(END_OF_ARCHIVE)]
    yield END_OF_ARCHIVE
