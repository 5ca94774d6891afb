"""The session contract as data: what a descriptor can say, and what it refuses to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from nemo_gym.contract.errors import ConfigError, ContractError
from nemo_gym.contract.sandbox import NetworkPolicy
from nemo_gym.contract.session import (
    Artifact,
    FilesHarvest,
    GitDiffHarvest,
    Placement,
    RolloutIdentity,
    SandboxClause,
    SandboxRef,
    SandboxSpecModel,
    SessionDescriptor,
    Topology,
)
from nemo_gym.contract.verdict import FailureKind, Verdict


def identity(**changes: object) -> RolloutIdentity:
    return RolloutIdentity.model_validate({"rollout_id": "r-1", "task_id": "t", "group_id": "g", **changes})


def descriptor(**changes: object) -> SessionDescriptor:
    return SessionDescriptor.model_validate({"environment": "env", "task_id": "t", "rollout": identity(), **changes})


def world() -> SandboxClause:
    return SandboxClause(spec=SandboxSpecModel(image="host"))


def test_descriptor_survives_a_json_round_trip() -> None:
    sent = descriptor(
        placement=Placement(topology=Topology.AGENT_IN_ENV),
        sandbox=world(),
        harvest=[GitDiffHarvest(path="/testbed"), FilesHarvest(paths=("/out",))],
        extensions={"acme/tracing/v1": {"id": 7}},
    )
    assert SessionDescriptor.model_validate_json(sent.model_dump_json()) == sent


def test_descriptor_refuses_an_unknown_key() -> None:
    with pytest.raises(ValidationError, match="verifier_metadata"):
        descriptor(verifier_metadata={"gold": "patch"})


def test_descriptor_refuses_an_agent_in_env_without_a_world() -> None:
    with pytest.raises(ValidationError, match="needs 'sandbox'"):
        descriptor(placement=Placement(topology=Topology.AGENT_IN_ENV))


def test_descriptor_refuses_more_than_its_size_but_not_large_files() -> None:
    files = {"/big": "x" * 100_000}
    clause = SandboxClause(spec=SandboxSpecModel(files=files))
    assert descriptor(sandbox=clause).sandbox == clause
    with pytest.raises(ValidationError, match="at most 16384"):
        descriptor(extensions={"acme/blob/v1": "x" * 20_000})


def test_descriptor_refuses_another_tasks_rollout() -> None:
    with pytest.raises(ValidationError, match=r"differs from rollout\.task_id"):
        descriptor(task_id="other")


def test_sandbox_clause_is_exactly_one_of_spec_and_ref() -> None:
    ref = SandboxRef(broker_url="http://127.0.0.1:1", sandbox_id="s", lease_token="t", expires_at=1.0)
    assert SandboxClause(ref=ref).spec is None
    for both_or_neither in ({}, {"spec": SandboxSpecModel(), "ref": ref}):
        with pytest.raises(ValidationError, match="exactly one"):
            SandboxClause(**both_or_neither)


def test_lease_token_is_not_in_a_printed_reference() -> None:
    ref = SandboxRef(broker_url="http://127.0.0.1:1", sandbox_id="s", lease_token="secret-lease", expires_at=1.0)
    assert "secret-lease" not in repr(descriptor(sandbox=SandboxClause(ref=ref)))


def test_spec_model_gives_a_spec_without_network() -> None:
    spec = SandboxSpecModel(image="img", env={"A": "b"}, mounts=[{"source": "/a", "target": "/b"}]).to_spec()
    assert spec.network is NetworkPolicy.NONE
    assert (spec.image, dict(spec.env), spec.mounts[0].target) == ("img", {"A": "b"}, "/b")


@pytest.mark.parametrize(
    ("name", "topology"), [("A", Topology.NONE), ("c", Topology.AGENT_IN_ENV), ("D", "whole_interaction")]
)
def test_topology_is_known_by_its_letter(name: str, topology: Topology) -> None:
    assert Topology.parse(name) is Topology(topology)


def test_unknown_topology_names_the_nearest_and_all_choices() -> None:
    with pytest.raises(ConfigError, match=r"agent_in_env.*A \(none\)") as caught:
        Topology.parse("agent_in_envs")
    assert "did you mean" in caught.value.message


@pytest.mark.parametrize("rollout_id", ["", "../up", "a b", "-x", "x" * 129])
def test_rollout_id_that_cannot_be_a_label_or_file_name_is_refused(rollout_id: str) -> None:
    with pytest.raises(ValidationError):
        identity(rollout_id=rollout_id)


def test_next_attempt_keeps_everything_but_the_number() -> None:
    first = identity()
    assert first.next_attempt() == identity(attempt=2)
    assert first.attempt_id != first.next_attempt().attempt_id


@given(st.binary(max_size=2000))
def test_artifact_content_is_what_was_harvested(data: bytes) -> None:
    artifact = Artifact.of("patch", "git_diff", data)
    received = Artifact.model_validate_json(artifact.model_dump_json())
    assert received.content() == data
    assert received.size == len(data)


def test_artifact_whose_data_was_changed_is_refused() -> None:
    artifact = Artifact.of("patch", "git_diff", b"one")
    with pytest.raises(ContractError, match="does not match its sha256"):
        artifact.model_copy(update={"data": "two"}).content()


def test_verdict_has_a_reward_exactly_when_it_is_valid() -> None:
    assert Verdict.of(1.0).reward == 1.0
    assert Verdict.invalid(FailureKind.SANDBOX_LOST, "gone").reward is None
    for wrong in (
        {"valid": True},
        {"valid": True, "reward": 1.0, "failure_kind": "internal"},
        {"valid": False, "reward": 0.0, "failure_kind": "internal"},
        {"valid": False},
    ):
        with pytest.raises(ValidationError):
            Verdict.model_validate(wrong)
