"""Clones hold one commit's history and nothing that came after it, also when made one on top of another."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, cast

import pytest

from nemo_gym.contract.errors import ConfigError
from nemo_gym.sandbox.base import SandboxHandle
from resources_servers.swe_bench.preparation.examples import EXAMPLE_ROWS, assemble, example_names, example_rows_text
from resources_servers.swe_bench.preparation.repositories import Repositories, git
from resources_servers.swe_bench.scrub import verify_box


def run(*words: str, cwd: Path) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *identity, *words], cwd=cwd, check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(repository: Path, name: str) -> str:
    (repository / name).write_text(name)
    run("add", "--all", cwd=repository)
    run("commit", "-qm", name, cwd=repository)
    return run("rev-parse", "HEAD", cwd=repository)


@pytest.fixture
def history(tmp_path: Path) -> dict[str, str]:
    """first - second - third - fix on main, and a side branch after the first; a tag on the fix."""
    source = tmp_path / "repos" / "a__b"
    source.mkdir(parents=True)
    run("init", "-q", "-b", "main", cwd=source)
    commits = {name: commit(source, name) for name in ("first", "second", "third", "fix")}
    run("tag", "v1", cwd=source)
    run("checkout", "-q", "-b", "side", commits["first"], cwd=source)
    return {**commits, "side": commit(source, "side")}


async def objects_of(this_host: Any, repositories: Repositories, commit: str) -> set[str]:
    async with repositories.clone("a/b", commit) as git_dir:
        git("reset", "--quiet", "--hard", commit, cwd=git_dir.parent)
        (git_dir / "ORIG_HEAD").unlink(missing_ok=True)
        await verify_box(this_host, cast(SandboxHandle, None), str(git_dir.parent), commit)
        listing = git("cat-file", "--batch-all-objects", "--batch-check=%(objectname)", cwd=git_dir.parent)
        return set(listing.stdout.split())


@pytest.mark.parametrize("order", [["second", "third", "side"], ["third", "second"], ["side", "third", "third"]])
async def test_clone_holds_nothing_but_its_history_when_others_were_made_before(
    order: list[str], this_host: Any, history: dict[str, str], tmp_path: Path
) -> None:
    repositories = Repositories([tmp_path / "repos"], tmp_path / "scratch")
    for name in order:
        objects = await objects_of(this_host, repositories, history[name])
        assert history[name] in objects
        assert history["first"] in objects
        assert history["fix"] not in objects


async def test_clone_is_the_same_when_the_repository_is_bare(
    this_host: Any, history: dict[str, str], tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    run("clone", "-q", "--bare", str(tmp_path / "repos" / "a__b"), str(bare / "a__b.git"), cwd=tmp_path)
    here = Repositories([bare], tmp_path / "one")
    there = Repositories([tmp_path / "repos"], tmp_path / "two")
    assert await objects_of(this_host, here, history["third"]) == await objects_of(this_host, there, history["third"])


async def test_clone_names_the_missing_commit(history: dict[str, str], tmp_path: Path) -> None:
    repositories = Repositories([tmp_path / "repos"], tmp_path / "scratch")
    with pytest.raises(ConfigError, match="does not hold commit " + "e" * 40):
        async with repositories.clone("a/b", "e" * 40):
            pass


def test_require_names_the_directory_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"owner__none in {tmp_path}"):
        Repositories([tmp_path], tmp_path).require("owner/none", "e" * 40)


def test_example_rows_are_what_their_files_make() -> None:
    assert EXAMPLE_ROWS.read_text(encoding="utf-8") == example_rows_text(), (
        "run: python -m resources_servers.swe_bench.preparation.examples"
    )


@pytest.mark.parametrize("name", example_names())
def test_example_commits_do_not_depend_on_this_machine(name: str, tmp_path: Path) -> None:
    import os

    first = assemble(name, tmp_path / "first")
    before = os.umask(0o077)
    try:
        second = assemble(name, tmp_path / "second")
    finally:
        os.umask(before)
    assert first == second
    assert run("status", "--porcelain", cwd=tmp_path / "first") == ""
    assert int(run("rev-list", "--count", "HEAD", cwd=tmp_path / "first")) > 1
