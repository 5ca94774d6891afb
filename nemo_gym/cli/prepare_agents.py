"""``ng_prepare agents [agents=a,b]``: fetch the CLIs that agents run, once per machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_gym._util.lazy import module_of
from nemo_gym._util.suggest import nearest
from nemo_gym.agent.harness.agent import CliAgent
from nemo_gym.agent.harness.base import CliPackage
from nemo_gym.cli import command
from nemo_gym.config.keys import AGENT_TYPE
from nemo_gym.config.roots import plugin_roots
from nemo_gym.contract.errors import ConfigError


def prepare_agents(settings: Sequence[str]) -> int:
    """Fetch the missing CLIs of all agents, or of those in ``agents=``. Raises `ConfigError` after trying all of them,
    if one cannot be fetched or an archive is not the pinned one."""
    from nemo_gym.agent.harness.provision.fetch import fetch

    packages = cli_packages()
    command.parser(
        "ng_prepare agents",
        "Fetch the CLIs that agents run, in their pinned versions, once per machine; agents=a,b fetches some of them."
        f" Agents: {', '.join(packages)}.",
        words="agents=NAME,NAME",
    ).parse_args(settings)
    failed: list[str] = []
    for name in chosen(settings, packages):
        package = packages[name]
        print(f"{name}: {package.name} {package.version} …", flush=True)
        try:
            print(f"{name}: {fetch(package)}", flush=True)
        except ConfigError as error:
            failed.append(f"{name}: {error.message}")
    if failed:
        raise ConfigError("; ".join(failed), key="agents")
    return command.EXIT_OK


def cli_packages() -> Mapping[str, CliPackage]:
    """Map each agent of every plugin root to the package that must be fetched for it."""
    found: dict[str, CliPackage] = {}
    roots = plugin_roots()
    sys.path[:0] = [str(root) for root in roots if str(root) not in sys.path]
    for root in roots:
        for path in sorted(root.glob(f"{AGENT_TYPE}/*/app.py")):
            # An agent without a harness runs no CLI, and importing it may need packages that are not installed here.
            if "harness_class" in path.read_text(encoding="utf-8") and (package := _package(path)) is not None:
                found.setdefault(path.parent.name.removesuffix("_agent"), package)
    return found


def _package(path: Path) -> CliPackage | None:
    # Under a name of its own: the package's own module may be imported, here or later.
    name = f"scanned_{AGENT_TYPE}_{path.parent.name}"
    for value in vars(module_of(path, name)).values():
        if isinstance(value, type) and issubclass(value, CliAgent) and "harness_class" in vars(value):
            package = value.harness_class.package
            return package if package.is_fetched else None
    return None


def chosen(settings: Sequence[str], packages: Mapping[str, CliPackage]) -> list[str]:
    """Return the agents that ``agents=`` names, or all. Raises `ConfigError` for unknown agents and settings."""
    names = list(packages)
    for word in settings:
        key, sign, value = word.partition("=")
        if key != "agents" or not sign:
            raise ConfigError(f"'{word}' is not a setting of ng_prepare agents; it takes agents=NAME,NAME", key=key)
        names = [name.strip().removesuffix("_agent") for name in value.split(",")]
    for name in names:
        if name not in packages:
            hint = nearest(name, packages)
            raise ConfigError(
                f"no agent '{name}' runs a CLI{hint}; those that do: {', '.join(packages)}", key="agents"
            )
    return names
