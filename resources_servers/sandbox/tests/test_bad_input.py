"""What is asked in bad faith, by mistake, or at the wrong time: each has one answer, and README.md says which."""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
import os
import tarfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from resources_servers.sandbox.tests.api import Answer, Api, LentBox, calling, eventually
from resources_servers.sandbox.tests.broker_process import BrokerProcess
from resources_servers.sandbox.tests.conftest import StartBroker

TAR = {"Content-Type": "application/x-tar"}
DAYS_S = 86400.0


def resident_mib(broker: BrokerProcess) -> int:
    assert broker.process is not None
    lines = Path(f"/proc/{broker.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) // 1024


def member(name: str, kind: bytes = tarfile.REGTYPE, **fields: Any) -> bytes:
    """A tar header and no content."""
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.PAX_FORMAT)


def file(name: str, content: bytes) -> bytes:
    return member(name, size=len(content)) + content + bytes(-len(content) % 512)


END = bytes(1024)


async def unpack(box: LentBox, data: Any, path: str = "/srv/into") -> Answer:
    return await box.ask("PUT", f"/archive?path={path}", data=data, headers=TAR)


# -- fields ----------------------------------------------------------------------------------------------------------


async def test_unknown_field_is_refused_by_name_on_every_route_with_a_body(api: Api) -> None:
    box = await api.box()
    described = (await api.ask("GET", "/openapi.json")).json
    tried = 0
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            if "application/json" not in operation.get("requestBody", {}).get("content", {}):
                continue
            place = path.format(sandbox_id=box.sandbox_id, exec_id="e-1", name="d", lease_id="l")
            if "{exec_id}/signal" in path:
                await box.submit("sleep 60", "e-1")
            caller = {**api.caller, "Idempotency-Key": uuid.uuid4().hex}
            headers = {"Authorization": f"Bearer {box.token}"} if "{sandbox_id}" in path else caller
            answer = await api.ask(method.upper(), place, headers=headers, json={"surplus_field": 1})
            assert (answer.status, answer.code) == (422, "body"), (method, path, answer.body)
            assert "surplus_field" in answer.json["detail"]
            tried += 1
    assert tried >= 7


async def test_unknown_field_is_refused_wherever_it_is_and_the_nearest_is_named(api: Api) -> None:
    key = uuid.uuid4().hex
    for body, named in (
        ({"spec": {"imag": "x"}}, "imag"),
        ({"spec": {"resources": {"memory": 1}}}, "memory"),
        ({"spec": {}, "ttl": 5}, "ttl_s"),
        ({"spec": {}, "labels": {"a": 1}}, "labels.a"),
        ([], "the body"),
    ):
        headers = {**api.caller, "Idempotency-Key": key}
        answer = await api.ask("POST", "/v1/sandboxes", headers=headers, json=body)
        assert (answer.status, answer.code, answer.json["started"]) == (422, "body", "no")
        assert named in answer.json["detail"], answer.json
    assert (await api.create(key)).status == 201, "a key is not spent on a request that was refused"


@pytest.mark.parametrize("ttl_s", [0, -1, -0.0, 1e12, 1e400, "NaN", "Infinity", "1h", [], True])
async def test_absurd_ttl_is_refused_wherever_one_is_given(ttl_s: object, api: Api) -> None:
    box = await api.box()
    said: dict[str, Any] = {"ttl_s": str(ttl_s)} if ttl_s == 1e400 else {"ttl_s": ttl_s}
    created = await api.create(**{**said, "labels": {"ttl": "absurd"}})
    for answer in (
        created,
        await box.ask("PUT", "/lease", json=said),
        await box.ask("POST", "/leases", json={"scope": "read", **said}),
    ):
        if ttl_s is True and answer.status < 300:
            continue  # one second, as JSON's own libraries read it
        assert (answer.status, answer.json["started"]) == (422, "no")
        assert "ttl_s" in answer.json["detail"]
    if ttl_s is not True:
        assert await api.ids(ttl="absurd") == []


# -- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "exec_id", ["..", ".", "..%2Fe", "%2e%2e", "e%00", "e%2F..%2F..%2Fidentity", "x" * 129, "%ff", "e e", "-e"]
)
async def test_exec_id_that_is_no_plain_name_is_refused_and_writes_nothing(exec_id: str, api: Api) -> None:
    box = await api.box()
    before = {path for path in api.broker.state_dir.rglob("*") if "spool" not in path.parts}
    url = URL(f"{api.broker.url}{box.path}/execs/{exec_id}", encoded=True)
    headers = {"Authorization": f"Bearer {box.token}", "Content-Type": "application/json"}
    async with api.session.put(url, headers=headers, data=b'{"command": "echo x"}') as response:
        assert response.status in (400, 404, 405, 422), await response.text()
    after = {path for path in api.broker.state_dir.rglob("*") if "spool" not in path.parts}
    assert after - before <= {path for path in after if path.name.startswith("broker.sqlite")}
    spooled = {path.name for path in api.broker.state_dir.glob("spool/*/*")}
    assert all(name.endswith((".out", ".idx")) and ".." not in name for name in spooled)


@pytest.mark.parametrize("path", ["relative", "", "/srv/%00x", "..", "~"])
async def test_archive_path_that_is_not_absolute_is_refused(path: str, api: Api) -> None:
    box = await api.box()
    for method, options in (("PUT", {"data": END, "headers": TAR}), ("GET", {})):
        answer = await box.ask(method, f"/archive?path={path}", **options)
        assert (answer.status, answer.code) == (422, "body")
        assert "path" in answer.json["detail"]


async def test_climbing_archive_path_ends_at_the_boxs_own_root(api: Api) -> None:
    box = await api.box()
    mark = f"faults-{uuid.uuid4().hex}"
    answer = await unpack(box, file(mark, b"in the box") + END, "/srv/../../../../../../tmp")
    assert answer.status in (204, 400)
    assert not Path("/tmp", mark).exists()
    outside = await box.ask("GET", f"/archive?path=/../../../../../..{api.broker.state_dir}/identity")
    assert outside.status in (400, 404)


async def test_image_name_that_climbs_reaches_no_file_of_the_host(api: Api, tmp_path: Path) -> None:
    box = await api.box()
    for name in ("../../../../escaped", "/etc/escaped", "a/../../../escaped", ".."):
        answer = await box.ask("POST", "/images", json={"image": name})
        assert answer.status < 500, (name, answer.body)
        encoded = name.replace("/", "%2F").replace(".", "%2E")
        gone = await api.call("DELETE", URL(f"/v1/images/{encoded}", encoded=True).raw_path)
        assert gone.status < 500
    state = api.broker.state_dir
    assert not [path for place in (Path("/etc"), state.parent, state.parent.parent) for path in place.glob("escaped*")]


# -- archives --------------------------------------------------------------------------------------------------------

OUT = "/srv/secret"
ESCAPES = {
    "hard link to a file outside": member("l", tarfile.LNKTYPE, linkname="../secret"),
    "hard link by its full name": member("l", tarfile.LNKTYPE, linkname="/srv/secret"),
    "link to a directory above": member("d", tarfile.SYMTYPE, linkname="..") + file("d/secret", b"changed"),
    "link that climbs through another": member("a", tarfile.SYMTYPE, linkname="b/..")
    + member("b", tarfile.SYMTYPE, linkname="..")
    + file("a/secret", b"changed"),
    "file that turns into a link": file("x", b"")
    + member("x", tarfile.SYMTYPE, linkname="../secret")
    + file("x", b"changed"),
    "name of another in a pax record": file("../secret", b"changed"),
    "device": member("zero", tarfile.CHRTYPE, devmajor=1, devminor=5),
    "pipe": member("pipe", tarfile.FIFOTYPE),
}


@pytest.mark.parametrize("what", ESCAPES)
async def test_member_that_reaches_outside_changes_nothing_there(what: str, api: Api) -> None:
    box = await api.box()
    await box.run(f"echo kept > {OUT}; ln {OUT} /srv/second; mkdir /srv/into")
    answer = await unpack(box, ESCAPES[what] + END)
    assert answer.status in (204, 400), answer.body
    assert answer.status == 204 or answer.code == "sandbox_archive"
    seen = await box.run(f"cat {OUT}; stat -c %h {OUT}; find /srv/into -type b -o -type c | wc -l")
    assert seen.stdout == b"kept\n2\n0\n"


BOMBS = {
    "eight exabytes announced": member("f", size=2**63 - 1) + b"x" * 4096,
    "an endless pax header": member("x", tarfile.XHDTYPE, size=2**30) + b"x" * 65536,
    "a sparse terabyte": member("s", tarfile.GNUTYPE_SPARSE, size=512) + bytes(512) + END,
    "compressed zeros": gzip.compress(file("z", bytes(20_000_000)) + END),
    "a name as long as a book": member("n" * 200_000) + END,
    "four thousand directories in one another": file("d/" * 4000 + "f", b"x") + END,
}


@pytest.mark.parametrize("what", BOMBS)
async def test_bomb_is_refused_or_unpacked_within_its_bounds(what: str, api: Api) -> None:
    box = await api.box()
    answer = await unpack(box, BOMBS[what])
    assert answer.status in (204, 400), (answer.status, answer.body[:300])
    assert answer.status == 204 or answer.code == "sandbox_archive"
    assert len(answer.body) < 5000
    assert (await box.run("echo alive; du -s /srv | cut -f1 | wc -l")).stdout == b"alive\n1\n"
    assert resident_mib(api.broker) < 300


async def test_archive_that_fills_the_boxs_disk_is_refused_and_the_box_goes_on(api: Api) -> None:
    box = await api.box(spec={"resources": {"disk_gib": 0.06}})

    async def endless() -> AsyncIterator[bytes]:
        yield member("f", size=500_000_000)
        for _ in range(500):
            yield bytes(1_000_000)

    try:
        answer = await unpack(box, endless())
        assert (answer.status, answer.json["started"]) in ((422, "no"), (422, "unknown"), (400, "unknown")), (
            answer.body
        )
    except (aiohttp.ClientError, ConnectionError):
        pass  # refused while we were still sending
    assert (await box.run("rm -rf /srv/into; echo x > /srv/f && cat /srv/f")).stdout == b"x\n"


async def test_ten_thousand_members_are_unpacked_in_bounded_memory(api: Api) -> None:
    box = await api.box()
    buffer = io.BytesIO()
    for number in range(10_000):
        buffer.write(file(f"d{number % 100}/f{number}", b"x"))
    assert (await unpack(box, buffer.getvalue() + END)).status == 204
    assert (await box.run("find /srv/into -type f | wc -l")).stdout == b"10000\n"
    assert resident_mib(api.broker) < 300


# -- output ----------------------------------------------------------------------------------------------------------


async def test_gigabyte_of_output_is_cut_at_the_bound_and_the_command_ends_by_itself(
    start_broker: StartBroker,
) -> None:
    broker = start_broker(max_output_bytes=50_000_000)
    async with calling(broker) as api:
        box = await api.box()
        exec_id, _ = await box.submit("head -c 1000000000 /dev/zero; echo done >&2", max_output_bytes=2**40)
        output = await box.output(exec_id)
        assert (output.end["outcome"], output.end["return_code"]) == ("exited", 0)
        assert (output.end["truncated"], len(output.stdout), output.stderr) == (["stdout"], 50_000_000, b"done\n")
        assert sum(path.stat().st_size for path in broker.state_dir.glob("spool/*/*")) < 60_000_000
        assert resident_mib(broker) < 300


@pytest.mark.parametrize("accept", ["application/octet-stream", "text/event-stream"])
async def test_binary_output_comes_byte_for_byte(accept: str, api: Api) -> None:
    box = await api.box()
    data = bytes(range(256)) * 40 + os.urandom(100_000) + b"\r\n\n\ndata: x\n\nevent: exit\n\n\xff\xfe\x00"
    assert (await unpack(box, file("blob", data) + END, "/srv")).status == 204
    exec_id, _ = await box.submit("cat /srv/blob; cat /srv/blob >&2")
    if accept == "application/octet-stream":
        output = await box.output(exec_id)
        assert (output.stdout, output.stderr) == (data, data)
        return
    await box.output(exec_id)
    answer = await box.ask("GET", f"/execs/{exec_id}/output", headers={"Accept": accept})
    received = {"stdout": b"", "stderr": b""}
    events = [dict(line.split(b": ", 1) for line in block.split(b"\n")) for block in answer.body.split(b"\n\n")[:-1]]
    for event in events[:-1]:
        received[event[b"event"].decode()] += base64.b64decode(event[b"data"], validate=True)
    assert received == {"stdout": data, "stderr": data}
    assert events[-1][b"event"] == b"exit"


async def test_client_that_stops_reading_an_archive_holds_up_nobody_else(api: Api) -> None:
    box = await api.box()
    await box.run("head -c 300000000 /dev/zero > /srv/big")
    async with api.session.get(
        f"{api.broker.url}{box.path}/archive?path=/srv/big", headers={"Authorization": f"Bearer {box.token}"}
    ) as unread:
        assert unread.status == 200
        assert (await box.run("echo alive")).stdout == b"alive\n"
        assert resident_mib(api.broker) < 300
        assert (await box.ask("DELETE")).status == 204
        assert await api.ids() == [] or box.sandbox_id not in await api.ids()


async def test_client_that_stops_sending_an_archive_holds_up_nobody_else(api: Api) -> None:
    box = await api.box()
    stop = asyncio.Event()

    async def stalled() -> AsyncIterator[bytes]:
        yield member("f", size=1_000_000) + b"x" * 1000
        await stop.wait()

    sending = asyncio.create_task(unpack(box, stalled()))
    try:
        await asyncio.sleep(0.3)
        assert (await box.run("echo alive")).stdout == b"alive\n"
        assert (await box.ask("DELETE")).status == 204
    finally:
        sending.cancel()
        await asyncio.wait({sending})
        stop.set()


# -- clocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump_s", [10 * DAYS_S, -10 * DAYS_S], ids=["forward", "back"])
async def test_clock_that_jumps_lengthens_and_shortens_no_lease(
    jump_s: float, start_broker: StartBroker, tmp_path: Path
) -> None:
    offset = tmp_path / "clock"
    offset.write_text("0")
    program = (str(Path(__file__).with_name("jumping_broker.py")),)
    broker = start_broker(program=program, env={"CLOCK_OFFSET": str(offset)})
    async with calling(broker) as api:
        long, short = await api.box(ttl_s=300), await api.box(ttl_s=4)
        lent, brief = await long.mint("operate", ttl_s=200), await long.mint("operate", ttl_s=3)
        offset.write_text(str(jump_s))
        assert (await long.run("echo alive")).stdout == b"alive\n"
        assert (await lent.run("echo lent")).stdout == b"lent\n"
        renewed = await long.ask("PUT", "/lease", json={"ttl_s": 100})
        assert 90 < renewed.json["ttl_s"] <= 100
        assert 190 < (await long.mint("read", ttl_s=200)).lease["ttl_s"] + 100 <= 200, "none outlives its box"

        async def over() -> bool:
            gone = (await short.ask("GET")).json.get("termination_reason") == "expired"
            return gone and (await brief.ask("GET")).code == "lease_expired" if gone else False

        await eventually(over, "what was short has ended")
        assert (await long.run("echo alive")).stdout == b"alive\n"
        assert (await lent.run("echo lent")).stdout == b"lent\n"


async def test_request_that_is_cut_off_is_nobodys_error_and_leaves_nothing_of_it_in_the_log(api: Api) -> None:
    box = await api.box()
    secret = uuid.uuid4().hex
    before = len(api.broker.log.read_text())  # of other tests
    for _ in range(5):
        _, writer = await asyncio.open_connection("127.0.0.1", api.broker.port)
        head = f"PUT {box.path}/execs/e-cut HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {box.token}\r\n"
        head += "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
        writer.write(f'{head}{{"command": "echo {secret}'.encode())
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()
    assert (await box.run("echo alive")).stdout == b"alive\n"
    assert (await box.ask("GET", "/execs/e-cut")).code == "exec_not_found"
    log = api.broker.log.read_text()[before:]
    assert secret not in log
    assert box.token not in log
    assert "Traceback" not in log
