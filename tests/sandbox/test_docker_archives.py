from __future__ import annotations

import asyncio
import contextlib
import io
import os
import tarfile
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import docker.errors
import pytest
import requests

from nemo_gym.contract.errors import SandboxArchiveError, SandboxLostError
from nemo_gym.sandbox.base import SandboxHandle
from nemo_gym.sandbox.providers.docker import DockerProvider, archives
from nemo_gym.sandbox.providers.docker.archives import Upload
from nemo_gym.sandbox.providers.docker.execution import DockerBox
from tests.sandbox.docker_boxes import Boxes


def member(
    name: str, content: bytes = b"", *, kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(content)
    info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    return info, content


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


async def chunks(data: bytes, size: int = 1000) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def fetched(boxes: Boxes, box: SandboxHandle, path: str, **options: object) -> tarfile.TarFile:
    data = b"".join([chunk async for chunk in boxes.provider.get_archive(box, path, **options)])
    return tarfile.open(fileobj=io.BytesIO(data))


async def test_docker_archive_round_trip_keeps_content_modes_and_links(boxes: Boxes, box: SandboxHandle) -> None:
    big = os.urandom(3_000_000)
    data = archive(
        member("d", kind=tarfile.DIRTYPE),
        member("d/big.bin", big),
        member("d/link", kind=tarfile.SYMTYPE, link="big.bin"),
        member("d/hard", kind=tarfile.LNKTYPE, link="d/big.bin"),
        member("näme \udcff".encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape"), b"odd"),
    )
    await boxes.provider.put_archive(box, "/new/place", chunks(data))
    tar = await fetched(boxes, box, "/new/place")
    assert tar.getnames()[0] == "place"
    content = tar.extractfile("place/d/big.bin")
    assert content is not None
    assert content.read() == big
    assert tar.getmember("place/d/link").linkname == "big.bin"
    assert sorted(tar.getnames()) == sorted(
        ["place", "place/d", "place/d/big.bin", "place/d/hard", "place/d/link", "place/näme \udcff"]
    )


@pytest.mark.parametrize(
    "bad",
    [
        member("../escaped", b"x"),
        member("/escaped", b"x"),
        member("a/../../escaped", b"x"),
        member("l", kind=tarfile.SYMTYPE, link="/etc"),
        member("l", kind=tarfile.SYMTYPE, link="../../etc"),
        member("l", kind=tarfile.LNKTYPE, link="../../etc/passwd"),
        member("device", kind=tarfile.CHRTYPE),
    ],
    ids=lambda value: f"{value[0].name}->{value[0].linkname}",
)
async def test_docker_put_archive_writes_nothing_when_any_member_escapes(
    boxes: Boxes, box: SandboxHandle, bad: tuple[tarfile.TarInfo, bytes]
) -> None:
    await boxes.provider.exec(box, "mkdir /t")
    with pytest.raises(SandboxArchiveError, match="'/t' is refused"):
        await boxes.provider.put_archive(box, "/t", chunks(archive(member("good", b"x"), bad)))
    assert (await boxes.provider.exec(box, "ls -A /t; ls /escaped")).stdout == ""


@pytest.mark.parametrize("explicit", [True, False], ids=["directory in the archive", "directory implied"])
async def test_docker_put_archive_never_writes_through_a_link_of_the_box(
    boxes: Boxes, box: SandboxHandle, explicit: bool
) -> None:
    await boxes.provider.exec(box, "mkdir /t /outside; ln -s /outside /t/sub; ln -s /outside/file /t/plain")
    members = [
        member("plain", b"new"),
        *([member("sub", kind=tarfile.DIRTYPE)] if explicit else []),
        member("sub/file", b"new"),
    ]
    with pytest.raises(SandboxArchiveError):
        await boxes.provider.put_archive(box, "/t", chunks(archive(*members)))
    assert (await boxes.provider.exec(box, "ls -A /outside")).stdout == ""


async def test_docker_put_archive_refuses_a_stream_that_ends_early(boxes: Boxes, box: SandboxHandle) -> None:
    data = archive(member("a", b"x" * 5000))
    with pytest.raises(SandboxArchiveError, match="ends early"):
        await boxes.provider.put_archive(box, "/t", chunks(data[:3000]))


async def test_docker_put_archive_refuses_a_target_that_is_a_file(boxes: Boxes, box: SandboxHandle) -> None:
    with pytest.raises(SandboxArchiveError, match=r"'/etc/passwd' in the box: .*not a directory"):
        await boxes.provider.put_archive(box, "/etc/passwd", chunks(archive(member("a", b"x"))))


async def test_docker_put_archive_leaves_existing_directories_as_they_are(boxes: Boxes, box: SandboxHandle) -> None:
    await boxes.provider.exec(box, "mkdir -m 700 /kept")
    await boxes.provider.put_archive(box, "/kept/x/y", chunks(archive(member("a", b"x"))))
    assert (await boxes.provider.exec(box, "stat -c %a /kept /kept/x; cat /kept/x/y/a")).stdout == "700\n755\nx"


async def test_docker_get_archive_excludes_paths_and_names(boxes: Boxes, box: SandboxHandle) -> None:
    await boxes.provider.exec(box, "mkdir -p /p/a/.git /p/b /p/.git; touch /p/a/keep /p/a/.git/x /p/b/drop /p/.git/y")
    tar = await fetched(boxes, box, "/p", exclude=["**/.git", "b/drop"])
    assert sorted(tar.getnames()) == ["p", "p/a", "p/a/keep", "p/b"]


async def test_docker_get_archive_stops_at_max_bytes(boxes: Boxes, box: SandboxHandle) -> None:
    await boxes.provider.exec(box, "head -c 5000000 /dev/zero > /zeros")
    with pytest.raises(SandboxArchiveError, match="max_bytes=100000"):
        await fetched(boxes, box, "/zeros", max_bytes=100_000)


async def test_docker_get_archive_holds_a_bounded_part_in_memory(boxes: Boxes, box: SandboxHandle) -> None:
    await boxes.provider.exec(box, "head -c 300000000 /dev/zero > /zeros")
    tracemalloc.start()
    try:
        size = 0
        async for chunk in boxes.provider.get_archive(box, "/zeros"):
            size += len(chunk)
        assert size > 300_000_000
        assert tracemalloc.get_traced_memory()[1] < 150_000_000
    finally:
        tracemalloc.stop()


async def test_docker_get_archive_follows_a_link_and_keeps_its_name(boxes: Boxes, box: SandboxHandle) -> None:
    await boxes.provider.exec(
        box, "mkdir /real; echo 1 > /real/f; ln /real/f /real/g; ln -s real /link; ln -s /link /far"
    )
    for path in ("/link", "/far"):
        tar = await fetched(boxes, box, path)
        name = path.strip("/")
        assert sorted(tar.getnames()) == [name, f"{name}/f", f"{name}/g"]
        content = tar.extractfile(f"{name}/g")
        assert content is not None
        assert content.read() == b"1\n"


async def test_docker_get_archive_says_when_there_is_nothing(boxes: Boxes, box: SandboxHandle) -> None:
    with pytest.raises(SandboxArchiveError, match="nothing at '/absent'"):
        await fetched(boxes, box, "/absent")
    await boxes.provider.close(box)
    with pytest.raises(SandboxLostError):
        await fetched(boxes, box, "/etc")


async def test_docker_get_archive_says_so_when_a_newer_engine_finds_a_loop_of_links(
    boxes: Boxes, box: SandboxHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Newer engines ask the kernel, in whose text links have "levels"; older ones look themselves.
    text = "lstat /srv/loop/f: too many levels of symbolic links"

    def refuse(response: requests.Response) -> None:
        response.status_code = 500
        raise docker.errors.APIError("500 Server Error", response=response, explanation=text)

    monkeypatch.setattr(archives, "_raise_for_status", refuse)
    with pytest.raises(SandboxArchiveError) as caught:
        await fetched(boxes, box, "/srv/loop/f")
    assert not caught.value.retryable


async def test_docker_archives_use_no_program_of_the_box(boxes: Boxes, box: SandboxHandle) -> None:
    await boxes.provider.exec(
        box, "mkdir /p; echo truth > /p/f; rm /usr/bin/tar /usr/bin/cat /usr/bin/mkdir /usr/bin/dash /usr/bin/bash"
    )
    tar = await fetched(boxes, box, "/p")
    content = tar.extractfile("p/f")
    assert content is not None
    assert content.read() == b"truth\n"
    await boxes.provider.put_archive(box, "/q/r", chunks(archive(member("g", b"x"))))


async def test_docker_upload_and_download_move_one_file(boxes: Boxes, box: SandboxHandle, tmp_path: Path) -> None:
    source = tmp_path / "source.bin"
    source.write_bytes(os.urandom(100_000))
    await boxes.provider.upload_file(box, source, "/made/up/name.bin")
    await boxes.provider.download_file(box, "/made/up/name.bin", tmp_path / "back.bin")
    assert (tmp_path / "back.bin").read_bytes() == source.read_bytes()
    with pytest.raises(SandboxArchiveError, match="not a regular file"):
        await boxes.provider.download_file(box, "/made", tmp_path / "dir")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back.bin", "source.bin"]


async def test_docker_box_can_be_closed_while_an_archive_of_it_is_half_read(boxes: Boxes, box: SandboxHandle) -> None:
    await boxes.provider.exec(box, "head -c 50000000 /dev/zero > /zeros")
    reading = boxes.provider.get_archive(box, "/zeros")
    first = await anext(reading)
    assert first
    await reading.aclose()
    async with asyncio.timeout(30):
        await boxes.provider.close(box)


async def test_docker_get_archive_ends_as_cancelled_when_its_reader_is_while_a_read_runs(
    boxes: Boxes, box: SandboxHandle
) -> None:
    await boxes.provider.exec(box, "head -c 30000000 /dev/zero > /zeros")

    async def read() -> None:
        async for _ in boxes.provider.get_archive(box, "/zeros"):
            pass

    for delay_ms in range(0, 40, 4):
        task = asyncio.create_task(read())
        await asyncio.sleep(delay_ms / 1000)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert (await boxes.provider.exec(box, "rm /zeros")).ok


async def test_docker_lease_is_renewed_and_box_removed_while_many_archives_are_read(
    boxes: Boxes, box: SandboxHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, sent = threading.Semaphore(0), threading.Event()

    def slow(*_: object, **__: object) -> Iterator[bytes]:
        begun.release()
        assert sent.wait(60)
        yield b""

    monkeypatch.setattr(archives, "download", slow)

    async def read() -> None:
        async for _ in boxes.provider.get_archive(box, "/etc"):
            pass

    reading = [asyncio.create_task(read()) for _ in range(200)]
    try:
        for _ in range(32):
            assert await asyncio.to_thread(begun.acquire, timeout=30)
        async with asyncio.timeout(30):
            await boxes.provider.renew(box, 300)
            assert (await boxes.provider.exec(box, "echo well")).stdout == "well\n"
            await boxes.provider.close(box)
    finally:
        sent.set()
        await asyncio.gather(*reading)


def test_upload_asks_the_engine_about_few_directories_and_keeps_no_more() -> None:
    deep = "/".join("d" * 2 for _ in range(900))
    members = [member(f"{number}/{deep}/file") for number in range(50)]
    tracemalloc.start()
    upload = Upload("/srv")
    try:
        with pytest.raises(SandboxArchiveError, match="more than 20000 directories"):
            upload.feed(archive(*members))
        assert tracemalloc.get_traced_memory()[1] < 200_000_000
    finally:
        tracemalloc.stop()
        upload.close()


def test_upload_knows_the_directories_that_an_archive_implies() -> None:
    upload = Upload("/srv")
    upload.feed(archive(member("a/b/c"), member("a/b/d"), member("e", kind=tarfile.DIRTYPE), member("e/f/g")))
    upload.close()
    assert upload.implied - {("e",)} == {("a",), ("a", "b"), ("e", "f")}


@pytest.mark.parametrize(("user", "owner"), [("", 0), ("root", 0), ("0:0", 0), ("node", None)])
async def test_docker_uploaded_file_belongs_to_root_when_root_uses_the_box(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: str, owner: int | None
) -> None:
    source = tmp_path / "key"
    source.write_text("secret")
    if os.geteuid() == 0:
        os.chown(source, 1234, 1234)
    received = bytearray()

    async def put_archive(handle: SandboxHandle, path: str, tar: AsyncIterator[bytes]) -> None:
        async for chunk in tar:
            received.extend(chunk)

    provider = DockerProvider(base_url="unix:///nowhere")
    monkeypatch.setattr(provider, "put_archive", put_archive)
    box = DockerBox("c", "n", {}, 0, None, has_memory_limit=False, user=user)
    await provider.upload_file(SandboxHandle("c", "docker", raw=box), source, "/key")
    with tarfile.open(fileobj=io.BytesIO(received)) as tar:
        (member,) = tar.getmembers()
    assert member.uid == (source.stat().st_uid if owner is None else owner)
    await provider.aclose()
