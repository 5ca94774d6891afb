"""The row's evaluation script with a canary in place of its test patch: of the same form, by the same steps."""

from __future__ import annotations

import posixpath
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass

from nemo_gym.contract.errors import SandboxArchiveError, VerifierError
from nemo_gym.contract.verdict import FailureKind
from nemo_gym.sandbox.archive_filters import single_file
from nemo_gym.sandbox.base import SandboxHandle
from resources_servers.swe_bench.eval_box import (
    APPLY_TIMEOUT_S,
    TESTBED,
    EvalSite,
    archive_of,
    evaluation_box,
    exec_in,
    split_script,
)
from resources_servers.swe_bench.patches import paths_of
from resources_servers.swe_bench.row import SweBenchRow
from resources_servers.swe_bench.tamper.canary import CanaryFile, rewrite_other, rewrite_python
from resources_servers.swe_bench.tamper.test_ids import TestId

_APPLY = re.compile(r"^git apply\b.*<<\s*(['\"]?)(?P<word>\w+)\1\s*$")
_STEP = re.compile(r"^(git checkout|git apply|rm -f|mkdir -p)\b")
_MAX_DIFF_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class CanaryScript:
    """An evaluation script whose expected tests can only fail."""

    eval_script: str
    files: tuple[CanaryFile, ...]
    exact: bool
    """Whether single tests are known to fail; else only that some test must."""

    def must_fail(self, test: TestId) -> bool:
        return self.exact and any(file.must_fail(test) for file in self.files)

    def belies(self, test: TestId, status: str) -> bool:
        """Whether a test that can only fail has a status that says something else. An expected failure is one that
        the test file itself must have announced."""
        return self.exact and any(
            file.must_fail(test) and (status == "PASSED" or (status == "XFAIL" and not file.expects_failure(test)))
            for file in self.files
        )


async def make_canary_script(site: EvalSite, row: SweBenchRow, rng: random.Random) -> CanaryScript | None:
    """Build the canary in a pristine box, where the row's own steps put the test files in place; ``None`` when no file
    of the test patch can be rewritten.

    Raises:
        SandboxError, VerifierError: the pristine box failed; no patch is involved yet.
    """
    found = _here_document(row.eval_script)
    if found is None:
        return None
    before, body_start, body_end = found
    paths = sorted(paths_of(row.test_patch.encode("utf-8", "surrogateescape")))
    fixed = [TestId.parse(text) for text in row.fail_to_pass]
    tests = [*fixed, *(TestId.parse(text) for text in row.pass_to_pass)]
    lines = row.eval_script.split("\n")
    async with evaluation_box(site) as handle:
        await _steps(site, handle, before)
        files: list[CanaryFile] = []
        sources = {path: await _read(site, handle, path) for path in paths}
        for path, source in sources.items():
            if source is not None and path.endswith(".py"):
                rewritten = rewrite_python(path, source, tests, rng, fixed=fixed)
                files += [rewritten] if rewritten else []
        exact = bool(files)
        if not files:
            files = [file for file in _others(sources, rng) if file]
        if not files:
            return None
        for file in files:
            directory, name = posixpath.split(f"{TESTBED}/{file.path}")
            await site.provider.put_archive(handle, directory, archive_of({name: file.content}))
        diff = ["git", "-c", "core.quotePath=true", "diff", "--no-color", "--no-ext-diff", "--no-renames", "--binary"]
        await _checked(site, handle, ["git", "add", "--force", "--all", "--", *_existing(sources, paths)])
        patch = await _checked(site, handle, [*diff, "--cached", row.base_commit, "--", *paths])
    script = "\n".join([*lines[:body_start], *patch.rstrip("\n").split("\n"), *lines[body_end:]])
    return CanaryScript(script, tuple(files), exact)


def _here_document(eval_script: str) -> tuple[str, int, int] | None:
    """The script's test patch: the steps up to it, and where its text begins and ends, as line numbers. ``None`` for a
    script that does not apply exactly one test patch from a here-document."""
    preparation, _, _ = split_script(eval_script)
    lines = preparation.split("\n")
    steps: list[str] = []
    place: tuple[int, int] | None = None
    number = 0
    while number < len(lines):
        line = lines[number]
        match = _APPLY.match(line)
        if match:
            if place is not None:
                return None
            end = next((n for n in range(number + 1, len(lines)) if lines[n] == match["word"]), None)
            if end is None:
                return None
            place = (number + 1, end)
            steps += lines[number : end + 1]
            number = end
        elif _STEP.match(line):
            steps.append(line)
        number += 1
    return ("\n".join(["set -e", *steps, ""]), *place) if place else None


def _others(sources: dict[str, bytes | None], rng: random.Random) -> Iterable[CanaryFile | None]:
    return (rewrite_other(path, source, rng) for path, source in sources.items() if source is not None)


def _existing(sources: dict[str, bytes | None], paths: list[str]) -> list[str]:
    return [path for path in paths if sources[path] is not None]


async def _steps(site: EvalSite, handle: SandboxHandle, script: str) -> None:
    # As in the official script, a step that fails stops nothing: a checkout that also names files which the test
    # patch adds does fail.
    stdin = script.encode("utf-8", "surrogateescape")
    await exec_in(site, handle, ["/bin/bash", "-s"], timeout_s=APPLY_TIMEOUT_S, stdin=stdin)


async def _checked(site: EvalSite, handle: SandboxHandle, command: list[str], *, stdin: bytes | None = None) -> str:
    result = await exec_in(
        site,
        handle,
        command,
        timeout_s=APPLY_TIMEOUT_S,
        stdin=stdin,
        max_output_bytes=_MAX_DIFF_BYTES,
    )
    text = result.stdout_bytes.decode("utf-8", "surrogateescape")
    if not result.ok or result.stdout_truncated:
        raise VerifierError(
            f"the row's test patch cannot be put on the pristine tree: {text[-500:]}",
            kind=FailureKind.CONTROL_RUN_FAILED,
        )
    return text


async def _read(site: EvalSite, handle: SandboxHandle, path: str) -> bytes | None:
    try:
        stream = site.provider.get_archive(handle, f"{TESTBED}/{path}")
        return b"".join([piece async for piece in single_file(stream)])
    except SandboxArchiveError:
        return None
