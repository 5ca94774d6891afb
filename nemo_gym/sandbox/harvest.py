"""Harvest: collect an agent's results from its box, read from outside and passed on as untrusted data.

Callers only need `harvest_all`. It collects a patch of everything that differs between a work tree in a box and the
same tree in the box's pristine image, the files that harvest rules name as one tar stream, and a command's output.

The agent's box is only read, as a tar stream made by its provider. The pristine tree comes from a fresh *harvest box*
of the same image. The git of the harvest box writes the patch: in a separate repository, from blobs, with no work
tree, with only this module's configuration and the pristine ignore rules. The patch uses nothing from the agent's box:
neither its git, its ``.git``, ``.gitattributes``, ``.gitignore``, hooks and nested repositories, nor any program on
its PATH. A commit, a stash or a deleted ``.git`` in the agent's box makes no difference.

A tree is read from the stream as git would store it, path → mode and blob id, without unpacking anything, so no name
or link that an agent chose ever reaches a file system of the host.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import itertools
import posixpath
import re
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any

import structlog

from nemo_gym.contract.errors import (
    ContractError,
    SandboxArchiveError,
    SandboxArchiveTooLargeError,
    SandboxError,
    SandboxLostError,
)
from nemo_gym.contract.sandbox import NetworkPolicy, SandboxRole, SandboxSpec
from nemo_gym.contract.session import Artifact, CommandHarvest, FilesHarvest, GitDiffHarvest, HarvestItem
from nemo_gym.sandbox.archive import END_OF_ARCHIVE, ArchiveError, TarParser, encode_header, member_parts, pack_bytes
from nemo_gym.sandbox.base import (
    BoxLabel,
    ExecOutcome,
    SandboxExecResult,
    SandboxHandle,
    SandboxProvider,
    overrun_of,
)
from nemo_gym.sandbox.facade import AsyncSandbox, keep_renewed

log = structlog.get_logger(__name__)

REGULAR, EXECUTABLE, SYMLINK = "100644", "100755", "120000"


@dataclass(frozen=True, slots=True)
class Entry:
    """One file as recorded in a git tree."""

    mode: str
    oid: str
    """Blob id (hex)."""


@dataclass
class Tree:
    """The tree that was read from a stream."""

    entries: dict[bytes, Entry] = field(default_factory=dict)
    """Path below the root, as bytes → entry."""
    is_directory: bool = False
    """Whether the stream's root was a directory; a work tree that became a file or a link has no entries."""
    skipped: list[str] = field(default_factory=list)
    """The first `MAX_NAMED_SKIPS` paths that no patch may name: those with a component ``.git`` in any case, and hard
    links to files that are not in the tree."""
    skipped_count: int = 0


class TreeTooLargeError(Exception):
    """The stream exceeded a limit; the message says which."""


MAX_NAMED_SKIPS = 20
MAX_PATH_BYTES = 256 * 1024 * 1024
"""Limit on the total size of all paths. They are kept in memory, and a box can make long ones at almost no cost: one
file more below hundreds of directories. The paths of the largest public repositories take some tens of MB."""
Content = tuple[bytes, Entry, bytes]
"""Path, entry and content of one file."""


class TreeReader:
    """Reads one tar stream whose first member is the tree's root; `tree` is complete once `contents` has ended."""

    def __init__(
        self, *, algorithm: str = "sha1", max_bytes: int, max_files: int, max_content_bytes: int = -1
    ) -> None:
        """
        Args:
            algorithm: hash of the repository's object ids, ``sha1`` or ``sha256``.
            max_bytes, max_files: limits on the whole stream.
            max_content_bytes: `contents` yields only files up to this size; by default none at all.
        """
        self.tree = Tree()
        self._algorithm = algorithm
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._max_content_bytes = max_content_bytes
        self._path_bytes_left = MAX_PATH_BYTES
        self._root: str | None = None
        self._path: bytes | None = None
        self._mode = REGULAR
        self._hash = hashlib.new(algorithm)
        self._content: bytearray | None = None

    async def contents(self, stream: AsyncIterator[bytes]) -> AsyncIterator[Content]:
        """Read the stream, and yield each file and link of at most ``max_content_bytes``.

        Raises:
            TreeTooLargeError: a limit was exceeded.
            ArchiveError: the stream is damaged.
        """
        parser, received = TarParser(), 0
        async for chunk in stream:
            received += len(chunk)
            if received > self._max_bytes:
                raise TreeTooLargeError(f"the tree is larger than {self._max_bytes} bytes")
            for event in parser.feed(chunk):
                if (content := self._take(event)) is not None:
                    yield content
        parser.close()

    def _take(self, event: tarfile.TarInfo | bytes | None) -> Content | None:
        """Process one event of the parser; return the file or link that it completes, if any."""
        if isinstance(event, tarfile.TarInfo):
            return self._start(event)
        if self._path is None:
            return None
        if event is None:
            return self._finish()
        self._hash.update(event)
        if self._content is not None:
            self._content += event
        return None

    def _start(self, member: tarfile.TarInfo) -> Content | None:
        self._path = None
        if self._root is None:
            self._root = member.name.strip("/")
            self.tree.is_directory = member.isdir()
            return None
        path = self._below_root(member.name)
        if path is None or member.isdir():
            return None
        if any(part.lower() == b".git" for part in path.split(b"/")):
            self._skip(path)
            return None
        if len(self.tree.entries) >= self._max_files:
            raise TreeTooLargeError(f"the tree has more than {self._max_files} files")
        self._path_bytes_left -= len(path)
        if self._path_bytes_left < 0:
            raise TreeTooLargeError(f"the paths of the tree's files take more than {MAX_PATH_BYTES} bytes")
        if member.islnk():
            # Another path of an entry that was already read.
            source = self._below_root(member.linkname)
            if source in self.tree.entries:
                self.tree.entries[path] = self.tree.entries[source]
            else:
                self._skip(path)
        elif member.issym():
            self._begin(path, SYMLINK, member.linkname.encode("utf-8", "surrogateescape"))
            return self._finish()
        elif member.isreg():
            self._begin(path, EXECUTABLE if member.mode & 0o100 else REGULAR, b"", member.size)
        return None

    def _below_root(self, name: str) -> bytes | None:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise ArchiveError(f"member '{name}' leaves the tree")
        if self._root not in ("", ".", None):
            parts = parts[1:]
        return "/".join(parts).encode("utf-8", "surrogateescape") if parts else None

    def _begin(self, path: bytes, mode: str, content: bytes, size: int | None = None) -> None:
        length = len(content) if size is None else size
        self._path, self._mode = path, mode
        self._hash = hashlib.new(self._algorithm)
        self._hash.update(b"blob %d\0" % length + content)
        self._content = bytearray(content) if length <= self._max_content_bytes else None

    def _finish(self) -> Content | None:
        path, content = self._path, self._content
        assert path is not None
        self._path, self._content = None, None
        entry = self.tree.entries[path] = Entry(self._mode, self._hash.hexdigest())
        return None if content is None else (path, entry, bytes(content))

    def _skip(self, path: bytes) -> None:
        self.tree.skipped_count += 1
        if len(self.tree.skipped) < MAX_NAMED_SKIPS:
            self.tree.skipped.append(path.decode("utf-8", "replace"))


HARVEST_LEASE_S = 120.0
"""Maximum time that a harvest box outlives this process if the process is killed."""
PRISTINE_GIT_TIMEOUT_S = 300.0
CHANGES_GIT_TIMEOUT_S = 120.0
"""Two tries, the second in another box, have to fit into the time for a harvest; else an agent whose changes keep git
busy would have its attempt repeated."""
MAX_TREE_BYTES = 4 * 1024**3
"""Limit on one work tree's stream, from which the directories that the pristine repository ignores are excluded."""
MAX_TREE_FILES = 400_000
MAX_LIST_BYTES = 64 * 1024 * 1024
MAX_NAMED_PATHS = 200
"""Maximum number of paths listed in an artifact's facts."""
MAX_EXCLUDES = 400
BYPRODUCT_DIRECTORIES = (
    "__pycache__",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
    ".hypothesis",
    ".tox",
    ".nox",
    ".ipynb_checkpoints",
)
"""Directories that running programs leave behind; harvested only where the repository tracks one of that name."""
BYPRODUCT_SUFFIXES = (b".pyc", b".pyo")

_UPLOAD = "/var/tmp/ng-harvest"
_REPOSITORY = "/var/tmp/ng-harvest.git"
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/nonexistent",
    "LC_ALL": "C",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_SYSTEM": "/dev/null",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_REPLACE_OBJECTS": "1",
}
_OPTIONS = "-c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.untrackedCache=false -c core.quotePath=true"

# Prints three NUL-separated sections, separated by "/", which cannot be a path below the work tree: object format and
# exclude file, tracked paths, ignored paths. Without a repository, no path is tracked or ignored.
_DESCRIBE = f"""
command -v git >/dev/null || exit 97
export GIT_DIR="$1/.git" GIT_WORK_TREE="$1"
if git {_OPTIONS} rev-parse --git-dir >/dev/null 2>&1; then
  if [ -n "$2" ]; then git {_OPTIONS} merge-base --is-ancestor "$2" HEAD || exit 98; fi
  format=$(git {_OPTIONS} rev-parse --show-object-format 2>/dev/null)
  [ "$format" = sha256 ] || format=sha1  # git before 2.25 prints the option that it does not know
  printf '%s\\0' "$format" "$(git {_OPTIONS} rev-parse --git-path info/exclude)" /
  git {_OPTIONS} ls-files -z && printf '/\\0' &&
  git {_OPTIONS} ls-files -z --others --ignored --exclude-standard --directory
else
  [ -z "$2" ] || exit 98
  printf '%s\\0' sha1 '' / /
fi
"""
# ls-files also lists a directory that no rule matches if all its files are ignored, though a new file there is not.
_CHECK_DIRECTORIES = f"""
cd "$1" && GIT_DIR="$1/.git" GIT_WORK_TREE="$1" git {_OPTIONS} check-ignore -z --stdin --verbose
"""
_INIT = f"""
set -e
format=; [ "$1" = sha1 ] || format="--object-format=$1"
git init --quiet --bare $format {_REPOSITORY}
printf '* -text -eol -crlf -ident -filter -working-tree-encoding !diff !merge\\n' > {_REPOSITORY}/info/attributes
if [ -n "$2" ] && [ -f "$2" ]; then cat "$2" > {_REPOSITORY}/info/exclude; fi
"""
_CHECK_IGNORE = f"""
mkdir -p {_UPLOAD}/ignore && cd {_UPLOAD}/ignore || exit 2  # 1 says that nothing is ignored
GIT_DIR={_REPOSITORY} GIT_WORK_TREE={_UPLOAD}/ignore git {_OPTIONS} check-ignore -z --stdin --no-index --verbose
"""
_DIFF = f"""
set -e
export GIT_DIR={_REPOSITORY}
cd "$1" && git hash-object -w --no-filters --stdin-paths < {_UPLOAD}/pristine-paths > /dev/null
cd {_UPLOAD} && git hash-object -w --no-filters --stdin-paths < blob-paths > /dev/null
tree() {{ rm -f "$GIT_DIR/index"; git update-index -z --index-info < "$1"; git write-tree; }}
old=$(tree old-index); new=$(tree new-index)
git {_OPTIONS} -c core.bigFileThreshold=32m diff-tree -r -p --binary --full-index --no-renames --no-ext-diff \\
  --no-textconv --no-color --src-prefix=a/ --dst-prefix=b/ "$old" "$new"
"""


class _BoxContentsError(Exception):
    """The contents of the agent's box cannot become a patch; ``truncated`` if the only reason is their size."""

    def __init__(self, message: str, *, truncated: bool = False, size: int = 0, in_harvest_box: bool = False) -> None:
        super().__init__(message)
        self.truncated = truncated
        self.size = size
        self.in_harvest_box = in_harvest_box
        """Whether the harvest box failed, which a slow or full machine may have caused as well."""


@dataclass
class _Contents:
    """Contents of changed files by blob id; they move to disk beyond a few MiB."""

    spool: IO[bytes]
    places: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, oid: str, content: bytes) -> None:
        if oid not in self.places:
            self.places[oid] = (self.spool.seek(0, 2), len(content))
            self.spool.write(content)

    def get(self, oid: str) -> bytes:
        offset, length = self.places[oid]
        self.spool.seek(offset)
        return self.spool.read(length)


@dataclass(frozen=True)
class _Pristine:
    """The work tree of the pristine image."""

    tree: Tree
    tracked: frozenset[bytes]
    exclude: tuple[str, ...]
    contents: Mapping[bytes, bytes]
    """Path → content, for symbolic links (their targets) and ``.gitignore`` files only."""
    by_oid: Mapping[str, bytes]

    @property
    def rules(self) -> dict[bytes, bytes]:
        """Path → content of the ``.gitignore`` files. Git does not follow one that is a link."""
        return {path: content for path, content in self.contents.items() if self.tree.entries[path].mode != SYMLINK}

    @property
    def links(self) -> dict[str, bytes]:
        """Blob id → target of the symbolic links. Not by path: a link's other names (hard links) have no content."""
        found = ((self.tree.entries[path], content) for path, content in self.contents.items())
        return {entry.oid: content for entry, content in found if entry.mode == SYMLINK}


async def harvest_git_diff(
    provider: SandboxProvider,
    handle: SandboxHandle,
    spec: SandboxSpec,
    item: GitDiffHarvest,
    labels: Mapping[str, str],
) -> Artifact:
    """Return the patch that turns ``item.path`` of the pristine image into that of the box.

    The patch omits untracked files that the pristine repository's rules ignore, and untracked by-products of running
    programs. Symbolic links are content, never followed. ``facts`` list the changed paths and what was left out.

    If the harvest box fails on the changes, another one tries once more. It has to read the pristine tree first, which
    a slow or full machine cannot do either; if only the changes fail again, they are the cause.

    Raises:
        SandboxError: the provider failed, a box was lost, the image has no git, or its repository does not descend
            from ``item.base_commit``.
    """
    with tempfile.SpooledTemporaryFile(max_size=8 * 1024 * 1024) as spool:
        contents, work = _Contents(spool), None
        while True:
            async with (
                AsyncSandbox(provider, _harvest_spec(spec, labels)) as box,
                keep_renewed(provider, box.handle, HARVEST_LEASE_S),
            ):
                harvester = _Harvester(provider, box.handle, item)
                pristine = await harvester.describe_pristine()
                is_second = work is not None
                try:
                    work = work or await harvester.read_work_tree(handle, pristine, contents)
                    return await harvester.artifact(pristine, work, contents)
                except SandboxLostError:
                    if (overrun := await overrun_of(provider, box.handle)) is None:
                        raise
                    error = _BoxContentsError(f"no patch can be made of the changes: {overrun}", in_harvest_box=True)
                except _BoxContentsError as contents_error:
                    error = contents_error
                if is_second or not error.in_harvest_box:
                    return Artifact.of(
                        item.name, "git_diff", b"", error=str(error), truncated=error.truncated, size=error.size
                    )
                log.warning("harvested again", sandbox_id=handle.sandbox_id, error=str(error))


def _harvest_spec(spec: SandboxSpec, labels: Mapping[str, str]) -> SandboxSpec:
    return SandboxSpec(
        image=spec.image,
        ttl_s=HARVEST_LEASE_S,
        ready_timeout_s=spec.ready_timeout_s,
        resources=spec.resources,
        provider_options=spec.provider_options,
        network=NetworkPolicy.NONE,
        metadata={**labels, BoxLabel.MANAGED: "true", BoxLabel.ROLE: SandboxRole.HARVEST},
    )


class _Harvester:
    def __init__(self, provider: SandboxProvider, box: SandboxHandle, item: GitDiffHarvest) -> None:
        self._provider = provider
        self._box = box
        self._item = item
        self._path = posixpath.normpath(item.path)
        self._algorithm = "sha1"

    # ------------------------------------------------------------------------------------------- the pristine side

    async def describe_pristine(self) -> _Pristine:
        """Read the pristine tree and create the harvest repository. The agent's box has not been read yet, so every
        failure here is a `SandboxError` and not an error in the artifact."""
        result = await self._sh(_DESCRIBE, self._path, self._item.base_commit or "")
        if not result.ok or result.stdout_truncated:
            reason = {
                97: "it has no git",
                98: f"its {self._path} is not a git repository with {self._item.base_commit} in its history",
            }
            why = reason.get(result.return_code or 0, f"git said {(result.stderr or '').strip()[-500:]!r}")
            raise SandboxError(f"the image cannot be harvested from: {why}", path=self._path)
        fields = result.stdout_bytes.split(b"\0")
        first_end, second_end = fields.index(b"/"), fields.index(b"/", fields.index(b"/") + 1)
        self._algorithm, exclude_file = (name.decode("utf-8", "surrogateescape") for name in fields[:first_end])
        tracked = frozenset(fields[first_end + 1 : second_end])
        tracked_directories = _directories(tracked)
        listed = [path.removesuffix(b"/") for path in fields[second_end + 1 :] if path.endswith(b"/")]
        exclude = _excludes(tracked_directories, await self._ignored_directories_of_image(listed))
        contents: dict[bytes, bytes] = {}
        reader = self._reader(max_content_bytes=1024 * 1024)
        stream = self._provider.get_archive(self._box, self._path, exclude=exclude, max_bytes=MAX_TREE_BYTES)
        try:
            async for path, entry, content in reader.contents(stream):
                if entry.mode == SYMLINK or path.rpartition(b"/")[2] == b".gitignore":
                    contents[path] = content
        except (SandboxArchiveError, ArchiveError, TreeTooLargeError) as error:
            raise SandboxError(f"the image's own {self._path} cannot be read: {error}", path=self._path) from error
        init = await self._sh(_INIT, self._algorithm, exclude_file)
        if not init.ok:
            raise SandboxError(f"the harvest box cannot make a repository: {(init.stderr or '').strip()[-500:]}")
        by_oid = {entry.oid: path for path, entry in reader.tree.entries.items() if entry.mode != SYMLINK}
        pristine = _Pristine(reader.tree, tracked, exclude, contents, by_oid)
        return replace(pristine, exclude=(*exclude, *_ignored_directories(pristine.rules, tracked_directories)))

    async def _ignored_directories_of_image(self, directories: list[bytes]) -> list[bytes]:
        """Return those that a rule ignores. They are asked for without ``/`` at the end, because ``logs/*`` matches
        ``logs/``. A failure is no error, because a directory that is missing here only costs time."""
        stdin = b"".join(b"./" + path + b"\0" for path in directories)
        result = await self._sh(_CHECK_DIRECTORIES, self._path, stdin=stdin) if directories else None
        return _ignored_paths(result.stdout_bytes) if result and not result.stdout_truncated else []

    # -------------------------------------------------------------------------------------------- the agent's side

    async def read_work_tree(self, handle: SandboxHandle, pristine: _Pristine, contents: _Contents) -> Tree:
        reader = self._reader(max_content_bytes=self._item.max_bytes)
        stream = self._provider.get_archive(handle, self._path, exclude=pristine.exclude, max_bytes=MAX_TREE_BYTES)
        try:
            async for path, entry, content in reader.contents(stream):
                if pristine.tree.entries.get(path) != entry:
                    contents.add(entry.oid, content)
        except (SandboxArchiveTooLargeError, TreeTooLargeError) as error:
            raise _BoxContentsError(str(error), truncated=True) from error
        except (SandboxArchiveError, ArchiveError) as error:
            raise _BoxContentsError(f"'{self._path}' cannot be read from the box: {error}") from error
        return reader.tree

    async def artifact(self, pristine: _Pristine, work: Tree, contents: _Contents) -> Artifact:
        changed = sorted(
            path
            for path in pristine.tree.entries.keys() | work.entries.keys()
            if pristine.tree.entries.get(path) != work.entries.get(path)
        )
        ignored = await self._ignored([path for path in changed if path not in pristine.tracked], pristine)
        changed = [path for path in changed if path not in ignored]
        facts = _facts(changed, ignored, work)
        patch = await self._diff(changed, pristine, work, contents) if changed else b""
        return Artifact.of(self._item.name, "git_diff", patch, facts=facts)

    def _reader(self, max_content_bytes: int) -> TreeReader:
        return TreeReader(
            algorithm=self._algorithm,
            max_bytes=MAX_TREE_BYTES,
            max_files=MAX_TREE_FILES,
            max_content_bytes=max_content_bytes,
        )

    async def _ignored(self, paths: list[bytes], pristine: _Pristine) -> set[bytes]:
        """Return the subset of ``paths`` that the pristine rules ignore or that are by-products."""
        byproducts = {path for path in paths if path.endswith(BYPRODUCT_SUFFIXES)}
        candidates = [path for path in paths if path not in byproducts]
        if not candidates:
            return byproducts
        rules = [
            (f"ignore/{path.decode('utf-8', 'surrogateescape')}", content)
            for path, content in sorted(pristine.rules.items())
        ]
        if rules:
            await self._put(rules)
        # The prefix keeps a name like ":(x)" from being read as pathspec magic.
        stdin = b"".join(b"./" + path + b"\0" for path in candidates)
        result = await self._sh(_CHECK_IGNORE, stdin=stdin, timeout_s=CHANGES_GIT_TIMEOUT_S)
        if result.return_code not in (0, 1) or result.stdout_truncated:
            raise _BoxContentsError(
                f"the ignore rules cannot be applied to the changed paths: {_said(result)}", in_harvest_box=True
            )
        return byproducts.union(_ignored_paths(result.stdout_bytes))

    async def _diff(self, changed: list[bytes], pristine: _Pristine, work: Tree, contents: _Contents) -> bytes:
        old = {path: pristine.tree.entries[path] for path in changed if path in pristine.tree.entries}
        new = {path: work.entries[path] for path in changed if path in work.entries}
        from_pristine = {entry.oid: path for path, entry in old.items() if entry.mode != SYMLINK}
        links = pristine.links
        oids = {entry.oid for entry in old.values() if entry.mode == SYMLINK}
        for path, entry in new.items():
            if entry.oid in contents.places or entry.oid in links:
                oids.add(entry.oid)
            elif entry.oid in pristine.by_oid:
                from_pristine[entry.oid] = pristine.by_oid[entry.oid]
            else:
                raise _BoxContentsError(
                    f"'{path.decode('utf-8', 'replace')}' is larger than the cap of {self._item.max_bytes} bytes",
                    truncated=True,
                )
        files: list[tuple[str, bytes]] = [
            ("pristine-paths", b"".join(_quoted(path) + b"\n" for path in sorted(set(from_pristine.values())))),
            ("blob-paths", b"".join(b"blob-%d\n" % number for number in range(len(oids)))),
            ("old-index", _index_info(old)),
            ("new-index", _index_info(new)),
        ]
        # The blobs are read from the spool one by one: together they may not fit into memory.
        blobs = (
            (f"blob-{number}", contents.get(oid) if oid in contents.places else links[oid])
            for number, oid in enumerate(sorted(oids))
        )
        await self._put(itertools.chain(files, blobs))
        cap = self._item.max_bytes
        result = await self._sh(_DIFF, self._path, timeout_s=CHANGES_GIT_TIMEOUT_S, max_output_bytes=cap + 1)
        size = len(result.stdout_bytes)
        if result.stdout_truncated or size > cap:
            raise _BoxContentsError(f"the patch is larger than the cap of {cap} bytes", truncated=True, size=size)
        if not result.ok:
            raise _BoxContentsError(f"no patch can be made of the changes: {_said(result)}", in_harvest_box=True)
        return result.stdout_bytes

    # --------------------------------------------------------------------------------------------- the harvest box

    async def _put(self, files: Iterable[tuple[str, bytes]]) -> None:
        try:
            await self._provider.put_archive(self._box, _UPLOAD, _archive(files))
        except SandboxArchiveError as error:  # the names are ours, so there is too much for its disk
            raise _BoxContentsError(f"the changes cannot be unpacked: {error}", in_harvest_box=True) from error

    async def _sh(
        self,
        script: str,
        *arguments: str,
        timeout_s: float | None = None,
        stdin: bytes | None = None,
        max_output_bytes: int = MAX_LIST_BYTES,
    ) -> SandboxExecResult:
        result = await self._provider.exec(
            self._box,
            ["/bin/sh", "-c", script, "sh", *arguments],
            cwd="/",
            env=_ENVIRONMENT,
            timeout_s=timeout_s or PRISTINE_GIT_TIMEOUT_S,
            stdin=stdin,
            max_output_bytes=max_output_bytes,
        )
        if result.outcome is ExecOutcome.LOST:
            raise SandboxLostError(f"harvest box {self._box.sandbox_id} was lost", retryable=True)
        return result


def _said(result: SandboxExecResult) -> str:
    return f"{result.outcome}, {(result.stderr or '').strip()[-500:]!r}"


def _ignored_paths(output: bytes) -> list[bytes]:
    """Return the ignored paths of check-ignore's verbose output, which also names the paths that a rule with ``!``
    includes again. Without ``--verbose``, git before 2.26 prints those as well, and nothing tells them apart.

    Each path has four fields: the rule's file, its line, the rule, and the path as asked for, with ``./``."""
    complete = output.split(b"\0")[:-1]  # the last one is what follows the last NUL
    paths = zip(complete[2::4], complete[3::4], strict=False)
    return [path.removeprefix(b"./") for rule, path in paths if not rule.startswith(b"!")]


def _directories(paths: Iterable[bytes]) -> set[bytes]:
    """Return every directory above ``paths``."""
    found: set[bytes] = set()
    for path in paths:
        while (path := path.rpartition(b"/")[0]) and path not in found:
            found.add(path)
    return found


def _excludes(tracked_directories: set[bytes], ignored: list[bytes]) -> tuple[str, ...]:
    """Return what a box's tar stream omits: every ``.git``, by-products, and directories the repository ignores.

    The image has those directories, so a link or file that took the place of one is omitted too: a patch that adds it
    could not be applied where the directory still is."""
    tracked_names = {directory.rpartition(b"/")[2] for directory in tracked_directories}
    names = [".git", *(name for name in BYPRODUCT_DIRECTORIES if name.encode() not in tracked_names)]
    directories = sorted(name.decode("utf-8", "surrogateescape") for name in ignored)
    return (*(f"**/{name}" for name in names), *directories[:MAX_EXCLUDES])


_PLAIN_RULE = re.compile(rb"/?(?:[\w.@+~-]+/)*[\w.@+~-]+/?")


def _ignored_directories(rules: Mapping[bytes, bytes], tracked_directories: set[bytes]) -> list[str]:
    """Return excludes for the directories that ``.gitignore`` files name plainly. The image may lack them: a build
    that the agent runs makes ``target/``, whose gigabytes would count against the limits although no patch holds them.

    A rule is left to check-ignore if a directory that it could match has tracked files, or if any rule with ``!``
    could include it again.
    """
    lines = [
        (path.rpartition(b"/")[0], line.rstrip(b"\r ")) for path, text in rules.items() for line in text.split(b"\n")
    ]
    tracked_names = {directory.rpartition(b"/")[2] for directory in tracked_directories}
    included = [line.rstrip(b"/").rpartition(b"/")[2].lstrip(b"!") for _, line in lines if line.startswith(b"!")]
    found = set()
    for base, line in lines:
        parts = line.strip(b"/").split(b"/")
        if not _PLAIN_RULE.fullmatch(line) or not {b".", b".."}.isdisjoint(parts):
            continue
        if any(b"\\" in glob or b"[" in glob or fnmatch.fnmatchcase(parts[-1], glob) for glob in included):
            continue
        directory = b"/".join([base, *parts]).lstrip(b"/")
        is_anywhere = not base and b"/" not in line.rstrip(b"/")
        if parts[-1] in tracked_names if is_anywhere else directory in tracked_directories:
            continue
        found.add(("**/" if is_anywhere else "") + directory.decode("utf-8", "surrogateescape") + "/")
    return sorted(found)[:MAX_EXCLUDES]


def _index_info(entries: Mapping[bytes, Entry]) -> bytes:
    return b"".join(f"{entry.mode} {entry.oid}\t".encode() + path + b"\0" for path, entry in sorted(entries.items()))


def _quoted(path: bytes) -> bytes:
    """Quote and escape a path for git's line-based input if git could misread it bare. It drops a CR before LF."""
    if path.startswith(b'"') or any(byte in path for byte in b"\n\r\\"):
        body = b"".join(b"\\%03o" % byte if byte < 32 or byte in b'"\\' else bytes([byte]) for byte in path)
        return b'"' + body + b'"'
    return path


async def _archive(files: Iterable[tuple[str, bytes]]) -> AsyncIterator[bytes]:
    for name, data in files:
        yield pack_bytes(name, data)[: -len(END_OF_ARCHIVE)]
    yield END_OF_ARCHIVE


def _facts(changed: list[bytes], ignored: set[bytes], work: Tree) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "paths": [path.decode("utf-8", "replace") for path in changed[:MAX_NAMED_PATHS]],
        "path_count": len(changed),
    }
    if not work.is_directory:
        facts["work_tree"] = "not a directory"
    if ignored:
        facts["ignored_count"] = len(ignored)
        facts["ignored"] = sorted(path.decode("utf-8", "replace") for path in ignored)[:20]
    if work.skipped_count:
        facts["skipped_count"], facts["skipped"] = work.skipped_count, work.skipped
    return facts


async def harvest_files(provider: SandboxProvider, handle: SandboxHandle, item: FilesHarvest) -> Artifact:
    """Return all of ``item.paths`` as one tar archive whose members are named by their path in the box without the
    leading slash. If any path cannot be read, the artifact is empty and its error names that path."""
    out = io.BytesIO()
    try:
        for path in item.paths:
            await _append(provider, handle, path, item, out)
    except SandboxArchiveTooLargeError:
        error_text = f"more than the cap of {item.max_bytes} bytes"
        return Artifact.of(item.name, "files", b"", truncated=True, size=out.tell(), error=error_text)
    except (SandboxArchiveError, ArchiveError) as error:
        return Artifact.of(item.name, "files", b"", error=f"cannot harvest '{path}': {error}")
    out.write(END_OF_ARCHIVE)
    return Artifact.of(item.name, "files", out.getvalue(), facts={"paths": list(item.paths)})


async def _append(
    provider: SandboxProvider, handle: SandboxHandle, path: str, item: FilesHarvest, out: io.BytesIO
) -> None:
    path = posixpath.normpath(path)
    parent = member_parts(posixpath.dirname(path).lstrip("/"))
    parser, padding = TarParser(), 0
    # The provider's names are shorter than the artifact's, so whatever fits into the artifact fits into its stream.
    cap = item.max_bytes + len(END_OF_ARCHIVE)
    async for chunk in provider.get_archive(handle, path, exclude=item.exclude, max_bytes=cap):
        for event in parser.feed(chunk):
            if isinstance(event, tarfile.TarInfo):
                event.name = "/".join([*parent, event.name])
                if event.islnk():
                    event.linkname = "/".join([*parent, event.linkname])
                padding = -event.size % tarfile.BLOCKSIZE
                out.write(encode_header(event))
            elif event is not None:
                out.write(event)
            else:
                out.write(bytes(padding))
            if out.tell() > item.max_bytes:
                raise SandboxArchiveTooLargeError(f"the files are larger than the cap of {item.max_bytes} bytes")
    parser.close()


def harvested_file(artifacts: Sequence[Artifact], name: str, path: str) -> bytes | None:
    """Return the content of the file ``path`` from the artifact called ``name``; ``None`` if there is no such file.

    The archive may come from an agent server, so a malformed archive also yields ``None`` and raises no error.
    """
    artifact = next((found for found in artifacts if found.name == name), None)
    if artifact is None or artifact.error or artifact.truncated:
        return None
    wanted_parts, content = member_parts(posixpath.normpath(path).lstrip("/")), None
    parser, inside = TarParser(), False
    try:
        for event in parser.feed(artifact.content()):
            if isinstance(event, tarfile.TarInfo):
                inside = event.isreg() and member_parts(event.name) == wanted_parts
                if inside:
                    content = b""
            elif inside and event is not None:
                content = (content or b"") + event
        parser.close()
    except (ArchiveError, ContractError):
        return None
    return content


async def harvest_command(provider: SandboxProvider, handle: SandboxHandle, item: CommandHarvest) -> Artifact:
    """Run ``item.command`` in the box and return its output, standard error included. The output is untrusted."""
    command = item.command if isinstance(item.command, str) else list(item.command)
    result = await provider.exec(
        handle,
        command,
        cwd=item.cwd,
        timeout_s=item.timeout_s,
        merge_stderr=True,
        max_output_bytes=item.max_bytes,
    )
    if result.outcome is ExecOutcome.LOST:
        raise SandboxLostError(f"box {handle.sandbox_id} was lost during harvest", retryable=True)
    error = None if result.outcome is ExecOutcome.EXITED else f"the command ended by '{result.outcome}'"
    return Artifact.of(
        item.name,
        "command",
        result.stdout_bytes,
        truncated=result.stdout_truncated,
        return_code=result.return_code,
        error=error,
    )


async def harvest_all(
    provider: SandboxProvider,
    handle: SandboxHandle,
    spec: SandboxSpec,
    items: Sequence[HarvestItem],
    labels: Mapping[str, str],
) -> list[Artifact]:
    """Collect ``items`` from a box, in the given order.

    A failure that the box's contents can cause (a missing directory, too much data, a command that hangs) does not
    raise; it yields an artifact with ``error`` or ``truncated``.

    Args:
        spec: the spec of the agent's box; its image supplies the pristine side of a patch.
        labels: labels of the attempt; harvest boxes carry them with the role ``harvest``.

    Raises:
        SandboxError: the provider failed, or a box was lost.
    """
    artifacts = []
    for item in items:
        if isinstance(item, GitDiffHarvest):
            artifacts.append(await harvest_git_diff(provider, handle, spec, item, labels))
        elif isinstance(item, FilesHarvest):
            artifacts.append(await harvest_files(provider, handle, item))
        else:
            artifacts.append(await harvest_command(provider, handle, item))
    return artifacts
