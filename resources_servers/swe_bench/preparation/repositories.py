"""Clones for boxes, made on this host from local repositories: the history of one commit and not an object more."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from nemo_gym.contract.errors import ConfigError
from resources_servers.swe_bench.preparation.errors import PreparationError

_TIMEOUT_S = 1800.0

GIT_ENV = {
    # Nobody's configuration, hooks or credentials: what is made depends on the repository alone.
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_CONFIG_COUNT": "5",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "GIT_CONFIG_KEY_1": "uploadpack.allowAnySHA1InWant",
    "GIT_CONFIG_VALUE_1": "true",
    "GIT_CONFIG_KEY_2": "core.logAllRefUpdates",
    "GIT_CONFIG_VALUE_2": "false",
    "GIT_CONFIG_KEY_3": "gc.auto",
    "GIT_CONFIG_VALUE_3": "0",
    "GIT_CONFIG_KEY_4": "core.hooksPath",
    "GIT_CONFIG_VALUE_4": "/dev/null",
    "LC_ALL": "C",
}
BRANCH = "main"


def git(*arguments: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run git, isolated from every configuration. A failure raises `PreparationError` with what it printed."""
    if shutil.which("git") is None:
        raise PreparationError("git is not installed on this machine; install the 'git' package")
    inherited = {name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ}
    command = ["git", *map(str, arguments)]
    try:
        done = subprocess.run(
            command, cwd=cwd, env=inherited | GIT_ENV, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise PreparationError(f"{' '.join(command[:3])} took longer than {_TIMEOUT_S:.0f} s in {cwd}") from error
    if check and done.returncode != 0:
        raise PreparationError(f"{' '.join(command[:3])} failed in {cwd}: {done.stderr.strip()[-500:]}")
    return done


class Repositories:
    """Finds repositories below some directories, and makes clones of single commits under ``scratch``.

    A clone starts from the previous one of the same repository when that commit is an ancestor, so that preparing many
    instances of a large repository copies its history once.
    """

    def __init__(self, directories: Sequence[Path], scratch: Path) -> None:
        self._directories = tuple(directories)
        self._scratch = scratch
        self._locks: dict[str, asyncio.Lock] = {}
        self._latest: dict[str, str] = {}

    def find(self, repo: str) -> Path | None:
        """The local repository of ``owner/name``: ``<owner>__<name>``, with or without ``.git``, bare or not."""
        name = repo.replace("/", "__")
        for directory in self._directories:
            for candidate in (directory / name, directory / f"{name}.git"):
                if candidate.is_dir():
                    return candidate
        return None

    def require(self, repo: str, commit: str) -> Path:
        """The local repository, checked to hold ``commit``; raises `ConfigError` saying what is missing."""
        found = self.find(repo)
        if found is None:
            looked = ", ".join(map(str, self._directories)) or "no directory: give repos=DIR"
            raise ConfigError(f"no local repository of '{repo}': expected {repo.replace('/', '__')} in {looked}")
        if git("cat-file", "-e", f"{commit}^{{commit}}", cwd=found, check=False).returncode != 0:
            raise ConfigError(
                f"repository {found} does not hold commit {commit}; fetch it (git fetch origin {commit})"
            )
        return found

    @contextlib.asynccontextmanager
    async def clone(self, repo: str, commit: str) -> AsyncIterator[Path]:
        """The ``.git`` directory of a repository on branch `BRANCH` at ``commit``, with that history and nothing else,
        for as long as the block lasts. Clones of one repository are made one after the other."""
        source = await asyncio.to_thread(self.require, repo, commit)
        async with self._locks.setdefault(repo, asyncio.Lock()):
            target = await asyncio.to_thread(self._clone, repo, source, commit)
        try:
            yield target / ".git"
        finally:
            await asyncio.to_thread(shutil.rmtree, target, ignore_errors=True)

    def _clone(self, repo: str, source: Path, commit: str) -> Path:
        store = self._scratch / repo.replace("/", "__")
        history = store / "history.git"
        base = self._latest.get(repo)
        if base is not None and base != commit:
            ancestor = git("merge-base", "--is-ancestor", base, commit, cwd=source, check=False).returncode == 0
            base = base if ancestor else None
        if base is None:
            shutil.rmtree(history, ignore_errors=True)
            history.mkdir(parents=True)
            git("init", "--quiet", "--bare", "--template=", f"--initial-branch={BRANCH}", cwd=history)
        git("fetch", "--quiet", "--no-tags", "--no-write-fetch-head", source.resolve(), commit, cwd=history)
        git("update-ref", f"refs/heads/{BRANCH}", commit, cwd=history)
        self._latest[repo] = commit
        target = Path(tempfile.mkdtemp(prefix=f"{commit[:12]}-", dir=store))
        git("init", "--quiet", "--template=", f"--initial-branch={BRANCH}", cwd=target)
        # Hard links where the file system has them: objects are never written to.
        shutil.copytree(history / "objects", target / ".git" / "objects", copy_function=_link, dirs_exist_ok=True)
        git("update-ref", f"refs/heads/{BRANCH}", commit, cwd=target)
        return target


def read_at(repository: Path, commit: str, path: str) -> str | None:
    """The text of a file in a commit; ``None`` when there is no such file."""
    done = git("show", f"{commit}:{path}", cwd=repository, check=False)
    return done.stdout if done.returncode == 0 else None


def commit_time(repository: Path, commit: str) -> int:
    """When the commit was made, in Unix seconds."""
    return int(git("show", "--no-patch", "--format=%ct", commit, cwd=repository).stdout.strip() or 0)


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
