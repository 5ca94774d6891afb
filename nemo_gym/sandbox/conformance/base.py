"""Fixtures and helpers that every group of checks uses, the checks of the abilities that a provider declares, and an
upstream server for the checks of doors.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import urllib.request
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import pytest
from aiohttp import web

from nemo_gym.contract.errors import SandboxCapabilityError, SandboxCreateError
from nemo_gym.contract.sandbox import NetworkPolicy, SandboxSpec
from nemo_gym.sandbox.base import (
    CAPABILITY_PROTOCOLS,
    BoxLabel,
    ExecEnd,
    ExecOutput,
    ExecProcess,
    SandboxCapabilities,
    SandboxExecResult,
    SandboxProvider,
    SupportsSnapshot,
    box_labels,
)
from nemo_gym.sandbox.facade import AsyncSandbox, create_provider

PATIENCE_S = 60.0
"""How long a check waits for something that must happen, on a machine that may be very busy."""

StartBox = Callable[..., Awaitable[AsyncSandbox]]


async def eventually(condition: Callable[[], Awaitable[object]], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Poll until the condition is true; after ``timeout_s`` fail with a message that quotes ``what``."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not await condition():
        assert asyncio.get_running_loop().time() < deadline, f"within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.05)


async def collect(process: ExecProcess) -> tuple[bytes, bytes, list[ExecEnd]]:
    """Read all of a command's output (stdout, stderr) and its terminal events."""
    streams = {"stdout": bytearray(), "stderr": bytearray()}
    ends: list[ExecEnd] = []
    async with asyncio.timeout(PATIENCE_S):
        async for event in process.events():
            if isinstance(event, ExecOutput):
                assert not ends, "output after the terminal event"
                streams[event.stream] += event.data
            else:
                ends.append(event)
    return bytes(streams["stdout"]), bytes(streams["stderr"]), ends


async def python(box: AsyncSandbox, code: str, **options: Any) -> Any:
    """Run Python code in the box and return the JSON that it prints."""
    result = await box.exec(["python3", "-c", code], **{"timeout_s": PATIENCE_S, **options})
    assert result.ok, f"{result.outcome} {result.return_code}: {result.stderr}"
    return json.loads(result.stdout or "null")


async def sh(box: AsyncSandbox, command: str, **options: Any) -> str:
    """Run a shell command that must succeed, and return its output."""
    result = await box.exec(command, **{"timeout_s": PATIENCE_S, **options})
    assert result.ok, f"{command!r}: {result.outcome} {result.return_code}: {result.stderr}"
    return result.stdout or ""


async def alive(box: AsyncSandbox, marker: str) -> int:
    """Count the processes of the box with ``marker`` in their command line, other than this search."""
    code = (
        "import glob, sys\n"
        "wanted, count = ''.join(sys.argv[1:]).encode(), 0\n"
        "for path in glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    try: count += wanted in open(path, 'rb').read()\n"
        "    except OSError: pass\n"
        "print(count)"
    )
    # In two pieces, so that the search does not find itself.
    result = await box.exec(["python3", "-c", code, marker[:3], marker[3:]], timeout_s=PATIENCE_S)
    assert result.ok, result
    return int(result.stdout or "")


async def dead(box: AsyncSandbox, marker: str) -> bool:
    return await alive(box, marker) == 0


class Checks:
    """Base class of all checks. A subclass of the suite provides the fixtures ``provider_config`` and ``image``."""

    @pytest.fixture
    def run_labels(self) -> dict[str, str]:
        """Labels that only this test's boxes have."""
        return dict(box_labels(run=f"conformance-{uuid.uuid4().hex[:12]}", rollout="r", attempt=1, role="work"))

    @pytest.fixture
    async def provider(
        self, provider_config: Mapping[str, Any], run_labels: dict[str, str]
    ) -> AsyncIterator[SandboxProvider]:
        provider = create_provider(provider_config)
        try:
            yield provider
        finally:
            await provider.reap({BoxLabel.RUN: run_labels[BoxLabel.RUN]})
            await provider.aclose()

    @pytest.fixture
    def network(self, provider: SandboxProvider) -> NetworkPolicy:
        """``NetworkPolicy.NONE`` if the provider supports it, else ``NetworkPolicy.OPEN``."""
        closed = NetworkPolicy.NONE in provider.capabilities.network_policies
        return NetworkPolicy.NONE if closed else NetworkPolicy.OPEN

    @pytest.fixture
    def spec(self, image: str | None, run_labels: dict[str, str], network: NetworkPolicy) -> SandboxSpec:
        """The plainest spec: the image, a lease that outlives the test, and no network if that is supported."""
        return SandboxSpec(image=image, ttl_s=300, metadata=run_labels, network=network)

    @pytest.fixture
    async def start(self, provider: SandboxProvider, spec: SandboxSpec) -> AsyncIterator[StartBox]:
        """A function that starts a box with changes to the plainest spec. The box is stopped after the test."""
        boxes: list[AsyncSandbox] = []

        async def start(**changes: Any) -> AsyncSandbox:
            box = AsyncSandbox(provider, spec.replace(**changes))
            await box.start()
            boxes.append(box)
            return box

        yield start
        await asyncio.gather(*(box.stop() for box in boxes))

    @pytest.fixture
    async def box(self, start: StartBox) -> AsyncSandbox:
        return await start()

    @staticmethod
    def needs(provider: SandboxProvider, ability: str) -> None:
        """Skip the test if the provider lacks an ability, and show the provider's reason."""
        capabilities = provider.capabilities
        if not getattr(capabilities, ability, ability not in capabilities.reasons):
            pytest.skip(f"{ability}: {capabilities.reasons.get(ability, 'not supported by this provider')}")

    @staticmethod
    async def mine(provider: SandboxProvider, run_labels: Mapping[str, str]) -> set[str]:
        """The ids of this test's boxes that the backend lists."""
        return {info.sandbox_id for info in await provider.list({BoxLabel.RUN: run_labels[BoxLabel.RUN]})}

    async def nothing(self, provider: SandboxProvider, run_labels: Mapping[str, str]) -> bool:
        """Whether the backend lists none of this test's boxes."""
        return not await self.mine(provider, run_labels)


def assert_lost(result: SandboxExecResult) -> None:
    assert (result.outcome.value, result.return_code, result.error_type) == ("lost", None, "lost"), result
    assert not result.ok


# -- Abilities -----------------------------------------------------------------------------------------------------

NEST = """
import ctypes, json, os
libc = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUSER, NEWPID, REC_PRIVATE = 0x20000, 0x10000000, 0x20000000, 0x44000
uid, gid = os.getuid(), os.getgid()
made = libc.unshare(NEWNS | NEWPID | (NEWUSER if %r else 0)) == 0
if made and uid and os.getuid() != uid:
    open("/proc/self/setgroups", "w").write("deny")
    open("/proc/self/uid_map", "w").write(f"0 {uid} 1")
    open("/proc/self/gid_map", "w").write(f"0 {gid} 1")
made = made and libc.mount(None, b"/", None, REC_PRIVATE, None) == 0
made = made and libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None) == 0
print(json.dumps(made))
"""
"""The first steps of every container engine: create namespaces, and mount a file system there."""


class AbilityChecks(Checks):
    async def test_declared_abilities_are_implemented_and_implemented_ones_declared_or_explained(
        self, provider: SandboxProvider
    ) -> None:
        capabilities = provider.capabilities
        for name, protocol in CAPABILITY_PROTOCOLS.items():
            if getattr(capabilities, name):
                assert isinstance(provider, protocol), (
                    f"{name} is declared, but {protocol.__name__} is not implemented"
                )
            elif isinstance(provider, protocol):
                assert capabilities.reasons.get(name), (
                    f"{protocol.__name__} is implemented, but {name} is not declared"
                )
        assert isinstance(provider, SandboxProvider)

    async def test_every_missing_ability_has_a_reason(self, provider: SandboxProvider) -> None:
        capabilities = provider.capabilities
        for field in dataclasses.fields(SandboxCapabilities):
            if getattr(capabilities, field.name) is False:
                assert capabilities.reasons.get(field.name), f"no reason is given for missing '{field.name}'"
        assert capabilities.network_policies

    async def test_nested_containers_can_be_made_exactly_where_that_is_declared(
        self, provider: SandboxProvider, start: StartBox, spec: SandboxSpec
    ) -> None:
        capabilities = provider.capabilities
        nesting_spec = spec.replace(requires=("nested_containers",))
        if not capabilities.nested_containers:
            with pytest.raises(SandboxCapabilityError) as caught:
                await provider.create(nesting_spec)
            assert capabilities.reasons["nested_containers"] in str(caught.value)
        box = await start(requires=nesting_spec.requires if capabilities.nested_containers else ())
        for user_namespace in (True, False):
            if await python(box, NEST % user_namespace):
                assert capabilities.nested_containers, "a container can be made in a box, and that is not declared"
                return
        assert not capabilities.nested_containers, "no container can be made in a box, and that is declared"

    @pytest.fixture
    def images(self, provider: SandboxProvider) -> SupportsSnapshot:
        self.needs(provider, "snapshot")
        assert isinstance(provider, SupportsSnapshot)
        return provider

    @pytest.fixture
    async def image_name(self, images: SupportsSnapshot) -> AsyncIterator[str]:
        name = f"conformance-{uuid.uuid4().hex[:12]}"
        yield name
        await images.remove_image(name)

    async def test_committed_box_becomes_an_image_that_new_boxes_start_from(
        self, images: SupportsSnapshot, start: StartBox, image_name: str
    ) -> None:
        box = await start()
        await sh(
            box, "mkdir -p /srv/built; echo layer > /srv/built/f; chmod 750 /srv/built/f; rm -f /etc/hostname.old"
        )
        await sh(box, "cp /bin/true /srv/gone; ln -s f /srv/built/link")
        assert await images.image_labels(image_name) is None
        await images.commit(box.handle, image_name, {"digest": "abc", "odd": "a=b ü"})
        assert (await box.exec("echo alive")).stdout == "alive\n"
        assert {"digest": "abc", "odd": "a=b ü"}.items() <= dict(await images.image_labels(image_name) or {}).items()
        await sh(box, "echo later > /srv/built/f")
        new, beside = await asyncio.gather(start(image=image_name), start(image=image_name))
        assert await sh(new, "cat /srv/built/link; stat -c %a /srv/built/f") == "layer\n750\n"
        await sh(new, "echo changed > /srv/built/f; rm /srv/gone")
        assert await sh(beside, "cat /srv/built/f; test -e /srv/gone") == "layer\n"

    async def test_images_stack_and_remember_deletions(
        self, images: SupportsSnapshot, start: StartBox, image_name: str
    ) -> None:
        base = await start()
        await sh(base, "mkdir -p /srv/d/sub; touch /srv/d/a /srv/d/b /srv/d/sub/c")
        await images.commit(base.handle, image_name, {})
        second = f"{image_name}-2"
        try:
            upper = await start(image=image_name)
            await sh(upper, "rm /srv/d/a; rm -r /srv/d/sub; mkdir /srv/d/sub; touch /srv/d/sub/new")
            await images.commit(upper.handle, second, {})
            box = await start(image=second)
            assert (await sh(box, "cd /srv/d; find . | sort")).split() == [".", "./b", "./sub", "./sub/new"]
            await box.stop()
            await upper.stop()
        finally:
            await images.remove_image(second)

    async def test_removed_image_is_gone_and_removing_is_idempotent(
        self, images: SupportsSnapshot, start: StartBox, image_name: str
    ) -> None:
        await images.commit((await start()).handle, image_name, {"a": "b"})
        await images.remove_image(image_name)
        await images.remove_image(image_name)
        assert await images.image_labels(image_name) is None
        with pytest.raises(SandboxCreateError):
            await start(image=image_name)

    async def test_endpoint_reaches_a_port_of_the_box(self, provider: SandboxProvider, start: StartBox) -> None:
        self.needs(provider, "endpoint")
        box: AsyncSandbox = await start(ports=[8123], workdir="/srv", files={"/srv/page": "served"})
        await sh(box, "(python3 -m http.server 8123 >/dev/null 2>&1 &)")
        url = await box.endpoint(8123)

        def fetch() -> bytes:
            try:
                with urllib.request.urlopen(f"{url}/page", timeout=5) as answer:
                    return bytes(answer.read())
            except OSError:
                return b""

        async def served() -> bool:
            return await asyncio.to_thread(fetch) == b"served"

        await eventually(served, "the endpoint answers")


# -- Upstream ------------------------------------------------------------------------------------------------------


class Upstream:
    """A server that responds with JSON or, if the body contains ``stream``, with two events."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.go_on = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.url = ""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        self.seen.append(
            (request.method, request.path, {key.lower(): value for key, value in request.headers.items()})
        )
        if b"stream" not in body:
            return web.json_response({"path": request.path, "size": len(body)})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await response.write(b"data: one\n\n")
            await self.go_on.wait()
            await response.write(b"data: two\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled.set()
            raise
        return response


@contextlib.asynccontextmanager
async def upstream() -> AsyncIterator[Upstream]:
    server = Upstream()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        server.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        runner = web.ServerRunner(web.Server(server.handle, handler_cancellation=True), shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.SockSite(runner, sock).start()
            yield server
        finally:
            await runner.cleanup()
