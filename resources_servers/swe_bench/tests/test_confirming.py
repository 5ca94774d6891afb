"""Confirming attempts whose code works against being confirmed."""

from __future__ import annotations

import tarfile
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nemo_gym.errors import SandboxArchiveError, SandboxLostError, VerifierError
from nemo_gym.sandbox.base import SandboxHandle, SandboxProvider
from nemo_gym.verdict import FailureKind
from resources_servers.swe_bench.confirm import confirming
from resources_servers.swe_bench.confirm.controls import ControlledRendering, RowControls
from resources_servers.swe_bench.confirm.runs import MAX_RECORD_BYTES, Recorded, Rendering, read_records
from resources_servers.swe_bench.eval_box import EvalSite
from resources_servers.swe_bench.preparation.example_rows import EXAMPLE_ROWS
from resources_servers.swe_bench.row import SweBenchRow, read_rows

ROW = SweBenchRow.from_mapping(next(row for _, row in read_rows(EXAMPLE_ROWS)))
CONTROLS = RowControls(ROW.instance_id, "", (ControlledRendering(Rendering({}, "/var/tmp/r"), {}),))
SITE = EvalSite(cast(SandboxProvider, None), "image")
LOST = SandboxLostError("the box is gone")
OUT_OF_MEMORY = VerifierError("the host ran out of memory", kind=FailureKind.HOST_OUT_OF_MEMORY)


@pytest.mark.parametrize("error", [LOST, OUT_OF_MEMORY])
async def test_a_patch_that_ends_its_box_while_it_is_confirmed_is_not_confirmed(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(site: EvalSite, row: SweBenchRow, patch: bytes, *_: Any, **__: Any) -> Recorded:
        if patch == row.patch.encode():
            return Recorded(True, records=("",))
        raise error

    monkeypatch.setattr(confirming, "run_renderings", run)
    (result,) = await confirming.confirm_control(SITE, ROW, b"diff --git a/x.py b/x.py\n", CONTROLS)
    assert [finding.kind for finding in result.findings] == ["values_not_confirmed"]


async def test_no_verdict_is_given_where_gold_loses_its_box_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(*_: Any, **__: Any) -> Recorded:
        raise LOST

    monkeypatch.setattr(confirming, "run_renderings", run)
    with pytest.raises(SandboxLostError):
        await confirming.confirm_control(SITE, ROW, b"diff --git a/x.py b/x.py\n", CONTROLS)


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
    assert await read_records(EvalSite(provider, "image"), cast(SandboxHandle, None), "/var/tmp/r") == ""
    assert produced <= 2 * MAX_RECORD_BYTES


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.DIRTYPE])
async def test_records_that_are_no_file_are_no_records(kind: bytes) -> None:
    async def get_archive(handle: object, path: str, *, max_bytes: int | None = None) -> AsyncIterator[bytes]:
        member = tarfile.TarInfo("records")
        member.type, member.linkname = kind, "elsewhere"
        yield member.tobuf() + bytes(2 * tarfile.BLOCKSIZE)

    provider = cast(SandboxProvider, SimpleNamespace(get_archive=get_archive))
    assert await read_records(EvalSite(provider, "image"), cast(SandboxHandle, None), "/var/tmp/r") == ""


@pytest.mark.parametrize(("throws", "found"), [("✗✓✓", False), ("✗✓✗", True), ("✗✗", True), ("✓", False)])
async def test_a_failed_confirmation_is_outweighed_by_two_clean_ones_alone(
    throws: str, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list(throws)

    async def run(site: EvalSite, row: SweBenchRow, patch: bytes, *_: Any, **__: Any) -> Recorded:
        if patch == row.patch.encode():
            return Recorded(True, records=("",))
        return Recorded(left.pop(0) == "✓", records=("",))

    monkeypatch.setattr(confirming, "run_renderings", run)
    (result,) = await confirming.confirm_control(SITE, ROW, b"diff --git a/x.py b/x.py\n", CONTROLS)
    assert bool(result.findings) is found
    assert left == []
