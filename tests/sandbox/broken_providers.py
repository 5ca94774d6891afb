"""Providers with one defect each, and the conformance check that must notice it.

Collected only by ``test_conformance_detects.py``, in a process of its own.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import pytest

from nemo_gym.contract.errors import SandboxArchiveError, SandboxLostError
from nemo_gym.contract.sandbox import NetworkPolicy, SandboxSpec
from nemo_gym.sandbox.base import (
    ExecEnd,
    ExecOutcome,
    ExecOutput,
    ExecProcess,
    ExecRequest,
    SandboxCapabilities,
    SandboxExecResult,
    SandboxHandle,
    SandboxInfo,
)
from nemo_gym.sandbox.conformance import SandboxConformance
from nemo_gym.sandbox.facade import register_provider
from nemo_gym.sandbox.providers.local import LocalProvider

DEFECTS: dict[str, tuple[type, list[str]]] = {}
"""Name → the provider with the defect, and the checks that must fail on it."""


def must_fail(*checks: str) -> Any:
    def mark(provider: type) -> type:
        DEFECTS[provider.__name__] = (provider, list(checks))
        return provider

    return mark


@must_fail("test_exec_is_lost_and_never_zero_when_the_box_is_closed")
class LostIsZero(LocalProvider):
    async def exec(self, *args: Any, **options: Any) -> SandboxExecResult:
        result = await super().exec(*args, **options)
        return SandboxExecResult("", "", 0) if result.outcome is ExecOutcome.LOST else result


@must_fail("test_bytes_that_are_not_text_survive")
class ReplacesBytes(LocalProvider):
    async def exec(self, *args: Any, **options: Any) -> SandboxExecResult:
        result = await super().exec(*args, **options)
        return dataclasses.replace(result, stdout=result.stdout_bytes.decode("utf-8", "replace"))


@must_fail("test_output_is_capped_per_stream_and_says_so")
class HidesTruncation(LocalProvider):
    async def exec(self, *args: Any, **options: Any) -> SandboxExecResult:
        return dataclasses.replace(await super().exec(*args, **options), stdout_truncated=False)


@must_fail("test_death_by_signal_is_reported_as_a_signal")
class SignalsAreCodes(LocalProvider):
    async def exec(self, *args: Any, **options: Any) -> SandboxExecResult:
        result = await super().exec(*args, **options)
        if result.signal is None:
            return result
        return dataclasses.replace(
            result, outcome=ExecOutcome.EXITED, return_code=128 + result.signal, signal=None, error_type=None
        )


@must_fail("test_environment_of_the_host_is_not_inherited")
class InheritsEnvironment(LocalProvider):
    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        return await super().create(spec.replace(env={**os.environ, **spec.env}))


@must_fail(
    "test_box_without_network_has_loopback_alone",
    "test_box_without_network_can_send_on_loopback_alone",
    "test_box_without_network_reaches_neither_host_nor_names_nor_the_world",
)
class NetworkIsOpen(LocalProvider):
    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        return await super().create(spec.replace(network=NetworkPolicy.OPEN))


@must_fail("test_door_forwards_allowed_routes_and_refuses_others")
class DoorsAllowAll(LocalProvider):
    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        allow = ("GET /**", "POST /**", "DELETE /**")
        return await super().create(spec.replace(doors=[dataclasses.replace(d, allow=allow) for d in spec.doors]))


@must_fail("test_door_headers_reach_the_target_and_are_nowhere_in_the_box")
class DoorHeadersInEnvironment(LocalProvider):
    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        secrets = {f"KEY_{n}": value for door in spec.doors for n, value in enumerate(door.headers.values())}
        return await super().create(spec.replace(env={**spec.env, **secrets}))


@must_fail("test_member_that_escapes_is_refused_and_nothing_outside_changes", "test_damaged_stream_is_refused")
class SwallowsArchiveErrors(LocalProvider):
    async def put_archive(self, handle: SandboxHandle, path: str, tar: AsyncIterator[bytes]) -> None:
        try:
            await super().put_archive(handle, path, tar)
        except SandboxArchiveError:
            pass


@must_fail("test_excluded_paths_are_left_out", "test_more_than_max_bytes_raises")
class IgnoresArchiveOptions(LocalProvider):
    def get_archive(
        self, handle: SandboxHandle, path: str, *, exclude: Sequence[str] = (), max_bytes: int | None = None
    ) -> AsyncIterator[bytes]:
        return super().get_archive(handle, path, max_bytes=None if max_bytes is None else 64 * max_bytes)


@must_fail("test_list_gives_boxes_with_all_the_labels_and_no_others")
class ListsAnyLabel(LocalProvider):
    async def list(self, labels: Mapping[str, str] | None = None) -> list[SandboxInfo]:
        found = await super().list(None)
        return [info for info in found if not labels or labels.items() & dict(info.labels).items()]


@must_fail("test_reap_without_labels_is_refused")
class ReapsNothing(LocalProvider):
    async def reap(self, labels: Mapping[str, str]) -> Any:
        return await super().reap(labels) if labels else []


@must_fail("test_renewing_a_box_that_is_gone_raises_lost")
class RenewsTheDead(LocalProvider):
    async def renew(self, handle: SandboxHandle, ttl_s: float) -> None:
        try:
            await super().renew(handle, ttl_s)
        except SandboxLostError:
            pass


@must_fail("test_declared_abilities_are_implemented_and_implemented_ones_declared_or_explained")
class Boasts(LocalProvider):
    @property
    def capabilities(self) -> SandboxCapabilities:
        return dataclasses.replace(super().capabilities, endpoint=True)


@must_fail("test_creates_with_one_idempotency_key_give_one_box")
class ForgetsKeys(LocalProvider):
    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        return await super().create(spec.replace(idempotency_key=None))


@must_fail("test_cancelling_create_leaves_nothing")
class LeaksWhenCancelled(LocalProvider):
    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        import asyncio

        return await asyncio.shield(asyncio.ensure_future(super().create(spec)))


@must_fail("test_stream_has_exactly_one_terminal_event_and_it_is_the_last")
class EndsTwice(LocalProvider):
    async def start_exec(self, handle: SandboxHandle, request: ExecRequest) -> ExecProcess:
        process = await super().start_exec(handle, request)
        events = process.events

        async def twice() -> AsyncIterator[ExecOutput | ExecEnd]:
            async for event in events():
                yield event
                if isinstance(event, ExecEnd):
                    yield event

        process.events = twice  # type: ignore[method-assign]
        return process


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("boxes"))


class Broken(SandboxConformance):
    __test__ = False
    defect: str

    @pytest.fixture(autouse=True)
    def registered(self) -> Iterator[None]:
        register_provider("broken", DEFECTS[self.defect][0], override=True)
        yield

    @pytest.fixture
    def provider_config(self, registered: None, state_dir: str) -> dict[str, Any]:
        return {"broken": {"state_dir": state_dir, "linger_s": 3}}

    @pytest.fixture
    def image(self) -> str | None:
        return None


for _name in DEFECTS:
    globals()[f"Test{_name}"] = type(f"Test{_name}", (Broken,), {"defect": _name, "__test__": True})
