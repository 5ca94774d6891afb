"""Single files and archives."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from nemo_gym.contract.errors import SandboxArchiveError, SandboxArchiveTooLargeError, SandboxError, SandboxLostError
from nemo_gym.sandbox.archive import extract, pack, pack_bytes
from nemo_gym.sandbox.base import SandboxProvider
from nemo_gym.sandbox.conformance.base import PATIENCE_S, Checks, StartBox, sh
from nemo_gym.sandbox.facade import AsyncSandbox

# -- Single files --------------------------------------------------------------------------------------------------


class FileChecks(Checks):
    async def test_file_goes_in_and_comes_out_unchanged_with_its_mode(self, box: AsyncSandbox, tmp_path: Path) -> None:
        source = tmp_path / "tool.bin"
        source.write_bytes(os.urandom(1_000_000))
        source.chmod(0o755)
        await box.upload(source, "/opt/new/directory/renamed.bin")
        assert await sh(box, "stat -c %a,%s /opt/new/directory/renamed.bin") == "755,1000000\n"
        await box.download("/opt/new/directory/renamed.bin", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == source.read_bytes()

    async def test_upload_replaces_a_file_and_follows_a_link_on_the_host(
        self, box: AsyncSandbox, tmp_path: Path
    ) -> None:
        (tmp_path / "a").write_text("new")
        (tmp_path / "link").symlink_to("a")
        await sh(box, "echo old > /tmp/f")
        await box.upload(tmp_path / "link", "/tmp/f")
        assert await sh(box, "cat /tmp/f; test ! -L /tmp/f") == "new"

    async def test_uploaded_file_belongs_to_whoever_runs_commands(self, box: AsyncSandbox, tmp_path: Path) -> None:
        (tmp_path / "a").write_text("x")
        await box.upload(tmp_path / "a", "/tmp/owned")
        assert await sh(box, "test -w /tmp/owned; stat -c %u /tmp/owned") == await sh(box, "id -u")

    async def test_missing_file_directory_and_pipe_raise_and_leave_no_target(
        self, box: AsyncSandbox, tmp_path: Path
    ) -> None:
        await sh(box, "mkfifo /tmp/pipe")
        for path in ("/no/such/file", "/etc", "/tmp/pipe"):
            with pytest.raises(SandboxError) as caught:
                await box.download(path, tmp_path / "back")
            assert not isinstance(caught.value, SandboxLostError)
            assert path in str(caught.value)
            assert not (tmp_path / "back").exists()

    async def test_download_follows_links_inside_the_box_only(self, box: AsyncSandbox, tmp_path: Path) -> None:
        secret = tmp_path / "host_secret"
        secret.write_text("secret of the host")
        await sh(box, f"ln -s {secret} /tmp/to_host; ln -s /proc/1/root{secret} /tmp/by_proc; mkdir -p /tmp/d")
        await sh(box, "echo inside > /tmp/d/real; ln -s /tmp/d /tmp/to_dir")
        for path in ("/tmp/to_host", "/tmp/by_proc"):
            with pytest.raises(SandboxError):
                await box.download(path, tmp_path / "back")
            assert not (tmp_path / "back").exists()
        await box.download("/tmp/to_dir/real", tmp_path / "back")
        assert (tmp_path / "back").read_text() == "inside\n"

    async def test_upload_through_a_link_of_the_box_stays_in_the_box(self, box: AsyncSandbox, tmp_path: Path) -> None:
        target = tmp_path / "outside"
        target.mkdir()
        (tmp_path / "a").write_text("x")
        await sh(box, f"ln -s {target} /tmp/out")
        try:
            await box.upload(tmp_path / "a", "/tmp/out/written")
        except SandboxError:
            pass
        assert list(target.iterdir()) == []

    async def test_files_of_a_closed_box_are_lost(
        self, provider: SandboxProvider, start: StartBox, tmp_path: Path
    ) -> None:
        box = await start()
        (tmp_path / "a").write_text("x")
        await provider.close(box.handle)
        with pytest.raises(SandboxLostError):
            await box.upload(tmp_path / "a", "/tmp/a")
        with pytest.raises(SandboxLostError):
            await box.download("/etc/passwd", tmp_path / "b")


# -- Archives ------------------------------------------------------------------------------------------------------


async def stream(data: bytes, size: int = 65536) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def receive(box: AsyncSandbox, path: str, *, exclude: Sequence[str] = (), max_bytes: int | None = None) -> bytes:
    return b"".join([chunk async for chunk in box.get_archive(path, exclude=exclude, max_bytes=max_bytes)])


def members(data: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape") as tar:
        return {info.name: info for info in tar}


def unpack(data: bytes, dest: Path) -> Path:
    dest.mkdir()
    extract(io.BytesIO(data).read, dest)
    return dest


def archive(*entries: tuple[str, bytes, str]) -> bytes:
    """Build a tar archive from (name, type, link target) entries. Each file contains its own name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind, link in entries:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.mode = kind, link, 0o755
            data = name.encode() if kind == tarfile.REGTYPE else b""
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


ESCAPES: dict[str, list[tuple[str, bytes, str]]] = {
    "absolute": [("/tmp/evil", tarfile.REGTYPE, "")],
    "dots": [("sub/../../evil", tarfile.REGTYPE, "")],
    "link_out": [("link", tarfile.SYMTYPE, "../../etc")],
    "absolute_link": [("link", tarfile.SYMTYPE, "/etc")],
    "through_link": [("link", tarfile.SYMTYPE, "sub"), ("link/evil", tarfile.REGTYPE, "")],
    "hard_link_out": [("hard", tarfile.LNKTYPE, "../secret")],
    "absolute_hard_link": [("hard", tarfile.LNKTYPE, "/tmp/secret")],
    "device": [("null", tarfile.CHRTYPE, "")],
}


class ArchiveChecks(Checks):
    async def test_ten_megabytes_go_in_and_come_out_unchanged(self, box: AsyncSandbox, tmp_path: Path) -> None:
        tree = tmp_path / "tree"
        tree.mkdir()
        (tree / "blob").write_bytes(os.urandom(10_000_000))
        digest = hashlib.sha256((tree / "blob").read_bytes()).hexdigest()
        await box.put_archive("/srv/in", stream(b"".join(pack(tree))))
        assert (await sh(box, "sha256sum /srv/in/tree/blob")).split()[0] == digest
        back = unpack(await receive(box, "/srv/in/tree"), tmp_path / "back")
        assert hashlib.sha256((back / "tree/blob").read_bytes()).hexdigest() == digest

    async def test_modes_links_and_odd_names_survive_the_round_trip(self, box: AsyncSandbox, tmp_path: Path) -> None:
        tree = tmp_path / "tree"
        (tree / "sub/empty").mkdir(parents=True)
        (tree / "run").write_text("#!/bin/sh\necho ran\n")
        (tree / "run").chmod(0o751)
        (tree / "readonly").write_text("r")
        (tree / "readonly").chmod(0o444)
        (tree / "sub/link").symlink_to("../run")
        (tree / "dangling").symlink_to("nowhere")
        os.link(tree / "run", tree / "zz_hard")
        names = [b"with space and 'quote'", "ünïcode".encode(), b"not_utf8_\xff\xfe", b"-dash", b"n" * 200]
        for name in names:
            Path(os.fsdecode(os.fsencode(tree) + b"/" + name)).write_bytes(name)
        await box.put_archive("/srv", stream(b"".join(pack(tree))))
        assert await sh(box, "/srv/tree/sub/link; stat -c %a /srv/tree/run /srv/tree/readonly") == "ran\n751\n444\n"
        assert await sh(box, "readlink /srv/tree/dangling; stat -c %h /srv/tree/zz_hard") == "nowhere\n2\n"
        back = unpack(await receive(box, "/srv/tree"), tmp_path / "back") / "tree"
        for name in names:
            assert Path(os.fsdecode(os.fsencode(back) + b"/" + name)).read_bytes() == name
        assert stat.S_IMODE((back / "run").stat().st_mode) == 0o751
        assert str((back / "sub/link").readlink()) == "../run"
        assert (back / "zz_hard").stat().st_ino == (back / "run").stat().st_ino
        assert (back / "sub/empty").is_dir()

    async def test_first_member_is_named_by_the_last_part_of_the_path(self, box: AsyncSandbox) -> None:
        await sh(box, "mkdir -p /srv/x/y; echo 1 > /srv/x/y/f")
        assert list(members(await receive(box, "/srv/x/y"))) == ["y", "y/f"]
        assert list(members(await receive(box, "/srv/x/y/"))) == ["y", "y/f"]
        assert list(members(await receive(box, "/srv/x/y/f"))) == ["f"]

    async def test_a_link_at_the_path_itself_is_followed_inside_the_box_only(
        self, box: AsyncSandbox, tmp_path: Path
    ) -> None:
        (tmp_path / "secret").write_text("secret of the host")
        await sh(box, "mkdir -p /srv/x/y; echo 1 > /srv/x/y/f; ln -s f /srv/x/y/inner; ln -s y /srv/x/link")
        await sh(box, f"cd /srv/x; ln -s link again; ln -s loop loop; ln -s {tmp_path}/secret to_host")
        for path, name in (("/srv/x/link", "link"), ("/srv/x/link/", "link"), ("/srv/x/again", "again")):
            tree = members(await receive(box, path))
            assert sorted(tree) == [name, f"{name}/f", f"{name}/inner"]
            assert tree[name].isdir() and tree[f"{name}/inner"].issym()
        await box.download("/srv/x/y/inner", tmp_path / "back")
        assert (tmp_path / "back").read_text() == "1\n"
        with pytest.raises(SandboxArchiveError):
            await receive(box, "/srv/x/to_host")

    async def test_whatever_a_box_puts_in_a_path_s_way_is_not_a_failure_of_the_backend(
        self, box: AsyncSandbox
    ) -> None:
        await sh(box, "mkdir /srv/x; cd /srv/x; touch f; ln -s loop loop; ln -s nowhere dangling")
        await sh(box, "cd /srv/x; ln -s '/No such container: x' gone; ln -s '/no space left on device' full")
        await sh(box, f"cd /srv/x; ln -s {'n' * 300} long")
        await sh(box, "cd /srv/x; ln -s f 0; for i in $(seq 1200); do ln -s $((i - 1)) $i; done; mv 1200 chain")
        broken = ("loop", "dangling", "gone", "full", "long")
        for path in ("missing", "f/f", "chain", *broken, *(f"{link}/f" for link in broken)):
            with pytest.raises(SandboxArchiveError, match=f"/srv/x/{path}") as caught:
                await receive(box, f"/srv/x/{path}")
            assert not caught.value.retryable

    async def test_link_to_a_processs_memory_is_not_a_failure_of_the_backend(self, box: AsyncSandbox) -> None:
        await sh(box, "mkdir /srv/x; sleep 600 >/dev/null 2>&1 & ln -s /proc/$!/mem /srv/x/memory")
        with contextlib.suppress(SandboxArchiveError):
            assert list(members(await receive(box, "/srv/x/memory"))) == ["memory"]

    async def test_account_files_that_a_box_replaces_hold_up_no_archive(self, box: AsyncSandbox) -> None:
        await sh(box, "mkdir /srv/x; touch /srv/x/f; cd /etc; rm group passwd; ln -s group group; ln -s passwd passwd")
        assert list(members(await receive(box, "/srv/x"))) == ["x", "x/f"]
        await sh(box, "mkfifo /srv/pipe; cd /etc; ln -sf /srv/pipe group; ln -sf /srv/pipe passwd")
        async with asyncio.timeout(PATIENCE_S):
            try:
                assert list(members(await receive(box, "/srv/x"))) == ["x", "x/f"]
            except SandboxArchiveError as error:
                assert not error.retryable

    async def test_excluded_sparse_file_holds_up_no_archive(self, box: AsyncSandbox) -> None:
        await sh(box, "mkdir -p /srv/x/.git; touch /srv/x/f; truncate -s 7T /srv/x/.git/sparse")
        async with asyncio.timeout(PATIENCE_S):
            try:
                tree = members(await receive(box, "/srv/x", exclude=["**/.git"], max_bytes=1_000_000))
            except SandboxArchiveTooLargeError:
                return
        assert list(tree) == ["x", "x/f"]

    async def test_excluded_paths_are_left_out(self, box: AsyncSandbox) -> None:
        await sh(
            box,
            "mkdir -p /srv/r/.git/objects /srv/r/a/.git /srv/r/a/__pycache__ /srv/r/build/x; cd /srv/r;"
            " touch .git/objects/o a/.git/c a/__pycache__/p a/keep build/x/y keep;"
            " mkdir -p target/t a/d; touch a/target",
        )
        exclude = [".git", "build/x", "**/__pycache__", "**/target/", "a/d/", "keep/"]
        names = set(members(await receive(box, "/srv/r", exclude=exclude)))
        assert names == {"r", "r/a", "r/a/.git", "r/a/.git/c", "r/a/keep", "r/a/target", "r/build", "r/keep"}

    async def test_more_than_max_bytes_raises(self, box: AsyncSandbox) -> None:
        await sh(box, "mkdir /srv/big; head -c 3000000 /dev/urandom > /srv/big/f; truncate -s 10T /srv/sparse")
        assert len(await receive(box, "/srv/big", max_bytes=3_100_000)) <= 3_100_000
        for path in ("/srv/big", "/srv/sparse"):
            async with asyncio.timeout(60):
                with pytest.raises(SandboxArchiveTooLargeError, match="1000000"):
                    await receive(box, path, max_bytes=1_000_000)
        assert (await box.exec("true")).ok

    async def test_missing_path_raises_and_names_it(self, box: AsyncSandbox) -> None:
        with pytest.raises(SandboxError, match="/srv/not_here") as caught:
            await receive(box, "/srv/not_here")
        assert not isinstance(caught.value, SandboxLostError)

    @pytest.mark.parametrize("case", ESCAPES)
    async def test_member_that_escapes_is_refused_and_nothing_outside_changes(
        self, case: str, box: AsyncSandbox
    ) -> None:
        await sh(box, "mkdir -p /srv/dest/sub; echo secret > /srv/secret; echo secret > /tmp/secret")
        outside = "find /srv /tmp /etc -path /srv/dest -prune -o -type f -print | sort | xargs -d '\\n' md5sum"
        before = await sh(box, outside)
        with pytest.raises(SandboxArchiveError):
            await box.put_archive("/srv/dest", stream(archive(*ESCAPES[case])))
        assert await sh(box, outside) == before
        assert (await box.exec("true")).ok

    async def test_damaged_stream_is_refused(self, box: AsyncSandbox) -> None:
        good = pack_bytes("f", b"x" * 5000)
        for damaged in (good[:3000], b"\x01" * 2048, b"", good[:-1024]):
            with pytest.raises(SandboxArchiveError):
                await box.put_archive("/srv", stream(damaged))
        await box.put_archive("/srv", stream(good, size=7))
        assert await sh(box, "wc -c < /srv/f") == "5000\n"

    async def test_error_in_the_callers_stream_passes_through(self, box: AsyncSandbox) -> None:
        async def breaks() -> AsyncIterator[bytes]:
            yield pack_bytes("f", b"x" * 5000)[:2000]
            raise ConnectionResetError("the caller's source broke")

        with pytest.raises(ConnectionResetError, match="source broke"):
            await box.put_archive("/srv", breaks())
        assert (await box.exec("true")).ok

    async def test_reading_stops_when_the_reader_stops(self, box: AsyncSandbox) -> None:
        await sh(box, "head -c 20000000 /dev/zero > /srv/f")
        chunks = box.get_archive("/srv/f")
        async for _ in chunks:
            break
        await chunks.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(60):
            assert (await box.exec("rm /srv/f")).ok

    async def test_archives_need_no_program_of_the_box(self, box: AsyncSandbox, tmp_path: Path) -> None:
        await sh(
            box,
            "mkdir /srv/t; echo real > /srv/t/f\n"
            "printf '#!/bin/sh\\necho forged\\n' > /tmp/forged; chmod 755 /tmp/forged\n"
            "for name in tar cat cp dd head mkdir gzip python3; do\n"
            "  for place in /bin /usr/bin /usr/local/bin; do\n"
            "    if [ -e $place/$name ]; then cp -f --remove-destination /tmp/forged $place/$name; fi\n"
            "  done\n"
            "done 2>/dev/null; true",
        )
        back = unpack(await receive(box, "/srv/t"), tmp_path / "back")
        assert (back / "t/f").read_text() == "real\n"
        await box.put_archive("/srv/new/place", stream(pack_bytes("g", b"given")))
        await box.download("/srv/new/place/g", tmp_path / "g")
        assert (tmp_path / "g").read_text() == "given"

    async def test_pipes_sockets_and_devices_are_left_out_and_do_not_block(self, box: AsyncSandbox) -> None:
        code = "import socket; socket.socket(socket.AF_UNIX).bind('/srv/s/sock')"
        await sh(box, f'mkdir /srv/s; mkfifo /srv/s/pipe; echo 1 > /srv/s/f; python3 -c "{code}"')
        async with asyncio.timeout(60):
            assert list(members(await receive(box, "/srv/s"))) == ["s", "s/f"]

    async def test_same_archive_put_several_times_at_once_is_there_whole(self, box: AsyncSandbox) -> None:
        """Covers a client that repeats a request because its response was lost."""
        content = os.urandom(20_000).hex().encode()
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name in ("a", "b", "c"):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            link = tarfile.TarInfo("d")
            link.type, link.linkname = tarfile.SYMTYPE, "a"
            tar.addfile(link)
        await sh(box, "mkdir -p /tmp/once")
        for _ in range(4):
            await asyncio.gather(*(box.put_archive("/tmp/once", stream(buffer.getvalue())) for _ in range(6)))
            assert await sh(box, "cd /tmp/once && cat a b c d") == content.decode() * 4
            assert (await sh(box, "ls -A /tmp/once")).split() == ["a", "b", "c", "d"]

    async def test_existing_files_are_replaced_and_others_stay(self, box: AsyncSandbox) -> None:
        await sh(box, "mkdir -p /srv/d; echo old > /srv/d/f; echo stays > /srv/d/g; ln -s /etc/passwd /srv/d/l")
        data = archive(("d/f", tarfile.REGTYPE, ""), ("d/l", tarfile.REGTYPE, ""))
        before = await sh(box, "md5sum /etc/passwd")
        await box.put_archive("/srv", stream(data))
        assert await sh(box, "cat /srv/d/f /srv/d/g /srv/d/l; test ! -L /srv/d/l") == "d/fstays\nd/l"
        assert await sh(box, "md5sum /etc/passwd") == before

    async def test_a_directory_never_replaces_a_file_nor_is_replaced_by_one(
        self, box: AsyncSandbox, tmp_path: Path
    ) -> None:
        (tmp_path / "a").write_text("x")
        await sh(box, "mkdir -p /srv/d/full /srv/d/empty; touch /srv/d/full/kept /srv/d/file")
        before = await sh(box, "cd /srv/d; find . | sort; test -f file")
        for name, kind in (
            *(("full", tarfile.REGTYPE), ("empty", tarfile.REGTYPE)),
            *(("full", tarfile.SYMTYPE), ("empty", tarfile.SYMTYPE), ("file", tarfile.DIRTYPE)),
        ):
            with pytest.raises(SandboxArchiveError):
                await box.put_archive("/srv/d", stream(archive((name, kind, "file"))))
        with pytest.raises(SandboxArchiveError):
            await box.upload(tmp_path / "a", "/srv/d/full")
        assert await sh(box, "cd /srv/d; find . | sort; test -f file") == before

    async def test_whatever_a_box_puts_in_an_uploads_way_is_not_a_failure_of_the_backend(
        self, box: AsyncSandbox
    ) -> None:
        await sh(
            box, f"mkdir /srv/x; cd /srv/x; touch f; ln -s loop loop; ln -s no/where gone; ln -s {'n' * 300} long"
        )
        for path in (f"{name}{below}" for name in ("f", "loop", "gone", "long") for below in ("", "/below")):
            with pytest.raises(SandboxArchiveError) as caught:
                await box.put_archive(f"/srv/x/{path}", stream(pack_bytes("g", b"given")))
            assert not caught.value.retryable
