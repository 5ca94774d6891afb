"""What an agent is given of a row: a prompt, and a session without any grading material."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nemo_gym.contract.errors import RowError
from nemo_gym.contract.session import (
    Egress,
    EgressPolicy,
    GitDiffHarvest,
    Limits,
    Placement,
    ResourcesModel,
    RolloutIdentity,
    SandboxClause,
    SandboxSpecModel,
    SessionDescriptor,
    Topology,
)
from resources_servers.swe_bench.config import SweBenchConfig
from resources_servers.swe_bench.row import TESTBED, PreparedImage, SweBenchRow

PATCH_ARTIFACT = "patch"
SUPPORTED_TOPOLOGIES = (Topology.AGENT_IN_ENV, Topology.ENV_SANDBOXED, Topology.WHOLE_INTERACTION)


def dataset_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The SWE-bench row in a row of a run: itself, or as NeMo Gym's rows carry it, as JSON in
    ``responses_create_params.metadata.instance_dict`` or in ``verifier_metadata``."""
    if "instance_id" in row and "eval_script" in row:
        return row
    params = row.get("responses_create_params")
    metadata = params.get("metadata") if isinstance(params, Mapping) else None
    for holder in (metadata, row.get("verifier_metadata")):
        instance = holder.get("instance_dict", holder) if isinstance(holder, Mapping) else None
        if isinstance(instance, str):
            try:
                instance = json.loads(instance)
            except ValueError as error:
                raise RowError(f"instance_dict is not JSON: {error}", field="instance_dict") from error
        if isinstance(instance, Mapping) and "instance_id" in instance:
            return instance
    return row


def prompt_params(row: Mapping[str, Any], template: str) -> dict[str, Any]:
    """``responses_create_params`` of a row: its own where they say something, else the problem statement's."""
    params = row.get("responses_create_params")
    own = {key: value for key, value in params.items() if key != "metadata"} if isinstance(params, Mapping) else {}
    if own.get("input"):
        return own
    task = SweBenchRow.from_mapping(dataset_row(row))
    text = template.format(problem_statement=task.problem_statement.strip(), repo=task.repo, workdir=TESTBED)
    return {**own, "input": [{"role": "user", "content": text}]}


def describe(
    config: SweBenchConfig, row: SweBenchRow, rollout: RolloutIdentity, image: PreparedImage
) -> SessionDescriptor:
    """The session of one attempt: a box of the row's prepared image that reaches nothing but the model, and the patch
    to harvest from it."""
    return SessionDescriptor(
        environment=config.name,
        task_id=rollout.task_id,
        rollout=rollout,
        placement=Placement(topology=config.topology, supported=SUPPORTED_TOPOLOGIES),
        sandbox=SandboxClause(
            spec=SandboxSpecModel(
                image=image.name,
                workdir=TESTBED,
                env=dict(image.env),
                resources=ResourcesModel(**config.work_resources.model_dump()),
                provider_options=config.provider_options,
            )
        ),
        egress=Egress(policy=EgressPolicy.MODEL_ONLY),
        harvest=(GitDiffHarvest(name=PATCH_ARTIFACT, path=TESTBED, max_bytes=config.max_patch_bytes),),
        limits=Limits(wall_clock_s=config.agent_wall_clock_s, max_turns=config.agent_max_turns),
    )
