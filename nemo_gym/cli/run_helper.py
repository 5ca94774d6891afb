"""NeMo Gym's run helper, with which a program starts and stops the servers of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_gym.config.files import read_yaml
from nemo_gym.contract.errors import ConfigError, ServerError
from nemo_gym.stack.background import BackgroundStack
from nemo_gym.stack.endpoints import StackEntry

_DROPPED_KEYS = frozenset(
    {
        "head_server",
        "ray_head_node_address",
        "global_aiohttp_connector_limit",
        "global_aiohttp_connector_limit_per_host",
        "config_paths",
    }
)
"""Keys of NeMo RL that are dropped: there is no head server and no Ray here, and connections are not limited."""


@dataclass(frozen=True, slots=True)
class GlobalConfigDictParserConfig:
    """Where a run helper's configuration comes from."""

    dotenv_path: Path | None = None
    """A YAML file with more keys (``env.yaml``); ``initial_global_config_dict`` takes precedence over it."""
    initial_global_config_dict: Mapping[str, Any] | None = None
    skip_load_from_cli: bool = False
    """Accepted; the program's own command line is never read."""
    skip_load_from_dotenv: bool = False


class RunHelper:
    """Starts the servers in a separate process. `RolloutCollectionHelper` finds them."""

    def __init__(self) -> None:
        self._stack: BackgroundStack | None = None

    def start(self, global_config_dict_parser_config: GlobalConfigDictParserConfig) -> StackEntry:
        """Start everything and wait until it is ready. Raises `ConfigError`, `ServerError`."""
        from omegaconf import OmegaConf

        if self._stack is not None:
            raise ConfigError("this run helper has started its servers already; shut it down first")
        given = global_config_dict_parser_config
        initial: Any = given.initial_global_config_dict or {}
        # Interpolations stay unresolved: some refer to keys of the files, and the policy's URL is still a list here.
        plain: Any = OmegaConf.to_container(initial) if OmegaConf.is_config(initial) else initial
        values = dict(plain)
        paths = [str(path) for path in values.get("config_paths") or ()]
        if given.dotenv_path is not None and given.dotenv_path.is_file() and not given.skip_load_from_dotenv:
            values = {**read_yaml(given.dotenv_path), **values}
        values = {name: value for name, value in values.items() if name not in _DROPPED_KEYS}
        urls = values.get("policy_base_url")
        if isinstance(urls, list) and len(urls) == 1:
            values["policy_base_url"] = urls[0]
        self._stack = BackgroundStack(values=values, config_paths=paths)
        try:
            return self._stack.start()
        except BaseException:
            self._stack = None
            raise

    def poll(self) -> None:
        """Raise `ServerError` if the servers do not run. NeMo RL calls this to check the health of its environment."""
        if self._stack is None:
            raise ServerError("the servers are not running; start them first")
        self._stack.check()

    def shutdown(self) -> None:
        """Stop the servers; idempotent."""
        if self._stack is not None:
            self._stack.stop()
            self._stack = None
