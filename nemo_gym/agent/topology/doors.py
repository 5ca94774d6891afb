"""The doors of an attempt's box: the model's and the MCP servers', with the credentials that stay outside of it."""

from __future__ import annotations

from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.sandbox import Door
from nemo_gym.contract.session import (
    DEFAULT_MODEL_DOOR_PORT,
    MODEL_DOOR,
    DoorRequest,
    EgressPolicy,
    InferenceEndpoint,
    McpServer,
    SessionDescriptor,
    Topology,
)
from nemo_gym.sandbox.doors import GENERATION_ROUTES, INFERENCE_ROUTES, MCP_ROUTES
from nemo_gym.sandbox.egress import EGRESS_DOOR
from nemo_gym.sandbox.merge import HarnessNeeds

FIRST_MCP_DOOR_PORT = 8100
"""MCP servers for which the environment asks no port get this one and those after it."""


def process_doors(
    descriptor: SessionDescriptor, inference: InferenceEndpoint, *, topology: Topology, needs: HarnessNeeds
) -> tuple[Door, ...]:
    """The doors of a box in which the harness's process runs: those asked for, and the model's and every MCP
    server's whether asked for or not. ``topology`` ``none`` also stands for a scratch box, which knows no egress rule.
    """
    asked = {request.name: request for request in descriptor.egress.doors}
    taken = {request.port for request in asked.values()}
    requests = list(asked.values())
    if MODEL_DOOR not in asked:
        requests.append(DoorRequest(name=MODEL_DOOR, port=_free_port(DEFAULT_MODEL_DOOR_PORT, taken)))
    for server in descriptor.mcp:
        if server.name not in asked:
            requests.append(DoorRequest(name=server.name, port=_free_port(FIRST_MCP_DOOR_PORT, taken)))
    changes: dict[str, object] = {"doors": tuple(requests)}
    if topology is Topology.NONE:
        changes["policy"] = EgressPolicy.MODEL_ONLY
    egress = descriptor.egress.model_copy(update=changes)
    return world_doors(descriptor.model_copy(update={"egress": egress}), inference, topology=topology, needs=needs)


def _free_port(first: int, taken: set[int]) -> int:
    port = first
    while port in taken:
        port += 1
    taken.add(port)
    return port


def world_doors(
    descriptor: SessionDescriptor, inference: InferenceEndpoint, *, topology: Topology, needs: HarnessNeeds
) -> tuple[Door, ...]:
    """The doors of the attempt's box, with the credentials that stay outside it.

    The model's door is opened unless the world forbids it, and is required when the harness runs in the box. An
    attempt without a model (an oracle's: an empty ``inference.base_url``) has no such door.
    """
    egress = descriptor.egress
    wants_model = egress.policy is not EgressPolicy.NONE and bool(inference.base_url)
    if needs.model_in_box and egress.policy is EgressPolicy.NONE:
        raise ConfigError(
            f"environment '{descriptor.environment}' lets nothing out of the box (egress.policy 'none'), and the agent"
            " runs in it and needs the model; use an agent that runs outside the box, or egress 'model_only'",
            key="egress.policy",
        )
    mcp = {server.name: server for server in descriptor.mcp}
    doors = []
    for request in egress.doors:
        if request.name == MODEL_DOOR:
            if wants_model and (needs.model_in_box or topology is not Topology.ENV_SANDBOXED):
                doors.append(_model_door(request.port, inference, needs.max_model_answers))
        elif request.name == EGRESS_DOOR and egress.allow:
            continue  # whoever makes the box opens it, see `egress_door`
        elif request.name in mcp:
            doors.append(_mcp_door(request.port, mcp[request.name]))
        else:
            raise ConfigError(
                f"environment '{descriptor.environment}' asks for a door '{request.name}' with nothing behind it;"
                f" known: {', '.join([MODEL_DOOR, *mcp])}",
                key="egress.doors",
            )
    return tuple(doors)


def _model_door(port: int, inference: InferenceEndpoint, max_answers: int | None = None) -> Door:
    return Door(
        name=MODEL_DOOR,
        port=port,
        target=inference.base_url.rstrip("/").removesuffix("/v1"),
        allow=INFERENCE_ROUTES,
        headers={"Authorization": f"Bearer {inference.token}"},
        counted=GENERATION_ROUTES,
        max_answers=max_answers,
    )


def _mcp_door(port: int, server: McpServer) -> Door:
    if server.transport != "http" or not server.url.rstrip("/").endswith("/mcp"):
        raise ConfigError(
            f"MCP server '{server.name}' at {server.url} cannot be given to a box: doors forward the streamable HTTP"
            " transport at a URL that ends in /mcp",
            key="mcp",
        )
    return Door(
        name=server.name,
        port=port,
        target=server.url.rstrip("/").removesuffix("/mcp"),
        allow=MCP_ROUTES,
        headers=dict(server.headers),
    )
