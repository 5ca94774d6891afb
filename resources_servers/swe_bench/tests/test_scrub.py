"""Scrubbing on real repositories: every place in which a fix is known to survive, and the verifier's own eyes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest

from nemo_gym.sandbox.base import SandboxHandle
from resources_servers.swe_bench import scrub
from resources_servers.swe_bench.scrub import ScrubError, scrub_box, verify_box

HANDLE = cast(SandboxHandle, None)
FIX = "the fix that nobody may see"


def git(cwd: Path, *arguments: str, check: bool = True, stdin: str | None = None) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "protocol.file.allow=always", *arguments],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        check=check,
    )
    return done.stdout.strip()


def commit(repository: Path, name: str, text: str) -> str:
    (repository / name).write_text(text)
    git(repository, "add", name)
    git(repository, "commit", "-qm", f"{name}: {text[:20]}")
    return git(repository, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, str]:
    """A repository at its base commit whose fix is everywhere."""
    origin = tmp_path / "origin"
    origin.mkdir()
    git(origin, "init", "-q", "-b", "main")
    commit(origin, "a.txt", "first")
    base = commit(origin, "a.txt", "second")
    git(origin, "tag", "v1", base)
    fixed = commit(origin, "a.txt", FIX)
    git(origin, "tag", "-a", "v2", "-m", FIX)
    git(origin, "branch", "release")
    work = tmp_path / "testbed"
    git(tmp_path, "clone", "-q", "--reference", str(origin), str(origin), str(work))
    git(work, "notes", "add", "-m", FIX, base)
    git(work, "worktree", "add", "-q", str(tmp_path / "elsewhere"), fixed)
    git(work, "reset", "-q", "--hard", base)
    (work / "a.txt").write_text(FIX + " stashed")
    git(work, "stash", "-q")
    git(work, "hash-object", "-w", "--stdin", stdin=FIX + " dangling")
    git(work, "fetch", "-q", "origin", "release")
    git(work, "bundle", "create", "-q", ".git/fix.bundle", "origin/release")
    git(work, "commit-graph", "write", "--reachable")
    git(work, "replace", base, fixed)
    (work / ".git" / "objects" / "pack").mkdir(exist_ok=True)
    (work / ".git" / "objects" / "pack" / "tmp_pack_x").write_text(FIX)
    (work / ".git" / "gc.log").write_text(FIX)
    (work / ".git" / "info" / "exclude").write_text("/built\n")
    (work / "built").write_text("product")
    return work, base


async def test_repository_holds_only_the_history_of_its_commit_when_it_was_scrubbed(
    this_host: Any, repository: tuple[Path, str]
) -> None:
    work, base = repository
    assert git(work, "log", "--all", "-S", FIX, "--oneline")
    await scrub_box(this_host, HANDLE, str(work), base)
    assert git(work, "log", "--all", "--format=%H").splitlines() == git(work, "rev-list", base).splitlines()
    objects = git(work, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split()
    assert all(FIX not in git(work, "cat-file", "-p", name) for name in objects)
    assert not git(work, "remote") and not git(work, "tag") and not git(work, "stash", "list")
    assert not any(FIX.encode() in path.read_bytes() for path in (work / ".git").rglob("*") if path.is_file())
    assert not git(work, "fsck", "--unreachable", "--dangling", "--no-progress")


async def test_work_tree_and_branch_are_untouched_when_a_repository_is_scrubbed(
    this_host: Any, repository: tuple[Path, str]
) -> None:
    work, base = repository
    (work / "new.txt").write_text("untracked")
    await scrub_box(this_host, HANDLE, str(work), base)
    assert git(work, "status", "--porcelain") == "?? new.txt"
    assert git(work, "symbolic-ref", "--short", "HEAD") == "main"
    assert git(work, "rev-parse", "HEAD") == base
    assert (work / "built").read_text() == "product"


OLD_GIT = """#!/bin/sh
for option; do
  case "$option" in --show-object-format) echo "$option"; exit ;; --no-object-names) exit 129 ;; esac
done
exec {git} "$@"
"""
"""A git of 2018: its rev-parse prints an option that it does not know, and its rev-list refuses one."""


async def test_repository_is_scrubbed_when_the_images_git_is_old(
    this_host: Any, repository: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, base = repository
    git(work, "replace", "-d", base)
    head = commit(work, "a name with spaces", "later")
    (tmp_path / "bin").mkdir()
    old_git = tmp_path / "bin" / "git"
    old_git.write_text(OLD_GIT.format(git=shutil.which("git")))
    old_git.chmod(0o755)
    monkeypatch.setitem(scrub._ENVIRONMENT, "PATH", f"{old_git.parent}:{scrub._ENVIRONMENT['PATH']}")
    await scrub_box(this_host, HANDLE, str(work), base, head=head)
    assert git(work, "rev-list", "--count", f"{base}..HEAD") == "1"


async def test_commit_of_the_image_makers_is_kept_when_it_is_named(
    this_host: Any, repository: tuple[Path, str]
) -> None:
    work, base = repository
    git(work, "replace", "-d", base)
    head = commit(work, "setup.cfg", "prepared")
    await scrub_box(this_host, HANDLE, str(work), base, head=head)
    assert git(work, "rev-list", "--count", f"{base}..HEAD") == "1"
    await verify_box(this_host, HANDLE, str(work), base, head=head)
    with pytest.raises(ScrubError, match="HEAD is not"):
        await verify_box(this_host, HANDLE, str(work), base)


async def test_linked_work_tree_becomes_a_repository_of_its_own_when_scrubbed(
    this_host: Any, repository: tuple[Path, str], tmp_path: Path
) -> None:
    work, base = repository
    elsewhere = tmp_path / "elsewhere"
    git(elsewhere, "checkout", "-q", "-B", "task", base)
    await scrub_box(this_host, HANDLE, str(elsewhere), base)
    assert (elsewhere / ".git").is_dir()
    assert not (work / ".git").exists(), "the history it shared is still there"


LEFTOVERS = {
    "tag": ["tag", "v9", "{future}"],
    "branch": ["branch", "later", "{future}"],
    "note": ["update-ref", "refs/notes/commits", "{future}"],
    "hidden_ref": ["update-ref", "refs/hidden/x", "{future}"],
    "dangling_commit": [],
    "remote": ["remote", "add", "origin", "https://example.org/x.git"],
    "fetch_head": [],
    "reflog": ["reflog", "expire", "--dry-run", "--all"],
}


@pytest.mark.parametrize("name", LEFTOVERS)
async def test_verification_fails_when_something_is_left(
    this_host: Any, repository: tuple[Path, str], name: str
) -> None:
    work, base = repository
    await scrub_box(this_host, HANDLE, str(work), base)
    tree = git(work, "hash-object", "-w", "-t", "tree", "--stdin", stdin="")
    future = git(work, "commit-tree", tree, "-p", base, "-m", FIX)
    if name in ("remote", "fetch_head", "reflog"):  # not about objects: leave none behind
        for oid in (tree, future):
            (work / ".git" / "objects" / oid[:2] / oid[2:]).unlink()
    if LEFTOVERS[name]:
        git(work, *(argument.format(future=future, base=base) for argument in LEFTOVERS[name]))
    if name == "fetch_head":
        (work / ".git" / "FETCH_HEAD").write_text(f"{base}\n")
    if name == "reflog":
        (work / ".git" / "logs").mkdir()
        (work / ".git" / "logs" / "HEAD").write_text(f"{base} {future} n <n@example.org> 0 +0000\tcommit: x\n")
    with pytest.raises(ScrubError):
        await verify_box(this_host, HANDLE, str(work), base)


async def test_scrub_fails_when_the_commit_is_not_there(this_host: Any, repository: tuple[Path, str]) -> None:
    with pytest.raises(ScrubError, match="is not in the repository"):
        await scrub_box(this_host, HANDLE, str(repository[0]), "0" * 40)


async def test_scrub_fails_when_there_is_no_repository(this_host: Any, tmp_path: Path) -> None:
    with pytest.raises(ScrubError, match="has no"):
        await scrub_box(this_host, HANDLE, str(tmp_path), "0" * 40)


async def test_verification_fails_when_a_git_that_lies_prints_nothing(this_host: Any, tmp_path: Path) -> None:
    with pytest.raises(ScrubError):
        await verify_box(this_host, HANDLE, str(tmp_path / "missing"), "0" * 40)
