"""``ng_prepare swe_bench`` on real boxes: built once, found again, finished after a kill, and nothing of the building
left in the image. Needs the package registry."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.sandbox.base import BoxLabel, SandboxHandle
from nemo_gym.sandbox.providers.local.provider import LocalProvider
from resources_servers.swe_bench.preparation.boxes import BUILD_DIR, RegistryAccess, build_box
from resources_servers.swe_bench.preparation.environments import copy_runtime, host_runtime
from resources_servers.swe_bench.preparation.examples import EXAMPLE_ROWS
from resources_servers.swe_bench.preparation.plan import Runtime
from resources_servers.swe_bench.row import CONTENT_LABEL, TESTBED, read_rows, resolve_image
from resources_servers.swe_bench.scrub import verify_box

ROWS = [row for _, row in read_rows(EXAMPLE_ROWS)]
FIRST, SECOND = ROWS[0], ROWS[1]
T = TypeVar("T")
BUILT_BYTES = 4 * 1024 * 1024
"""More than an empty file system takes of its disk."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A provider of its own, so that what other runs prepared plays no part."""
    return tmp_path_factory.mktemp("local")


def command(store: Path, *words: str) -> list[str]:
    """Controls take longest, and are nothing of an image."""
    settings = [f"++sandbox.local.image_dir={store}/images", f"++sandbox.local.state_dir={store}/state"]
    return [
        sys.executable,
        *("-m", "resources_servers.swe_bench.prepare", f"rows={EXAMPLE_ROWS}", "sandbox=local", "controls=off"),
        *settings,
        *words,
    ]


def prepare(store: Path, *words: str) -> dict[str, Any]:
    done = subprocess.run(command(store, *words, "--json"), capture_output=True, text=True, timeout=280)
    assert done.returncode in (0, 1), done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def with_provider(store: Path, use: Callable[[LocalProvider], Awaitable[T]]) -> T:
    async def run() -> T:
        provider = LocalProvider(image_dir=str(store / "images"), state_dir=str(store / "state"))
        try:
            return await use(provider)
        finally:
            await provider.aclose()

    return asyncio.run(run())


def in_box(store: Path, row: dict[str, Any], use: Callable[[LocalProvider, SandboxHandle], Awaitable[T]]) -> T:
    """Run ``use`` in a box of the row's image, without a network, as a task would."""

    async def run(provider: LocalProvider) -> T:
        image = await resolve_image(provider, row)
        handle = await provider.create(SandboxSpec(image=image.name, env=image.env, workdir=TESTBED))
        try:
            return await use(provider, handle)
        finally:
            await provider.close(handle)

    return with_provider(store, run)


def _is_being_built(state: Path) -> bool:
    """Whether a box has a part of an environment: files of its own, or on a disk of its own that has grown."""
    disks = (path.stat().st_blocks * 512 for path in state.rglob("disk.img"))
    return any(state.rglob("pyvenv.cfg")) or any(size > BUILT_BYTES for size in disks)


@pytest.fixture(scope="module")
def prepared(store: Path) -> dict[str, Any]:
    """The first row, whose preparation was killed in the middle and then repeated."""
    killed = subprocess.Popen(command(store, f"instances={FIRST['instance_id']}"), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and killed.poll() is None:
        if _is_being_built(store / "state"):
            break
        time.sleep(0.1)
    assert killed.poll() is None, "it ended before it could be killed"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    # Its boxes are still being removed, so directories vanish while they are looked through. The environment, which
    # comes first, may be whole by now: that one is built on, and a half of it would fail the preparation below.
    names = [
        name
        for _, dirs, files in os.walk(store / "images")
        for name in [*dirs, *files]
        if name.startswith("ng-swe-bench") and ".env." not in name
    ]
    assert names == [], "a killed preparation must leave no image of its row"
    return prepare(store, f"instances={FIRST['instance_id']}")


def test_a_killed_preparation_is_finished_by_the_next(prepared: dict[str, Any]) -> None:
    assert (prepared["built"], prepared["failed"]) == (1, 0), prepared


def test_what_is_prepared_is_found_again(store: Path, prepared: dict[str, Any]) -> None:
    again = prepare(store, f"instances={FIRST['instance_id']}")
    assert (again["cached"], again["total"]) == (1, 1), again


def test_a_second_row_shares_the_environment_of_the_first(store: Path, prepared: dict[str, Any]) -> None:
    def environments() -> list[Path]:
        return sorted(path for path in (store / "images" / "images").iterdir() if ".env." in path.name)

    before = environments()
    assert prepare(store, f"instances={SECOND['instance_id']}")["built"] == 1
    assert environments() == before
    assert len(before) == 1


def test_an_image_is_built_again_when_its_environment_changes(store: Path, prepared: dict[str, Any]) -> None:
    entry = {"instance_id": FIRST["instance_id"], "runtime": "python 3", "packages": [], "env": {"GREETING": "hello"}}
    environments = store / "environments.json"
    environments.write_text(json.dumps([entry]))

    async def label(provider: LocalProvider) -> str:
        image = await resolve_image(provider, FIRST)
        return (await provider.image_labels(image.name) or {})[CONTENT_LABEL]

    before = with_provider(store, label)
    words = [f"instances={FIRST['instance_id']}", f"environments={environments}"]
    assert prepare(store, *words)["built"] == 1
    assert with_provider(store, label) != before
    script = ". /opt/miniconda3/bin/activate; conda activate testbed; echo $GREETING"

    async def greeting(provider: LocalProvider, handle: SandboxHandle) -> str | None:
        return (await provider.exec(handle, ["bash", "-c", script])).stdout

    assert in_box(store, FIRST, greeting) == "hello\n"
    assert prepare(store, f"instances={FIRST['instance_id']}")["built"] == 1, "back to its own environment"


def test_the_image_holds_the_base_commit_and_nothing_of_the_build(store: Path, prepared: dict[str, Any]) -> None:
    async def look(provider: LocalProvider, handle: SandboxHandle) -> None:
        await verify_box(provider, handle, TESTBED, FIRST["base_commit"])
        status = await provider.exec(handle, "git status --porcelain --untracked-files=all", cwd=TESTBED)
        assert (status.return_code, status.stdout) == (0, "")
        left = await provider.exec(handle, ["find", BUILD_DIR, "/root/.cache", "/root/.npm", "-maxdepth", "0"])
        assert left.stdout == ""
        configuration = await provider.exec(handle, ["python", "-m", "pip", "config", "list"])
        assert "index-url" not in (configuration.stdout or "")
        assert "no-index='true'" in (configuration.stdout or "")

    in_box(store, FIRST, look)


def test_no_build_box_is_left(store: Path, prepared: dict[str, Any]) -> None:
    async def boxes(provider: LocalProvider) -> list[str]:
        return [box.labels[BoxLabel.ROLE] for box in await provider.list({BoxLabel.MANAGED: "true"})]

    # The killed preparation's box lives until its lease ends, as every box whose owner was killed.
    assert len(with_provider(store, boxes)) <= 1

    async def reap(provider: LocalProvider) -> list[str]:
        return await provider.reap({BoxLabel.MANAGED: "true"})

    with_provider(store, reap)
    assert with_provider(store, boxes) == []


def test_a_row_fails_alone_and_says_why_when_its_runtime_is_nowhere(store: Path, prepared: dict[str, Any]) -> None:
    environments = store / "runtimes.json"
    environments.write_text(
        json.dumps([{"instance_id": FIRST["instance_id"], "runtime": "python 2.5", "packages": []}])
    )
    instances = f"instances={FIRST['instance_id']},{SECOND['instance_id']}"
    summary = prepare(store, instances, f"environments={environments}")
    errors = {row["instance_id"]: row.get("error", "") for row in summary["rows"]}
    assert "python 2.5" in errors[FIRST["instance_id"]]
    assert "Python here: " in errors[FIRST["instance_id"]]
    assert errors[SECOND["instance_id"]] == ""


def test_a_row_without_repository_names_what_is_missing(store: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({**FIRST, "repo": "nobody/nothing", "instance_id": "nobody__nothing-1"}) + "\n")
    words = [word if not word.startswith("rows=") else f"rows={rows}" for word in command(store, "--json")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    error = json.loads(done.stdout)["rows"][0]["error"]
    assert "repos=DIR with nobody__nothing in it" in error
    assert "swebench/sweb.eval.x86_64.nobody_1776_nothing-1:latest" in error


def make_row(place: Path, name: str, files: dict[str, str], eval_script: str) -> tuple[dict[str, Any], list[str]]:
    """A row of a repository made of these files, and the words of `prepare` that name both."""
    repository = place / "repos" / f"nobody__{name}"
    repository.mkdir(parents=True)
    for path, text in files.items():
        (repository / path).write_text(text)
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "base"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    changed = {"instance_id": f"nobody__{name}-1", "repo": f"nobody/{name}", "base_commit": head}
    row = {**FIRST, **changed, "eval_script": eval_script}
    (place / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return row, [f"rows={place / 'rows.jsonl'}", f"repos={place / 'repos'}"]


def prepare_one(store: Path, words: list[str]) -> dict[str, Any]:
    command_line = [word for word in command(store, "--json") if not word.startswith("rows=")]
    done = subprocess.run([*command_line, *words], capture_output=True, text=True, timeout=280)
    (found,) = json.loads(done.stdout)["rows"]
    return dict(found)


def test_packages_that_the_project_requires_in_another_version_are_moved(store: Path, tmp_path: Path) -> None:
    # As pytest's own repository, whose tests need packages that pin pytest; and pylint's, which pins its astroid.
    project = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "iniconfig"
version = "9.9"
dependencies = ["packaging>=24"]
[tool.setuptools]
py-modules = []
"""
    script = f"python -m pip install -e .\ngit checkout {'0' * 40} t.py\npytest -rA t.py\n"
    row, words = make_row(tmp_path, "moved", {"pyproject.toml": project}, script)
    packages = ["packaging==23.2", "iniconfig==2.0.0", "pluggy==1.4.0"]
    entry = {"instance_id": row["instance_id"], "runtime": "python 3", "packages": packages}
    (tmp_path / "environments.json").write_text(json.dumps([entry]))
    found = prepare_one(store, [*words, f"environments={tmp_path / 'environments.json'}"])
    assert found["status"] == "built", found

    async def versions(provider: LocalProvider, handle: SandboxHandle) -> str | None:
        show = "from importlib.metadata import version as v; print(v('iniconfig'), v('packaging'), v('pluggy'))"
        return (await provider.exec(handle, ["python", "-c", show])).stdout

    iniconfig, packaging, pluggy = str(in_box(store, row, versions)).split()
    assert (iniconfig, pluggy) == ("9.9", "1.4.0")
    assert int(packaging.split(".")[0]) >= 24


def test_javascript_project_with_a_lock_file_out_of_sync_is_installed_from_its_package_file(
    store: Path, tmp_path: Path
) -> None:
    package = {"name": "x", "version": "1.0.0", "dependencies": {"is-odd": "3.0.1"}}
    lock = {"name": "x", "version": "1.0.0", "lockfileVersion": 3, "packages": {"": {"name": "x", "version": "1.0.0"}}}
    files = {"package.json": json.dumps(package), "package-lock.json": json.dumps(lock)}
    row, words = make_row(tmp_path, "unlocked", files, ". /opt/nvm/nvm.sh\nnpx jest t.js\n")
    found = prepare_one(store, words)
    assert found["status"] == "built", found

    async def look(provider: LocalProvider, handle: SandboxHandle) -> str | None:
        script = "node -p 'require(\"is-odd\")(3)'; git status --porcelain -uno"
        return (await provider.exec(handle, script, cwd=TESTBED)).stdout

    assert in_box(store, row, look) == "true\n"


def test_a_copied_interpreter_starts_where_the_image_has_another_one(store: Path) -> None:
    """The tree of the interpreter that runs this test, with its own libraries, in a box that has the system's."""
    tree = host_runtime(Runtime("python", ".".join(map(str, sys.version_info[:3]))))

    async def copy(provider: LocalProvider) -> str:
        async with build_box(provider, None, RegistryAccess(), run_id="test", what="copy", online=False) as box:
            await copy_runtime(box, tree)
            check = "import ctypes, sqlite3, ssl, sys, venv, zlib; print(sys.base_prefix, sys.version.split()[0])"
            return await box.run([tree.executable, "-c", check], step="starting it")

    prefix, version = with_provider(store, copy).split()
    assert tree.executable.startswith(f"{prefix}/bin/")
    assert version == ".".join(map(str, sys.version_info[:3]))


PUBLISHED = """
mkdir /testbed && cd /testbed
export GIT_CONFIG_GLOBAL=/tmp/config && git config --global user.name a && git config --global user.email a@example.org
git init -q -b main . && echo one > file && git add file && git commit -qm base && git rev-parse HEAD
echo adapted > file && git commit -qam 'what the makers of the image changed' && git rev-parse HEAD
git checkout -q -b later && echo fixed > file && git commit -qam fix && git rev-parse HEAD && git checkout -q main
"""


def publish(store: Path, place: Path, name: str) -> tuple[list[str], dict[str, Any], list[str]]:
    """The words that prepare a row of a published image, the row, and the commits of the image."""
    image = f"published.{name}-1"

    async def commit(provider: LocalProvider) -> list[str]:
        handle = await provider.create(SandboxSpec())
        try:
            done = await provider.exec(handle, ["bash", "-euc", PUBLISHED])
            assert done.ok, done.stderr
            await provider.commit(handle, image, {})
        finally:
            await provider.close(handle)
        return (done.stdout or "").split()

    commits = with_provider(store, commit)
    changed = {"instance_id": f"nobody__{name}-1", "repo": f"nobody/{name}", "base_commit": commits[0], "image": image}
    row = {**FIRST, **changed}
    rows = place / "rows.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    return (
        [word if not word.startswith("rows=") else f"rows={rows}" for word in command(store, "--json")],
        row,
        commits,
    )


def test_a_published_image_is_scrubbed_down_to_what_its_makers_committed(store: Path, tmp_path: Path) -> None:
    words, row, (base, head, fix) = publish(store, tmp_path, "published")
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"][0]["source"] == "official"

    async def look(provider: LocalProvider, handle: SandboxHandle) -> None:
        await verify_box(provider, handle, TESTBED, base, head=head)
        assert (await provider.exec(handle, "cat file", cwd=TESTBED)).stdout == "adapted\n"
        assert not (await provider.exec(handle, ["git", "cat-file", "-e", fix], cwd=TESTBED)).ok

    in_box(store, row, look)


def test_of_processes_that_prepare_one_row_at_once_one_does_the_work(store: Path, tmp_path: Path) -> None:
    words, _, _ = publish(store, tmp_path, "shared")
    at_once = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(3)]
    found = [json.loads(process.communicate(timeout=240)[0])["rows"][0]["status"] for process in at_once]
    assert sorted(found) == ["built", "cached", "cached"]
