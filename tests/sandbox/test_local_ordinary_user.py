"""The local provider works for an ordinary user, and says what it cannot enforce for one.

The tests run again in a process of user ``nobody``, which sees this checkout and this Python through bind mounts, for
they may lie where only root can read.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import nemo_gym

CHECKOUT = Path(nemo_gym.__file__).parent.parent
NOBODY = 65534
CAPABILITIES = """
import asyncio, sys
from nemo_gym.contract.errors import SandboxCapabilityError
from nemo_gym.contract.sandbox import SandboxResources, SandboxSpec
from nemo_gym.sandbox.providers.local import LocalProvider

async def main():
    provider = LocalProvider(state_dir=sys.argv[1] + "/state", image_dir=sys.argv[1] + "/images", linger_s=0.1)
    found = provider.capabilities
    print(found.memory_limit, found.reasons["memory_limit"])
    print(found.reasons["exec_user"])
    try:
        await provider.create(SandboxSpec(resources=SandboxResources(memory_mib=64)))
    except SandboxCapabilityError as error:
        print("refused", error)
    box = await provider.create(SandboxSpec())
    done = await provider.exec(box, "id -u; cat /proc/self/uid_map; mkdir /testbed /usr/local/x; touch /testbed/f")
    print(done.stdout, done.stderr)
    await provider.close(box)
    await provider.aclose()

asyncio.run(main())
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that ``nobody`` may enter."""
    path = Path(tempfile.mkdtemp(prefix="nemo-gym-nobody-"))
    path.chmod(0o755)
    for name in ("checkout", "site", "python", "home"):
        (path / name).mkdir()
    shutil.chown(path / "home", NOBODY, NOBODY)
    yield path
    for _ in range(100):  # a supervisor that is leaving still removes files of its own
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            break
        time.sleep(0.1)
    assert not path.exists()


def as_nobody(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    binds = {
        place / "checkout": CHECKOUT,
        place / "site": Path(pytest.__file__).parent.parent,
        place / "python": Path(sys.base_prefix),
    }
    python = place / "python" / Path(sys.executable).resolve().relative_to(Path(sys.base_prefix).resolve())
    mounts = " && ".join(f"mount --bind '{source}' '{target}'" for target, source in binds.items())
    user = f"setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups"
    env = (
        f"env -i HOME='{place}/home' PATH=/usr/bin:/bin LD_LIBRARY_PATH='{place}/python/lib' PYTHONDONTWRITEBYTECODE=1"
    )
    script = f"{mounts} && cd / && exec {user} {env} PYTHONPATH='{place}/checkout:{place}/site' {python} \"$@\""
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def test_ordinary_user_gets_boxes_and_is_told_what_is_missing(place: Path) -> None:
    done = as_nobody(place, "-c", CAPABILITIES, str(place / "home"))
    assert done.returncode == 0, done.stderr
    assert "False cgroup" in done.stdout
    assert "boxes of an ordinary user have user 0 alone" in done.stdout
    assert "refused sandbox provider 'local' cannot serve this spec: memory_limit: cgroup" in done.stdout
    assert "\n0\n         0          0          1\n" in done.stdout
    assert "cannot create directory '/usr/local/x': Permission denied" in done.stdout.replace("‘", "'").replace(
        "’", "'"
    )


@pytest.mark.parametrize(
    "tests",
    [
        pytest.param("test_local_commands.py -k no_cgroups", marks=pytest.mark.full),
        pytest.param("test_local_isolation.py", marks=pytest.mark.full),
        "test_user_limits.py -k takes_nothing",
        "test_limits.py -k writes_too_much and not docker",
        "test_conformance_local.py -k door or network or commit or stack or escapes or round_trip or cancel or disk",
    ],
)
def test_ordinary_user_passes_the_same_tests_as_root(place: Path, tests: str) -> None:
    name, _, selection = tests.partition(" -k ")
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={place}/home/pytest", f"--rootdir={place}/checkout"]
    if selection:
        options += ["-k", selection]
    done = as_nobody(place, "-m", "pytest", *options, str(place / "checkout" / "tests" / "sandbox" / name))
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
