"""Confirming attempts whose code works against being confirmed."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nemo_gym.contract.errors import SandboxArchiveError, SandboxLostError, VerifierError
from nemo_gym.contract.verdict import FailureKind
from nemo_gym.sandbox.base import SandboxHandle, SandboxProvider
from resources_servers.swe_bench import verdicts
from resources_servers.swe_bench.confirm.controls import ControlledRendering, RowControls
from resources_servers.swe_bench.confirm.runs import MAX_RECORD_BYTES, Recorded, Rendering, fetch_records
from resources_servers.swe_bench.confirm.twins import Mutant, Twin, TwinTest
from resources_servers.swe_bench.eval_box import EvalSite
from resources_servers.swe_bench.preparation.examples import EXAMPLE_ROWS
from resources_servers.swe_bench.row import SweBenchRow, read_rows

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
