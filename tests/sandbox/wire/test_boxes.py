"""Bodies of the broker's API say exactly what the seam's types say."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from nemo_gym.contract.sandbox import Door, Mount, NetworkPolicy, SandboxResources, SandboxSpec
from nemo_gym.sandbox.base import ExecEnd, ExecOutcome, ExecRequest, SandboxCapabilities, SandboxStatus
from nemo_gym.sandbox.door_statistics import DoorStatistics
from nemo_gym.sandbox.wire.models import (
    MAX_TTL_S,
    BoxSpec,
    BrokerLimits,
    CapabilitiesView,
    CreateSandbox,
    DoorModel,
    DoorsView,
    ExecEndModel,
    ExecSubmission,
    ExecView,
    MintLease,
    RenewLease,
    SandboxView,
)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
mappings = st.dictionaries(names, text, max_size=4)
positive = st.integers(1, 2**40)
fractions = st.floats(0.001, 1e6, allow_nan=False)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**50), 2**50) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
doors = st.builds(
    Door,
    name=names,
    port=st.integers(1, 65535),
    target=text,
    allow=st.lists(text, max_size=3).map(tuple),
    headers=mappings,
    counted=st.lists(text, max_size=3).map(tuple),
    max_answers=st.none() | positive,
)
specs = st.builds(
    SandboxSpec,
    image=st.none() | text,
    ttl_s=st.none() | st.floats(0.001, MAX_TTL_S),
    ready_timeout_s=st.none() | fractions,
    workdir=st.none() | text,
    env=mappings,
    files=mappings,
    metadata=mappings,
    resources=st.builds(
        SandboxResources,
        cpu=st.none() | fractions,
        memory_mib=st.none() | positive,
        disk_gib=st.none() | fractions,
        gpu=st.none() | st.integers(0, 8),
        gpu_type=st.none() | text,
        pids=st.none() | positive,
    ),
    entrypoint=st.none() | st.lists(text, max_size=3).map(tuple),
    provider_options=st.dictionaries(text, plain, max_size=3),
    ports=st.lists(st.integers(1, 65535), max_size=3).map(tuple),
    network=st.sampled_from(NetworkPolicy),
    doors=st.lists(doors, max_size=3).map(tuple),
    mounts=st.lists(st.builds(Mount, source=text, target=text), max_size=3).map(tuple),
    user=st.none() | text,
    requires=st.lists(text, max_size=3).map(tuple),
    idempotency_key=st.none() | text,
)


@given(specs)
def test_create_body_gives_back_the_spec_it_was_made_of(spec: SandboxSpec) -> None:
    body = CreateSandbox.of(spec).model_dump_json()
    assert CreateSandbox.model_validate_json(body).to_spec().replace(idempotency_key=spec.idempotency_key) == spec


def test_every_field_of_a_spec_is_carried() -> None:
    carried = {*BoxSpec.model_fields, *CreateSandbox.model_fields} - {"spec", "labels"}
    names = {field.name for field in dataclasses.fields(SandboxSpec)}
    assert names == carried | {"metadata", "idempotency_key"}
    assert set(DoorModel.model_fields) == {field.name for field in dataclasses.fields(Door)}


@given(
    st.builds(
        ExecRequest,
        command=text | st.lists(text, min_size=1, max_size=4).map(tuple),
        cwd=st.none() | text,
        env=mappings,
        timeout_s=st.none() | fractions,
        user=st.none() | text,
        stdin=st.none() | st.binary(max_size=20),
        merge_stderr=st.booleans(),
        max_output_bytes=st.integers(0, 2**40),
    )
)
def test_submission_gives_back_the_request_it_was_made_of(request: ExecRequest) -> None:
    submission = ExecSubmission.model_validate_json(ExecSubmission.of(request).model_dump_json())
    assert submission.stdin == ("none" if request.stdin is None else "attached")
    assert submission.to_request(request.stdin) == request


@pytest.mark.parametrize(
    "end",
    [
        ExecEnd(ExecOutcome.EXITED, return_code=0, duration_s=1.5),
        ExecEnd(ExecOutcome.SIGNALED, signal=9),
        ExecEnd(ExecOutcome.LOST),
        ExecEnd(ExecOutcome.TIMED_OUT, duration_s=3),
    ],
)
def test_end_of_an_exec_survives_the_wire(end: ExecEnd) -> None:
    model = ExecEndModel.of(end, output_bytes=7, truncated=("stderr",))
    assert ExecEndModel.model_validate_json(model.model_dump_json()).to_end() == end


@pytest.mark.parametrize(
    "fields",
    [{"outcome": "lost", "return_code": 0}, {"outcome": "timed_out", "return_code": 124}, {"outcome": "exited"}],
)
def test_end_that_claims_a_code_it_cannot_know_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="contradict"):
        ExecEndModel(output_bytes=0, **fields)


def test_exec_has_an_end_exactly_when_it_is_over() -> None:
    end = ExecEndModel(outcome=ExecOutcome.LOST, output_bytes=0)
    assert ExecView(exec_id="a", state="ended", submitted_at=1, end=end).end == end
    with pytest.raises(ValidationError, match="has an end"):
        ExecView(exec_id="a", state="running", submitted_at=1, end=end)
    with pytest.raises(ValidationError, match="has no end"):
        ExecView(exec_id="a", state="ended", submitted_at=1)


def test_door_statistics_survive_the_wire() -> None:
    statistics = DoorStatistics(requests=3, failed=1, statuses={200: 2, 503: 1}, last_error="503: busy", seconds=1.5)
    body = DoorsView(doors={"model": statistics, "mcp": None}).model_dump_json()
    assert DoorsView.model_validate_json(body).doors == {"model": statistics, "mcp": None}


def test_credentials_of_doors_are_not_in_what_is_logged() -> None:
    spec = SandboxSpec(doors=[Door("model", 8000, "http://x", ("GET /",), {"Authorization": "Bearer secret-of-door"})])
    assert "secret-of-door" not in repr(CreateSandbox.of(spec))
    assert "secret-of-door" in CreateSandbox.of(spec).model_dump_json()


@pytest.mark.parametrize("ttl_s", [0, -1, math.inf, math.nan, MAX_TTL_S + 1, 1e300])
def test_absurd_lease_is_refused(ttl_s: float) -> None:
    for model, more in ((RenewLease, {}), (MintLease, {"scope": "read"}), (CreateSandbox, {"spec": {}})):
        with pytest.raises(ValidationError, match="ttl_s"):
            model.model_validate({"ttl_s": ttl_s, **more})


@pytest.mark.parametrize(
    "body",
    [
        {"spec": {"imagee": "x"}},
        {"spec": {}, "lable": {}},
        {"spec": {"ttl_s": 5}},
        {"spec": {"doors": [{"name": "m", "port": 70000, "target": "", "allow": []}]}},
        {"spec": {}, "labels": {str(n): "" for n in range(65)}},
        {"spec": {}, "labels": {"": "x"}},
        {"spec": {"resources": {"cpu": -1}}},
    ],
)
def test_malformed_create_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CreateSandbox.model_validate(body)


@pytest.mark.parametrize("fields", [{}, {"command": "a", "argv": ["a"]}, {"argv": []}, {"command": "a", "tty": True}])
def test_malformed_submission_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ExecSubmission.model_validate(fields)


def test_view_of_a_box_becomes_what_list_gives() -> None:
    view = SandboxView(
        sandbox_id="box-1",
        state=SandboxStatus.STOPPED,
        ready=False,
        termination_reason="expired",
        labels={"a": "b"},
        provider="local",
        epoch=1,
        created_at=1.0,
        expires_at=2.0,
    )
    info = view.to_info()
    assert (info.sandbox_id, info.status, info.termination_reason, info.labels, info.expires_at) == (
        "box-1",
        SandboxStatus.STOPPED,
        "expired",
        {"a": "b"},
        2.0,
    )


LIMITS = BrokerLimits(default_ttl_s=1, max_body_bytes=1, max_archive_bytes=1, max_output_bytes=1)


def test_capabilities_are_the_backends_as_far_as_the_wire_carries_them() -> None:
    backend = SandboxCapabilities(
        network_policies=frozenset({NetworkPolicy.NONE}),
        loopback_door=True,
        endpoint=True,
        memory_limit=True,
        reasons={"snapshot": "no disk", "connect": "one process only", "idempotent_create": "it has no keys"},
    )
    view = CapabilitiesView.of(backend, provider="x", door_statistics=True, limits=LIMITS)
    view = CapabilitiesView.model_validate_json(view.model_dump_json())
    seen = view.to_capabilities(carried={"connect": None, "endpoint": "not carried", "idempotent_create": None})
    assert seen == dataclasses.replace(
        backend, connect=True, endpoint=False, reasons={"snapshot": "no disk", "endpoint": "not carried"}
    )


def test_abilities_of_a_newer_broker_are_ignored() -> None:
    view = CapabilitiesView(
        provider="x", network_policies=(), abilities={"time_travel": True, "gpu": True}, limits=LIMITS
    )
    assert view.to_capabilities(carried={}).gpu
