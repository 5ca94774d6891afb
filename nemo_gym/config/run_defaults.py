"""Defaults of a run: the environment's own rows as input, and an output folder named after the time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_gym.config.datasets import DataSet
from nemo_gym.config.roots import find_plugin
from nemo_gym.contract.errors import ConfigError

if TYPE_CHECKING:
    from nemo_gym.config.composition import Composition

OWN_ROWS = Path("data", "example.jsonl")
"""The path of the rows in an environment's folder."""


def complete_run(composition: Composition, *, wanted: bool) -> None:
    """Set what the settings of a run leave out: as ``input`` the rows of ``dataset`` or the environment's own; as
    ``output`` a file in a directory named after the time. Without ``wanted``, do so only if one of ``input``,
    ``output`` and ``dataset`` is given; with it, also if the environment ships rows.

    Raises:
        ConfigError: ``dataset`` is not prepared, or stands beside ``input``.
    """
    values = composition.values
    given = composition.run_values()
    has_input = composition.has_run
    has_output = "output" in given or "output_jsonl_fpath" in given
    dataset, split = values.pop("dataset", None), values.pop("split", None)
    check_dataset_words(dataset, split, has_input=has_input)
    plugin = environment_folder(composition)
    if dataset is not None:
        values["input"] = str(DataSet.parse(str(dataset), split, plugin).prepared())
    elif not has_input and (wanted or has_output) and "input" not in values:
        own_rows = plugin / OWN_ROWS if plugin is not None else None
        if own_rows is not None and own_rows.is_file():
            values["input"] = str(own_rows)
    if (values.get("input") is not None or has_input) and not has_output:
        values["output"] = str(default_output())


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
