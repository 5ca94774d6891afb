"""Tar streams: what goes in comes out, and nothing leaves the target."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.sandbox import archive, tar_stream
from nemo_gym.sandbox.archive import ArchiveError, ArchiveTooLargeError, encode_header, extract, pack, pack_bytes
from nemo_gym.sandbox.tar_stream import TarFilter, filtered, single_file
from tests.properties import examples


def reader(chunks: Iterable[bytes]) -> Callable[[int], bytes]:
    return io.BytesIO(b"".join(chunks)).read


def member(
    name: str, kind: bytes = tarfile.REGTYPE, *, link: str = "", data: bytes = b""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = kind, link, len(data), 0o755
    return info, data


def build(*members: tuple[tarfile.TarInfo, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format, encoding="utf-8", errors="surrogateescape") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def snapshot(root: Path) -> dict[str, object]:
    """Name → (type and mode, content or target) of everything below ``root``."""
    found: dict[str, object] = {}
    for path in root.rglob("*"):
        content: object = None
        if path.is_symlink():
            content = path.readlink()
        elif path.is_file():
            content = path.read_bytes()
        found[str(path.relative_to(root))] = (path.lstat().st_mode, content)
    return found


def members_of(stream: bytes) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(stream), errors="surrogateescape") as tar:
        return tar.getmembers()


def names_of(stream: bytes) -> list[str]:
    return [info.name for info in members_of(stream)]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "a/b").mkdir(parents=True)
    (root / "a/b/binary").write_bytes(bytes(range(256)) * 3000)
    (root / "a/run.sh").write_text("#!/bin/sh\n")
    (root / "a/run.sh").chmod(0o751)
    (root / "a/to_run").symlink_to("run.sh")
    (root / "a/b/up").symlink_to("../run.sh")
    os.link(root / "a/run.sh", root / "z_hard")
    (root / "empty").mkdir(mode=0o700)
    (root / "empty_file").touch()
    Path(os.fsdecode(os.fsencode(root) + b"/not_utf8_\xff\xfe")).write_bytes(b"x")
    (root / ("long_" * 20)).mkdir()
    (root / ("long_" * 20) / ("name_" * 40)).write_text("deep")
    readonly = root / "readonly"
    readonly.mkdir()
    (readonly / "inside").write_text("kept")
    readonly.chmod(0o555)
    return root


def test_pack_then_extract_gives_the_same_tree(tree: Path, tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    dest.mkdir()
    extract(reader(pack(tree)), dest)
    assert snapshot(dest / "tree") == snapshot(tree)
    assert (dest / "tree/z_hard").stat().st_ino == (dest / "tree/a/run.sh").stat().st_ino
    assert int((dest / "tree/a/run.sh").stat().st_mtime) == int((tree / "a/run.sh").stat().st_mtime)


def test_pack_is_read_by_gnu_tar_and_gnu_tars_stream_is_read_by_extract(tree: Path, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    subprocess.run(["tar", "-x", "-p", "-C", ours], input=b"".join(pack(tree)), check=True)
    for format in ("gnu", "pax", "posix"):
        stream = subprocess.run(
            ["tar", "-c", f"--format={format}", "-C", tree.parent, "tree"], stdout=subprocess.PIPE, check=True
        ).stdout
        extract(reader([stream]), theirs)
        assert snapshot(theirs / "tree") == snapshot(tree)
    assert snapshot(ours / "tree") == snapshot(tree)


def test_pack_leaves_out_excluded_paths_and_names_at_every_depth(tree: Path) -> None:
    (tree / "a/b/__pycache__").mkdir()
    (tree / "a/b/__pycache__/x.pyc").touch()
    (tree / "__pycache__").mkdir()
    stream = b"".join(pack(tree, exclude=["a/run.sh", "empty", "**/__pycache__"]))
    names = names_of(stream)
    assert names[0] == "tree"
    assert "tree/a/to_run" in names
    assert not [n for n in names if n == "tree/a/run.sh" or n.startswith("tree/empty/") or "__pycache__" in n]
    # The other name of an excluded file still has its content.
    assert next(info for info in members_of(stream) if info.name == "tree/z_hard").isreg()


def test_pack_skips_sockets_and_pipes_and_packs_a_link_as_a_link(tmp_path: Path) -> None:
    root = tmp_path / "r"
    root.mkdir()
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "sock"))
        (root / "link").symlink_to("/etc/passwd")
        names = names_of(b"".join(pack(root)))
        (only,) = members_of(b"".join(pack(root / "link")))
    assert names == ["r", "r/link"]
    assert (only.name, only.linkname) == ("link", "/etc/passwd")


def test_pack_raises_when_the_stream_passes_max_bytes(tree: Path) -> None:
    produced = 0
    with pytest.raises(ArchiveError, match="max_bytes=100000"):
        for chunk in pack(tree, max_bytes=100_000):
            produced += len(chunk)
    assert produced <= 100_000
    assert b"".join(pack(tree, max_bytes=10_000_000))


def test_pack_raises_file_not_found_when_the_path_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(pack(tmp_path / "missing"))


def test_pack_raises_when_directories_are_too_deep(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    for _ in range(archive.MAX_DEPTH + 10):
        os.mkdir("d", dir_fd=descriptor)
        deeper = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = deeper
    os.close(descriptor)
    with pytest.raises(ArchiveError, match="deep"):
        list(pack(tmp_path / "d"))
    subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)


def test_pack_stays_a_valid_stream_when_files_change_while_it_is_read(tmp_path: Path) -> None:
    root = tmp_path / "r"
    root.mkdir()
    stop = threading.Event()

    def churn() -> None:
        count = 0
        while not stop.is_set():
            count += 1
            (root / "grows").write_bytes(b"x" * (count * 7919 % 900_000))
            (root / "comes").write_bytes(b"y")
            (root / "comes").unlink()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for n in range(30):
            dest = tmp_path / f"d{n}"
            dest.mkdir()
            extract(reader(pack(root)), dest)
    finally:
        stop.set()
        thread.join()


def validated(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """A stream into a box, as providers filter it."""
    tar_filter = TarFilter()
    for chunk in chunks:
        yield tar_filter.feed(chunk)
    yield tar_filter.finish()


ESCAPES = {
    "absolute name": [member("/tmp/evil", data=b"x")],
    "name with dots": [member("a/../../evil", data=b"x")],
    "absolute link": [member("l", tarfile.SYMTYPE, link="/etc")],
    "climbing link": [member("a/l", tarfile.SYMTYPE, link="../../outside")],
    "link climbing behind another link": [
        member("d/e/l", tarfile.SYMTYPE, link=".."),
        member("m", tarfile.SYMTYPE, link="d/e/l/../.."),
    ],
    "write through a link": [member("l", tarfile.SYMTYPE, link="inner"), member("l/evil", data=b"x")],
    "link then directory over it": [member("l", tarfile.SYMTYPE, link="a"), member("l/b", tarfile.DIRTYPE)],
    "hard link outside": [member("h", tarfile.LNKTYPE, link="../outside/secret")],
    "absolute hard link": [member("h", tarfile.LNKTYPE, link="/etc/passwd")],
    "hard link through a link": [member("l", tarfile.SYMTYPE, link="a"), member("h", tarfile.LNKTYPE, link="l/x")],
    "character device": [member("dev", tarfile.CHRTYPE)],
    "block device": [member("dev", tarfile.BLKTYPE)],
    "pipe": [member("pipe", tarfile.FIFOTYPE)],
}


@pytest.mark.parametrize("case", ESCAPES)
@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["gnu", "pax"])
def test_extract_and_validated_refuse_and_leave_the_outside_alone_when_a_member_escapes(
    case: str, format: int, tmp_path: Path
) -> None:
    outside, dest = tmp_path / "outside", tmp_path / "dest"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    dest.mkdir()
    before = snapshot(outside)
    stream = build(*ESCAPES[case], format=format)
    with pytest.raises(ArchiveError):
        extract(reader([stream]), dest)
    with pytest.raises(ArchiveError):
        list(validated([stream]))
    assert snapshot(outside) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dest", "outside"]


def test_extract_does_not_write_through_links_that_were_already_there(tmp_path: Path) -> None:
    outside, dest = tmp_path / "outside", tmp_path / "dest"
    outside.mkdir()
    dest.mkdir()
    (outside / "file").write_text("before")
    (dest / "dir").symlink_to(outside)
    (dest / "file").symlink_to(outside / "file")
    os.link(outside / "file", dest / "hard")
    with pytest.raises(ArchiveError, match="link"):
        extract(reader([build(member("dir/new", data=b"x"))]), dest)
    extract(reader([build(member("file", data=b"after"), member("hard", data=b"after"))]), dest)
    assert (outside / "file").read_text() == "before"
    assert (dest / "file").read_text() == (dest / "hard").read_text() == "after"
    assert not (dest / "file").is_symlink()


def test_extract_stays_inside_when_a_process_swaps_directories_for_links(tmp_path: Path) -> None:
    outside, dest = tmp_path / "outside", tmp_path / "dest"
    outside.mkdir()
    dest.mkdir()
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            for make in (lambda: (dest / "d").symlink_to(outside), lambda: (dest / "d").mkdir()):
                subprocess.run(["rm", "-rf", dest / "d"], check=False)
                try:
                    make()
                except FileExistsError:
                    pass

    thread = threading.Thread(target=swap)
    thread.start()
    stream = build(*[member(f"d/f{i}", data=b"x") for i in range(50)])
    try:
        for _ in range(100):
            try:
                extract(reader([stream]), dest)
            except ArchiveError:
                pass
    finally:
        stop.set()
        thread.join()
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("cut", [1, 511, 513, 1200, -600])
def test_extract_raises_when_the_stream_is_cut(cut: int, tmp_path: Path) -> None:
    stream = build(member("a", data=b"x" * 700), format=tarfile.GNU_FORMAT)[: 512 * 3 + 1024]
    with pytest.raises(ArchiveError):
        extract(reader([stream[:cut] if cut > 0 else stream[: 512 * 3]]), tmp_path)


@examples(300)
@given(st.data())
def test_reading_a_damaged_stream_raises_archive_error_or_stays_inside(data: st.DataObject) -> None:
    stream = bytearray(
        build(
            member("d", tarfile.DIRTYPE),
            member("d/file", data=b"content" * 20),
            member("d/link", tarfile.SYMTYPE, link="file"),
            member("ü" * 120, data=b"pax"),
            format=data.draw(st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])),
        )
    )
    for _ in range(data.draw(st.integers(1, 4))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    try:
        out = b"".join(validated([bytes(stream)]))
    except ArchiveError:
        return
    for info in members_of(out):
        assert not info.name.startswith("/")
        assert ".." not in info.name.split("/")


@examples(50)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=30))
def test_parsing_gives_the_same_result_however_the_stream_is_chunked(sizes: list[int]) -> None:
    stream = build(member("a" * 150, data=b"1" * 1500), member("b/c", data=b""), member("d", data=b"2" * 512))
    chunks, position = [], 0
    for size in [*sizes, len(stream)]:
        chunks.append(stream[position : position + size])
        position += size
    assert b"".join(validated(chunks)) == b"".join(validated([stream]))


def test_extract_leaves_the_old_file_when_the_stream_is_cut_within_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    info = tarfile.TarInfo("file")
    info.size = 100_000
    cut = io.BytesIO(info.tobuf() + bytes(50_000))
    with pytest.raises(ArchiveError):
        extract(cut.read, tmp_path)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


def test_extract_raises_when_a_directory_is_in_a_files_place(tmp_path: Path) -> None:
    (tmp_path / "x/y").mkdir(parents=True)
    with pytest.raises(ArchiveError, match="directory is in the place of 'x'"):
        extract(reader([build(member("x", data=b"1"))]), tmp_path)


def test_extract_keeps_neither_set_user_id_nor_owners(tmp_path: Path) -> None:
    info, data = member("s", data=b"1")
    info.mode, info.uid, info.gid = 0o4755, 1234, 1235
    extract(reader([build((info, data))]), tmp_path)
    assert (tmp_path / "s").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "s").stat().st_uid == os.getuid()


def test_filtered_leaves_out_excludes_and_devices_of_a_backends_stream() -> None:
    stream = build(
        member("repo", tarfile.DIRTYPE),
        member("repo/.git", tarfile.DIRTYPE),
        member("repo/.git/config", data=b"x" * 600),
        member("repo/dev", tarfile.CHRTYPE),
        member("repo/abs", tarfile.SYMTYPE, link="/usr/bin/python"),
        member("repo/sub/.git", data=b"x"),
        member("repo/keep", data=b"kept"),
    )
    out = b"".join(filtered([stream], again=list, exclude=[".git"]))
    assert names_of(out) == ["repo", "repo/abs", "repo/sub/.git", "repo/keep"]
    out = b"".join(filtered([stream], again=list, exclude=["**/.git"]))
    assert names_of(out) == ["repo", "repo/abs", "repo/keep"]
    with pytest.raises(ArchiveError, match="max_bytes"):
        list(filtered([stream], again=list, max_bytes=2000))


def test_filtered_keeps_the_content_of_a_hard_link_when_the_file_that_came_first_is_excluded() -> None:
    links = [member(f"r/{name}", tarfile.LNKTYPE, link="r/.git/x") for name in ("y", "z", ".git/w")]
    stream = build(member("r/.git/x", data=b"1" * 700), *links, member("r/last", data=b"2"))
    out = b"".join(filtered([stream], again=lambda: [stream[:900], stream[900:]], exclude=[".git"]))
    assert [(info.name, info.size, info.linkname) for info in members_of(out)] == [
        ("r/last", 1, ""),
        ("r/y", 700, ""),
        ("r/z", 0, "r/y"),
    ]
    assert b"1" * 700 in out
    vanished = build(member("r/last", data=b"2"))
    assert names_of(b"".join(filtered([stream], again=lambda: [vanished], exclude=[".git"]))) == ["r/last"]
    with pytest.raises(ArchiveTooLargeError):
        list(filtered([stream], again=lambda: [stream], exclude=[".git"], max_bytes=2000))
    with pytest.raises(ArchiveError, match="'r/y' is a hard link"):
        TarFilter(exclude=[".git"], strict=False).feed(stream)


def test_filtered_loses_no_hard_link_to_an_excluded_file_whatever_it_is_and_however_it_changed() -> None:
    def link(name: str, to: str) -> tuple[tarfile.TarInfo, bytes]:
        return member(name, tarfile.LNKTYPE, link=to)

    def read(first: bytes, second: bytes) -> list[tuple[str, int, str]]:
        out = b"".join(filtered([first], again=lambda: [second], exclude=[".git"]))
        return [(info.name, info.size, info.linkname) for info in members_of(out)]

    names = [link("r/y", "r/.git/x"), link("r/z", "r/.git/x")]
    stream = build(member("r/.git/x", data=b"1"), *names)
    symbolic = build(member("r/.git/x", tarfile.SYMTYPE, link="to"), *names)
    assert read(symbolic, symbolic) == [("r/y", 0, "to"), ("r/z", 0, "r/y")]
    pipe = build(member("r/.git/x", tarfile.FIFOTYPE), *names)
    assert read(pipe, pipe) == []
    first_name_vanished = build(member("r/y", data=b"1"), link("r/z", "r/y"))
    assert read(stream, first_name_vanished) == [("r/y", 1, ""), ("r/z", 0, "r/y")]
    earlier_name = build(member("r/.git/a", data=b"1"), *(link(name, "r/.git/a") for name in ("r/.git/x", "r/y")))
    replaced = build(member("r/.git/x", data=b"2"), member("r/y", data=b"1"))
    for changed in (earlier_name, replaced):
        with pytest.raises(ArchiveError, match="changed while it was read"):
            read(stream, changed)


def test_names_of_hard_links_to_excluded_files_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_stream, "_MAX_UNRESOLVED_BYTES", 1000)
    links = [member(f"r/{n:080}", tarfile.LNKTYPE, link="r/.git/x") for n in range(20)]
    with pytest.raises(ArchiveError, match="more than 1000 bytes"):
        list(filtered([build(member("r/.git/x"), *links)], again=list, exclude=[".git"]))


def test_validated_encodes_headers_anew_when_a_global_header_renames_members() -> None:
    """Tar readers differ on global pax headers; after the filter there is nothing left to differ on."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"path": "safe"}) as tar:
        info, data = member("../../evil", data=b"x")
        tar.addfile(info, io.BytesIO(data))
    out = b"".join(validated([buffer.getvalue()]))
    assert b"evil" not in out
    assert names_of(out) == ["safe"]


def test_member_that_is_larger_than_max_bytes_is_refused_before_its_content_comes() -> None:
    """A packer sends a sparse file's holes as zeros: a petabyte of them would take days to count."""
    huge = tarfile.TarInfo("repo/sparse")
    huge.size = 2**50
    with pytest.raises(ArchiveTooLargeError, match="max_bytes=1000000"):
        list(filtered([encode_header(huge)], again=list, max_bytes=1_000_000))


async def test_single_file_gives_the_content_and_raises_when_it_is_something_else() -> None:
    async def content(tar: bytes) -> bytes:
        async def stream() -> AsyncIterator[bytes]:
            yield tar

        return b"".join([piece async for piece in single_file(stream())])

    assert await content(pack_bytes("f", b"content")) == b"content"
    assert await content(pack_bytes("f", b"")) == b""
    for other in (build(member("d", tarfile.DIRTYPE)), archive.END_OF_ARCHIVE):
        with pytest.raises(ArchiveError, match="not a regular file"):
            await content(other)
    with pytest.raises(ArchiveError, match="early"):
        await content(pack_bytes("f", b"content")[:600])


def test_filter_raises_when_an_exclude_is_not_understood() -> None:
    for pattern in ("**/a/b", "", "../x", "/abs"):
        with pytest.raises(ArchiveError):
            TarFilter(exclude=[pattern])


def test_archive_runs_in_an_isolated_interpreter_with_the_standard_library_alone(tree: Path, tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    dest.mkdir()
    code = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "from nemo_gym.sandbox import archive\n"
        "archive.extract(sys.stdin.buffer.read, sys.argv[2])\n"
        "ours = sorted(name for name in sys.modules if name.startswith('nemo_gym'))\n"
        "sandbox = ['nemo_gym.sandbox', 'nemo_gym.sandbox.archive', 'nemo_gym.sandbox.tar_stream']\n"
        "assert ours == ['nemo_gym', 'nemo_gym._util', 'nemo_gym._util.files', *sandbox], ours\n"
    )
    command = [sys.executable, "-I", "-S", "-c", code, str(Path(archive.__file__).parents[2]), str(dest)]
    subprocess.run(command, input=b"".join(pack(tree)), check=True, env={})
    assert snapshot(dest / "tree") == snapshot(tree)


def header(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def with_extended_header(kind: bytes, data: bytes) -> bytes:
    """A member behind an extended header of these bytes."""
    extended = header("extended", kind, len(data)) + data + bytes(-len(data) % tarfile.BLOCKSIZE)
    return extended + header("file") + archive.END_OF_ARCHIVE


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(with_extended_header(b"x", b"4 =\n" * (1 << 18)), id="a megabyte of the shortest records"),
        pytest.param(with_extended_header(b"g", b"12 %06d=1\n" * 60_000 % (*range(60_000),)), id="global records"),
        pytest.param(with_extended_header(b"x", b"9" * 5000 + b" a=b\n"), id="a record's length of 5000 digits"),
        pytest.param(with_extended_header(b"x", b"30 uid=" + b"9" * 22 + b"\n"), id="a user beyond 32 bits"),
        pytest.param(with_extended_header(b"x", b"30 size=" + b"9" * 21 + b"\n"), id="a size beyond 64 bits"),
        pytest.param(with_extended_header(b"x", b"15 mtime=1e300\n"), id="a time beyond 64 bits"),
        pytest.param(with_extended_header(b"L", b"a/" * 100_000 + b"a\0"), id="a path of 100 000 directories"),
        pytest.param(with_extended_header(b"L", b"../" + b"a" * 900_000 + b"\0"), id="a name of 900 kB"),
    ],
)
def test_hostile_headers_are_refused_at_once_and_in_few_words(stream: bytes, tmp_path: Path) -> None:
    began = time.process_time()
    with pytest.raises(ArchiveError) as refused:
        b"".join(validated([stream]))
    assert len(str(refused.value)) < 400
    with pytest.raises(ArchiveError) as refused:
        extract(reader([stream]), tmp_path)
    assert len(str(refused.value)) < 400
    with contextlib.suppress(ArchiveError):  # what comes out of a box may have any name
        b"".join(filtered([stream], again=list, exclude=["x/y"]))
    assert time.process_time() - began < 1


def test_records_that_nobody_reads_are_not_kept() -> None:
    parser = archive.TarParser()
    for number in range(50):
        record = b"%06d=" % number + b"v" * 900_000 + b"\n"
        for _ in parser.feed(
            with_extended_header(b"g", b"%d " % (len(record) + 7) + record)[: -3 * tarfile.BLOCKSIZE]
        ):
            pass
    assert sum(map(len, parser._global.values())) == 0
