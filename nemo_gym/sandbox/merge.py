"""The world's spec is the environment's, with the harness's needs merged in; a conflict names both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.sandbox import Door, Mount, NetworkPolicy, SandboxResources, SandboxSpec
from nemo_gym.contract.session import BoxNeeds, Egress, EgressPolicy, Limits, SessionDescriptor
from nemo_gym.sandbox.egress import DEFAULT_EGRESS_DOOR_PORT, EGRESS_DOOR


@dataclass(frozen=True)
class HarnessNeeds:
    """What a harness adds to a world so that it can work there."""

    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    requires: tuple[str, ...] = ()
    model_in_box: bool = False
    """Whether the harness's own process is in the box, so that the model must be reachable there."""
    max_model_answers: int | None = None
    """What the model's door lets through, whoever in the box asks; ``None`` is no limit."""

    @classmethod
    def of(cls, needs: BoxNeeds) -> HarnessNeeds:
        """As the owner of a box learns them."""
        mounts = tuple(Mount(source=mount.source, target=mount.target) for mount in needs.mounts)
        return cls(env=dict(needs.env), mounts=mounts, requires=needs.requires)


def merge_env(environment: Mapping[str, str], agent: Mapping[str, str], *, name: str) -> dict[str, str]:
    """Both, or `ConfigError` when they give one variable two values."""
    for key in environment.keys() & agent.keys():
        if environment[key] != agent[key]:
            raise ConfigError(
                f"environment '{name}' sets {key}={environment[key]!r} in the box and the agent needs {agent[key]!r};"
                " change one of them",
                key=key,
            )
    return {**environment, **agent}


def world_spec(spec: SandboxSpec, descriptor: SessionDescriptor, needs: HarnessNeeds) -> SandboxSpec:
    """The spec of the attempt's box: the environment's, egress rules and harness needs added. Of its doors it has the
    one that the egress policy itself needs."""
    doors, proxies = egress_door(descriptor.egress)
    env = merge_env(spec.env, descriptor.egress.env, name=descriptor.environment)
    env = merge_env(merge_env(env, needs.env, name=descriptor.environment), proxies, name=descriptor.environment)
    taken = {mount.target: mount for mount in spec.mounts}
    for mount in needs.mounts:
        if mount.target in taken and taken[mount.target] != mount:
            raise ConfigError(
                f"environment '{descriptor.environment}' and the agent both mount {mount.target}:"
                f" {taken[mount.target].source} and {mount.source}",
                key="mounts",
            )
    mounts = tuple({**taken, **{mount.target: mount for mount in needs.mounts}}.values())
    requires = tuple(dict.fromkeys((*spec.requires, *descriptor.placement.requires, *needs.requires)))
    return spec.replace(
        env=env,
        mounts=mounts,
        requires=requires,
        resources=bounded(spec.resources, descriptor.limits),
        network=network_policy(descriptor.egress),
        doors=doors,
    )


def bounded(resources: SandboxResources, limits: Limits) -> SandboxResources:
    """A box's resources, with the attempt's limits in place of what was wanted."""
    given = {name: value for name in ("cpu", "memory_mib") if (value := getattr(limits, name)) is not None}
    unlimited = tuple(name for name in resources.unlimited if name not in given)
    return replace(resources, unlimited=unlimited, **given)


def network_policy(egress: Egress) -> NetworkPolicy:
    """What the box's own network is; the model, and the hosts of an allow-list, are behind doors."""
    return NetworkPolicy.OPEN if egress.policy is EgressPolicy.OPEN else NetworkPolicy.NONE


def egress_door(egress: Egress) -> tuple[tuple[Door, ...], dict[str, str]]:
    """The door that an allow-list needs, and the variables by which programs in the box find it."""
    if egress.policy is not EgressPolicy.ALLOWLIST:
        return (), {}
    ports = {request.name: request.port for request in egress.doors}
    port = ports.get(EGRESS_DOOR, DEFAULT_EGRESS_DOOR_PORT)
    while EGRESS_DOOR not in ports and port in ports.values():
        port += 1
    proxy, direct = f"http://127.0.0.1:{port}", "localhost,127.0.0.1,::1"
    names = {"HTTPS_PROXY": proxy, "HTTP_PROXY": proxy, "NO_PROXY": direct}
    # Programs differ in which spelling they read, and curl reads only the lower one of HTTP_PROXY.
    env = {**names, **{name.lower(): value for name, value in names.items()}}
    return (Door(name=EGRESS_DOOR, port=port, target="", allow=egress.allow, kind="proxy"),), env
