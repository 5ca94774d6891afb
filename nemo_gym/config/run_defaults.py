"""Defaults of a run: the rows of a benchmark or of the environment, and an output folder named after the time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_gym.config.datasets import DataSet
from nemo_gym.config.files import find_file, find_plugin
from nemo_gym.config.keys import AGENT_TYPE
from nemo_gym.contract.errors import ConfigError

if TYPE_CHECKING:
    from nemo_gym.config.composition import Composition

OWN_ROWS = Path("data", "example.jsonl")
"""The path of the rows in an environment's folder."""


def complete_run(composition: Composition, *, wanted: bool) -> None:
    """Set what the settings of a run leave out: as ``input`` the rows of ``dataset``, those of an agent's data set of
    the type ``split``, those of a benchmark of NeMo Gym's or the environment's own; as ``output`` a file in a
    directory named after the time. Without ``wanted``, do so only if one of ``input``, ``output`` and ``dataset`` is
    given; with it, also if the environment ships rows.

    Raises:
        ConfigError: ``dataset`` is not prepared, or stands beside ``input``; or a benchmark's rows cannot be used.
    """
    values = composition.values
    given = composition.run_values()
    has_input = composition.has_run
    has_output = "output" in given or "output_jsonl_fpath" in given
    dataset, split = values.pop("dataset", None), values.pop("split", None)
    finds_rows = not has_input and (wanted or has_output) and "input" not in values
    of_type = str(split) if finds_rows and dataset is None and split is not None else None
    check_dataset_words(dataset, None if of_type else split, has_input=has_input)
    plugin = environment_folder(composition)
    if dataset is not None:
        values["input"] = str(DataSet.parse(str(dataset), split, plugin).prepared())
    elif finds_rows:
        own_rows = plugin / OWN_ROWS if plugin is not None else None
        if of_type is not None or _has_benchmark(composition):
            # Never the environment's examples: their score would pass for the benchmark's.
            values |= {**_run_of_data_set(composition, of_type or "benchmark"), **given}
        elif own_rows is not None and own_rows.is_file():
            values["input"] = str(own_rows)
    if (values.get("input") is not None or has_input) and not has_output:
        values["output"] = str(default_output())


def _has_benchmark(composition: Composition) -> bool:
    """Whether a file of NeMo Gym's ``benchmarks`` is in this composition."""
    folders = [root / "benchmarks" for root in composition.roots]
    return any(file.is_relative_to(folder) for file in composition.files for folder in folders)


def _run_of_data_set(composition: Composition, of_type: str) -> dict[str, Any]:
    """Return the run keys of the one data set of this type that an agent of NeMo Gym's form has."""
    chosen = composition.chosen.get("agent")
    found: list[tuple[str, Mapping[str, Any]]] = [
        (agent.instance, dataset)
        for agent in composition.servers.values()
        if agent.server_type == AGENT_TYPE and chosen in (None, agent.instance)
        for dataset in agent.values.get("datasets") or ()
        if isinstance(dataset, Mapping) and dataset.get("type") == of_type
    ]
    if len(found) != 1:
        agents = [agent for agent, _ in found]
        chosen_by = {agent: f": --agent {agent}" for agent in agents if agents.count(agent) == 1}
        choices = "".join(f"\n  {dataset.get('jsonl_fpath')}{chosen_by.get(agent, '')}" for agent, dataset in found)
        raise ConfigError(
            f"the agents have {len(found)} data sets of the type {of_type}, and one is run at a time; name the rows"
            " with --input (input=), or a data set with dataset="
            f"{', or choose an agent' if chosen_by else ''}{':' if found else ''}{choices}",
            key="input",
        )
    ((agent_name, dataset),) = found
    named, repeats = str(dataset.get("jsonl_fpath")), dataset.get("num_repeats", 1)
    rows = find_file(named, composition.roots)
    if rows is None:
        script = dataset.get("prepare_script")
        makes = f" ({script} makes it: ng eval prepare --benchmark NAME)" if script else ""
        raise ConfigError(
            f"the data set's file {named} is not there{makes}; make it, or name rows with --input (input=)",
            key="input",
        )
    template = dataset.get("prompt_config")
    return {"input": str(rows), "num_repeats": repeats, "agent_name": agent_name, "prompt_config": template}


def check_dataset_words(dataset: object, split: object, *, has_input: bool) -> None:
    """Raise `ConfigError` for a ``split`` of no data set, and for a ``dataset`` beside an input."""
    if split is not None and dataset is None:
        raise ConfigError("split= is a part of a data set; name one with dataset=, or leave it out", key="split")
    if dataset is not None and has_input:
        raise ConfigError("dataset= and input= both name rows; leave one of them out", key="dataset")


def default_output() -> Path:
    """``results/<time>/rollouts.jsonl``."""
    return Path("results", time.strftime("%Y%m%d-%H%M%S"), "rollouts.jsonl")


def environment_folder(composition: Composition) -> Path | None:
    """The plugin folder of the chosen environment."""
    server = composition.servers.get(composition.chosen.get("environment", ""))
    return None if server is None else find_plugin(server.server_type, server.implementation, composition.roots)
