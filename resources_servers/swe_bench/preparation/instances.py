"""The layer of one row: the repository at its base commit, and the project installed as its evaluation script does."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from resources_servers.swe_bench.images import TESTBED
from resources_servers.swe_bench.preparation import shims
from resources_servers.swe_bench.preparation.boxes import BuildBox, add_tree
from resources_servers.swe_bench.preparation.environments import PATH, TESTBED_PYTHON
from resources_servers.swe_bench.preparation.plan import PipInstall, RowPlan
from resources_servers.swe_bench.preparation.registries import BUILD_DIR
from resources_servers.swe_bench.preparation.repositories import read_at

_SCM = re.compile(r"setuptools[_-]scm")
_ACTIVATE = f". {shims.CONDA_ROOT}/bin/activate && conda activate testbed"


async def build_instance(box: BuildBox, plan: RowPlan, git_dir: Path) -> None:
    """Put repository and project into a box that was started from the row's environment layer."""
    await box.open_registries()
    await _place_repository(box, git_dir, plan.row.base_commit)
    if plan.environment.runtime.name == "node":
        await _install_node_project(box)
    else:
        await _install_python_project(box, plan, git_dir)
    # Lock files and the like that installing rewrote; what it added is left, as in the published images.
    await box.run("git checkout --quiet -- . && git status --porcelain", step="restoring tracked files", cwd=TESTBED)
    await box.clean()


def image_env(plan: RowPlan) -> dict[str, str]:
    """Variables of every process in a box from the image."""
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
            # The packages are there already. None of them binds pip: the project, or what it requires, may be one.
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
    # The evaluation script repeats these with no network; what cannot work then is found out now.
    for install in plan.installs:
        if isinstance(install, PipInstall):
            line = f"python -m pip install --quiet {' '.join(install.arguments(with_extras=True))}"
            await box.run(f"{_ACTIVATE}\n{line}", step=f"repeating {line!r} without a registry", cwd=TESTBED)


async def _install_build_requirements(box: BuildBox, pyproject: str) -> None:
    """What the project declares it is built with, as far as nothing of that name is there yet."""
    try:
        declared = tomllib.loads(pyproject).get("build-system", {}).get("requires", [])
        requirements = [Requirement(text) for text in declared]
    except (tomllib.TOMLDecodeError, InvalidRequirement, TypeError, AttributeError):
        return  # Installing the project says what is wrong with it, better than we could.
    installed = await _installed(box)
    missing = [str(item) for item in requirements if canonicalize_name(item.name) not in installed]
    if missing:
        await box.run(
            [TESTBED_PYTHON, "-m", "pip", "install", *missing],
            step="installing what the project is built with",
            online=True,
        )


async def _installed(box: BuildBox) -> set[str]:
    """Normalized names of the distributions in the environment."""
    listing = await box.run(
        [TESTBED_PYTHON, "-m", "pip", "--disable-pip-version-check", "list", "--format=json"], step="listing packages"
    )
    return {canonicalize_name(entry["name"]) for entry in json.loads(listing.splitlines()[0])}


def _default_installs(git_dir: Path, commit: str) -> tuple[PipInstall, ...]:
    """For evaluation scripts that install nothing: an editable install of whatever looks like a project."""
    names = ("pyproject.toml", "setup.py", "setup.cfg")
    return (PipInstall(editable=True),) if any(read_at(git_dir, commit, name) is not None for name in names) else ()
