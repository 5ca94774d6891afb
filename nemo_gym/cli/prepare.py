"""``ng_prepare <environment> key=value…``: make, once, the images and datasets that an environment needs.

``ng_prepare agents [agents=a,b]`` fetches, once per machine, the CLIs that agents run."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_gym._util.lazy import module_of
from nemo_gym._util.suggest import nearest
from nemo_gym.cli import command
from nemo_gym.config.files import find_file, find_plugin, plugin_roots, read_yaml
from nemo_gym.config.keys import AGENT_TYPE, ENVIRONMENT_TYPE
from nemo_gym.contract.errors import ConfigError, NemoGymError

if TYPE_CHECKING:
    from nemo_gym.agent.harness.base import CliPackage

NAME = "ng_prepare"
AGENTS = "agents"
"""Given in place of an environment."""
_BENCHMARK = "benchmark="
"""NeMo Gym's ``--benchmark NAME``, given in place of an environment."""
_CONFIG_PATHS = re.compile(r"\+{1,2}config_paths=\[([^\],]+\.yaml)\]")
"""The older way to name a benchmark: ``ng_prepare_benchmark +config_paths=[benchmarks/NAME/config.yaml]``."""
_DATASET_SETTINGS = ("dataset=", "split=", "sha256=", "refresh=")
"""Settings about the data set; an environment's ``prepare.py`` gets ``rows=`` in their place."""


def main() -> None:
    command.run(NAME, prepare)


def prepare(argv: Sequence[str]) -> int:
    """Call ``main(overrides)`` of the environment's ``prepare.py`` and return its exit code."""
    words = list(argv)
    first = words[0] if words and words[0][0] not in "-+~" and "=" not in words[0] else None
    environment = first or next((word for word in words if word.startswith(_BENCHMARK)), None)
    if environment is None and (file := _CONFIG_PATHS.fullmatch(words[0] if words else "")):
        words[0] = environment = f"{_BENCHMARK}{file[1]}"
    if environment is not None:
        words.remove(environment)
    if environment is None:
        parser = command.parser(
            NAME,
            "Prepare an environment: whatever its prepare.py makes (sandbox images, datasets). Safe to repeat."
            " dataset=NAME[@revision] split=SPLIT fetches rows for it first; ng_run takes them by the same words."
            f" 'ng_prepare <environment> --help' shows its settings; 'ng_prepare {AGENTS}' fetches the CLIs of agents,"
            f" 'ng_prepare {AGENTS} agents=a,b' some of them. Environments: {', '.join(preparable())}.",
            words="environment key=value",
        )
        parser.parse_args(words)
        raise ConfigError(f"which environment? there are: {', '.join(preparable()) or 'none'}", key="environment")
    if environment == AGENTS:
        return prepare_agents(words)
    roots = plugin_roots()
    if environment.startswith(_BENCHMARK):
        return _prepare_benchmark(environment.removeprefix(_BENCHMARK), words, roots)
    folder = find_plugin(ENVIRONMENT_TYPE, environment, roots)
    script = folder / "prepare.py"
    values = dict(
        word.lstrip("+").partition("=")[::2] for word in words if word.lstrip("+").startswith(_DATASET_SETTINGS)
    )
    if dataset := values.pop("dataset", None):
        from nemo_gym.cli.dataset import fetch_rows

        rows = fetch_rows(dataset, values, folder)
        print(rows)
        if not script.is_file():
            return command.EXIT_OK
        words = [word for word in words if not word.lstrip("+").startswith((*_DATASET_SETTINGS, "rows="))]
        words.append(f"rows={rows}")
    if not script.is_file():
        raise ConfigError(
            f"environment '{environment}' needs no preparation: {script} does not exist;"
            f" environments that do: {', '.join(preparable()) or 'none'}",
            key="environment",
        )
    return _call(script, roots, words)


def preparable() -> list[str]:
    """Environments that have a ``prepare.py``."""
    return sorted(
        {path.parent.name for root in plugin_roots() for path in root.glob(f"{ENVIRONMENT_TYPE}/*/prepare.py")}
    )


def _prepare_benchmark(name: str, words: Sequence[str], roots: Sequence[Path]) -> int:
    """NeMo Gym's ``eval prepare --benchmark NAME``: run the script that makes the rows of its data set."""
    from nemo_gym.config.overrides import given_values

    files = [name] if name.endswith(".yaml") else [f"benchmarks/{name}/config.yaml", f"benchmarks/{name}.yaml"]
    file = next((found for path in files if (found := find_file(path, roots))), None)
    if file is None:
        raise ConfigError(f"there is no benchmark '{name}': no root of plugins has {files[0]}", key="benchmark")
    named = next(_prepare_scripts(read_yaml(file)), None)
    if named is None or (script := find_file(named, roots)) is None:
        raise ConfigError(f"{file} names no 'prepare_script' that exists", key="benchmark")
    return _call(script, roots, given_values(words).get("prepare_script_args") or {})


def _prepare_scripts(node: object) -> Iterator[str]:
    if isinstance(node, Mapping) and isinstance(node.get("prepare_script"), str):
        yield node["prepare_script"]
    for child in node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ():
        yield from _prepare_scripts(child)


def _call(script: Path, roots: Sequence[Path], settings: list[str] | dict[str, Any]) -> int:
    """Call ``main`` (or NeMo Gym's ``prepare``), async or not, with the settings if it takes an argument; a
    benchmark's ``prepare`` takes them by name. An error of the script's own is printed with the part of its traceback
    that begins there."""
    sys.path[:0] = [str(script.parent), *(str(root) for root in roots if str(root) not in sys.path)]
    try:
        result = _result(script, settings)
    except (NemoGymError, BrokenPipeError):
        raise
    except Exception as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
        raise NemoGymError(f"{script} failed: {type(error).__name__}: {error}") from error
    return result if isinstance(result, int) and not isinstance(result, bool) else command.EXIT_OK


def _result(script: Path, settings: list[str] | dict[str, Any]) -> object:
    is_benchmark = isinstance(settings, dict)
    folder = "benchmarks" if is_benchmark else ENVIRONMENT_TYPE
    module = module_of(script, f"{folder}.{script.parent.name}.{script.stem}")
    entry = None if is_benchmark else getattr(module, "main", None)
    entry = entry or getattr(module, "prepare", None)
    if not callable(entry):
        raise ConfigError(f"{script} defines neither main(overrides) nor prepare()", file=str(script))
    if isinstance(settings, dict):
        result = entry(**settings)
    else:
        result = entry(settings) if inspect.signature(entry).parameters else entry()
    return asyncio.run(result) if inspect.iscoroutine(result) else result


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
    for name in chosen_agents(settings, packages):
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
    from nemo_gym.agent.harness.agent import CliAgent

    # Under a name of its own: the package's own module may be imported, here or later.
    name = f"scanned_{AGENT_TYPE}_{path.parent.name}"
    for value in vars(module_of(path, name)).values():
        if isinstance(value, type) and issubclass(value, CliAgent) and "harness_class" in vars(value):
            package = value.harness_class.package
            return package if package.is_fetched else None
    return None


def chosen_agents(settings: Sequence[str], packages: Mapping[str, CliPackage]) -> list[str]:
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
