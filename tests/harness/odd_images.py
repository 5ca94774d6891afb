"""Images unlike a Debian: with musl in place of glibc, without bash, and one with a single program and no shell."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

MUSL = "musl-world"
NO_BASH = "musl-world-without-bash"
BARE = "bare-world"
_PROGRAM = """
#include <stdio.h>
int main(void) {
    puts("this is musl");
    return 0;
}
"""
_IDLE = """
#include <unistd.h>
int main(void) {
    for (;;) pause();
}
"""


def musl_root(root: Path) -> Path:
    """A root with busybox's commands, bash, a repository's directory, and a program that needs musl's loader."""
    program = _tools("busybox", "bash-static", "musl-gcc")
    for name in ("bin", "lib", "etc", "tmp", "var/tmp", "root", "proc", "sys", "dev", "opt", "repo", "usr/bin"):
        (root / name).mkdir(parents=True)
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n")
    (root / "etc" / "group").write_text("root:x:0:\nuser:x:1000:\n")
    (root / "repo" / "greeting.txt").write_text("hello wrld\n")
    shutil.copy(program["busybox"], root / "bin" / "busybox")
    shutil.copy(program["bash-static"], root / "bin" / "bash")
    applets = subprocess.run([program["busybox"], "--list"], capture_output=True, text=True, check=True).stdout
    for applet in set(applets.split()) - {"busybox", "bash"}:
        (root / "bin" / applet).symlink_to("busybox")
    (root / "usr" / "bin" / "env").symlink_to("/bin/busybox")
    _compile(_PROGRAM, root / "bin" / "which-libc")
    loader = Path("/lib/ld-musl-x86_64.so.1")
    shutil.copy(loader.resolve(), root / "lib" / loader.name)
    return root


def root_without_bash(root: Path) -> Path:
    """As `musl_root`, with busybox's shell alone."""
    (musl_root(root) / "bin" / "bash").unlink()
    return root


def bare_root(root: Path) -> Path:
    """A root that holds one static program, which waits."""
    _tools("musl-gcc")
    for name in ("tmp", "proc", "sys", "dev", "etc", "opt"):
        (root / name).mkdir(parents=True)
    _compile(_IDLE, root / "idle", "-static")
    return root


def import_into_docker(root: Path, name: str) -> None:
    """Make a root an image of the engine that ``DOCKER_HOST`` names."""
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as packing:
        subprocess.run(["docker", "import", "-", name], stdin=packing.stdout, check=True, capture_output=True)


def remove_from_docker(*names: str) -> None:
    """Remove what `import_into_docker` made."""
    subprocess.run(["docker", "rmi", "--force", *names], check=True, capture_output=True)


def _compile(source: str, target: Path, *options: str) -> None:
    command = ["musl-gcc", "-O1", *options, "-x", "c", "-", "-o", str(target)]
    subprocess.run(command, input=source, text=True, check=True, capture_output=True)


def _tools(*names: str) -> dict[str, str]:
    found = {name: shutil.which(name) for name in names}
    missing = [name for name, path in found.items() if path is None]
    assert not missing, f"run scripts/install-system: there is no {', '.join(missing)}"
    return {name: path for name, path in found.items() if path is not None}
