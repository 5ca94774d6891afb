"""Archives, doors and images, with real boxes behind the broker."""

from __future__ import annotations

import asyncio
import io
import sqlite3
import tarfile
import uuid
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from resources_servers.sandbox.tests.api import Api, calling
from resources_servers.sandbox.tests.conftest import StartBroker

TAR = {"Content-Type": "application/x-tar"}


def tar_of(*entries: tuple[str, bytes, str]) -> bytes:
    """Of (name, content, link target)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content, link in entries:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            if link:
                info.type, info.linkname = tarfile.SYMTYPE, link
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
async def target() -> AsyncIterator[str]:
    """A server outside the box that says which credential it was shown."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=f"secret={request.headers.get('X-Secret')}")

    app = web.Application()
    app.router.add_get("/hello", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


def fetch(port: int) -> str:
    code = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port}/hello', timeout=20).read().decode())"
    return f'python3 -c "{code}"'


async def test_archive_goes_in_and_comes_out(api: Api) -> None:
    box = await api.box()
    data = tar_of(("d/f", b"x" * 3_000_000, ""))
    assert (await box.ask("PUT", "/archive?path=/srv", data=data, headers=TAR)).status == 204
    answer = await box.ask("GET", "/archive?path=/srv/d")
    assert answer.headers["Content-Type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(answer.body)) as tar:
        assert [member.name for member in tar] == ["d", "d/f"]


@pytest.mark.parametrize(
    "data",
    [
        tar_of(("../evil", b"x", "")),
        tar_of(("/etc/evil", b"x", "")),
        tar_of(("out", b"", "/etc"), ("out/evil", b"x", "")),
        b"this is no archive" * 100,
        b"",
    ],
    ids=["dots", "absolute", "through a link", "no archive", "nothing"],
)
async def test_archive_that_escapes_or_is_damaged_is_refused(data: bytes, api: Api) -> None:
    box = await api.box()
    answer = await box.ask("PUT", "/archive?path=/srv/into", data=data, headers=TAR)
    assert (answer.status, answer.code) == (400, "sandbox_archive")
    assert (await box.run("ls /etc/evil /srv/evil /tmp/evil 2>/dev/null")).stdout == b""


async def test_archive_beyond_its_bound_is_refused_whether_announced_or_not(start_broker: StartBroker) -> None:
    broker = start_broker(max_archive_bytes=100_000)
    async with calling(broker) as api:
        box = await api.box()
        data = tar_of(("f", b"x" * 200_000, ""))

        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(data), 5000):
                yield data[start : start + 5000]

        for body in (data, chunks()):
            answer = await box.ask("PUT", "/archive?path=/srv", data=body, headers=TAR)
            assert (answer.status, answer.code) == (413, "archive_too_large")
        await box.run("head -c 200000 /dev/urandom > /srv/big")
        cut = await api.ask(
            "GET",
            f"{box.path}/archive?path=/srv/big",
            headers={"Authorization": f"Bearer {box.token}", "X-Request-ID": "cut"},
        )
        assert cut.status >= 400


async def test_archive_that_breaks_off_tells_why_when_it_is_asked(api: Api) -> None:
    box = await api.box()
    await box.run("head -c 3000000 /dev/urandom > /srv/big")
    request_id = uuid.uuid4().hex
    try:
        answer = await box.ask("GET", "/archive?path=/srv/big&max_bytes=1000000", headers={"X-Request-ID": request_id})
        assert answer.status == 400
        assert answer.code == "sandbox_archive_too_large"
    except Exception as error:
        assert "Connection" in type(error).__name__ or "Payload" in type(error).__name__
        why = await box.ask("GET", f"/archive/failure?request_id={request_id}")
        assert why.json["code"] == "sandbox_archive_too_large"
        assert "1000000" in why.json["detail"]


async def test_missing_path_is_a_problem_and_names_it(api: Api) -> None:
    box = await api.box()
    answer = await box.ask("GET", "/archive?path=/srv/not_here")
    assert answer.status >= 400
    assert "/srv/not_here" in answer.json["detail"]


async def test_door_is_opened_counted_and_closed_and_its_headers_are_told_to_nobody(api: Api, target: str) -> None:
    door = {
        "name": "model",
        "port": 8000,
        "target": target,
        "allow": ["GET /hello"],
        "headers": {"X-Secret": "s3cr3t"},
    }
    box = await api.box(spec={"doors": [door]})
    assert b"secret=s3cr3t" in (await box.run(fetch(8000))).stdout
    late = {**door, "name": "late", "port": 8001}
    for _ in range(2):
        assert (await box.ask("PUT", "/doors/late", json=late)).status == 204
    other = await box.ask("PUT", "/doors/late", json={**late, "port": 8002})
    assert (other.status, other.code) == (409, "door_exists")
    assert b"secret=s3cr3t" in (await box.run(fetch(8001))).stdout
    view = await box.ask("GET", "/doors")
    assert {name: counts["answered"] for name, counts in view.json["doors"].items()} == {"model": 1, "late": 1}
    for _ in range(2):
        assert (await box.ask("DELETE", "/doors/late")).status == 204
    assert (await box.run(fetch(8001))).end["return_code"] != 0
    told = [await box.ask("GET"), view, await api.call("GET", "/v1/sandboxes")]
    assert not any(b"s3cr3t" in answer.body for answer in told)


async def test_doors_are_open_again_after_a_restart_and_their_headers_are_sealed_in_the_database(
    start_broker: StartBroker, target: str
) -> None:
    broker = start_broker()
    headers = {"X-Secret": "s3cr3t-at-rest"}
    door = {"name": "model", "port": 8000, "target": target, "allow": ["GET /hello"], "headers": headers}
    async with calling(broker) as api:
        box = await api.box(spec={"doors": [door], "env": {"TOKEN": "env-s3cr3t"}})
        closed = {**door, "name": "closed", "port": 8001}
        assert (await box.ask("PUT", "/doors/closed", json=closed)).status == 204
        assert (await box.ask("PUT", "/doors/late", json={**door, "name": "late", "port": 8002})).status == 204
        assert (await box.ask("DELETE", "/doors/closed")).status == 204
        broker.kill()
        with sqlite3.connect(broker.state_dir / "broker.sqlite") as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        database.close()
        files = [path.read_bytes() for path in broker.state_dir.rglob("*") if path.is_file()]
        assert not any(b"s3cr3t" in data for data in files)
        broker.start()
        for port in (8000, 8002):
            assert b"secret=s3cr3t-at-rest" in (await box.run(fetch(port))).stdout
        assert set((await box.ask("GET", "/doors")).json["doors"]) == {"model", "late"}
        assert (await box.run('printf %s "$TOKEN"')).stdout == b"env-s3cr3t"


async def test_image_is_committed_looked_at_and_forgotten(api: Api) -> None:
    image = f"broker/test:{uuid.uuid4().hex[:12]}"
    path = f"/v1/images/{image.replace('/', '%2F')}"
    box = await api.box()
    await box.run("mkdir -p /srv/built; echo layer > /srv/built/f")
    assert (await api.call("GET", path)).code == "image_not_found"
    made = await box.ask("POST", "/images", json={"image": image, "labels": {"digest": "abc"}})
    assert made.status == 201
    try:
        assert (await api.call("GET", path)).json["labels"]["digest"] == "abc"
        second = await api.box(spec={"image": image})
        assert (await second.run("cat /srv/built/f")).stdout == b"layer\n"
        await second.ask("DELETE")
    finally:
        for _ in range(2):
            assert (await api.call("DELETE", path)).status == 204
    assert (await api.call("GET", path)).code == "image_not_found"


async def test_twenty_archives_at_once_do_not_mix(api: Api) -> None:
    boxes = await asyncio.gather(*(api.box() for _ in range(4)))

    async def one(number: int) -> None:
        box = boxes[number % 4]
        data = tar_of((f"f{number}", b"%d" % number * 50_000, ""))
        assert (await box.ask("PUT", "/archive?path=/srv", data=data, headers=TAR)).status == 204
        back = await box.ask("GET", f"/archive?path=/srv/f{number}")
        with tarfile.open(fileobj=io.BytesIO(back.body)) as tar:
            member = tar.extractfile(f"f{number}")
            assert member is not None
            assert member.read() == b"%d" % number * 50_000

    await asyncio.gather(*(one(number) for number in range(20)))
