"""The layer of one row: its repository at the base commit, and the project installed as its evaluation script does.

Repositories are cloned on this host from local ones. A clone holds the history of one commit and no other object.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from nemo_gym.contract.errors import ConfigError
from resources_servers.swe_bench.preparation import shims
from resources_servers.swe_bench.preparation.boxes import BUILD_DIR, BuildBox, add_tree
from resources_servers.swe_bench.preparation.environments import PATH, TESTBED_PYTHON
from resources_servers.swe_bench.preparation.plan import PipInstall, PreparationError, RowPlan
from resources_servers.swe_bench.row import TESTBED

_TIMEOUT_S = 1800.0

GIT_ENV = {
    # Use no configuration, hooks or credentials, so that the result depends on the repository alone.
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


def git(
    *arguments: str | Path, cwd: Path, check: bool = True, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run git, isolated from all configuration. A failure raises `PreparationError` with git's error output."""
    if shutil.which("git") is None:
        raise PreparationError("git is not installed on this machine; install the 'git' package")
    inherited = {name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ}
    environment = {**inherited, **GIT_ENV, **(env or {})}
    command = ["git", *map(str, arguments)]
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise PreparationError(f"{' '.join(command[:3])} took longer than {_TIMEOUT_S:.0f} s in {cwd}") from error
    if check and done.returncode != 0:
        raise PreparationError(f"{' '.join(command[:3])} failed in {cwd}: {done.stderr.strip()[-500:]}")
    return done


class Repositories:
    """Finds repositories in some directories, and makes clones of single commits below ``scratch``.

    A clone starts from the previous clone of the same repository if that clone's commit is an ancestor. So preparing
    many instances of a large repository copies its history only once.
    """

    def __init__(self, directories: Sequence[Path], scratch: Path) -> None:
        self._directories = tuple(directories)
        self._scratch = scratch
        self._locks: dict[str, asyncio.Lock] = {}
        self._latest: dict[str, str] = {}

    def find(self, repo: str) -> Path | None:
        """Find the local repository of ``owner/name``: ``<owner>__<name>``, with or without ``.git``, bare or not."""
        name = repo.replace("/", "__")
        for directory in self._directories:
            for candidate in (directory / name, directory / f"{name}.git"):
                if candidate.is_dir():
                    return candidate
        return None

    def require(self, repo: str, commit: str) -> Path:
        """Return the local repository. Raises `ConfigError` if there is none or it does not hold ``commit``."""
        repository = self.find(repo)
        if repository is None:
            searched = ", ".join(map(str, self._directories)) or "no directory: give repos=DIR"
            raise ConfigError(f"no local repository of '{repo}': expected {repo.replace('/', '__')} in {searched}")
        if git("cat-file", "-e", f"{commit}^{{commit}}", cwd=repository, check=False).returncode != 0:
            raise ConfigError(
                f"repository {repository} does not hold commit {commit}; fetch it (git fetch origin {commit})"
            )
        return repository

    @contextlib.asynccontextmanager
    async def clone(self, repo: str, commit: str) -> AsyncIterator[Path]:
        """Provide the ``.git`` directory of a clone until the block ends. The clone is on branch `BRANCH` at
        ``commit`` and holds only that history. Clones of one repository are made one after the other."""
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
        # Use hard links if the file system supports them. That is safe, because git never changes an object file.
        shutil.copytree(history / "objects", target / ".git" / "objects", copy_function=_link, dirs_exist_ok=True)
        git("update-ref", f"refs/heads/{BRANCH}", commit, cwd=target)
        return target


def read_at(repository: Path, commit: str, path: str) -> str | None:
    """Return the text of a file in a commit, or ``None`` if there is no such file."""
    done = git("show", f"{commit}:{path}", cwd=repository, check=False)
    return done.stdout if done.returncode == 0 else None


def commit_time(repository: Path, commit: str) -> int:
    """Return the time of the commit, in Unix seconds."""
    return int(git("show", "--no-patch", "--format=%ct", commit, cwd=repository).stdout.strip() or 0)


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


_SCM = re.compile(r"setuptools[_-]scm")
_ACTIVATE = f". {shims.CONDA_ROOT}/bin/activate && conda activate testbed"


async def build_instance(box: BuildBox, plan: RowPlan, git_dir: Path) -> None:
    """Install the repository and the project in a box that was started from the row's environment layer."""
    await box.open_registries()
    await _place_repository(box, git_dir, plan.row.base_commit)
    if plan.environment.runtime.name == "node":
        await _install_node_project(box)
    else:
        await _install_python_project(box, plan, git_dir)
    # Restore tracked files that the installation changed, such as lock files. New files stay, as in published images.
    await box.run("git checkout --quiet -- . && git status --porcelain", step="restoring tracked files", cwd=TESTBED)
    await box.clean()


def image_env(plan: RowPlan) -> dict[str, str]:
    """Return the environment variables of every process in a box of the image."""
    env = {"PATH": PATH}
    if plan.environment.runtime.name == "node":
        env["NVM_DIR"] = shims.NVM_DIR
    return env


async def _place_repository(box: BuildBox, git_dir: Path, base_commit: str) -> None:
    await box.put(TESTBED, lambda tar: add_tree(tar, git_dir, ".git"))
    script = f"""
git -c core.logAllRefUpdates=false reset --quiet --hard {base_commit}
rm -rf .git/ORIG_HEAD .git/FETCH_HEAD .git/logs
test "$(git rev-parse HEAD)" = {base_commit}
"""
    await box.run(script, step="checking out the base commit", cwd=TESTBED)


async def _install_node_project(box: BuildBox) -> None:
    script = f"""
export PATH={shims.NODE_BIN}:$PATH
if [ -f package-lock.json ] || [ -f npm-shrinkwrap.json ]; then
    npm ci > {BUILD_DIR}/npm-ci.log 2>&1 || {{
        # What the published images were installed with mends a lock file that is not that of package.json.
        grep -q EUSAGE {BUILD_DIR}/npm-ci.log || {{ cat {BUILD_DIR}/npm-ci.log; exit 1; }}
        npm install
    }}
elif [ -f package.json ]; then
    npm install --no-package-lock
fi
"""
    await box.run(script, step="npm install", cwd=TESTBED, online=True)


async def _install_python_project(box: BuildBox, plan: RowPlan, git_dir: Path) -> None:
    environment = plan.environment
    scm_env: dict[str, str] = {}
    texts = [
        read_at(git_dir, plan.row.base_commit, name) or "" for name in ("pyproject.toml", "setup.cfg", "setup.py")
    ]
    if any(_SCM.search(text) for text in texts):
        scm_env = {"SETUPTOOLS_SCM_PRETEND_VERSION": plan.pretended_version}
        await box.put_files(shims.activation_files({**scm_env, **environment.env}))
    if plan.needs_tox:
        await box.put_files(shims.tox_files())
    await _install_build_requirements(box, texts[0])
    installs = plan.installs or _default_installs(git_dir, plan.row.base_commit)
    for install in installs:
        if isinstance(install, PipInstall):
            # The packages are installed already. They do not constrain pip here, because the project or its
            # requirements may be among them.
            command = ["-m", "pip", "install", "--no-build-isolation"]
            if install.editable:
                command += ["--config-settings", shims.EDITABLE_MODE]
            await box.run(
                [TESTBED_PYTHON, *command, *install.arguments(with_extras=environment.packages is None)],
                step="installing the project",
                cwd=TESTBED,
                env={"PATH": PATH, **scm_env},
                online=True,
            )
        else:
            await box.run(
                f"{_ACTIVATE}\n{install}", step=f"running {install!r}", cwd=TESTBED, env=scm_env, online=True
            )
    if environment.packages is None and "pytest" in plan.row.eval_script and "pytest" not in await _installed(box):
        await box.run([TESTBED_PYTHON, "-m", "pip", "install", "pytest"], step="installing pytest", online=True)
    await box.put_files(
        shims.offline_pip_files(editable=any(isinstance(i, PipInstall) and i.editable for i in installs))
    )
    # The evaluation script repeats these commands without a network, so check now that they work that way.
    for install in plan.installs:
        if isinstance(install, PipInstall):
            command_line = f"python -m pip install --quiet {' '.join(install.arguments(with_extras=True))}"
            await box.run(
                f"{_ACTIVATE}\n{command_line}", step=f"repeating {command_line!r} without a registry", cwd=TESTBED
            )


async def _install_build_requirements(box: BuildBox, pyproject: str) -> None:
    """Install the project's declared build requirements, except distributions that are installed in any version."""
    try:
        declared = tomllib.loads(pyproject).get("build-system", {}).get("requires", [])
        requirements = [Requirement(text) for text in declared]
    except (tomllib.TOMLDecodeError, InvalidRequirement, TypeError, AttributeError):
        return  # Installing the project reports the mistake in its declaration better.
    installed = await _installed(box)
    missing = [str(item) for item in requirements if canonicalize_name(item.name) not in installed]
    if missing:
        await box.run(
            [TESTBED_PYTHON, "-m", "pip", "install", *missing],
            step="installing what the project is built with",
            online=True,
        )


async def _installed(box: BuildBox) -> set[str]:
    """Return the normalized names of the distributions in the environment."""
    listing = await box.run(
        [TESTBED_PYTHON, "-m", "pip", "--disable-pip-version-check", "list", "--format=json"], step="listing packages"
    )
    return {canonicalize_name(entry["name"]) for entry in json.loads(listing.splitlines()[0])}


def _default_installs(git_dir: Path, commit: str) -> tuple[PipInstall, ...]:
    """Return the installs for an evaluation script without any: an editable install if there is a Python project."""
    names = ("pyproject.toml", "setup.py", "setup.cfg")
    return (PipInstall(editable=True),) if any(read_at(git_dir, commit, name) is not None for name in names) else ()
