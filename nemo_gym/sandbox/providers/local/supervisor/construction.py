"""Creation of a box's file system and namespaces: overlays in a mount namespace of its own, then bubblewrap."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path, PurePosixPath

from nemo_gym._util.tasks import finish
from nemo_gym.sandbox import linux
from nemo_gym.sandbox.providers.local.protocol import close_all, memory_file
from nemo_gym.sandbox.providers.local.supervisor import files, processes
from nemo_gym.sandbox.providers.local.supervisor.processes import Report

MOVES_IDS = True
"""This builder can give boxes their own user ids; see "User ids" in `processes`."""
UNSHARED, GO = b"u", b"g"
"""What a new box's first child writes when it is in its user namespace, and the supervisor when it has written the
namespace's id maps."""
_SHM_BYTES = 1024 * 1024 * 1024
_RUN_BYTES = 64 * 1024 * 1024
_OWN = ("/proc", "/dev")
"""File systems of the box that are not the image's; nothing else can be mounted in them but below ``/dev/shm``."""
_MAX_LINKS = 40
"""How many links the kernel follows in one path."""
PROC_READ_ONLY = ("/proc/sys", "/proc/fs", "/proc/irq", "/proc/bus")
PROC_ABSENT = (
    *("/proc/sysrq-trigger", "/proc/kcore", "/proc/kmsg", "/proc/keys", "/proc/timer_list", "/proc/sched_debug"),
    *("/proc/latency_stats", "/proc/acpi", "/proc/scsi", "/proc/asound"),
)


class BuildError(Exception):
    """A box could not be created; the message gives the reason and a remedy."""


@dataclass(frozen=True)
class Overlay:
    """One overlay of a box: the directory where it appears (``part``), and its lower directories from the top down."""

    part: str
    lowers: Sequence[str]
    """Paths relative to the directory of layers, or absolute paths."""


@dataclass(frozen=True)
class BoxPlan:
    """Everything that determines a box."""

    directory: Path
    layers: Path
    overlays: Sequence[Overlay]
    program: str
    """Path of the program that creates the box's namespaces."""
    hostname: str
    open_network: bool
    mounts: Sequence[tuple[str, str]]
    hidden: Sequence[str]
    memory_bytes: int | None
    disk_bytes: int | None
    """Size of a separate disk for the files that the box writes; ``None`` uses the state directory's disk."""
    user_overlays: bool
    """Whether an ordinary user mounts overlayfs (in a user namespace)."""
    identity: str
    """The box's user ids as a line of the kernel's id map, if the box does not have its own range of ids."""
    first_id: int | None
    """The host's id of the box's user 0, if the box has its own range of ids; see "User ids" in `processes`."""
    stage: str
    """With ``first_id``: the directory where the box's mounts are assembled, as only root can reach ``directory``."""
    network_files: dict[str, bytes]
    """Path in the box → content, for boxes on the host's network."""

    @property
    def writable(self) -> Path:
        """The directory that contains the overlays' upper directories."""
        return self.directory if self.disk_bytes is None else self.directory / "disk"

    @property
    def root(self) -> str:
        """The directory where the box's root is assembled."""
        return str(self.directory / "root") if self.first_id is None else f"{self.stage}/root"

    @property
    def memory_file_systems(self) -> tuple[int, int]:
        """Sizes of ``/dev/shm`` and ``/run`` in bytes. Files in memory count as memory that cannot be reclaimed, so
        there is room left for a process that deletes them."""
        if self.memory_bytes is None:
            return _SHM_BYTES, _RUN_BYTES
        return min(_SHM_BYTES, self.memory_bytes // 2), min(_RUN_BYTES, self.memory_bytes // 8)

    def source(self, number: int) -> str:
        """The path from which the source of ``mounts[number]`` is mounted into the box."""
        return self.mounts[number][0] if self.first_id is None else f"{self.stage}/mount-{number}"


@dataclass(frozen=True)
class BuiltBox:
    """The processes of a new box."""

    monitor_pid: int
    """bubblewrap's process outside the box, a child of this process."""
    monitor_fd: int
    init_fd: int
    """pidfd of the box's process 1, whose namespaces make up the box."""
    init_pid: int
    network_fd: int
    """Descriptor of the box's network namespace."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment that the image sets for every process."""


async def build(plan: BoxPlan) -> BuiltBox:
    """Create a box. On failure, nothing of it is left except files below ``plan.directory``.

    Raises:
        BuildError: the box could not be created; the message gives the reason.
    """
    (plan.directory / "root").mkdir(exist_ok=True)
    ready_read, ready_write = os.pipe()
    go_read, go_write = os.pipe()
    error_read, error_write = os.pipe()
    info_read, info_write = os.pipe()
    program = linux.open_program()
    files = {path: memory_file(data, "file") for path, data in plan.network_files.items()}
    inherited = [program, info_write, *files.values()]
    try:
        pid = processes.fork(
            lambda report: _become_bwrap(plan, program, info_write, files, report, ready_write, go_read),
            error_write,
            keep=[ready_write, go_read, *inherited],
        )
    except BaseException:
        close_all([ready_read, go_write, error_read, info_read])
        raise
    finally:
        close_all([ready_write, go_read, error_write, *inherited])
    pidfd = os.pidfd_open(pid)
    built = False
    try:
        signal_byte = await processes.read_byte(ready_read)
        if signal_byte == UNSHARED:
            write_maps(pid, plan.identity)
            os.write(go_write, GO)
            signal_byte = await processes.read_byte(ready_read)
        if signal_byte != linux.READY:
            raise BuildError(explain(plan, await processes.read_all(os.dup(error_read))))
        init_pid = int(json.loads(os.read(info_read, 65536))["child-pid"])
        init_fd = os.pidfd_open(init_pid)
        network_fd = os.open(f"/proc/{init_pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        built = True
        return BuiltBox(pid, pidfd, init_fd, init_pid, network_fd)
    finally:
        close_all([ready_read, go_write, error_read, info_read])
        if not built:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            await finish(processes.wait_for_exit(pid, pidfd))


def write_maps(pid: int, identity: str) -> None:
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{pid}/{name}").write_text(identity)


def enter_mount_namespace(plan: BoxPlan, report: Report) -> None:
    """In the child: enter a new session and mount namespace, and mount the box's disk, if it has one."""
    report.step = "mounting"
    os.setsid()
    linux.unshare(linux.CLONE_NEWNS)
    if plan.disk_bytes is not None:
        report.step = "disk"
        files.make_and_mount(plan.directory / "disk.img", plan.writable, plan.disk_bytes)


def enter_user_namespace(report: Report, unshared_fd: int, go_fd: int) -> None:
    """In the child: enter a new user namespace without rights outside, once the supervisor has written its id maps."""
    report.step = "user namespace"
    linux.unshare(linux.CLONE_NEWUSER)
    os.write(unshared_fd, UNSHARED)
    if os.read(go_fd, 1) != GO:
        os._exit(1)
    processes.limit_counters()
    forbid_user_namespaces()


def forbid_user_namespaces() -> None:
    """Let nothing inside create further user namespaces: most kernel vulnerabilities are reached through them."""
    Path("/proc/sys/user/max_user_namespaces").write_text("0")


def set_streams(report: Report, ready_fd: int, inherited: Sequence[int]) -> None:
    """In the child: prepare the descriptors of the program that it will execute."""
    for number, descriptor in enumerate((os.open("/dev/null", os.O_RDONLY), ready_fd, report.descriptor)):
        os.dup2(descriptor, number)
    for descriptor in inherited:
        os.set_inheritable(descriptor, True)


def _become_bwrap(
    plan: BoxPlan,
    program: int,
    info_fd: int,
    files: Mapping[str, int],
    report: Report,
    ready_fd: int,
    go_fd: int,
) -> None:
    """In the child: mount the box's files, enter a user namespace without rights outside, and execute bubblewrap."""
    parent = os.getppid()
    enter_mount_namespace(plan, report)
    bwrap = os.open(plan.program, os.O_RDONLY | os.O_CLOEXEC)
    namespace = None
    if plan.first_id is not None:
        report.step = "user namespace"
        namespace = processes.user_namespace(plan.first_id)
        report.step = "moving user ids"
        _move_ids(plan, namespace)
    for overlay in plan.overlays:
        report.step = f"overlay {overlay.part}"
        target = Path(plan.root)
        mount_overlay(plan, overlay, target if overlay.part == "root" else target / overlay.part)
    report.step = "finding the places of mounts"
    places = {path: place_in_image(plan.root, path) for path in (*_OWN, "/run")}
    covered = [*places.values()]
    paths = [*plan.hidden, *files, *(target for _, target in plan.mounts)]
    places |= {path: place_in_image(plan.root, path, covered) for path in paths}
    arguments = _bwrap_arguments(plan, program, info_fd, files, places)
    if namespace is None:
        enter_user_namespace(report, ready_fd, go_fd)
    else:
        report.step = "user namespace"
        linux.setns(namespace, linux.CLONE_NEWUSER)
        processes.become_root()
        forbid_user_namespaces()
    linux.die_with_parent(parent)
    report.step = "bwrap"
    set_streams(report, ready_fd, [program, info_fd, *files.values()])
    os.execve(bwrap, arguments, {"PATH": "/usr/bin:/bin"})


def _move_ids(plan: BoxPlan, namespace: int) -> None:
    """Mount all of the box's directories with shifted ids below ``plan.stage``, where every user can reach them."""
    trees = {"layers": linux.clone_mount(str(plan.layers), namespace)}
    trees["writable"] = linux.clone_mount(str(plan.writable), namespace)
    for number, lower in enumerate(_foreign_lowers(plan)):
        trees[f"lower-{number}"] = linux.clone_mount(lower, namespace)
    for number, (source, _) in enumerate(plan.mounts):
        try:
            trees[f"mount-{number}"] = linux.clone_mount(source, namespace, recursive=True)
        except OSError:  # the file system does not support shifted ids; files that all may read are enough
            trees[f"mount-{number}"] = linux.clone_mount(source, recursive=True)
    linux.mount("tmpfs", plan.stage, "tmpfs", linux.MS_NODEV | linux.MS_NOSUID, "mode=755,size=1M")
    for name, tree in trees.items():
        target = Path(plan.stage, name)
        if stat.S_ISDIR(os.fstat(tree).st_mode):
            target.mkdir()
        else:
            target.touch()
        linux.attach_mount(tree, str(target))
    Path(plan.root).mkdir()
    for overlay in plan.overlays:
        _make_upper(plan, overlay)
    # Overlayfs creates files as the user who mounts it, and user 0 of the host does not exist below it.
    assert plan.first_id is not None
    linux.become_for_files(plan.first_id, plan.first_id)


def _foreign_lowers(plan: BoxPlan) -> list[str]:
    """The lower directories outside the directory of layers."""
    return [lower for overlay in plan.overlays for lower in overlay.lowers if lower.startswith("/")]


def mount_overlay(plan: BoxPlan, overlay: Overlay, target: Path) -> None:
    """Mount one overlay of a box. Its upper directory gets the mode and owner of the topmost lower one."""
    lowers = list(overlay.lowers)
    if plan.first_id is None:
        upper, work = _make_upper(plan, overlay)
    else:
        shifted = {lower: f"{plan.stage}/lower-{number}" for number, lower in enumerate(_foreign_lowers(plan))}
        lowers = [shifted.get(lower, lower) for lower in lowers]
        upper, work = (Path(plan.stage, "writable", name, overlay.part) for name in ("upper", "work"))
        os.chdir(f"{plan.stage}/layers")
    # A renamed system directory of the host is not joined to the one at its old path: an image made of the box would
    # then show what a mount hides there. As in Docker, a program that renames it gets EXDEV and copies it.
    redirects = "on" if overlay.part == "root" else "nofollow"
    options = [
        "lowerdir=" + ":".join(_escape(path) for path in lowers),
        f"upperdir={_escape(str(upper))}",
        f"workdir={_escape(str(work))}",
        # A box does not survive a crash, so its writes need not wait for the disk.
        "volatile",
        "index=off",
        *(("userxattr",) if plan.user_overlays else (f"redirect_dir={redirects}", "metacopy=off")),
    ]
    linux.mount("overlay", str(target), "overlay", linux.MS_NODEV | linux.MS_NOSUID, ",".join(options))


def _make_upper(plan: BoxPlan, overlay: Overlay) -> tuple[Path, Path]:
    """Create the directories that an overlay writes to; the upper one gets the mode and owner of the top lower one.
    Changes the current directory to the directory of layers."""
    os.chdir(plan.layers)
    upper, work = plan.writable / "upper" / overlay.part, plan.writable / "work" / overlay.part
    for directory in (upper, work):
        directory.mkdir(parents=True, exist_ok=True)
    lower = Path(overlay.lowers[0]).stat()
    upper.chmod(lower.st_mode & 0o7777)
    if not plan.user_overlays:
        os.chown(upper, lower.st_uid, lower.st_gid)
    return upper, work


def _escape(path: str) -> str:
    for character in "\\:,":
        path = path.replace(character, "\\" + character)
    return path


def place_in_image(root: str, path: str, covered: Collection[str] = ()) -> str:
    """Return the path without links of the place in the image at ``root`` where ``path`` leads in a box. Until the box
    is built, all files of the host are in reach, and a link of the image could lead there. Links of the image below
    ``covered``, where the box has other file systems, are not in the box.

    Raises:
        OSError: the links are a loop, or nothing can be mounted there.
    """
    place: list[str] = []
    left = [*reversed(PurePosixPath(path).parts[1:])]
    links = 0
    while left:
        name = left.pop()
        if name == "..":
            place = place[:-1]
            continue
        if any(part in covered for part in accumulate(place, lambda path, name: f"{path}/{name}", initial="")):
            place.append(name)
            continue
        try:
            link = PurePosixPath(os.readlink("/".join((root, *place, name))))  # noqa: PTH115 - plain strings
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR):  # whether it is a link is not known
                raise
            place.append(name)
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, f"nothing can be mounted on {path}, as links of the image there are a loop")
        if link.is_absolute():
            place = []
        left += [name for name in reversed(link.parts) if name != "/"]
    found = "/" + "/".join(place)
    # The links of a file system of the box are not in the image, and some of them lead out of the box.
    in_own = place[:1] in (["proc"], ["dev"]) and place[:2] != ["dev", "shm"]
    if found != path if path in _OWN else in_own or not place:
        raise OSError(errno.EINVAL, f"nothing can be mounted on {path}, which is {found} in this image")
    return found


def _bwrap_arguments(
    plan: BoxPlan, program: int, info_fd: int, files: Mapping[str, int], places: Mapping[str, str]
) -> list[str]:
    arguments = [plan.program, "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
    if not plan.open_network:
        arguments += ["--unshare-net"]
    arguments += ["--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL", "--clearenv"]
    arguments += ["--hostname", plan.hostname, "--bind", plan.root, "/"]
    arguments += ["--proc", "/proc", *_protect_proc(), "--dev", "/dev"]
    shm, run = plan.memory_file_systems
    arguments += ["--perms", "1777", "--size", str(shm), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    arguments += ["--perms", "0755", "--size", str(run), "--tmpfs", places["/run"]]
    arguments += ["--perms", "1777", "--dir", f"{places['/run']}/lock"]
    for path in plan.hidden:
        arguments += _hide(path, places[path])
    for path, descriptor in files.items():
        arguments += [*_parents(places[path]), "--ro-bind-data", str(descriptor), places[path]]
    for number, (_, target) in enumerate(plan.mounts):
        arguments += [*_parents(places[target]), "--ro-bind", plan.source(number), places[target]]
    return [*arguments, "--chdir", "/", "--info-fd", str(info_fd), "--", f"/proc/self/fd/{program}"]


def _protect_proc() -> list[str]:
    """Protect the files of /proc that concern the whole machine, which a box's user 0 might access as the host's."""
    arguments: list[str] = []
    for path in PROC_READ_ONLY:
        if os.path.exists(path):  # noqa: PTH110 - plain strings throughout
            arguments += ["--ro-bind", path, path]
    for path in PROC_ABSENT:
        if os.path.exists(path):  # noqa: PTH110
            arguments += _hide(path, path)
    return arguments


def _parents(path: str) -> list[str]:
    """Create missing parents. bubblewrap by itself would create them with access for root alone."""
    return [
        word
        for parent in [*reversed(PurePosixPath(path).parents)][1:]
        for word in ("--perms", "0755", "--dir", str(parent))
    ]


def _hide(path: str, place: str) -> list[str]:
    if os.path.isdir(path):  # noqa: PTH112 - plain strings throughout
        return ["--perms", "0555", "--size", "4096", "--tmpfs", place, "--remount-ro", place]
    return ["--ro-bind", "/dev/null", place]


def explain(plan: BoxPlan, said: bytes) -> str:
    """Build the error message, the cause of the failure and a remedy, from the child's problem or, if the child became
    ``plan.program``, from that program's error output."""
    try:
        problem: processes.Problem = json.loads(said)
        step, number, message = problem["step"], problem["errno"], problem["message"]
    except (ValueError, TypeError, KeyError):
        text = said.decode("utf-8", "replace").strip() or "it ended without an error message"
        return f"{plan.program} could not make the box: {text}"
    if step == "apptainer":
        return f"cannot run '{plan.program}' ({message}): set the provider's option apptainer"
    if number == errno.ENOSPC:
        if step == "user namespace":
            return "no more user namespaces can be made: raise the sysctl user.max_user_namespaces, or close boxes"
        return f"no space left on the device of {plan.directory.parent}: free some, or set the provider's state_dir"
    if step.startswith("overlay"):
        if number == errno.ENODEV:
            return "this kernel has no overlayfs: load it with `modprobe overlay`, or use another provider"
        if number == errno.EPERM and plan.user_overlays:
            return "this kernel does not let ordinary users mount overlayfs: Linux 5.11 or later is needed, or root"
        return (
            f"cannot mount overlayfs for '{step.removeprefix('overlay ')}' ({message}): the provider's state_dir "
            f"{plan.directory.parent.parent} must be on a file system that can hold an overlay's upper layer "
            "(ext4, xfs, btrfs, tmpfs; not overlayfs, NFS or FUSE)"
        )
    if step == "user namespace":
        return (
            f"user namespaces cannot be used here ({message}): set the sysctls user.max_user_namespaces, "
            "kernel.unprivileged_userns_clone=1 or kernel.apparmor_restrict_unprivileged_userns=0"
        )
    if step == "disk":
        return f"the box's limited disk could not be made: {message}"
    if step == "bwrap":
        return (
            f"cannot run '{plan.program}' ({message}): install the package bubblewrap "
            "(`apt-get install bubblewrap`, `dnf install bubblewrap`) or set the provider's option bwrap"
        )
    return f"making the box failed while {step}: {message}"
