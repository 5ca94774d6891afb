"""Creation of a box with Apptainer, in the supervisor. Uses only the standard library.

The overlays and the user namespace are created as for local boxes, and nothing in the box can create further user
namespaces. Inside the namespace, Apptainer is root without rights outside, so it needs neither a set-user-id program
nor the site's configuration. The box has no user ids of its own: see `MOVES_IDS`.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import signal
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from nemo_gym._util.tasks import finish
from nemo_gym.sandbox import linux
from nemo_gym.sandbox.providers.apptainer import CONFIGURATION
from nemo_gym.sandbox.providers.local.protocol import BASE_ENV, close_all, readable
from nemo_gym.sandbox.providers.local.supervisor import processes
from nemo_gym.sandbox.providers.local.supervisor.construction import (
    GO,
    PROC_ABSENT,
    PROC_READ_ONLY,
    BoxPlan,
    BuildError,
    BuiltBox,
    enter_mount_namespace,
    enter_user_namespace,
    explain,
    mount_overlay,
    place_in_image,
    set_streams,
    write_maps,
)
from nemo_gym.sandbox.providers.local.supervisor.processes import Problem, Report

# -- Finishing -----------------------------------------------------------------------------------------------------
# Work before and after Apptainer's own: creating mount points before it, adding the last mounts after it.
#
# This code runs in children of the supervisor, so it uses only the standard library.

_STANDARD_PLACES = ("/dev", "/proc", "/run", "/tmp", "/var/tmp")
_OWN_VARIABLES = ("APPTAINER_", "SINGULARITY_", "PS1", "PROMPT_COMMAND", "PWD", "OLDPWD", "HOME", "SHLVL", "TERM", "_")


def make_places(root: str, binds: Sequence[tuple[str, str]]) -> None:
    """Create the missing directories and files that Apptainer mounts on."""
    os.umask(0o022)
    for path in _STANDARD_PLACES:
        place = root + place_in_image(root, path)
        if not os.path.lexists(place):
            os.makedirs(place)  # noqa: PTH103 - plain strings throughout
            if path.endswith("tmp"):
                os.chmod(place, 0o1777)  # noqa: PTH101
    for source, target in binds:
        place = root + place_in_image(root, target)
        if os.path.lexists(place):
            continue
        is_directory = os.path.isdir(source)  # noqa: PTH112
        os.makedirs(place if is_directory else os.path.dirname(place), exist_ok=True)  # noqa: PTH103, PTH120
        if not is_directory:
            os.close(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))


async def finish_mounts(init_fd: int, plan: BoxPlan) -> Problem | None:
    """Add the mounts that Apptainer omits, before any command runs; return the problem, or ``None``."""

    def job(report: Report) -> None:
        report.step = "entering the box"
        linux.setns(init_fd, linux.CLONE_NEWUSER | linux.CLONE_NEWNS)
        report.step = "protecting /proc"
        _protect_proc()
        report.step = "mounting /dev/shm and /run"
        _mount_memory(*plan.memory_file_systems)
        for path in plan.hidden:
            report.step = f"hiding {path}"
            _hide(path)

    return await processes.run(job, keep=[init_fd])


def _protect_proc() -> None:
    """Protect the files of /proc that concern the whole machine, which a box's user 0 might access as the host's."""
    for path in PROC_READ_ONLY:
        if os.path.exists(path):  # noqa: PTH110
            linux.mount(path, path, None, linux.MS_BIND | linux.MS_REC)
            _remount_read_only(path, linux.MS_NODEV | linux.MS_NOEXEC)
    for path in PROC_ABSENT:
        if os.path.exists(path):  # noqa: PTH110
            _hide(path)


def _mount_memory(shm: int, run: int) -> None:
    flags = linux.MS_NOSUID | linux.MS_NODEV
    with contextlib.suppress(OSError):
        linux.umount("/dev/mqueue", linux.MNT_DETACH)
    linux.mount("tmpfs", "/dev/shm", "tmpfs", flags, f"mode=1777,size={shm}")
    _remount_read_only("/dev")
    linux.mount("tmpfs", "/run", "tmpfs", flags, f"mode=0755,size={run}")
    os.mkdir("/run/lock")  # noqa: PTH102
    os.chmod("/run/lock", 0o1777)  # noqa: PTH101


def _hide(path: str) -> None:
    if os.path.isdir(path):  # noqa: PTH112
        flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_RDONLY
        linux.mount("tmpfs", path, "tmpfs", flags, "mode=0555,size=4096")
    else:
        linux.mount("/dev/null", path, None, linux.MS_BIND)


def _remount_read_only(path: str, extra_flags: int = 0) -> None:
    flags = linux.MS_BIND | linux.MS_REMOUNT | linux.MS_RDONLY | linux.MS_NOSUID | extra_flags
    linux.mount("none", path, None, flags)


def image_env(init_pid: int) -> dict[str, str]:
    """The image's environment for every process: that of the first process, without Apptainer's own variables."""
    env: dict[str, str] = {}
    for entry in Path(f"/proc/{init_pid}/environ").read_bytes().split(b"\0"):
        name, separator, value = entry.decode("utf-8", "surrogateescape").partition("=")
        if not separator or name in _OWN_VARIABLES or name.startswith(_OWN_VARIABLES[:2]):
            continue
        if (name, value) in (("LANG", "C"), ("LD_LIBRARY_PATH", "/.singularity.d/libs")):
            continue
        env[name] = value
    return env


# -- Construction --------------------------------------------------------------------------------------------------

MOVES_IDS = False
"""Boxes cannot have their own user ids: Apptainer finds its files by paths that only the user outside can access."""


async def build(plan: BoxPlan) -> BuiltBox:
    """Create a box. On failure, nothing of it is left except files below ``plan.directory``.

    Raises:
        BuildError: the box could not be created; the message gives the reason.
    """
    for name in ("root", "parts", "files"):
        (plan.directory / name).mkdir(exist_ok=True)
    (plan.directory / "apptainer.conf").write_text(CONFIGURATION)
    binds = _binds(plan)
    status_read, status_write = os.pipe()
    go_read, go_write = os.pipe()
    error_read, error_write = os.pipe()
    program = linux.open_program()
    ready, ready_child = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    # The kernel adds the sender's pid, as valid in this pid namespace: that of the box's first process.
    ready.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    ready.setblocking(False)
    ready_fd = ready_child.detach()
    arguments = _arguments(plan, binds, program)
    try:
        maker = processes.fork(
            lambda report: _become_apptainer(plan, arguments, binds, report, status_write, go_read, ready_fd, program),
            error_write,
            keep=[status_write, go_read, ready_fd, program],
        )
    except BaseException:
        ready.close()
        close_all([status_read, go_write, error_read])
        raise
    finally:
        close_all([status_write, go_read, ready_fd, error_write, program])
    maker_fd = os.pidfd_open(maker)
    monitor, monitor_fd, built = 0, -1, False
    try:
        if await processes.read_byte(status_read):
            write_maps(maker, plan.identity)
            os.write(go_write, GO)
            await readable(status_read)
            monitor = int(os.read(status_read, 16) or b"0")
        if monitor:
            monitor_fd = os.pidfd_open(monitor)
            os.write(go_write, GO)
        init_pid = await _first_process(ready)
        if not init_pid:
            raise BuildError(explain(plan, await processes.read_all(os.dup(error_read))))
        init_fd = os.pidfd_open(init_pid)
        try:
            problem = await finish_mounts(init_fd, plan)
            if problem is not None:
                raise BuildError(f"making the box failed while {problem['step']}: {problem['message']}")
            network_fd = os.open(f"/proc/{init_pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            env = image_env(init_pid)
        except BaseException:
            os.close(init_fd)
            raise
        built = True
        return BuiltBox(monitor, monitor_fd, init_fd, init_pid, network_fd, env)
    finally:
        ready.close()
        close_all([status_read, go_write, error_read])
        if not built:
            with contextlib.suppress(ProcessLookupError):
                os.kill(maker, signal.SIGKILL)
            if monitor_fd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(monitor_fd, signal.SIGKILL)
                await finish(processes.wait_for_exit(monitor, monitor_fd))
        await finish(processes.wait_for_exit(maker, maker_fd))


async def _first_process(ready: socket.socket) -> int:
    """Wait until the box's first process runs and return its pid; 0 if it did not start."""
    await readable(ready.fileno())
    data, ancillary, _, _ = ready.recvmsg(16, socket.CMSG_SPACE(struct.calcsize("3i")))
    if data != linux.READY:
        return 0
    for level, kind, value in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            return int(struct.unpack("3i", value)[0])
    return 0


def _binds(plan: BoxPlan) -> list[tuple[str, str, bool]]:
    """The bind mounts in order: (path outside, path inside, whether it is writable)."""
    binds = [(str(plan.directory / "parts" / o.part), f"/{o.part}", True) for o in plan.overlays if o.part != "root"]
    for number, (path, data) in enumerate(plan.network_files.items()):
        file = plan.directory / "files" / str(number)
        file.write_bytes(data)
        binds.append((str(file), path, False))
    return binds + [(source, target, False) for source, target in plan.mounts]


def _arguments(plan: BoxPlan, binds: Sequence[tuple[str, str, bool]], program: int) -> list[str]:
    arguments = [plan.program, "--silent", "--config", str(plan.directory / "apptainer.conf"), "exec"]
    arguments += ["--containall", "--no-home", "--no-init", "--no-privs", "--no-mount", "cwd,bind-paths"]
    if not plan.open_network:
        arguments += ["--net", "--network", "none"]
    arguments += ["--uts", "--hostname", plan.hostname, "--writable"]
    # Apptainer runs scripts of the image as it starts, before `finish_mounts`, with the user id of the supervisor.
    protected = filter(os.path.exists, (*PROC_READ_ONLY, *PROC_ABSENT))
    early = [(path if os.path.isdir(path) else "/dev/null", path, False) for path in protected]  # noqa: PTH112
    for source, target, writable in (*early, *binds):
        fields = ["type=bind", f"source={source}", f"destination={target}", *([] if writable else ["ro"])]
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow(fields)
        arguments += ["--mount", line.getvalue()]
    return [*arguments, str(plan.directory / "root"), f"/proc/self/fd/{program}"]


def _become_apptainer(
    plan: BoxPlan,
    arguments: Sequence[str],
    binds: Sequence[tuple[str, str, bool]],
    report: Report,
    status_fd: int,
    go_fd: int,
    ready_fd: int,
    program: int,
) -> None:
    """In the child: mount the box's files, enter a user namespace, start Apptainer in a sibling process, and exit."""
    enter_mount_namespace(plan, report)
    for overlay in plan.overlays:
        report.step = f"overlay {overlay.part}"
        # Mount the overlays side by side, not nested: only a mount without submounts can become Apptainer's root.
        target = plan.directory / ("root" if overlay.part == "root" else f"parts/{overlay.part}")
        target.mkdir(exist_ok=True)
        mount_overlay(plan, overlay, target)
    report.step = "making the places of mounts"
    make_places(plan.root, [(source, target) for source, target, _ in binds])
    enter_user_namespace(report, status_fd, go_fd)
    # Apptainer and its box run in a pid namespace whose process 1 ends when the supervisor or Apptainer ends.
    linux.unshare(linux.CLONE_NEWPID)
    pid = linux.fork_as_sibling()
    if pid:
        os.write(status_fd, str(pid).encode())
        os._exit(0)
    linux.die_with_parent()
    os.close(status_fd)
    if os.read(go_fd, 1) != GO:  # the supervisor died before it opened a pidfd of this process
        os._exit(1)
    report.step = "apptainer"
    linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWCGROUP)
    # Apptainer looks up its own processes in /proc by their pids in this namespace.
    linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    set_streams(report, ready_fd, [program])
    _fork_and_watch()
    # They apply to what Apptainer runs of the image, too.
    linux.no_new_privileges()
    linux.install()
    environment = {**BASE_ENV, "HOME": str(plan.directory / "files")}
    os.execve(plan.program, list(arguments), environment)


def _fork_and_watch() -> None:
    """Fork. The child returns, to become Apptainer; the parent exits when the child does. Apptainer itself cannot be
    process 1: it starts its own program from a thread, and the kernel then drops the setting to die with its parent.
    """
    child = os.fork()
    if child == 0:
        return
    os.closerange(0, 1 << 20)
    while os.wait()[0] != child:
        pass
    os._exit(0)
