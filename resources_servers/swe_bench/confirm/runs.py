"""Runs renderings and compares their records with the expected records.

A rendering runs the row's own steps, with rendered test files in place of the test patch. The code under test can
write the file of records and controls the values in it, so they are compared in a process that is killed when it takes
too long.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import tarfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from nemo_gym.environment.worker_pool import Ending, WorkerPool
from nemo_gym.sandbox.base import ExecOutcome, SandboxHandle
from resources_servers.swe_bench.confirm.values import Check, Record, is_value
from resources_servers.swe_bench.eval_box import (
    APPLY_TIMEOUT_S,
    INPUTS,
    EvalSite,
    Steps,
    apply_patch,
    archive_of,
    evaluation_box,
    exec_in,
    read_file,
)
from resources_servers.swe_bench.row import TESTBED, SweBenchRow

MAX_RECORD_BYTES = 16 * 1024 * 1024
_STATE = f"{INPUTS}/state"
# Each exec has variables of its own, such as the mark by which a provider finds its processes: NEMO_GYM_*. Options
# come last, because they may trace what follows or make its errors fatal.
_KEEP_STATE = f"""
mkdir -p {INPUTS}
( unset ${{!NEMO_GYM_@}}; shopt -p; declare -p; declare -fp; umask -p; set +o ) > {_STATE}
"""
# Standard error is dropped because `declare` complains about variables that belong to the shell itself.
_TAKE_STATE = """
set -- "$(head -c {size})"
for name in $(compgen -e); do [[ $name == NEMO_GYM_* ]] || unset "$name"; done; unset name
eval "$1" 2> /dev/null; set --
"""


@dataclass(frozen=True)
class Rendering:
    """One rendering of a row's tests, as it goes into the box."""

    files: Mapping[str, str]
    """Path in the repository → text."""
    records: str
    """The file in the box that receives the records."""
    plain: str = ""
    """The file to run as a program in place of the row's test command; empty to run the test command."""
    module: str = ""
    """The name of that file as a module of a package; empty to run it as a separate program."""
    beside: str = ""
    """The directory of tests that the plain file imports from. The file runs in a copy of another name, because a
    package that is called like the tests would look like a test run. The copy is the file's directory or above it."""
    printed: bool = False
    """Whether the output of the test command is taken as the records."""
    instead: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """File that the test command names → the files that replace it in the command."""

    def command(self, test_command: str) -> str:
        for path, files in self.instead.items():
            test_command = word_in_command(path).sub(lambda _, files=files: shlex.join(files), test_command)  # type: ignore[misc]
        if self.printed:
            return f"{{\n{test_command}\n}} > {self.records} 2>&1"
        if not self.plain:
            return test_command
        interpreter = "python" if self.plain.endswith(".py") else "node"
        program = ["-c", f"import {self.module}"] if self.module else [self.plain]
        command = f"env -u PYTEST_CURRENT_TEST -u PYTEST_ADDOPTS {interpreter} {shlex.join(program)}"
        if not self.beside:
            return command
        return f"cp -R {shlex.quote(self.beside)}/. {shlex.quote(self.copy)}\n{command}"

    @property
    def copy(self) -> str:
        """The directory that receives a copy of ``beside``."""
        return "/".join(self.plain.split("/")[: self.beside.count("/") + 1]) if self.beside else ""


def word_in_command(word: str) -> re.Pattern[str]:
    """Return a pattern that finds ``word`` as a whole word of a command."""
    return re.compile(rf"(?<!\S){re.escape(word)}(?!\S)")


@dataclass(frozen=True)
class Recorded:
    """The records of the renderings of one run, in the order in which they ran."""

    applied: bool
    outcome: ExecOutcome = ExecOutcome.EXITED
    records: tuple[str, ...] = ()
    """For each rendering the contents of its file of records; empty texts if the patch does not apply. The code under
    test may have written any of it."""
    log: str = ""
    duration_s: float = 0.0


async def run_renderings(
    site: EvalSite,
    row: SweBenchRow,
    patch: bytes,
    renderings: Sequence[Rendering],
    *,
    support: Mapping[str, bytes] | None = None,
) -> Recorded:
    """Run renderings one after the other in a new box, with ``patch`` applied.

    Nothing of a rendering is in the box before its turn, and its records are read before the next one's.

    Args:
        support: other files of the test patch that the renderings need.

    Raises:
        SandboxError: the provider failed.
        VerifierError: an exec was lost, or this host ran out of memory.
    """
    steps = Steps.of(row.eval_script)
    assert steps is not None
    started = time.monotonic()
    logs: list[bytes] = []
    records: list[str] = []
    async with evaluation_box(site) as handle:
        inputs = {"patch.diff": patch, "run.sh": _preparation(steps).encode("utf-8", "surrogateescape")}
        await site.provider.put_archive(handle, INPUTS, archive_of(inputs))
        applied = await apply_patch(site, handle, patch)
        if not applied.applied or applied.refusal is not None:
            nothing = ("",) * len(renderings)
            return Recorded(False, records=nothing, log=applied.apply_log, duration_s=time.monotonic() - started)
        deadline = time.monotonic() + site.timeout_s

        async def run(*arguments: str, stdin: bytes | None = None) -> ExecOutcome:
            result = await exec_in(
                site,
                handle,
                ["/bin/bash", *arguments],
                timeout_s=max(deadline - time.monotonic(), 0.001),
                stdin=stdin,
                max_output_bytes=1024 * 1024,
            )
            logs.append(result.stdout_bytes)
            return result.outcome

        outcome = await run(f"{INPUTS}/run.sh")
        state = await read_file(site, handle, _STATE, max_bytes=MAX_RECORD_BYTES)
        earlier_files: set[str] = set()
        for number, rendering in enumerate(renderings):
            if outcome is not ExecOutcome.EXITED or not state:  # without a state, the steps before the tests broke off
                break
            # An earlier rendering's file that this one does not have must not exist now.
            leftovers = earlier_files - {*rendering.files}
            earlier_files |= {*rendering.files, rendering.copy} - {""}
            script = _turn(rendering, rendering.command(steps.test_command), leftovers, len(state))
            script_bytes = script.encode("utf-8", "surrogateescape")
            archive = _tar({**(support or {}), **_bytes(rendering.files)}, number)
            # The script is input, because it may be longer than an argument.
            read_script = f'eval "$(head -c {len(script_bytes)})"'
            outcome = await run("-c", read_script, f"{INPUTS}/run.sh", stdin=script_bytes + state + archive)
            if outcome is ExecOutcome.EXITED:
                records.append(await fetch_records(site, handle, rendering.records))
    records += [""] * (len(renderings) - len(records))
    log = b"".join(logs).decode("utf-8", "replace")
    return Recorded(True, outcome, tuple(records), log, round(time.monotonic() - started, 3))


@dataclass(frozen=True)
class Pristine:
    """The files from which the controls of a row are made."""

    sources: Mapping[str, bytes | None]
    """Path → content of a test file after the row's own steps; ``None`` if the file does not exist."""
    product: bytes
    """Every other file that git tracks, as a tar archive."""


async def read_pristine(
    site: EvalSite, row: SweBenchRow, paths: Sequence[str], is_product: Callable[[str], bool]
) -> Pristine:
    """Read the tree and the test files in a box without any patch. As in the official script, a failed step does not
    stop the others.

    Raises:
        SandboxError, VerifierError: the pristine box failed.
    """
    steps = Steps.of(row.eval_script)
    assert steps is not None
    async with evaluation_box(site) as handle:
        inputs = {"test.diff": steps.test_patch.encode("utf-8", "surrogateescape")}
        await site.provider.put_archive(handle, INPUTS, archive_of(inputs))
        tracked = await exec_in(
            site, handle, ["git", "ls-files", "-z"], timeout_s=APPLY_TIMEOUT_S, max_output_bytes=32 * 1024 * 1024
        )
        names = [name for name in tracked.stdout_bytes.decode("utf-8", "surrogateescape").split("\0") if name]
        product_names = "\0".join(name for name in names if is_product(name)).encode("utf-8", "surrogateescape")
        pack = ["tar", "-cf", f"{INPUTS}/product.tar", "--null", "-T", "-"]
        await exec_in(site, handle, pack, timeout_s=APPLY_TIMEOUT_S, stdin=product_names)
        product = await read_file(site, handle, f"{INPUTS}/product.tar") or b""
        checkout = [line for line in steps.before.split("\n") if line.startswith("git checkout")]
        script = "\n".join([*checkout, f"git apply -v {INPUTS}/test.diff"])
        await exec_in(site, handle, ["/bin/bash", "-c", script], timeout_s=APPLY_TIMEOUT_S)
        sources = {path: await read_file(site, handle, f"{TESTBED}/{path}") for path in paths}
    return Pristine(sources, product)


def _preparation(steps: Steps) -> str:
    """Return the script of the steps before the tests, which keeps its shell's state for the renderings."""
    first, *rest = steps.before.split("\n")
    # Neither the installation nor the tests shall find the inputs. The shell keeps the script open.
    return "\n".join([first, f"rm -rf {INPUTS}", *rest, steps.after, _KEEP_STATE, "exit 0", ""])


def _turn(rendering: Rendering, command: str, leftovers: Collection[str], state_bytes: int) -> str:
    """Return the script of a rendering. Its input is the state of the preparation's shell, and then the archive.
    ``leftovers``: files that it removes before."""
    return "\n".join(
        [
            f"cd {TESTBED}",
            f"rm -rf {shlex.join([INPUTS, rendering.records, *sorted(leftovers)])}",
            _TAKE_STATE.format(size=state_bytes),
            f"tar -xf - -C {TESTBED}",
            "exec < /dev/null",
            f"cd {TESTBED}",
            command,
        ]
    )


def _tar(files: Mapping[str, bytes], number: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            member.mode = 0o644
            # A distinct time keeps Python from using another rendering's compiled file of the same source size.
            member.mtime = int(time.time()) + number
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _bytes(files: Mapping[str, str]) -> dict[str, bytes]:
    return {path: text.encode("utf-8", "surrogatepass") for path, text in files.items()}


async def fetch_records(site: EvalSite, handle: SandboxHandle, path: str) -> str:
    """Return the contents of a file of records, or nothing if it exceeds the limit, which protects our memory."""
    return (await read_file(site, handle, path, max_bytes=MAX_RECORD_BYTES) or b"").decode("latin-1")


COMPARE_TIMEOUT_S = 30.0
MAX_COMPARERS = 8
"""The number of attempts compared concurrently. Each has its own process, started when it is needed."""

Tests = Mapping[str, Sequence[Sequence[Check]]]
"""Test → its invocations. Each is the checks of its records, in order; the first check begins the test."""


async def compare(tests: Sequence[Tests], records: Sequence[str]) -> list[dict[str, str]]:
    """Return for each rendering the tests whose records are wrong → why.

    Raises:
        VerifierError: no process can be started.
    """
    question = {"tests": msgspec.to_builtins(tests), "records": list(records)}
    answer = await _comparers.ask(question, timeout_s=COMPARE_TIMEOUT_S)
    if answer.ending is Ending.ANSWERED:
        return [dict(rendering_tests) for rendering_tests in answer.value]
    reason = {
        Ending.TIMED_OUT: f"its records could not be compared within {COMPARE_TIMEOUT_S:g} s",
        Ending.FAILED: "its records cannot be compared",
        Ending.DIED: "comparing its records took too much memory",
    }[answer.ending]
    return [dict.fromkeys(rendering_tests, reason) for rendering_tests in tests]


def close_comparers() -> None:
    """Stop the comparing processes. The next comparison starts new ones."""
    _comparers.close()


def compare_here(tests: Sequence[Any], records: Sequence[str]) -> list[dict[str, str]]:
    """Run in a comparing process: do the work of `compare`."""
    checks = msgspec.convert(tests, list[Tests])
    return [failed(by_test, read_records(text)) for by_test, text in zip(checks, records, strict=True)]


def read_records(text: str) -> list[Record]:
    """Return the records of one file. Lines that do not have the form of a record are skipped."""
    records: list[Record] = []
    for line in text.split("\n"):
        try:
            site, values = json.loads(line)
            if isinstance(site, str) and isinstance(values, list) and all(map(is_value, values)):
                records.append((site, values))
        except (ValueError, TypeError, RecursionError):
            continue
    return records


def failed(tests: Tests, records: Sequence[Record]) -> dict[str, str]:
    """Return the tests whose records are wrong → why."""
    test_by_first_site = {calls[0][0].site: test for test, calls in tests.items() if calls and calls[0]}
    known_sites = {check.site for calls in tests.values() for checks in calls for check in checks}
    recorded: dict[str, list[list[Record]]] = {test: [] for test in tests}
    current: list[Record] | None = None
    for site, values in records:
        if site in test_by_first_site:
            current = []
            recorded[test_by_first_site[site]].append(current)
        if current is not None and site in known_sites:
            current.append((site, values))
    return {test: why for test, calls in tests.items() if (why := _difference(calls, recorded[test])) is not None}


def _difference(expected: Sequence[Sequence[Check]], recorded: Sequence[Sequence[Record]]) -> str | None:
    if len(expected) != len(recorded):
        return f"ran {len(recorded)} times, not {len(expected)}"
    for checks, records in zip(expected, recorded, strict=True):
        if len(checks) != len(records):
            return f"left {len(records)} records, not {len(checks)}"
        if [check.site for check in checks] != [site for site, _ in records]:
            return "left its records in another order"
        for number, (check, (_, values)) in enumerate(zip(checks, records, strict=True)):
            if not check.holds(values):
                return f"record {number} of {len(checks)} is another value"
    return None


_SAMPLE: dict[str, Any] = {"tests": [{}], "records": [""]}
_comparers = WorkerPool(
    f"{__name__}:compare_here",
    workers=MAX_COMPARERS,
    warm_up=_SAMPLE,
    missing="install resources_servers/swe_bench's requirements",
)
