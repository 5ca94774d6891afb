"""Images of local boxes: directories of layers, and the ``host`` image of this host's own system."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from nemo_gym.sandbox.linux import locked

# -- The image of this host ----------------------------------------------------------------------------------------
# The lowest layer of the built-in ``host`` image, without the system directories. Uses only the standard library.
#
# The host's system directories (``/usr`` and what belongs to it) are used in place, read-only. This layer holds the
# rest of the root: links such as ``/bin``, empty directories, and only those parts of ``/etc`` that programs need to
# run. Everything else of the host, above all homes and configuration, is not merely hidden but absent.

_CANDIDATES = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "libo32")
_EMPTY = ("boot", "home", "media", "mnt", "opt", "srv", "sys", "proc", "dev", "run", "etc", "var")
_VAR = ("cache", "lib", "local", "log", "opt", "spool")
_ETC = (
    *("alternatives", "bash.bashrc", "bash_completion.d", "bindresvport.blacklist", "binfmt.d", "ca-certificates"),
    *("ca-certificates.conf", "crypto-policies", "debian_version", "default/locale", "fonts", "gai.conf", "gss"),
    *("host.conf", "inputrc", "java-*", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias", "locale.conf"),
    *("localtime", "lsb-release", "magic", "magic.mime", "mime.types", "networks", "nsswitch.conf", "os-release"),
    *("perl", "pki/ca-trust", "pki/tls/certs", "profile", "profile.d", "protocols", "python3", "python3.*"),
    *("redhat-release", "rpc", "services", "sgml", "shells", "skel", "ssl/certs", "ssl/openssl.cnf", "terminfo"),
    *("timezone", "xml"),
)
_MAX_ETC_FILE_BYTES = 4 * 1024 * 1024


def system_directories() -> list[str]:
    """Top-level directories used in place: ``usr``, and those of ``bin``, ``lib`` … that are not links into it."""
    names = ["usr"]
    for name in _CANDIDATES:
        path = Path("/", name)
        if path.is_dir() and not path.is_symlink():
            names.append(name)
    return names


def build_skeleton(root: Path) -> None:
    """Fill an empty directory with the lowest layer."""
    for name in ("usr", *_CANDIDATES):
        path = Path("/", name)
        if path.is_symlink():
            (root / name).symlink_to(path.readlink())
        elif path.is_dir():
            (root / name).mkdir()
    for name in (*_EMPTY, *(f"var/{name}" for name in _VAR)):
        (root / name).mkdir()
    for name in ("tmp", "var/tmp"):
        (root / name).mkdir()
        (root / name).chmod(0o1777)
    (root / "root").mkdir(mode=0o700)
    (root / "var/run").symlink_to("/run")
    (root / "var/lock").symlink_to("/run/lock")
    _fill_etc(root / "etc")


def _fill_etc(target: Path) -> None:
    for pattern in _ETC:
        for source in Path("/etc").glob(pattern):
            _copy_readable(source, target / source.relative_to("/etc"))
    (target / "passwd").write_text(_accounts(Path("/etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n"))
    (target / "group").write_text(_accounts(Path("/etc/group"), "root:x:0:\n"))
    (target / "hosts").write_text("127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n")
    (target / "hostname").write_text("sandbox\n")
    (target / "resolv.conf").write_text("")
    (target / "mtab").symlink_to("/proc/self/mounts")
    if not (target / "nsswitch.conf").exists():
        (target / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")


def _copy_readable(source: Path, target: Path) -> None:
    """Copy only what every user may read, because secrets have narrower permissions wherever they are."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        info = source.lstat()
        target.parent.mkdir(parents=True, exist_ok=True)
        if stat.S_ISLNK(info.st_mode):
            target.symlink_to(source.readlink())
        elif stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_IROTH:
            target.mkdir(exist_ok=True)
            for name in os.listdir(source):  # noqa: PTH208 - names are wanted, not paths
                _copy_readable(source / name, target / name)
        elif stat.S_ISREG(info.st_mode) and info.st_mode & stat.S_IROTH and info.st_size <= _MAX_ETC_FILE_BYTES:
            shutil.copyfile(source, target)
            target.chmod(stat.S_IMODE(info.st_mode) & 0o755)


def _accounts(source: Path, fallback: str) -> str:
    """Return the lines of system accounts only: a box should not see people's names and home directories."""
    try:
        lines = source.read_text(errors="replace").splitlines(keepends=True)
    except OSError:
        return fallback
    accounts = []
    for line in lines:
        fields = line.split(":")
        if len(fields) > 2 and fields[2].isdigit() and (int(fields[2]) < 1000 or int(fields[2]) == 65534):
            accounts.append(line if line.endswith("\n") else line + "\n")
    return "".join(accounts) or fallback


# -- Store ---------------------------------------------------------------------------------------------------------
# Images of the local provider: named stacks of read-only layers in a directory. Uses only the standard library.
#
#     <image_dir>/images/<quoted name>.json   manifest: base, layers from the bottom up, labels
#     <image_dir>/layers/<id>/<part>/         files that a box wrote, in overlayfs form; part ``root`` is ``/``
#     <image_dir>/staging/                    incomplete layers, each with a lock file, and manifests; deleted layers
#
# A manifest is written last and renamed into place, so an image either has all of its layers or does not exist.

HOST_IMAGE = "host"
_MANIFEST_VERSION = 1
_LOCK_SUFFIX = ".lock"
_ABANDONED_S = 24 * 3600.0


class ImageError(Exception):
    """An image that is missing, damaged, or made for another kind of user."""


@dataclass(frozen=True)
class ImageManifest:
    """The components of an image."""

    name: str
    host_base: bool
    """Whether the host's system directories are below the layers."""
    layers: list[str] = field(default_factory=list)
    """Ids of layers, the lowest first."""
    labels: dict[str, str] = field(default_factory=dict)
    xattrs: str = "trusted"
    """Namespace of overlayfs's extended attributes in the layers: ``trusted`` (made by root) or ``user``."""
    created_at: float = 0.0
    base_dir: str | None = None
    """A directory with a complete root filesystem below the layers, used in place."""
    version: int = _MANIFEST_VERSION


class ImageStore:
    """The images below one directory. Several processes can use it at once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.layers = root / "layers"

    def prepare(self) -> None:
        """Create the directories. Raises `OSError`."""
        for directory in (self.root, self.root / "images", self.layers, self.root / "staging"):
            directory.mkdir(parents=True, exist_ok=True)
        for directory in (self.layers, self.root / "staging"):
            with contextlib.suppress(PermissionError):  # it is another user's
                directory.chmod(0o700)  # no other user of the host may run a set-user-id file that a box made

    def names(self) -> list[str]:
        """The names of all images, including the built-in one."""
        directory = self.root / "images"
        names = [unquote(p.stem) for p in directory.glob("*.json")] if directory.is_dir() else []
        return sorted({HOST_IMAGE, *names})

    def manifest(self, name: str) -> ImageManifest | None:
        """The manifest of an image; ``None`` if there is no such image. Raises `ImageError` if it is not readable."""
        try:
            data: dict[str, Any] = json.loads(self._path(name).read_text())
            if data.get("version") != _MANIFEST_VERSION:
                raise ImageError(f"image '{name}' has manifest version {data.get('version')}; prepare it again")
            return ImageManifest(**data)
        except FileNotFoundError:
            return ImageManifest(HOST_IMAGE, host_base=True) if name == HOST_IMAGE else None
        except (ValueError, TypeError) as error:
            raise ImageError(
                f"the manifest {self._path(name)} is damaged ({error}); prepare the image again"
            ) from error

    def resolve(self, name: str, xattrs: str) -> ImageManifest:
        """Return the manifest of an image, and check that a box can use the image.

        Raises:
            ImageError: there is no such image, a layer is missing, or only the other kind of user (root or ordinary)
                can use the image.
        """
        manifest = self.manifest(name)
        if manifest is None:
            raise ImageError(
                f"there is no image '{name}' in {self.root}; available: {', '.join(self.names())}. Prepare it with "
                "`ng_prepare <environment> rows=… sandbox=local`, or set the provider's image_dir to where it is"
            )
        for layer in manifest.layers:
            if not (self.layers / layer).is_dir():
                raise ImageError(f"image '{name}' lacks its layer {layer} in {self.layers}; prepare it again")
        if manifest.layers and manifest.xattrs != xattrs:
            maker, user = ("root", "an ordinary user") if xattrs == "user" else ("an ordinary user", "root")
            raise ImageError(f"image '{name}' was made by {maker} and cannot be used as {user}; prepare it again")
        return manifest

    @contextlib.contextmanager
    def locked(self, *, exclusive: bool) -> Iterator[None]:
        """Lock the store: shared to pick layers, exclusive to publish or collect them."""
        self.prepare()
        with locked(self.root / "lock", fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH):
            yield

    def hold_layers(self, manifest: ImageManifest) -> list[int]:
        """Open descriptors that protect the image's layers from `collect` until they are closed."""
        descriptors: list[int] = []
        try:
            for layer in manifest.layers:
                descriptors.append(os.open(self.layers / layer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
                fcntl.flock(descriptors[-1], fcntl.LOCK_SH)
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return descriptors

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """An empty directory to build a layer in. The ``with`` block must `publish` or delete it; if this process is
        killed, `collect` deletes it."""
        self.prepare()
        path = self.root / "staging" / f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        lock = _lock_of(path)
        with locked(lock):
            path.mkdir(mode=0o755)
            try:
                yield path
            finally:
                lock.unlink(missing_ok=True)

    @contextlib.contextmanager
    def building(self, name: str, labels: Mapping[str, str]) -> Iterator[Path]:
        """Create the image ``name`` from the complete root filesystem that the ``with`` block makes as ``root`` in the
        directory it gets."""
        with self.staging() as staged:
            try:
                yield staged
                xattrs = "trusted" if os.geteuid() == 0 else "user"
                self.publish(name, ImageManifest(name, host_base=False), staged, labels, xattrs)
            finally:
                remove_directory(staged)  # does nothing if the image has it

    def add_base(self, name: str, directory: Path, labels: Mapping[str, str]) -> None:
        """Create the image ``name`` from a directory with a complete root filesystem, without copying it."""
        manifest = ImageManifest(name, host_base=False, labels=dict(labels), base_dir=str(directory))
        with self.locked(exclusive=True):
            self._write(replace(manifest, created_at=time.time()))

    def publish(self, name: str, parent: ImageManifest, staged: Path, labels: Mapping[str, str], xattrs: str) -> None:
        """Create the image ``name`` from ``parent``'s layers and the staged one on top. Replaces an existing image."""
        layer = uuid.uuid4().hex[:12]
        with self.locked(exclusive=True):
            staged.rename(self.layers / layer)
            manifest = ImageManifest(
                name,
                parent.host_base,
                [*parent.layers, layer],
                dict(labels),
                xattrs,
                created_at=time.time(),
                base_dir=parent.base_dir,
            )
            self._write(manifest)
        self.collect()

    def _write(self, manifest: ImageManifest) -> None:
        temporary = self.root / "staging" / f"{uuid.uuid4().hex[:12]}.json"
        with temporary.open("w") as file:
            json.dump(asdict(manifest), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path(manifest.name))

    def remove(self, name: str) -> None:
        """Remove an image and delete the layers that are no longer used. Its boxes keep their layers until they close.

        Raises:
            ImageError: ``name`` is the built-in image.
        """
        if name == HOST_IMAGE:
            raise ImageError(f"'{HOST_IMAGE}' is built in and cannot be removed")
        with contextlib.suppress(FileNotFoundError):
            self._path(name).unlink()
        self.collect()

    def collect(self) -> None:
        """Delete the layers that no manifest names and no box holds, and what killed processes left unfinished."""
        if not self.layers.is_dir():
            return
        removed = []
        with self.locked(exclusive=True):
            manifests = (self.manifest(name) for name in self.names())
            used = {layer for manifest in manifests if manifest is not None for layer in manifest.layers}
            for path in self.layers.iterdir():
                if path.name in used:
                    continue
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    removed.append(path.rename(self.root / "staging" / f"removed-{path.name}"))
                except BlockingIOError:
                    continue  # a box uses this layer; a later collection deletes it
                finally:
                    os.close(descriptor)
            abandoned = self._take_abandoned()
        for path in removed:
            remove_directory(path)
        for path in abandoned:
            with contextlib.suppress(OSError):  # a helper of the killed process may still write; tried again later
                remove_directory(path)

    def _take_abandoned(self) -> list[Path]:
        """Rename what killed processes left in ``staging``, so that nobody else takes it. Needs the exclusive lock."""
        staging = self.root / "staging"
        taken: list[Path] = []

        def take(path: Path) -> None:
            taken.append(path.rename(staging / f"removed-{uuid.uuid4().hex[:12]}"))

        for path in [*staging.iterdir()]:
            with contextlib.suppress(OSError):  # its maker works on it or has just finished, or is another user
                if path.suffix == _LOCK_SUFFIX:
                    with locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
                        if path.with_suffix("").exists():
                            take(path.with_suffix(""))
                        path.unlink()
                elif not _lock_of(path).exists() and time.time() - path.lstat().st_ctime > _ABANDONED_S:
                    # Processes of earlier releases, and those that delete a directory, lock none. Renaming it makes
                    # it young.
                    take(path)
        return taken

    def _path(self, name: str) -> Path:
        return self.root / "images" / f"{quote(name, safe='')}.json"


def _lock_of(staged: Path) -> Path:
    return staged.with_name(f"{staged.name}{_LOCK_SUFFIX}")


def remove_directory(path: Path) -> None:
    """Delete a tree, including directories without permissions. Raises `OSError` if something cannot be deleted.

    The tree may be of any depth. A box can nest directories deeper than the limits on path lengths, descriptors and
    recursion allow, so every directory is moved up to the top before it is emptied.
    """
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    prefix = uuid.uuid4().hex
    names = (path / f"{prefix}-{number}" for number in itertools.count())
    pending = [path]
    while pending:
        directory = pending.pop()
        directory.chmod(0o700)
        for entry in [*os.scandir(directory)]:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)  # noqa: PTH108 - the entry has its path as text
            elif directory == path:
                pending.append(Path(entry.path))
            else:
                Path(entry.path).chmod(0o700)  # moving a directory writes to it, as its ".." entry changes
                pending.append(Path(entry.path).rename(next(names)))
        if directory != path:
            directory.rmdir()
    path.rmdir()


def copy_layer(source: Path, target: Path) -> None:
    """Copy a tree in overlayfs form, with owners, modes, times, extended attributes, hard links and whiteouts.

    The tree may belong to a box that is still running, which can exchange any entry for a link to a file of the host
    at any time. So every directory is held open, and no link is ever followed. The process's working directory moves
    meanwhile: call it in a process of its own, or where nobody else needs that.
    """
    before, parent = os.open(".", _DIRECTORY), os.open(source.parent, _DIRECTORY)
    try:
        _copy_entry(parent, source.name, target.absolute(), {})
    except RecursionError as error:
        raise OSError(errno.ENAMETOOLONG, "its directories are nested too deeply", str(source)) from error
    finally:
        os.fchdir(before)
        os.close(before)
        os.close(parent)


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def _copy_entry(parent: int, name: str, target: Path, links: dict[tuple[int, int], Path]) -> None:
    # Not below /proc/self/fd: the /proc of a box's mount namespace may belong to another process namespace.
    os.fchdir(parent)
    source = Path(name)
    info = source.lstat()
    kind = stat.S_IFMT(info.st_mode)
    if kind not in (stat.S_IFDIR, stat.S_IFSOCK) and info.st_nlink > 1:
        first = links.setdefault((info.st_dev, info.st_ino), target)
        if first is not target:
            os.link(first, target, follow_symlinks=False)
            return
    if kind == stat.S_IFDIR:
        target.mkdir(exist_ok=True)
        directory = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    _copy_entry(directory, entry.name, target / entry.name, links)
        finally:
            os.close(directory)
        os.fchdir(parent)
    elif kind == stat.S_IFLNK:
        target.symlink_to(source.readlink())
    elif kind == stat.S_IFREG:
        _copy_content(parent, name, target, info)
    elif kind in (stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO):
        os.mknod(target, info.st_mode, info.st_rdev)
    else:
        return  # a socket has no content that outlives its process
    if (target_info := target.lstat()) and (target_info.st_uid, target_info.st_gid) != (info.st_uid, info.st_gid):
        os.chown(target, info.st_uid, info.st_gid, follow_symlinks=False)
    for attribute in os.listxattr(source, follow_symlinks=False):
        # The file system may refuse security labels, which it sets itself; all other attributes must be copied.
        with contextlib.suppress(PermissionError) if attribute.startswith("security.") else contextlib.nullcontext():
            value = os.getxattr(source, attribute, follow_symlinks=False)
            os.setxattr(target, attribute, value, follow_symlinks=False)
    if kind != stat.S_IFLNK:
        target.chmod(stat.S_IMODE(info.st_mode))
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns), follow_symlinks=False)


def _copy_content(parent: int, name: str, target: Path, info: os.stat_result) -> None:
    """Copy the data, but not the holes, of the regular file that ``info`` describes."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # it may be a link or a pipe by now
    descriptor = os.open(name, flags, dir_fd=parent)
    with open(descriptor, "rb", buffering=0) as reader, target.open("xb", buffering=0) as writer:  # noqa: PTH123
        if not os.path.samestat(os.fstat(descriptor), info):
            raise OSError(errno.ESTALE, "the file was exchanged while it was copied", name)
        size = info.st_size
        os.truncate(writer.fileno(), size)
        position = 0
        while position < size:
            try:
                position = os.lseek(reader.fileno(), position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole is left
                    return
                raise
            end = os.lseek(reader.fileno(), position, os.SEEK_HOLE)
            os.lseek(writer.fileno(), position, os.SEEK_SET)
            while position < end:
                copied = os.sendfile(writer.fileno(), reader.fileno(), position, end - position)
                if copied == 0:
                    return
                position += copied
