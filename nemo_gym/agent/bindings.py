"""Decides which box an agent server creates for an attempt, by topology.

    A none               no world; a process harness gets a scratch box of the agent
    B env_sandboxed      the world is the environment's. A process harness gets a scratch box, and the environment's
                         tools through MCP doors; a harness in the agent server acts on the descriptor's box
    C agent_in_env       the world's box, as the descriptor specifies it; the harness runs in it, or acts on it by exec
    D whole_interaction  one outer box that contains everything: the descriptor's world and the agent's ``outer``

In B and C the environment may already have created the box and lend it (`SandboxRef`); then the agent server creates
none. A box's spec merges the environment's and the agent's; a conflict is an error that names both sides.

A harness reports its conversation as chat messages; `output_items` and `response_object` turn them into the OpenAI
Responses object that ``/act`` returns.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import count
from typing import Any

from nemo_gym.contract.errors import ConfigError, RowError
from nemo_gym.contract.sandbox import Door, SandboxResources, SandboxSpec
from nemo_gym.contract.session import (
    DEFAULT_MODEL_DOOR_PORT,
    MODEL_DOOR,
    ActRequest,
    DoorRequest,
    EgressPolicy,
    InferenceEndpoint,
    McpServer,
    SandboxRef,
    SessionDescriptor,
    Topology,
)
from nemo_gym.sandbox.doors import GENERATION_ROUTES, INFERENCE_ROUTES, MCP_ROUTES
from nemo_gym.sandbox.egress import (
    EGRESS_DOOR,
    HarnessNeeds,
    bounded,
    egress_door,
    merge_env,
    network_policy,
    world_spec,
)

FIRST_MCP_DOOR_PORT = 8100
"""The first port for MCP servers for which the environment requests none; the others get the next free ports."""


# Doors of an attempt's box, to the model and the MCP servers, with credentials that stay outside of the box


def process_doors(
    descriptor: SessionDescriptor, inference: InferenceEndpoint, *, topology: Topology, needs: HarnessNeeds
) -> tuple[Door, ...]:
    """The doors of a box in which the harness's process runs: the requested ones, and always those of the model and of
    every MCP server. ``topology`` ``none`` also means a scratch box, to which no egress policy applies.
    """
    ports = {request.name: request.port for request in descriptor.egress.doors}
    first_ports = {
        MODEL_DOOR: DEFAULT_MODEL_DOOR_PORT,
        **{server.name: FIRST_MCP_DOOR_PORT for server in descriptor.mcp},
    }
    for name, first_port in first_ports.items():
        if name not in ports:
            ports[name] = next(port for port in count(first_port) if port not in ports.values())
    changes: dict[str, object] = {"doors": tuple(DoorRequest(name=name, port=port) for name, port in ports.items())}
    if topology is Topology.NONE:
        changes["policy"] = EgressPolicy.MODEL_ONLY
    egress = descriptor.egress.model_copy(update=changes)
    return world_doors(descriptor.model_copy(update={"egress": egress}), inference, topology=topology, needs=needs)


def world_doors(
    descriptor: SessionDescriptor, inference: InferenceEndpoint, *, topology: Topology, needs: HarnessNeeds
) -> tuple[Door, ...]:
    """The doors of the attempt's box, with the credentials that stay outside it.

    The model's door is opened unless the world forbids it; a harness that runs in the box requires it. An attempt
    without a model (an oracle's: an empty ``inference.base_url``) has no such door.
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
            continue  # the creator of the box opens it, see `egress_door`
        elif request.name in mcp:
            doors.append(_mcp_door(request.port, mcp[request.name]))
        else:
            raise ConfigError(
                f"environment '{descriptor.environment}' requests the door '{request.name}', which has no target;"
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


_SINGLE_VALUES = ("image", "workdir", "user", "entrypoint", "ready_timeout_s", "ttl_s")


@dataclass(frozen=True)
class AgentBoxes:
    """The agent's own boxes, by its configuration."""

    scratch: SandboxSpec = field(default_factory=SandboxSpec)
    """Topologies A and B: the box of a process harness that does not run in the world."""
    outer: SandboxSpec = field(default_factory=SandboxSpec)
    """Topology D: what the episode's box needs beyond the environment's world."""


@dataclass(frozen=True)
class Binding:
    """The box of one attempt."""

    spec: SandboxSpec
    """The spec with doors; the box's owner adds labels and lease."""
    is_world: bool
    """Whether the box contains the task's world, so that the descriptor's harvest collects from it."""
    lent: SandboxRef | None = None
    """A box that the environment owns, harvests and destroys; ``spec`` then has only the workdir and the doors to
    open."""


def bind(request: ActRequest, topology: Topology, needs: HarnessNeeds, boxes: AgentBoxes) -> Binding:
    """The box for a request. Raises `ConfigError` if the topology is impossible for it, with advice in the message."""
    descriptor, clause = request.descriptor, request.descriptor.sandbox
    if topology is Topology.NONE:
        return Binding(_scratch(request, needs, boxes), is_world=True)
    if topology is Topology.ENV_SANDBOXED and needs.model_in_box:
        if not descriptor.mcp:
            raise ConfigError(
                f"environment '{descriptor.environment}' offers no MCP server, so an agent outside of its world"
                " cannot reach it in topology 'env_sandboxed'; use topology=agent_in_env where it supports that",
                key="topology",
            )
        return Binding(_scratch(request, needs, boxes), is_world=False)
    build_doors = process_doors if needs.model_in_box else world_doors
    doors = build_doors(descriptor, request.inference, topology=topology, needs=needs)
    is_outer = topology is Topology.WHOLE_INTERACTION
    if clause is not None and clause.ref is not None and not is_outer:
        return Binding(SandboxSpec(workdir=clause.ref.workdir, doors=doors), is_world=True, lent=clause.ref)
    if clause is not None and clause.spec is not None:
        base = clause.spec.to_spec()
        if is_outer:
            base = joined(base, boxes.outer, descriptor.environment)
    elif clause is None and is_outer:
        base = boxes.outer
    else:
        raise ConfigError(
            f"environment '{descriptor.environment}' describes no box for topology '{descriptor.placement.topology}'",
            key="sandbox",
        )
    spec = world_spec(base, descriptor, needs)
    return Binding(spec.replace(doors=(*spec.doors, *doors)), is_world=True)


def _scratch(request: ActRequest, needs: HarnessNeeds, boxes: AgentBoxes) -> SandboxSpec:
    """A scratch box of the agent. The environment's egress rules apply to its world; from here a process harness
    reaches only the model and the environment's MCP servers, unless the task's egress is open or has an allow-list.
    For a harness in the agent server the box has neither door."""
    descriptor = request.descriptor
    name = descriptor.environment
    allowed, proxies = egress_door(descriptor.egress)
    env = merge_env(merge_env(descriptor.egress.env, boxes.scratch.env, name=name), needs.env, name=name)
    env = merge_env(env, proxies, name=name)
    doors: tuple[Door, ...] = ()
    if needs.model_in_box:
        doors = process_doors(descriptor, request.inference, topology=Topology.NONE, needs=needs)
    return boxes.scratch.replace(
        env=env,
        mounts=(*boxes.scratch.mounts, *needs.mounts),
        requires=tuple(dict.fromkeys((*boxes.scratch.requires, *needs.requires))),
        resources=bounded(boxes.scratch.resources, descriptor.limits),
        network=network_policy(descriptor.egress),
        doors=(*allowed, *doors),
    )


def joined(environment: SandboxSpec, agent: SandboxSpec, name: str) -> SandboxSpec:
    """Merge both specs. ``name`` is the environment's, for error messages. Raises `ConfigError` for any conflict."""
    changes: dict[str, object] = {"env": merge_env(environment.env, agent.env, name=name)}
    for key in _SINGLE_VALUES:
        changes[key] = _agreed(getattr(environment, key), getattr(agent, key), key, name)
    resources = {
        key: _agreed(getattr(environment.resources, key), getattr(agent.resources, key), f"resources.{key}", name)
        for key in (resource.name for resource in fields(SandboxResources))
        if key != "unlimited"
    }
    unlimited = tuple(dict.fromkeys((*environment.resources.unlimited, *agent.resources.unlimited)))
    for key in unlimited:
        if resources[key] is not None:
            raise ConfigError(
                f"environment '{name}' and the agent disagree on resources.{key} of the outer box: one sets"
                f" {resources[key]!r}, the other unlimited; change one of them",
                key=f"resources.{key}",
            )
    for key in ("files", "provider_options"):
        agent_items, environment_items = getattr(agent, key), getattr(environment, key)
        for item in agent_items.keys() & environment_items.keys():
            _agreed(environment_items[item], agent_items[item], f"{key}.{item}", name)
        changes[key] = {**environment_items, **agent_items}
    targets = {mount.target: mount for mount in environment.mounts}
    for mount in agent.mounts:
        _agreed(targets.get(mount.target), mount, f"mounts of {mount.target}", name)
    return environment.replace(
        **changes,
        resources=SandboxResources(**resources, unlimited=unlimited),
        mounts=tuple({**targets, **{mount.target: mount for mount in agent.mounts}}.values()),
        ports=tuple(dict.fromkeys((*environment.ports, *agent.ports))),
        requires=tuple(dict.fromkeys((*environment.requires, *agent.requires))),
    )


def _agreed(environment: Any, agent: Any, key: str, name: str) -> Any:
    if environment is not None and agent is not None and environment != agent:
        raise ConfigError(
            f"environment '{name}' wants {key}={environment!r} of the outer box and the agent wants {agent!r}; change"
            " one of them",
            key=key,
        )
    return agent if environment is None else environment


_PROMPT_ROLES = ("user", "system", "developer")
_NOT_TEXT = (
    "this agent is given its task as text and begins the conversation itself: write the row that way, or choose an"
    " agent that is given whole conversations (simple_agent)"
)


def response_object(
    output: list[dict[str, Any]],
    *,
    model: str,
    usage: Mapping[str, int] | None = None,
    incomplete: str | None = None,
) -> dict[str, Any]:
    """A Responses object around ``output`` items: completed, or incomplete for the reason ``incomplete``, for example
    ``max_output_tokens``."""
    counted = {"input_tokens": 0, "output_tokens": 0, **(usage or {})}
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": time.time(),
        "model": model,
        "status": "incomplete" if incomplete else "completed",
        "incomplete_details": {"reason": incomplete} if incomplete else None,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            **counted,
            "total_tokens": counted["input_tokens"] + counted["output_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def text_message(text: str) -> dict[str, Any]:
    """An assistant's message item."""
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def output_items(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert Chat Completions messages (assistant, tool) to Responses output items; skip system and user messages."""
    items: list[dict[str, Any]] = []
    for message in messages:
        if message.get("role") == "assistant":
            if text := _text(message.get("content")) or str(message.get("refusal") or ""):
                items.append(text_message(text))
            for call in message.get("tool_calls") or []:
                function = call["function"]
                items.append(
                    {
                        "id": f"fc_{uuid.uuid4().hex}",
                        "type": "function_call",
                        "call_id": call["id"],
                        "name": function["name"],
                        "arguments": function["arguments"],
                        "status": "completed",
                    }
                )
        elif message.get("role") == "tool":
            items.append(
                {
                    "type": "function_call_output",
                    "call_id": message["tool_call_id"],
                    "output": _text(message.get("content")),
                }
            )
    return items


def prompt_text(responses_create_params: Mapping[str, Any]) -> tuple[str, str]:
    """``(system, user)`` text of the public prompt; several messages of one role are joined by blank lines.

    For a harness that takes a task as text and starts its own conversation. Raises `RowError`, which names the first
    item that cannot be passed as text: an earlier answer or tool call, an image, a file.
    """
    prompt = responses_create_params.get("input", "")
    system = [responses_create_params["instructions"]] if responses_create_params.get("instructions") else []
    user: list[str] = []
    for number, message in enumerate([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt):
        where = f"responses_create_params.input[{number}]"
        kind, role = message.get("type", "message"), message.get("role")
        if kind != "message" or role not in _PROMPT_ROLES:
            kind_text = f"a turn of the {role}" if kind == "message" else f"of type '{kind}'"
            raise RowError(f"{where} is {kind_text}; {_NOT_TEXT}")
        (user if role == "user" else system).append(_prompt_content(message.get("content"), where))
    return "\n\n".join(filter(None, system)), "\n\n".join(filter(None, user))


def _prompt_content(content: Any, where: str) -> str:
    for number, part in enumerate([] if isinstance(content, str) else content or []):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("input_text", "text"):
            raise RowError(f"{where}.content[{number}] is of type '{kind}'; {_NOT_TEXT}")
    return _text(content)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or [] if isinstance(part, dict))
