"""The world's spec is the environment's, with the harness's needs merged in; a conflict names both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from nemo_gym.errors import ConfigError
from nemo_gym.sandbox.base import Mount, NetworkPolicy, SandboxResources, SandboxSpec
from nemo_gym.session import BoxNeeds, Egress, EgressPolicy, Limits, SessionDescriptor


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
    """The spec of the attempt's box, before its doors: the environment's, egress variables and harness needs added."""
    env = merge_env(spec.env, descriptor.egress.env, name=descriptor.environment)
    env = merge_env(env, needs.env, name=descriptor.environment)
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
    )


def bounded(resources: SandboxResources, limits: Limits) -> SandboxResources:
    """A box's resources, with the attempt's limits in place of what was wanted."""
    given = {name: value for name in ("cpu", "memory_mib") if (value := getattr(limits, name)) is not None}
    unlimited = tuple(name for name in resources.unlimited if name not in given)
    return replace(resources, unlimited=unlimited, **given)


def network_policy(egress: Egress) -> NetworkPolicy:
    """What the box's own network is; the model, where allowed, is behind a door."""
    match egress.policy:
        case EgressPolicy.OPEN:
            return NetworkPolicy.OPEN
        case EgressPolicy.NONE | EgressPolicy.MODEL_ONLY:
            return NetworkPolicy.NONE
        case EgressPolicy.ALLOWLIST:
            raise ConfigError(
                "egress.policy 'allowlist' is not enforced by any sandbox of this suite yet; use 'model_only', or"
                " 'open' where the task may reach everything",
                key="egress.policy",
            )
