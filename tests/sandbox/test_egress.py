"""The door of an allow-list: which hosts it forwards to, in which form, and that a box has no other way out."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from nemo_gym.agent.world import HarnessRun, World, act_in_world
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.sandbox import AllowedHosts, Door
from nemo_gym.contract.session import (
    ActRequest,
    Egress,
    EgressPolicy,
    InferenceEndpoint,
    Placement,
    RolloutIdentity,
    SandboxClause,
    SandboxSpecModel,
    SessionDescriptor,
    Topology,
)
from nemo_gym.sandbox.base import SandboxProvider
from nemo_gym.sandbox.egress import EgressProxy
from nemo_gym.sandbox.providers.docker import DockerProvider
from tests.sandbox.local_boxes import local_place

NAMES = {"files.example": "127.0.0.1", "two.files.example": "127.0.0.1", "inner.example": "127.0.0.3"}
"""Names of this test's own name service."""

ASK = """
import http.client, sys, urllib.error, urllib.request
def ask(url):
    try:
        return urllib.request.urlopen(url, timeout=20).read().decode()
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"
    except OSError as error:
        return f"no way: {error}"
def tunnel(host, port):
    connection = http.client.HTTPConnection("127.0.0.1", 3128, timeout=20)
    connection.set_tunnel(host, port)
    try:
        connection.request("GET", "/through")
        return connection.getresponse().read().decode()
    except OSError as error:
        return str(error)
"""


@pytest.fixture(autouse=True)
def name_service(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *args, **kw: real(NAMES.get(host, host), *args, **kw))


@pytest_asyncio.fixture
async def site() -> AsyncIterator[int]:
    """A site on this machine's loopback that tells what it was asked."""

    async def answer(request: web.Request) -> web.Response:
        body = (await request.read()).decode()
        seen = sorted(name for name in request.headers if name.lower().startswith(("proxy", "x-")))
        return web.Response(text=f"{request.method} {request.host} {request.path_qs} {body} {seen}")

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


class Proxy:
    """A proxy on a port of this machine, and a client that writes what it likes."""

    def __init__(self, *allow: str, **limits: Any) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.server = EgressProxy(Door("egress", self.port, "", allow, kind="proxy"), listener, **limits)

    async def __aenter__(self) -> Proxy:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.aclose()

    async def say(self, *lines: str, body: str = "") -> str:
        """The whole answer to a request."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write("\r\n".join([*lines, "", body]).encode("latin-1"))
        answer = (await reader.read()).decode()
        writer.close()
        return answer

    async def tunnel(self, host: str) -> tuple[str, asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        return (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()[0], reader, writer


@pytest.mark.parametrize(
    ("entries", "host", "port", "allowed"),
    [
        (["pypi.org"], "pypi.org", 443, True),
        (["pypi.org"], "PyPI.org.", 80, True),
        (["pypi.org"], "pypi.org", 8443, False),
        (["pypi.org:8443"], "pypi.org", 8443, True),
        (["pypi.org:8443"], "pypi.org", 443, False),
        (["pypi.org"], "files.pypi.org", 443, False),
        (["pypi.org"], "evilpypi.org", 443, False),
        (["*.pypi.org"], "a.b.pypi.org", 443, True),
        (["*.pypi.org"], "pypi.org", 443, False),
        (["10.0.0.0/8"], "10.1.2.3", 443, True),
        (["10.0.0.0/8"], "::ffff:10.1.2.3", 443, True),
        (["10.0.0.0/8"], "11.1.2.3", 443, False),
        (["10.0.0.7"], "10.0.0.7", 443, True),
        (["fd00::/8"], "fd00::1", 443, True),
        (["[fd00::/8]:9000"], "fd00::1", 9000, True),
        (["example.org"], "93.184.216.34", 443, False),
        (["*.pypi.org"], "elsewhere.example\0.pypi.org", 443, False),
        (["*.pypi.org"], "8.8.8.8\0.pypi.org", 443, False),
        (["*.pypi.org"], "elsewhere.example\\.pypi.org", 443, False),
        (["*.pypi.org"], "elsewhere.example%00.pypi.org", 443, False),
        (["*.pypi.org"], ".pypi.org", 443, False),
        (["127.0.0.1"], "127.1", 80, False),
        (["127.0.0.1"], "2130706433", 80, False),
    ],
)
def test_what_may_be_asked_for_is_what_the_list_names(entries: list[str], host: str, port: int, allowed: bool) -> None:
    assert AllowedHosts(entries).names(host, port) is allowed


@pytest.mark.parametrize(
    ("address", "reaches"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("169.254.169.254", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("0.0.0.0", False),
        ("::1", False),
        ("fe80::1", False),
        ("::ffff:169.254.169.254", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::808:808", True),
        ("2002:7f00:1::", False),
        ("10.1.2.3", True),
        ("::ffff:10.1.2.3", True),
    ],
)
def test_name_leads_to_public_addresses_and_listed_ones_alone(address: str, reaches: bool) -> None:
    hosts = AllowedHosts(["example.org", "10.0.0.0/8"])
    assert hosts.reaches(ipaddress.ip_address(address), 443) is reaches


@pytest.mark.parametrize(
    "entry", ["*", "", "https://pypi.org", "pypi.org/simple", "pypi.org:0", "pypi.org:https", "127.1", "a b", "x..y"]
)
def test_entry_that_cannot_be_read_is_refused_with_what_could(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"egress\.allow: '.*' (is not a valid entry; use a name|has no port)"):
        AllowedHosts([entry])


@pytest.mark.parametrize(
    ("policy", "allow"),
    [("model_only", ("pypi.org",)), ("allowlist", ()), ("open", ("pypi.org",)), ("allowlist", "*")],
)
def test_list_goes_with_its_policy_alone(policy: str, allow: Any) -> None:
    with pytest.raises(ValueError, match=r"egress\.allow"):
        Egress(policy=EgressPolicy(policy), allow=tuple(allow))


async def test_tunnel_carries_both_ways_and_ends_with_either_side(site: int) -> None:
    async with Proxy(f"files.example:{site}", f"127.0.0.0/8:{site}") as proxy:
        status, reader, writer = await proxy.tunnel(f"files.example:{site}")
        assert status == "HTTP/1.1 200 Connection established"
        for path in ("/one", "/two"):
            writer.write(f"GET {path} HTTP/1.1\r\nHost: within\r\n\r\n".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
            assert (await reader.readexactly(length)).decode() == f"GET within {path}  []"
        writer.close()
        await writer.wait_closed()
        _, reader, writer = await proxy.tunnel(f"files.example:{site}")
        await proxy.server.aclose()
        assert await reader.read() == b""
        writer.close()
    assert proxy.server.statistics.requests == 2


async def test_plain_request_is_forwarded_without_what_is_the_proxys(site: int) -> None:
    async with Proxy(f"files.example:{site}", f"127.0.0.1:{site}") as proxy:
        answer = await proxy.say(
            f"POST http://files.example:{site}/a?b=c HTTP/1.1",
            "Host: elsewhere.example",
            "Proxy-Authorization: Basic eA==",
            "Connection: X-Hop",
            "X-Hop: 1",
            "X-Kept: 1",
            "Content-Length: 4",
            body="bodyGET http://files.example/smuggled HTTP/1.1\r\n\r\n",
        )
    assert answer.startswith("HTTP/1.1 200 OK")
    assert answer.endswith(f"POST files.example:{site} /a?b=c body ['X-Kept']")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["CONNECT other.example:{site} HTTP/1.1"], "403 Forbidden"),
        (["CONNECT files.example:1 HTTP/1.1"], "403 Forbidden"),
        (
            ["CONNECT inner.example:{site} HTTP/1.1"],
            "is at 127.0.0.3, which is neither public nor in an allowed network",
        ),
        (["CONNECT 127.0.0.3:{site} HTTP/1.1"], "403 Forbidden"),
        (["CONNECT localhost:{site} HTTP/1.1"], "403 Forbidden"),
        (["CONNECT 127.0.0.1\0.files.example:{site} HTTP/1.1"], "403 Forbidden"),
        (["GET http://127.0.0.1\0.files.example:{site}/ HTTP/1.1"], "403 Forbidden"),
        (["GET http://[::1/ HTTP/1.1"], "400 Bad Request"),
        (["GET http://files.example:{site}/ HTTP/1.1", "Content-Length: " + "9" * 5000], "400 Bad Request"),
        (["CONNECT u@files.example:{site} HTTP/1.1"], "400 Bad Request"),
        (["CONNECT files.example HTTP/1.1"], "400 Bad Request"),
        (["GET / HTTP/1.1"], "400 Bad Request"),
        (["GET https://files.example/ HTTP/1.1"], "400 Bad Request"),
        (["GET http://files.example:{site}/ HTTP/1.1", "A : b"], "400 Bad Request"),
        (["GET http://files.example:{site}/ HTTP/1.1", "A: b\nC: d"], "400 Bad Request"),
        (["GET http://files.example:{site}/ HTTP/1.1", "Content-Length: 1", "Content-Length: 2"], "400 Bad Request"),
        (["POST http://files.example:{site}/ HTTP/1.1", "Transfer-Encoding: chunked"], "411 Length Required"),
        (["GET http://files.example:{site}/ HTTP/1.1", "A: " + "x" * 70_000], "431 Request Header"),
        (["CONNECT files.example:{closed} HTTP/1.1"], "502 Bad Gateway"),
    ],
)
async def test_what_is_not_allowed_or_cannot_be_read_is_answered_and_goes_nowhere(
    site: int, lines: list[str], said: str
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        closed = held.getsockname()[1]
        allow = [
            f"{name}:{port}" for name in ("files.example", "*.files.example", "127.0.0.1") for port in (site, closed)
        ]
        async with Proxy(*allow, f"inner.example:{site}") as proxy:
            answer = await proxy.say(*(line.format(site=site, closed=closed) for line in lines))
    assert said in answer, answer
    assert proxy.server.statistics.answered == 0


async def test_silent_and_surplus_connections_are_closed(site: int) -> None:
    async with Proxy("files.example", patience_s=0.05) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"CONNECT")
        assert await reader.read() == b""
        writer.close()
    async with Proxy(f"127.0.0.1:{site}", max_connections=1) as proxy:
        _, _, first = await proxy.tunnel(f"127.0.0.1:{site}")
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        first.close()
    async with Proxy(f"127.0.0.1:{site}", idle_s=0.05) as proxy:
        _, reader, writer = await proxy.tunnel(f"127.0.0.1:{site}")
        assert await reader.read() == b""
        writer.close()


async def test_lookups_that_take_long_hold_up_nothing_but_their_own_proxy(
    site: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, begun, answered = socket.getaddrinfo, threading.Semaphore(0), threading.Event()

    def slow(host: str, *args: Any, **options: Any) -> Any:
        if host.endswith(".slow.example"):
            begun.release()
            answered.wait(60)
            raise socket.gaierror
        return quick(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    # As many as the process has for all else.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
    async with (
        Proxy(f"*.slow.example:{site}") as hostile,
        Proxy(f"files.example:{site}", f"127.0.0.0/8:{site}") as other,
    ):
        asking = [asyncio.create_task(hostile.tunnel(f"{n}.slow.example:{site}")) for n in range(8)]
        try:
            async with asyncio.timeout(30):
                assert await asyncio.to_thread(begun.acquire)
                assert await asyncio.to_thread(begun.acquire)
                status, _, writer = await other.tunnel(f"files.example:{site}")
                writer.close()
            assert status == "HTTP/1.1 200 Connection established"
        finally:
            answered.set()
            for _, _, writer in await asyncio.gather(*asking):
                writer.close()


async def through_a_box(provider: SandboxProvider, site: int) -> list[str]:
    """What a command in an attempt's box is answered: a listed name by request and by tunnel, two that are not."""
    who = RolloutIdentity(rollout_id="r", task_id="t", group_id="g")
    descriptor = SessionDescriptor(
        environment="env",
        task_id="t",
        rollout=who,
        placement=Placement(topology=Topology.AGENT_IN_ENV),
        sandbox=SandboxClause(spec=SandboxSpecModel(image="host", workdir="/tmp")),
        egress=Egress(policy=EgressPolicy.ALLOWLIST, allow=(f"*.files.example:{site}", f"127.0.0.1:{site}")),
    )
    request = ActRequest(
        responses_create_params={}, descriptor=descriptor, inference=InferenceEndpoint(base_url="", token="")
    )
    answers: list[str] = []

    async def harness(world: World, _: HarnessRun) -> None:
        script = ASK + (
            f"print(ask('http://two.files.example:{site}/asked'))\n"
            f"print(tunnel('two.files.example', {site}))\n"
            f"print(ask('http://files.example:{site}/asked'))\n"
            f"print(tunnel('127.0.0.3', {site}))\n"
            # Past the proxy (NO_PROXY names localhost) there is no network.
            f"print(ask('http://localhost:{site}/'))\n"
        )
        done = await world.exec(["python3", "-c", script], timeout_s=120)
        assert done.ok, done
        answers.extend((done.stdout or "").splitlines())

    await act_in_world(request, provider, harness)
    return answers


async def test_box_of_the_local_provider_reaches_the_listed_hosts_alone(tmp_path: Path, site: int) -> None:
    async with local_place(tmp_path) as place:
        answers = await through_a_box(place.provider, site)
    check(answers, site)


async def test_box_of_the_docker_provider_reaches_the_listed_hosts_alone(docker_engine: str, site: int) -> None:
    provider = DockerProvider(base_url=docker_engine)
    try:
        answers = await through_a_box(provider, site)
    finally:
        await provider.aclose()
    check(answers, site)


def check(answers: list[str], site: int) -> None:
    assert answers[:2] == [f"GET two.files.example:{site} {path}  []" for path in ("/asked", "/through")]
    assert answers[2].startswith("403 ") and f"this box reaches *.files.example:{site}" in answers[2]
    assert "403" in answers[3]
    assert answers[4].startswith("no way: ")
