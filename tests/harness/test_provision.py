"""Packages on this machine, and boxes that cannot run them."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_gym._util.files import cache_root
from nemo_gym.agent.harness.base import CliPackage, Runtime
from nemo_gym.agent.harness.provision import UNFIT_STATUS, fitness_check, installed
from nemo_gym.agent.harness.provision.fetch import _unpack, fetch
from nemo_gym.config.compose import run_directory_root
from nemo_gym.contract.errors import ConfigError
from nemo_gym.sandbox.archive import pack_bytes
from tests.acceptance.clis import place

PACKAGE = CliPackage(
    name="some-cli",
    version="1.2.3",
    command="node_modules/some-build/some",
    runtime="elf-static",
    npm={"some-build": "1.2.3"},
    integrity={"some-build": "sha512-right"},
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEMO_GYM_CACHE_DIR", str(tmp_path))
    return tmp_path


def install(cache: Path, integrity: str = "sha512-right") -> Path:
    directory = cache / "agents" / PACKAGE.name / PACKAGE.version
    (directory / "node_modules" / "some-build").mkdir(parents=True)
    (directory / PACKAGE.command).touch()
    record = {"packages": {"node_modules/some-build": {"integrity": integrity}}}
    (directory / "node_modules" / ".package-lock.json").write_text(json.dumps(record))
    (directory / ".installed").touch()
    return directory


def test_package_is_found_in_the_cache(cache: Path) -> None:
    directory = install(cache)
    assert installed(PACKAGE) == directory


def test_cache_that_cannot_be_written_is_refused_by_name(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "file").touch()
    monkeypatch.setenv("NEMO_GYM_CACHE_DIR", str(cache / "file"))
    with pytest.raises(
        ConfigError, match=r"the cache .*file cannot hold 'some-cli': Not a directory; set NEMO_GYM_CACHE"
    ):
        fetch(PACKAGE)


@pytest.mark.parametrize("missing", [".", ".installed", PACKAGE.command])
def test_missing_package_is_refused_with_the_command_that_installs_it(cache: Path, missing: str) -> None:
    directory = install(cache)
    if missing == ".":
        directory.rename(cache / "elsewhere")
    else:
        (directory / missing).unlink()
    with pytest.raises(ConfigError, match=r"'some-cli' 1\.2\.3 is not in .*; run: ng_prepare agents"):
        installed(PACKAGE)


def test_package_of_another_checksum_is_refused(cache: Path) -> None:
    directory = install(cache, integrity="sha512-wrong")
    with pytest.raises(ConfigError, match=r"another 'some-build' than the pinned one \(its checksum is sha512-wrong"):
        installed(PACKAGE)
    (directory / "node_modules" / ".package-lock.json").unlink()
    with pytest.raises(ConfigError, match="its checksum is None"):
        installed(PACKAGE)


def checked(runtime: Runtime, command: str, path: str = "/usr/bin:/bin") -> subprocess.CompletedProcess[str]:
    package = CliPackage(name="x", version="1", command=command, runtime=runtime)
    script = fitness_check(package).replace(package.install_dir, "/usr") + "\necho fit\n"
    return subprocess.run(["/bin/sh", "-s"], input=script, capture_output=True, text=True, env={"PATH": path})


@pytest.mark.parametrize("command", ["bin/env", "."])  # a directory may hold any program, so it is not loaded
@pytest.mark.parametrize("runtime", ["elf-static", "elf-glibc", "python", "script"])
def test_fit_box_goes_on(runtime: Runtime, command: str) -> None:
    assert checked(runtime, command).stdout == "fit\n"


@pytest.mark.parametrize(
    ("runtime", "command", "said"),
    [
        ("elf-static", "bin/no-such", "not mounted into the box"),
        ("node", "bin/env", "no node, which x needs; use an image that has it"),
        ("python", "bin/env", "no python3, which x needs; use an image"),
    ],
)
def test_unfit_box_says_what_it_lacks(runtime: Runtime, command: str, said: str) -> None:
    done = checked(runtime, command, path="/nowhere")
    assert (done.returncode, done.stdout) == (UNFIT_STATUS, "")
    assert said in done.stderr


def test_box_without_glibc_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_gym.agent.harness.provision.LOADERS", ("/lib/ld-musl-x86_64.so.1.not-here",))
    done = checked("elf-glibc", "bin/env")
    assert (done.returncode, done.stdout) == (UNFIT_STATUS, "")
    assert "no glibc, which x needs; use an image that has it" in done.stderr  # nothing is fetched for it


@pytest.fixture
def source(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> CliPackage:
    """A package that npm itself packs, from a directory of this machine; its checksum is of what npm makes."""
    if shutil.which("npm") is None:
        monkeypatch.setenv("PATH", f"{place.installed('node') / 'bin'}{os.pathsep}{os.environ['PATH']}")
    directory = tmp_path_factory.mktemp("source")
    (directory / "package.json").write_text('{"name": "some-build", "version": "1.2.3", "files": ["some", "lib"]}')
    (directory / "some").write_text("#!/bin/sh\necho it runs\n")
    (directory / "lib").mkdir()
    (directory / "lib" / "data").write_text("data")
    subprocess.run(["npm", "pack", "--silent"], cwd=directory, check=True, capture_output=True)
    (archive,) = directory.glob("*.tgz")
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    archive.unlink()
    return CliPackage(
        name="some-cli",
        version="1.2.3",
        command="node_modules/some-build/some",
        runtime="script",
        npm={"some-build": f"npm:{directory}"},
        integrity={"some-build": f"sha512-{digest}"},
    )


def test_fetched_package_runs_and_is_fetched_once(cache: Path, source: CliPackage) -> None:
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(fetch, [source, source])
    assert first == second == installed(source)
    assert subprocess.run([first / source.command], capture_output=True, text=True).stdout == "it runs\n"
    assert (first / "node_modules" / "some-build" / "lib" / "data").read_text() == "data"
    (first / "here").touch()
    assert (fetch(source) / "here").exists()
    assert sorted(path.name for path in first.parent.iterdir()) == [".lock", "1.2.3"]


def test_fetch_deletes_what_killed_fetches_left(cache: Path, source: CliPackage) -> None:
    directory = cache / "agents" / source.name
    for version in (source.version, "1.2.2"):
        (directory / f".{version}.killed" / "package").mkdir(parents=True)
        (directory / f".{version}.killed" / "package" / "some").touch()
    fetch(source)
    assert sorted(path.name for path in directory.iterdir()) == [".lock", source.version]


def test_copy_of_glibc_that_a_killed_fetch_left_incomplete_is_deleted(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = install(cache)
    (directory / ".glibc.killed" / ".glibc").mkdir(parents=True)
    monkeypatch.setattr("nemo_gym.agent.harness.provision.fetch.take_along", lambda _, target: target.mkdir())
    fetch(replace(PACKAGE, runtime="elf-glibc"))
    assert sorted(path.name for path in directory.glob(".glibc*")) == [".glibc"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"integrity": {"some-build": "sha512-other"}}, "but sha512-other is pinned; refused"),
        ({"integrity": {}}, "pins no checksum of 'some-build'"),
        ({"command": "node_modules/some-build/none"}, "has no 'node_modules/some-build/none'"),
        ({"npm": {"some-build": "npm:/no/such/directory"}}, "npm could not fetch '/no/such/directory'"),
    ],
)
def test_package_that_is_not_the_pinned_one_is_never_installed(
    cache: Path, source: CliPackage, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        fetch(replace(source, **fields))
    assert [path.name for path in (cache / "agents" / "some-cli").iterdir()] == [".lock"]
    with pytest.raises(ConfigError, match="ng_prepare agents"):
        installed(source)


def test_archive_that_leaves_its_directory_is_refused(cache: Path, tmp_path: Path) -> None:
    archive = tmp_path / "some-build-1.2.3.tgz"
    archive.write_bytes(gzip.compress(pack_bytes("package/../../outside", b"data")))
    with pytest.raises(ConfigError, match=r"some-build-1\.2\.3\.tgz cannot be unpacked: .*leaves the target"):
        _unpack(archive, tmp_path / "inside" / "some-build")
    assert not (tmp_path / "outside").exists()


def test_cache_below_the_users_home_is_one_place_for_agents_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NEMO_GYM_CACHE_DIR", "~/kept")
    assert cache_root() == tmp_path / "kept"
    assert run_directory_root() == tmp_path / "kept" / "runs"
