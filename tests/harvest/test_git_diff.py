"""Patches made outside the box: complete, and indifferent to whatever the agent did to git."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from nemo_gym.contract.errors import SandboxArchiveError, SandboxError
from nemo_gym.contract.session import Artifact, CommandHarvest, FilesHarvest, GitDiffHarvest
from nemo_gym.sandbox import harvest
from nemo_gym.sandbox.archive import END_OF_ARCHIVE, TarParser, encode_header
from nemo_gym.sandbox.base import SandboxExecResult, SandboxHandle
from tests.harvest.conftest import Bench

EVERYTHING = r"""
printf 'one\nTWO\n' > a.txt; git add a.txt 2> /dev/null || true
echo 'y = 2' > pkg/new.py; git rm -q --cached gone.txt 2> /dev/null || true; rm -f gone.txt
printf '\0\2other' > data.bin; ln -sfn pkg link; chmod +x run.sh; mv crlf.txt renamed.txt
printf 'changed\n' >> "$(printf 'we"ird\nname')"; printf '\377\n' > latin.txt; ln a.txt hard.txt
ln -s /etc/passwd absolute; echo q > ':(glob)x'; echo changed >> generated.txt; printf 'no newline' > last
"""


async def test_patch_gives_the_same_tree_when_every_kind_of_change_was_made(bench: Bench) -> None:
    artifact = await bench.patch_after(EVERYTHING)
    assert artifact.error is None and not artifact.truncated
    assert await bench.differences(artifact.content(), EVERYTHING) == ""


OLD_GIT = r"""
real=$(command -v git)
printf '%s\n' '#!/bin/sh' 'for option; do [ "$option" != --show-object-format ] || exec echo "$option"; done' \
  "exec $real \"\$@\"" > /usr/local/bin/git && chmod +x /usr/local/bin/git
"""
"""A git before 2.25, whose rev-parse prints an option that it does not know."""


async def test_patch_is_made_when_the_images_git_cannot_name_its_object_format(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = bench.provider.exec

    async def exec_(box: SandboxHandle, command: Sequence[str] | str, **options: Any) -> SandboxExecResult:
        if harvest._DESCRIBE in command:
            assert (await run(box, ["/bin/sh", "-c", OLD_GIT], cwd="/")).ok
        return await run(box, command, **options)

    monkeypatch.setattr(bench.provider, "exec", exec_)
    artifact = await bench.patch_after("echo more >> a.txt")
    assert (artifact.error, artifact.facts["paths"]) == (None, ["a.txt"])


async def _with_links_of_links(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Write equal symbolic links as hard links to the first one, as a Docker Engine writes those of one inode."""
    first: dict[str, str] = {}
    parser = TarParser()
    async for chunk in stream:
        for event in parser.feed(chunk):
            if isinstance(event, tarfile.TarInfo):
                padding = bytes(-event.size % tarfile.BLOCKSIZE)
                if event.issym() and first.setdefault(event.linkname, event.name) != event.name:
                    event.type, event.linkname = tarfile.LNKTYPE, first[event.linkname]
                yield encode_header(event)
            else:
                yield padding if event is None else event
    yield END_OF_ARCHIVE


@pytest.mark.parametrize("script", ["ln -P link zlink", "ln -sfn pkg twin", "rm twin", "rm link", "ln -sfn pkg link"])
async def test_patch_holds_names_that_share_a_symbolic_link(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    read = bench.provider.get_archive
    monkeypatch.setattr(bench.provider, "get_archive", lambda *args, **of: _with_links_of_links(read(*args, **of)))
    artifact = await bench.patch_after(script)
    assert artifact.error is None
    assert await bench.differences(artifact.content(), script) == ""


async def test_patch_is_empty_when_only_products_and_byproducts_appeared(bench: Bench) -> None:
    script = "echo more >> build/p; mkdir -p pkg/__pycache__ x.egg-info; touch pkg/__pycache__/m.pyc x.egg-info/P"
    artifact = await bench.patch_after(script)
    assert artifact.content() == b""
    assert artifact.error is None


async def test_patch_holds_a_new_file_beside_ignored_ones_in_a_directory_that_no_rule_ignores(bench: Bench) -> None:
    script = "echo new > logs/report.py; echo n > notes.log; echo x > x.log; echo n > zout/a.py; echo r > zout/b.log"
    artifact = await bench.patch_after(script)
    assert artifact.facts["paths"] == ["logs/report.py", "notes.log", "zout/a.py"]


async def test_patch_can_be_applied_when_an_ignored_directory_of_the_image_became_a_link(bench: Bench) -> None:
    script = "mv build /tmp/b; ln -s /tmp/b build; echo more >> a.txt"
    artifact = await bench.patch_after(script)
    assert artifact.facts["paths"] == ["a.txt"]
    assert await bench.differences(artifact.content(), script) == ""


async def test_ignored_directories_that_the_agent_made_do_not_count_against_the_limits(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harvest, "MAX_TREE_FILES", 50)
    made = "node_modules pkg/node_modules target web/dist"
    kept = "mkdir -p pkg/target dist web/out; touch pkg/target/a dist/b web/out/c; echo f > pkg/build"
    artifact = await bench.patch_after(f"for d in {made}; do mkdir $d; touch $d/{{1..60}}; done; {kept}")
    assert (artifact.error, artifact.truncated) == (None, False)
    assert artifact.facts["paths"] == ["dist/b", "pkg/build", "pkg/target/a", "web/out/c"]


async def test_patch_holds_files_that_share_their_content_with_excluded_ones(bench: Bench) -> None:
    script = "mkdir .tox; echo shared > .tox/f; ln .tox/f new.txt; ln -f .tox/f a.txt; git clone -q --bare . x.git"
    artifact = await bench.patch_after(script)
    assert artifact.error is None
    assert {"a.txt", "new.txt", "x.git/HEAD"} <= set(artifact.facts["paths"])
    assert artifact.content().count(b"+shared") == 2


async def test_patch_holds_what_the_agent_tried_to_hide_when_it_changed_gits_rules(bench: Bench) -> None:
    artifact = await bench.patch_after(
        """
        echo '*' > .gitignore; echo secret > hidden.txt; printf '* -diff filter=evil\\n' > .gitattributes
        printf '*\\n' > .git/info/exclude; git config diff.external /bin/false; git config filter.evil.clean 'rm -rf /'
        git update-index --assume-unchanged a.txt; echo changed >> a.txt
        git update-index --skip-worktree pkg/m.py; echo 'z = 3' >> pkg/m.py
        """
    )
    assert {".gitignore", "hidden.txt", ".gitattributes", "a.txt", "pkg/m.py"} <= set(artifact.facts["paths"])


async def test_patch_is_whole_when_the_agent_committed_or_destroyed_the_repository(bench: Bench) -> None:
    commit = "echo more >> a.txt; git -c user.name=a -c user.email=a@x commit -qam done"
    for script in (commit, "echo more >> a.txt; rm -rf .git", "echo more >> a.txt; rm -rf .git; echo x > .git"):
        artifact = await bench.patch_after(script)
        assert artifact.facts["paths"] == ["a.txt"], script
        assert b"+more" in artifact.content()


async def test_patch_does_not_depend_on_programs_of_the_box_when_they_were_replaced(bench: Bench) -> None:
    artifact = await bench.patch_after(
        """
        echo more >> a.txt
        for program in git tar sh; do
          printf '#!/bin/false\\n' > /usr/local/bin/$program; chmod +x /usr/local/bin/$program
        done
        rm -f /usr/bin/git /bin/tar
        """
    )
    assert artifact.facts["paths"] == ["a.txt"]


async def test_files_of_a_nested_repository_are_in_the_patch(bench: Bench) -> None:
    artifact = await bench.patch_after("mkdir nest; cd nest; git init -q; echo n > n.txt; git add .")
    assert artifact.facts["paths"] == ["nest/n.txt"]


async def test_everything_is_deleted_when_the_work_tree_is_empty(bench: Bench) -> None:
    artifact = await bench.patch_after("rm -rf -- * .[a-z]*; true")
    assert artifact.error is None
    assert artifact.content().count(b"deleted file mode") == artifact.facts["path_count"] == 14


async def test_file_that_is_all_holes_is_said_to_be_too_large_at_once(bench: Bench) -> None:
    """A backend that packs by itself would send its holes as zeros: a petabyte takes days, or all memory."""
    box = await bench.provider.create(bench.spec)
    try:
        await bench.sh(box, "truncate -s 1P huge.bin || truncate -s 15T huge.bin")
        async with asyncio.timeout(60):
            patch, files = await bench.harvest(
                box, GitDiffHarvest(path="/testbed"), FilesHarvest(paths=("/testbed/huge.bin",))
            )
    finally:
        await bench.provider.close(box)
    for artifact in (patch, files):
        assert artifact.truncated and artifact.error and artifact.content() == b""


async def test_artifact_says_so_when_the_patch_is_larger_than_its_cap(bench: Bench) -> None:
    box = await bench.provider.create(bench.spec)
    try:
        await bench.sh(box, "head -c 300000 /dev/urandom > big.bin; seq 30000 > many.txt")
        (artifact,) = await bench.harvest(box, GitDiffHarvest(path="/testbed", max_bytes=100_000))
    finally:
        await bench.provider.close(box)
    assert artifact.truncated and artifact.error and artifact.content() == b""


async def test_artifact_has_an_error_when_the_work_tree_is_gone(bench: Bench) -> None:
    box = await bench.provider.create(bench.spec)
    try:
        (artifact,) = await bench.harvest(box, GitDiffHarvest(path="/testbed"))
        assert artifact.content() == b""
        result = await bench.provider.exec(box, "rm -rf /testbed", cwd="/")
        if not result.ok:
            pytest.fail(f"the work tree could not be removed: {result.stderr}")
        (artifact,) = await bench.harvest(box, GitDiffHarvest(path="/testbed"))
    finally:
        await bench.provider.close(box)
    assert artifact.error


FULL = "rm -rf /var/tmp/ng-harvest && touch /var/tmp/ng-harvest"
"""Nothing more can be written into a harvest box where it is needed."""
STEPS = pytest.mark.parametrize("step", ["put", harvest._CHECK_IGNORE, harvest._DIFF], ids=["put", "ignore", "diff"])


async def harvest_with_full_boxes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str, *, full: int
) -> tuple[Artifact, int]:
    """Harvest where the first ``full`` harvest boxes are full at a step. Return the number of harvest boxes, too."""
    run, put = bench.provider.exec, bench.provider.put_archive
    boxes: set[str] = set()

    async def exec_(box: SandboxHandle, command: Sequence[str] | str, **options: Any) -> SandboxExecResult:
        if harvest._DESCRIBE in command:
            boxes.add(box.sandbox_id)
        if step in command and len(boxes) <= full:
            assert (await run(box, ["/bin/sh", "-c", FULL], cwd="/")).ok
        return await run(box, command, **options)

    async def put_archive(box: SandboxHandle, path: str, tar: AsyncIterator[bytes]) -> None:
        if step == "put" and len(boxes) <= full:
            raise SandboxArchiveError("cannot unpack 'blob-0': No space left on device")
        await put(box, path, tar)

    monkeypatch.setattr(bench.provider, "exec", exec_)
    monkeypatch.setattr(bench.provider, "put_archive", put_archive)
    artifact = await bench.patch_after("echo more >> a.txt; mkdir x.egg-info; echo p > x.egg-info/P")
    return artifact, len(boxes)


@STEPS
async def test_patch_is_made_in_another_box_when_the_first_one_failed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    artifact, boxes = await harvest_with_full_boxes(bench, monkeypatch, step, full=1)
    assert (artifact.error, artifact.facts["paths"], boxes) == (None, ["a.txt"], 2)


@STEPS
async def test_artifact_has_an_error_when_two_boxes_fail_on_the_changes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    artifact, boxes = await harvest_with_full_boxes(bench, monkeypatch, step, full=2)
    assert artifact.error and artifact.content() == b"" and not artifact.truncated
    assert boxes == 2


async def test_harvest_raises_when_the_machine_cannot_read_the_pristine_tree_any_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = "sleep 100\n"
    monkeypatch.setattr(harvest, "_DIFF", slow)
    monkeypatch.setattr(harvest, "CHANGES_GIT_TIMEOUT_S", 0.5)
    run = bench.provider.exec

    async def exec_(box: SandboxHandle, command: Sequence[str] | str, **options: Any) -> SandboxExecResult:
        result = await run(box, command, **options)
        if slow in command:
            monkeypatch.setattr(harvest, "_DESCRIBE", slow)
            monkeypatch.setattr(harvest, "PRISTINE_GIT_TIMEOUT_S", 0.5)
        return result

    monkeypatch.setattr(bench.provider, "exec", exec_)
    with pytest.raises(SandboxError, match="cannot be harvested from"):
        await bench.patch_after("echo more >> a.txt")


async def test_harvest_raises_when_the_box_is_gone(bench: Bench) -> None:
    box = await bench.provider.create(bench.spec)
    await bench.provider.close(box)
    with pytest.raises(SandboxError):
        await bench.harvest(box)


async def test_harvest_raises_when_the_image_is_not_at_the_base_commit(bench: Bench) -> None:
    box = await bench.provider.create(bench.spec)
    try:
        with pytest.raises(SandboxError, match="not a git repository with"):
            await bench.harvest(box, GitDiffHarvest(path="/testbed", base_commit="1" * 40))
    finally:
        await bench.provider.close(box)


async def test_files_and_command_output_are_harvested_beside_a_patch(bench: Bench) -> None:
    box = await bench.provider.create(bench.spec)
    try:
        await bench.sh(box, "echo more >> a.txt")
        patch, files, output = await bench.harvest(
            box,
            GitDiffHarvest(path="/testbed"),
            FilesHarvest(paths=("/testbed/pkg", "/testbed/a.txt")),
            CommandHarvest(command="echo said; exit 3", cwd="/testbed"),
        )
        (dotted,) = await bench.harvest(box, FilesHarvest(paths=("/testbed/pkg/.",)))
        (missing,) = await bench.harvest(box, FilesHarvest(paths=("/nowhere",)))
        (large,) = await bench.harvest(box, FilesHarvest(paths=("/testbed",), max_bytes=2000))
    finally:
        await bench.provider.close(box)
    with tarfile.open(fileobj=io.BytesIO(files.content())) as archive:
        names = archive.getnames()
    assert patch.facts["paths"] == ["a.txt"]
    assert {"testbed/pkg", "testbed/pkg/m.py", "testbed/a.txt"} <= set(names)
    assert harvest.harvested_file([dotted], dotted.name, "/testbed/pkg/m.py") == b"x = 1\n"
    assert (output.content(), output.return_code) == (b"said\n", 3)
    assert missing.error and "/nowhere" in missing.error
    assert large.truncated and large.content() == b""
