"""Network isolation: a box reaches only its doors, and a door forwards only its routes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from nemo_gym.contract.sandbox import Door, NetworkPolicy
from nemo_gym.sandbox.base import ExecEnd, ExecOutput, ExecProcess, ExecRequest, SandboxProvider, SupportsLoopbackDoor
from nemo_gym.sandbox.conformance.base import PATIENCE_S, Checks, StartBox, Upstream, eventually, python, sh, upstream
from nemo_gym.sandbox.doors import INFERENCE_ROUTES
from nemo_gym.sandbox.facade import AsyncSandbox

CALL = """
import json, sys, urllib.request
def call(method, url, body=None, headers={}):
    request = urllib.request.Request(url, data=body, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return [answer.status, answer.read().decode()]
    except urllib.error.HTTPError as error:
        return [error.code, error.read().decode()]
    except OSError as error:
        return [0, str(error)]
"""

CONNECT = """
import json, socket
def reach(family, address):
    with socket.socket(family) as sock:
        sock.settimeout(3)
        try: sock.connect(address); return True
        except OSError: return False
"""


class NetworkChecks(Checks):
    none_is_filtered = False
    """Whether boxes with ``network=none`` have an interface with a filter that blocks all traffic."""

    @pytest.fixture
    async def behind(self) -> AsyncIterator[Upstream]:
        async with upstream() as server:
            yield server

    @staticmethod
    def door(behind: Upstream, port: int = 8000, **changes: Any) -> Door:
        return Door(**{"name": "model", "port": port, "target": behind.url, "allow": INFERENCE_ROUTES, **changes})

    @pytest.fixture
    async def closed_box(self, network: NetworkPolicy, provider: SandboxProvider, start: StartBox) -> AsyncSandbox:
        if network is not NetworkPolicy.NONE:
            pytest.skip(provider.capabilities.reasons.get("network_none", "network=none is not supported"))
        return await start()

    @pytest.fixture
    async def door_box(self, provider: SandboxProvider, start: StartBox, behind: Upstream) -> AsyncSandbox:
        self.needs(provider, "loopback_door")
        return await start(doors=[self.door(behind)])

    @staticmethod
    async def call(box: AsyncSandbox, port: int = 8000) -> tuple[int, str]:
        """Call the model through a door, from the box; return the status, or 0, and the body."""
        url = f"http://127.0.0.1:{port}/v1/responses"
        status, body = await python(box, f"{CALL}\nprint(json.dumps(call('POST', '{url}', b'1')))")
        return status, body

    async def test_box_without_network_has_loopback_alone(self, closed_box: AsyncSandbox) -> None:
        if self.none_is_filtered:
            pytest.skip("boxes have an interface and a filter before it; what they can send is checked")
        interfaces = await sh(closed_box, "cat /proc/net/dev | tail -n +3 | cut -d: -f1 | tr -d ' '")
        assert interfaces.split() == ["lo"]
        assert len((await sh(closed_box, "cat /proc/net/route")).splitlines()) <= 1

    async def test_box_without_network_can_send_on_loopback_alone(self, closed_box: AsyncSandbox) -> None:
        # Sending a datagram needs no receiver: it succeeds wherever there is a route and no filter.
        code = (
            "import json, socket\n"
            "def sends(family, address):\n"
            "    with socket.socket(family, socket.SOCK_DGRAM) as sock:\n"
            "        try: sock.sendto(b'x', address); return True\n"
            "        except OSError: return False\n"
            "routes = [line.split() for line in open('/proc/net/route').read().splitlines()[1:]]\n"
            "near = {socket.inet_ntoa(bytes.fromhex(field)[::-1]) for r in routes for field in r[1:3]}\n"
            "near |= {a[:a.rindex('.')] + '.1' for a in near} | {'1.1.1.1', '172.17.0.1', '127.0.0.53'}\n"
            "near -= {'0.0.0.0', '0.0.0.1'}\n"
            "print(json.dumps(sorted(a for a in near if sends(socket.AF_INET, (a, 53)))\n"
            "    + [a for a in ('2606:4700:4700::1111', 'fd00::1') if sends(socket.AF_INET6, (a, 53))]))"
        )
        # The loopback address proves that the probe can detect a route.
        assert await python(closed_box, code) == ["127.0.0.53"]
        code = (
            "import json, socket\n"
            "with socket.create_server(('127.0.0.1', 0)) as server:\n"
            "    with socket.create_connection(server.getsockname(), 3): print(json.dumps(True))"
        )
        assert await python(closed_box, code) is True

    async def test_box_without_network_reaches_neither_host_nor_names_nor_the_world(
        self, closed_box: AsyncSandbox
    ) -> None:
        abstract = f"\0conformance-{uuid.uuid4().hex}"
        with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
            unix.bind(abstract)
            unix.listen()
            code = (
                f"{CONNECT}\n"
                "found = {\n"
                f"  'loopback': reach(socket.AF_INET, ('127.0.0.1', {tcp.getsockname()[1]})),\n"
                f"  'abstract': reach(socket.AF_UNIX, {abstract!r}),\n"
                "  'world': reach(socket.AF_INET, ('1.1.1.1', 443)),\n"
                "  'gateway': reach(socket.AF_INET, ('172.17.0.1', 22)),\n"
                "}\n"
                "try: found['dns'] = bool(socket.getaddrinfo('example.com', 443))\n"
                "except OSError: found['dns'] = False\n"
                "print(json.dumps(found))"
            )
            reached = await python(closed_box, code)
        assert not any(reached.values()), reached

    async def test_open_network_has_an_interface_beside_loopback(
        self, provider: SandboxProvider, start: StartBox
    ) -> None:
        if NetworkPolicy.OPEN not in provider.capabilities.network_policies:
            pytest.skip(provider.capabilities.reasons.get("network_open", "network=open is not supported"))
        box = await start(network=NetworkPolicy.OPEN)
        code = "import json, socket\nprint(json.dumps([name for _, name in socket.if_nameindex() if name != 'lo']))"
        assert await python(box, code)

    async def test_box_does_not_reach_the_loopback_of_another_box(self, start: StartBox) -> None:
        one, two = await asyncio.gather(start(), start())
        await sh(one, "(python3 -m http.server --bind 127.0.0.1 9123 >/dev/null 2>&1 &)")
        code = f"{CONNECT}\nprint(json.dumps(reach(socket.AF_INET, ('127.0.0.1', 9123))))"

        async def serves() -> bool:
            return await python(one, code) is True

        await eventually(serves, "the first box's server listens")
        assert await python(two, code) is False

    async def test_door_forwards_allowed_routes_and_refuses_others(
        self, door_box: AsyncSandbox, behind: Upstream
    ) -> None:
        code = (
            f"{CALL}\n"
            "base = 'http://127.0.0.1:8000'\n"
            "print(json.dumps([\n"
            "  call('POST', base + '/v1/responses', b'{}', {'Authorization': 'Bearer of-the-box'}),\n"
            "  call('GET', base + '/v1/models'),\n"
            "  call('POST', base + '/admin', b'{}'),\n"
            "  call('GET', base + '/v1/models/../../admin'),\n"
            "  call('DELETE', base + '/v1/responses'),\n"
            "]))"
        )
        allowed, models, *refused = await python(door_box, code)
        assert (allowed[0], json.loads(allowed[1])) == (200, {"path": "/v1/responses", "size": 2})
        assert models[0] == 200
        for status, body in refused:
            assert (status, json.loads(body)["code"]) == (403, "door_route")
        assert [(method, path) for method, path, _ in behind.seen] == [
            ("POST", "/v1/responses"),
            ("GET", "/v1/models"),
        ]
        assert "of-the-box" not in str(behind.seen)

    async def test_door_headers_reach_the_target_and_are_nowhere_in_the_box(
        self, provider: SandboxProvider, start: StartBox, behind: Upstream
    ) -> None:
        self.needs(provider, "loopback_door")
        secret = f"secret-{uuid.uuid4().hex}"
        box = await start(doors=[self.door(behind, headers={"Authorization": f"Bearer {secret}"})])
        await self.call(box)
        assert behind.seen[0][2]["authorization"] == f"Bearer {secret}"
        half = secret[:20]  # so that the search does not find its own command line
        search = (
            "env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n';"
            " find / -xdev -newer /proc/1 -type f -size -1000k -exec cat {} + 2>/dev/null; true"
        )
        result = await box.exec(search, timeout_s=PATIENCE_S)
        assert half.encode() not in result.stdout_bytes

    async def test_door_streams_events_as_they_come(self, door_box: AsyncSandbox, behind: Upstream) -> None:
        process, events = await self._stream(door_box)
        async with asyncio.timeout(PATIENCE_S):
            assert await self._output(events) == b"data: one\n"
            behind.go_on.set()
            assert await self._output(events) == b"data: two\n"
            assert isinstance([event async for event in events][-1], ExecEnd)
        await process.kill()

    async def test_door_closes_with_its_box_and_cancels_calls_in_flight(
        self, door_box: AsyncSandbox, behind: Upstream
    ) -> None:
        _, events = await self._stream(door_box)
        async with asyncio.timeout(PATIENCE_S), contextlib.aclosing(events):
            assert await self._output(events) == b"data: one\n"
            await door_box.stop()
            await behind.cancelled.wait()

    async def test_boxes_have_doors_of_their_own_on_the_same_port(
        self, provider: SandboxProvider, start: StartBox, behind: Upstream
    ) -> None:
        self.needs(provider, "loopback_door")
        boxes = await asyncio.gather(
            *(
                start(doors=[self.door(behind, headers={"X-Box": str(n)}), self.door(behind, 8001, name="b")])
                for n in range(3)
            )
        )
        for box in boxes:
            assert (await self.call(box))[0] == 200
        assert [headers["x-box"] for _, _, headers in behind.seen] == ["0", "1", "2"]
        assert (await self.call(boxes[0], 8001))[0] == 200

    async def test_door_can_be_opened_and_closed_on_a_running_box(
        self, provider: SandboxProvider, box: AsyncSandbox, behind: Upstream
    ) -> None:
        self.needs(provider, "loopback_door")
        assert isinstance(provider, SupportsLoopbackDoor)
        assert (await self.call(box))[0] == 0
        await provider.open_door(box.handle, self.door(behind))
        assert (await self.call(box))[0] == 200
        await provider.close_door(box.handle, "model")
        await provider.close_door(box.handle, "model")
        assert (await self.call(box))[0] == 0
        await provider.open_door(box.handle, self.door(behind))
        assert (await self.call(box))[0] == 200

    async def test_door_says_502_when_its_target_is_gone(self, provider: SandboxProvider, start: StartBox) -> None:
        self.needs(provider, "loopback_door")
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        door = Door("model", 8000, f"http://127.0.0.1:{port}", INFERENCE_ROUTES)
        status, body = await self.call(await start(doors=[door]))
        assert (status, json.loads(body)["code"]) == (502, "door_unreachable")

    @staticmethod
    async def _stream(box: AsyncSandbox) -> tuple[ExecProcess, Any]:
        code = (
            "import urllib.request\n"
            "answer = urllib.request.urlopen('http://127.0.0.1:8000/v1/responses', b'stream')\n"
            "for line in answer:\n"
            "    if line.strip(): print(line.decode(), end='', flush=True)"
        )
        process = await box.start_exec(ExecRequest(["python3", "-c", code]))
        return process, process.events()

    @staticmethod
    async def _output(events: Any) -> bytes:
        event = await anext(events)
        assert isinstance(event, ExecOutput), event
        assert event.stream == "stdout", event.data
        return event.data
