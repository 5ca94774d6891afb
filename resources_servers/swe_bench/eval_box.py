"""Runs one evaluation in a fresh box: applies a patch as data, runs the row's evaluation script and keeps its output.

The steps are the official harness's: four ways to apply the patch, from strict to lenient, each on a clean tree; then
the script, which puts the row's own test files in place last. Only the patch comes from an earlier box.

One check is added in between: the changed files must be those that the patch names, and none may be in ``.git``. This
matters because the checks of a patch read the names in it, and programs that apply patches may read it differently.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import secrets
import shlex
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from nemo_gym.contract.errors import SandboxArchiveError, SandboxLostError, VerifierError
from nemo_gym.contract.sandbox import NetworkPolicy, SandboxResources, SandboxSpec
from nemo_gym.contract.verdict import FailureKind, Finding
from nemo_gym.sandbox.archive import END_OF_ARCHIVE, pack_bytes
from nemo_gym.sandbox.base import ExecOutcome, SandboxExecResult, SandboxHandle, SandboxProvider
from nemo_gym.sandbox.facade import AsyncSandbox, keep_renewed
from nemo_gym.sandbox.tar_stream import ArchiveError, single_file
from resources_servers.swe_bench import grading
from resources_servers.swe_bench.row import TESTBED
from resources_servers.swe_bench.signs import finding_in_tree

INPUTS = "/var/tmp/ng-eval"
APPLY_COMMANDS = (
    ("git", "apply", "--verbose"),
    ("git", "apply", "--verbose", "--3way"),
    ("git", "apply", "--verbose", "--reject"),
    ("patch", "--batch", "--forward", "--fuzz=5", "-p1", "-i"),
)
APPLY_TIMEOUT_S = 600.0
"""The time limit for all four ways together."""
MAX_LIST_BYTES = 64 * 1024 * 1024
MAX_LOG_BYTES = 64 * 1024 * 1024
_EXIT_VARIABLE = "SWEBENCH_TEST_EXIT_CODE"
_THREE_WAY = 1
_CANNOT_LOOK = 97
_APPLY = re.compile(r"^git apply\b.*<<\s*(['\"]?)(?P<word>\w+)\1\s*$")

_WAYS = " ||\n".join(f"try {number} {shlex.join(way)}" for number, way in enumerate(APPLY_COMMANDS))
# This is one script, so that it costs one exec. Changing a file changes its ctime, which no patch can set; directories
# are compared without times. Each record starts with the path, which cannot contain "//". `hash` looks up all programs
# before a patch can add others of the same name.
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
    """Where and how evaluations of one row run."""

    provider: SandboxProvider
    image: str
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: SandboxResources = field(default_factory=SandboxResources)
    provider_options: Mapping[str, object] = field(default_factory=dict)
    timeout_s: float = 1800.0
    """The time limit of the evaluation script, in seconds."""
    lease_s: float = 120.0
    """How long a box lives after its owner was killed."""


@dataclass(frozen=True)
class EvalRun:
    """The result of one evaluation."""

    applied: bool
    apply_log: str
    """The output of the last way of applying that was tried."""
    log: str = ""
    """The script's output, including standard error."""
    outcome: ExecOutcome = ExecOutcome.EXITED
    test_exit_code: int | None = None
    """The exit code of the test command, from the script's exit code and not from the log."""
    log_truncated: bool = False
    duration_s: float = 0.0
    changed_paths: tuple[str, ...] = ()
    """The files that applying the patch created, changed or removed, including those in ``.git``."""
    refusal: Finding | None = None
    """Why the tests did not run although the patch applied: its changes contradict the paths it names."""


async def run_evaluation(site: EvalSite, eval_script: str, patch: bytes) -> EvalRun:
    """Evaluate ``patch`` in a box that is created for it and then destroyed.

    Failures that the patch causes (it does not apply, the tests hang or use up the memory) are in the result.

    Raises:
        SandboxError: the provider failed.
        VerifierError: an exec was lost, or this host ran out of memory, as given in ``details['kind']``.
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
        log = grading.log_text(result.stdout_bytes)
        return dataclasses.replace(
            run,
            log=log,
            outcome=result.outcome,
            test_exit_code=result.return_code if result.outcome is ExecOutcome.EXITED else None,
            log_truncated=result.stdout_truncated,
            duration_s=round(time.monotonic() - started, 3),
        )


def split_script(eval_script: str) -> tuple[str, str, str]:
    """Return the script before the start marker, the test command between the markers, and the rest, without markers.

    Raises:
        VerifierError: the script does not have each marker exactly once, start before end.
    """
    module = grading.grading()
    lines = eval_script.split("\n")
    starts = [number for number, line in enumerate(lines) if module.START_TEST_OUTPUT in line]
    ends = [number for number, line in enumerate(lines) if module.END_TEST_OUTPUT in line]
    if len(starts) != 1 or len(ends) != 1 or starts[0] > ends[0]:
        raise VerifierError("the row's eval_script does not print its start and end markers once each")
    start, end = starts[0], ends[0]
    return "\n".join(lines[:start]), "\n".join(lines[start + 1 : end]), "\n".join(lines[end + 1 :])


@dataclass(frozen=True)
class Steps:
    """The parts of an evaluation script that applies one test patch from a here-document."""

    before: str
    """The lines before the test patch."""
    patch_lines: slice
    """Where the test patch stands among the script's lines, without the lines of the here-document's ends."""
    test_patch: str
    after: str
    """The lines between the test patch and the start of the tests."""
    test_command: str

    @classmethod
    def of(cls, eval_script: str) -> Steps | None:
        """Return ``None`` for a script that does not apply exactly one test patch from a here-document."""
        preparation, command, _ = split_script(eval_script)
        lines = preparation.split("\n")
        places: list[tuple[int, int]] = []
        number = 0
        while number < len(lines):
            if match := _APPLY.match(lines[number]):
                end = next((n for n in range(number + 1, len(lines)) if lines[n] == match["word"]), None)
                if end is None:
                    return None
                places.append((number, end))
                number = end
            number += 1
        if len(places) != 1:
            return None
        start, end = places[0]
        return cls(
            before="\n".join(lines[:start]),
            patch_lines=slice(start + 1, end),
            test_patch="\n".join(lines[start + 1 : end]) + "\n",
            after="\n".join(lines[end + 1 :]),
            test_command=command,
        )


def instrumented(eval_script: str) -> str:
    """Return the script with the test command's exit code recorded as the official harness records it. The script also
    exits with that code, which graded code cannot forge by printing."""
    module = grading.grading()
    split_script(eval_script)
    first, *rest = eval_script.split("\n")
    # Delete the grader's files, so that tests cannot find them or tell runs apart. The shell keeps the script open, so
    # code can write to it below /proc. As one group, the script is read before any of it runs.
    lines = [first, f"{{ rm -rf {INPUTS}"]
    for line in rest:
        if module.END_TEST_OUTPUT in line:
            lines += [f"{_EXIT_VARIABLE}=$?", line, f'echo "{module.TEST_EXIT_CODE}: ${_EXIT_VARIABLE}"']
            continue
        lines.append(line)
    return "\n".join(lines).rstrip("\n") + f"\nexit ${_EXIT_VARIABLE}\n}}\n"


async def apply_patch(site: EvalSite, handle: SandboxHandle, patch: bytes) -> EvalRun:
    """Apply ``patch``, which is in the box already, and compare the changed files with those that it names.

    Raises:
        VerifierError: the box cannot apply patches, or applying was cut off (an exec that was lost).
    """
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
        error_text = result.stdout_bytes[-500:].decode("utf-8", "replace").strip()
        raise VerifierError(
            f"the evaluation box cannot apply patches: {error_text}; its image needs git, findutils, coreutils"
        )
    if result.outcome is not ExecOutcome.EXITED:
        # A patch that was harvested in this image applies to it, so the host may be to blame; gold tells.
        raise VerifierError(
            f"applying the patch ended by '{result.outcome}'", retryable=True, kind=FailureKind.EXEC_LOST
        )
    output, way, numstat, differences = (*result.stdout_bytes.split(seam.encode()), b"", b"", b"")[:4]
    apply_log = output[-4000:].decode("utf-8", "replace")
    if not way or not result.ok or result.stdout_truncated:
        return EvalRun(applied=False, apply_log=apply_log)
    tree = _differences(differences)
    by_three_way = way == b"%d" % _THREE_WAY
    return EvalRun(
        applied=True,
        apply_log=apply_log,
        changed_paths=tuple(path for path, is_directory in tree.items() if not is_directory),
        refusal=await asyncio.to_thread(finding_in_tree, patch, tree, _listed(numstat), by_three_way=by_three_way),
    )


def _differences(records: bytes) -> dict[str, bool]:
    """Return path → whether it is or was only a directory, for every path that differs between the two listings of the
    tree."""
    tree: dict[str, bool] = {}
    for record in records.split(b"\0")[:-1]:
        name, _, facts = record.removeprefix(b"\t").partition(b"//")  # `comm` indents lines of the second listing only
        path = name.removeprefix(b"./").decode("utf-8", "surrogateescape")
        tree[path] = tree.get(path, True) and facts.startswith(b"d")
    return tree


def _listed(numstat: bytes) -> set[str] | None:
    """Return the paths that git reads in the patch, or ``None`` if git cannot read it as a patch."""
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
        # The box has no memory limit of its own, so the host ran out of memory, which other processes may have caused.
        raise VerifierError(
            "the host ran out of memory during an evaluation; set a memory limit for evaluation boxes",
            retryable=True,
            kind=FailureKind.HOST_OUT_OF_MEMORY,
        )
    return result


def patch_may_be_the_cause(error: SandboxLostError | VerifierError) -> bool:
    """Whether the patch may have caused ``error``: it can kill its box or, without a limit, use up all host memory."""
    kinds = (FailureKind.EXEC_LOST, FailureKind.HOST_OUT_OF_MEMORY)
    return isinstance(error, SandboxLostError) or error.details.get("kind") in kinds


@contextlib.asynccontextmanager
async def evaluation_box(site: EvalSite) -> AsyncIterator[SandboxHandle]:
    """Provide a fresh box, which is destroyed when the block ends, even by cancellation."""
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


async def read_file(site: EvalSite, handle: SandboxHandle, path: str, *, max_bytes: int | None = None) -> bytes | None:
    """Return the content of a file in the box, or ``None`` if it is missing, too large, a link, or a directory."""
    try:
        stream = site.provider.get_archive(handle, path, max_bytes=max_bytes)
        return b"".join([piece async for piece in single_file(stream)])
    except (ArchiveError, SandboxArchiveError):
        return None


async def archive_of(files: Mapping[str, bytes]) -> AsyncIterator[bytes]:
    for name, content in files.items():
        yield pack_bytes(name, content)[: -len(END_OF_ARCHIVE)]
    yield END_OF_ARCHIVE
