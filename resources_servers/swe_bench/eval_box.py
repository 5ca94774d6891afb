"""One evaluation in a fresh box: apply a patch as data, run the row's evaluation script, keep what it printed.

The steps are the official harness's: four ways to apply, from strict to lenient, on a clean tree each time; then the
script, which puts the row's own test files in place last. Nothing from an earlier box is used but the patch.

In between stands a check of ours: what changed in the tree is what the patch names, and nothing in ``.git``. Programs
that apply patches disagree about what a patch is, and everything that judges one reads the names in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import shlex
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from nemo_gym.contract.errors import SandboxLostError, VerifierError
from nemo_gym.contract.sandbox import NetworkPolicy, SandboxResources, SandboxSpec
from nemo_gym.contract.verdict import FailureKind, Finding
from nemo_gym.sandbox.archive import END_OF_ARCHIVE, pack_bytes
from nemo_gym.sandbox.base import ExecOutcome, SandboxExecResult, SandboxHandle, SandboxProvider
from nemo_gym.sandbox.facade import AsyncSandbox, keep_renewed
from resources_servers.swe_bench import grading
from resources_servers.swe_bench.signs import finding_in_tree

TESTBED = "/testbed"
INPUTS = "/var/tmp/ng-eval"
APPLY_COMMANDS = (
    ("git", "apply", "--verbose"),
    ("git", "apply", "--verbose", "--3way"),
    ("git", "apply", "--verbose", "--reject"),
    ("patch", "--batch", "--forward", "--fuzz=5", "-p1", "-i"),
)
APPLY_TIMEOUT_S = 600.0
"""For all four ways together."""
MAX_LIST_BYTES = 64 * 1024 * 1024
MAX_LOG_BYTES = 64 * 1024 * 1024
_EXIT_VARIABLE = "SWEBENCH_TEST_EXIT_CODE"
_THREE_WAY = 1
_CANNOT_LOOK = 97

_WAYS = " ||\n".join(f"try {number} {shlex.join(way)}" for number, way in enumerate(APPLY_COMMANDS))
# One command, so that it costs one exec. A change of a file changes its ctime, which no patch can set; directories are
# there or not. Names go first: "//" is in no path. Programs are looked up before a patch can offer others.
_APPLY_SCRIPT = f"""
export LC_ALL=C
cd {INPUTS} && hash git find sort comm cat tail || exit {_CANNOT_LOOK}
hash patch 2> /dev/null
look() {{
  find {TESTBED} -mindepth 1 \\( -type d -printf './%P//d %m\\0' -o -printf './%P//%y %m %s %C@ %T@ %l\\0' \\) |
    sort -z > "$1"
  [ "${{PIPESTATUS[*]}}" = '0 0' ] || exit {_CANNOT_LOOK}
}}
safely() {{ git -c core.fsmonitor= -c core.hooksPath=/dev/null "$@"; }}
again() {{ git checkout -- . ; git clean -fd; }}
try() {{
  [ "$1" = 0 ] || again > /dev/null 2>&1  # a failed way, notably --reject, leaves part of the patch behind
  look {INPUTS}/before
  way=$1; shift
  "$@" {INPUTS}/patch.diff > {INPUTS}/said 2>&1
}}
cd {TESTBED} || exit {_CANNOT_LOOK}
safely apply --numstat -z {INPUTS}/patch.diff > {INPUTS}/listed 2> /dev/null || printf '/\\0' > {INPUTS}/listed
{{
{_WAYS} ||
safely apply --check --reverse {INPUTS}/patch.diff > /dev/null 2>&1
}} || way=
look {INPUTS}/after
tail -c 4000 {INPUTS}/said; printf %s "$1$way$1"
cat {INPUTS}/listed; printf %s "$1"
[ -z "$way" ] || comm -z -3 {INPUTS}/before {INPUTS}/after
"""


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
    changed_paths: tuple[str, ...] = ()
    """Files that applying the patch made, changed or removed, those in ``.git`` included."""
    refusal: Finding | None = None
    """Why the patch was applied and its tests were not run: it does other than it says."""


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
        run = await apply_patch(site, handle, patch)
        if not run.applied or run.refusal is not None:
            return run
        started = time.monotonic()
        result = await exec_in(
            site,
            handle,
            ["/bin/bash", f"{INPUTS}/eval.sh"],
            timeout_s=site.timeout_s,
            max_output_bytes=MAX_LOG_BYTES,
        )
        log = result.stdout_bytes.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
        return dataclasses.replace(
            run,
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
    module = grading.grading()
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
    module = grading.grading()
    split_script(eval_script)
    first, *rest = eval_script.split("\n")
    # The shell has the script open. What the grader put there is nothing for tests to find, or to tell runs apart by.
    lines = [first, f"rm -rf {INPUTS}"]
    for line in rest:
        if module.END_TEST_OUTPUT in line:
            lines += [f"{_EXIT_VARIABLE}=$?", line, f'echo "{module.TEST_EXIT_CODE}: ${_EXIT_VARIABLE}"']
            continue
        lines.append(line)
    return "\n".join(lines).rstrip("\n") + f"\nexit ${_EXIT_VARIABLE}\n"


async def apply_patch(site: EvalSite, handle: SandboxHandle, patch: bytes) -> EvalRun:
    """Apply ``patch``, which lies in the box, and compare what changed with what it names."""
    if not patch.strip():
        return EvalRun(applied=True, apply_log="")
    seam = secrets.token_hex(16)
    result = await exec_in(
        site,
        handle,
        ["/bin/bash", "-c", _APPLY_SCRIPT, "apply", seam],
        timeout_s=APPLY_TIMEOUT_S,
        max_output_bytes=MAX_LIST_BYTES,
    )
    if result.outcome is ExecOutcome.EXITED and result.return_code == _CANNOT_LOOK:
        complaint = result.stdout_bytes[-500:].decode("utf-8", "replace").strip()
        raise VerifierError(
            f"the evaluation box cannot apply patches: {complaint}; its image needs git, findutils, coreutils"
        )
    said, way, listed, changed = (*result.stdout_bytes.split(seam.encode()), b"", b"", b"")[:4]
    apply_log = said[-4000:].decode("utf-8", "replace")
    if not way or not result.ok or result.stdout_truncated:
        return EvalRun(applied=False, apply_log=apply_log)
    tree = _differences(changed)
    by_three_way = way == b"%d" % _THREE_WAY
    return EvalRun(
        applied=True,
        apply_log=apply_log,
        changed_paths=tuple(path for path, is_directory in tree.items() if not is_directory),
        refusal=await asyncio.to_thread(finding_in_tree, patch, tree, _listed(listed), by_three_way=by_three_way),
    )


def _differences(compared: bytes) -> dict[str, bool]:
    """Path → whether it is, or was, only a directory; of everything of which both looks at the tree do not say the
    same."""
    tree: dict[str, bool] = {}
    for record in compared.split(b"\0")[:-1]:
        name, _, facts = record.removeprefix(b"\t").partition(b"//")  # what the second look alone has is indented
        path = name.removeprefix(b"./").decode("utf-8", "surrogateescape")
        tree[path] = tree.get(path, True) and facts.startswith(b"d")
    return tree


def _listed(numstat: bytes) -> set[str] | None:
    """The paths that git reads in the patch; ``None`` where it reads no patch."""
    records = numstat.split(b"\0")
    if records[-2:] == [b"/", b""]:
        return None
    return {record.split(b"\t", 2)[2].decode("utf-8", "surrogateescape") for record in records if record}


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
    limits = site.provider.capabilities.limits(site.resources)
    if result.outcome is ExecOutcome.OUT_OF_MEMORY and limits.memory_mib is None:
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
