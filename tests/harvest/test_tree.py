"""Reading a tree from a stream that an agent's box made."""

from __future__ import annotations

import tarfile
from collections.abc import AsyncIterator

import pytest

from nemo_gym.sandbox import harvest
from nemo_gym.sandbox.archive import END_OF_ARCHIVE, encode_header


async def files_behind(directories: int, count: int) -> AsyncIterator[bytes]:
    root = tarfile.TarInfo("testbed")
    root.type = tarfile.DIRTYPE
    yield encode_header(root)
    above = "/".join("d" * 250 for _ in range(directories))
    for number in range(count):
        yield encode_header(tarfile.TarInfo(f"testbed/{above}/{number}"))
    yield END_OF_ARCHIVE


async def test_paths_of_a_tree_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harvest, "MAX_PATH_BYTES", 1_000_000)
    reader = harvest.TreeReader(max_bytes=1 << 30, max_files=1000)
    assert [content async for content in reader.contents(files_behind(390, 9))] == []
    assert len(reader.tree.entries) == 9
    with pytest.raises(harvest.TreeTooLargeError, match="paths of the tree's files take more than 1000000 bytes"):
        async for _ in harvest.TreeReader(max_bytes=1 << 30, max_files=1000).contents(files_behind(390, 20)):
            pass
