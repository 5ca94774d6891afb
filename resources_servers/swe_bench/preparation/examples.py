"""Makes the repositories and rows of the example tasks from files. Run as a module, it rewrites the dataset.

``examples/<name>/task.json`` holds the problem statement and the tests that must change from failing to passing.
``fix.patch`` is the gold patch, and ``test.patch`` adds the tests for it.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from resources_servers.swe_bench.preparation.plan import Environment, read_environments
from resources_servers.swe_bench.preparation.repositories import BRANCH, git

EXAMPLES_DIR = Path(__file__).resolve().parent.parent / "examples"
OWNER = "examples"
_FIRST_DAY = 1_704_106_800
_DAY_S = 86_400
_AUTHOR = ("Example Maintainer", "maintainer@example.org")


def example_environments() -> dict[str, Environment]:
    """Return the environments of the example rows, by instance id."""
    return read_environments(EXAMPLES_DIR / "environments.json")


def example_names() -> list[str]:
    return sorted(path.parent.name for path in EXAMPLES_DIR.glob("*/before"))


def example_repositories(repos: Iterable[str], scratch: Path) -> list[Path]:
    """Assemble the repositories in ``repos`` that are examples. Return the directories that contain them."""
    names = [name for name in example_names() if f"{OWNER}/{name}" in set(repos)]
    if not names:
        return []
    directory = scratch / "example-repositories"
    for name in names:
        assemble(name, directory / f"{OWNER}__{name}")
    return [directory]


def assemble(name: str, target: Path) -> str:
    """Make the repository of an example at ``target``. Return the base commit."""
    source = EXAMPLES_DIR / name
    shutil.copytree(source / "before", target)
    git("init", "--quiet", "--template=", f"--initial-branch={BRANCH}", cwd=target)
    _commit(target, f"Start {name}", _FIRST_DAY)
    for number, patch in enumerate(sorted((source / "history").glob("*.patch")), start=1):
        git("apply", "--index", str(patch), cwd=target)
        subject = patch.stem.partition("-")[2].replace("-", " ").capitalize()
        _commit(target, subject, _FIRST_DAY + number * 9 * _DAY_S)
    return git("rev-parse", "HEAD", cwd=target).stdout.strip()


def _commit(repository: Path, message: str, when: int) -> None:
    """Commit everything. The identity and the date are fixed, so that the commit's hash depends on the files alone."""
    for path in [repository, *repository.rglob("*")]:
        if ".git" not in path.relative_to(repository).parts:
            # Git records the executable bit of files, which must not depend on this machine's umask or checkout.
            path.chmod(0o755 if path.is_dir() else 0o644)
    git("add", "--all", "--force", cwd=repository)
    name, email = _AUTHOR
    date = f"{when} +0000"
    identity = {"GIT_AUTHOR_NAME": name, "GIT_AUTHOR_EMAIL": email, "GIT_AUTHOR_DATE": date}
    identity |= {"GIT_COMMITTER_NAME": name, "GIT_COMMITTER_EMAIL": email, "GIT_COMMITTER_DATE": date}
    git("commit", "--quiet", "--no-gpg-sign", "--no-verify", "-m", message, cwd=repository, env=identity)


EXAMPLE_ROWS = EXAMPLES_DIR.parent / "data" / "example.jsonl"
_DELIMITER = "EOF_114329324912"
_PATCHED_FILE = re.compile(r"^diff --git a/(\S+) b/", re.MULTILINE)

_EVAL_SCRIPT = """\
#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
conda activate testbed
cd /testbed
git config --global --add safe.directory /testbed
cd /testbed
git status
git show
git -c core.fileMode=false diff {base}
source /opt/miniconda3/bin/activate
conda activate testbed
python -m pip install -e .
git checkout {base} {files}
git apply -v - <<'{delimiter}'
{test_patch}
{delimiter}
: '>>>>> Start Test Output'
{test_command}
: '>>>>> End Test Output'
git checkout {base} {files}
"""


def example_row(name: str) -> dict[str, Any]:
    """Return one row, in the form that SWE-bench publishes since harness 5."""
    directory = EXAMPLES_DIR / name
    task = json.loads((directory / "task.json").read_text(encoding="utf-8"))
    test_patch = (directory / "test.patch").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        base = assemble(name, Path(scratch) / name)
    files = " ".join(_PATCHED_FILE.findall(test_patch))
    return {
        "instance_id": f"{OWNER}__{name}-1",
        "repo": f"{OWNER}/{name}",
        "base_commit": base,
        "environment_setup_commit": base,
        "version": task["version"],
        "created_at": task["created_at"],
        "problem_statement": "\n".join(task["problem_statement"]),
        "hints_text": "",
        "patch": (directory / "fix.patch").read_text(encoding="utf-8"),
        "test_patch": test_patch,
        "FAIL_TO_PASS": json.dumps(task["FAIL_TO_PASS"]),
        "PASS_TO_PASS": json.dumps(task["PASS_TO_PASS"]),
        "image": "",
        "eval_script": _EVAL_SCRIPT.format(
            base=base,
            files=files,
            delimiter=_DELIMITER,
            test_patch=test_patch,
            test_command=task["test_command"].format(files=files),
        ),
        "log_parser": task["log_parser"],
        "eval_type": "pass_and_fail",
    }


def example_rows_text() -> str:
    """Return the whole text of the dataset."""
    return "".join(json.dumps(example_row(name), ensure_ascii=False) + "\n" for name in example_names())


if __name__ == "__main__":
    EXAMPLE_ROWS.parent.mkdir(exist_ok=True)
    EXAMPLE_ROWS.write_text(example_rows_text(), encoding="utf-8")
    sys.stdout.write(f"{EXAMPLE_ROWS.name}: {len(example_names())} rows\n")
