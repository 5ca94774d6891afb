"""Fixtures and helpers that every group of checks uses."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import pytest

from nemo_gym.contract.sandbox import NetworkPolicy, SandboxSpec
from nemo_gym.sandbox.base import (
    BoxLabel,
    ExecEnd,
    ExecOutput,
    ExecProcess,
    SandboxExecResult,
    SandboxProvider,
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
