"""This process's configuration, and the key names NeMo Gym plugins import.

A started server has only the part of the configuration that its launcher passed to it: its own block, the addresses of
the servers it may call, and the shared values it uses. It is never fetched over HTTP.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict

from nemo_gym._util.suggest import nearest
from nemo_gym.config.keys import AGENT_TYPE, ENVIRONMENT_TYPE, MODEL_TYPE, NEMO_GYM_KEYS, SUITE_KEYS
from nemo_gym.contract.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from nemo_gym.config.composition import Composition

NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME: Final = "NEMO_GYM_CONFIG_DICT"
NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME: Final = "NEMO_GYM_CONFIG_PATH"

CONFIG_PATHS_KEY_NAME: Final = "config_paths"
ENTRYPOINT_KEY_NAME: Final = "entrypoint"
DEFAULT_HOST_KEY_NAME: Final = "default_host"
HEAD_SERVER_KEY_NAME: Final = "head_server"
DISALLOWED_PORTS_KEY_NAME: Final = "disallowed_ports"
USE_ABSOLUTE_IP: Final = "use_absolute_ip"
HF_TOKEN_KEY_NAME: Final = "hf_token"
RESULTS_DIR_KEY_NAME: Final = "results_dir"
CACHE_DIR_KEY_NAME: Final = "cache_dir"
DRY_RUN_KEY_NAME: Final = "dry_run"
INHERIT_FROM_KEY_NAME: Final = "_inherit_from"
COPY_KEY_NAME: Final = "_copy"
DELETE_KEY_KEY_NAME: Final = "_delete_key"
POLICY_BASE_URL_KEY_NAME: Final = "policy_base_url"
POLICY_API_KEY_KEY_NAME: Final = "policy_api_key"
POLICY_MODEL_NAME_KEY_NAME: Final = "policy_model_name"
POLICY_MODEL_KEY_NAME: Final = "policy_model"
OBSERVABILITY_ENABLED_KEY_NAME: Final = "observability_enabled"
MODEL_CALL_CAPTURE_DIR_KEY_NAME: Final = "model_call_capture_dir"
TOKEN_ID_CAPTURE_BLOCK: Final = "token_id_capture"
SKIP_VERIFICATION_KEY_NAME: Final = "skip_verification"
SKIP_VERIFICATION_REWARD_KEY_NAME: Final = "skip_verification_reward"

MODEL_SERVER_TYPE_KEY_NAME: Final = MODEL_TYPE
RESOURCES_SERVER_TYPE_KEY_NAME: Final = ENVIRONMENT_TYPE
AGENT_SERVER_TYPE_KEY_NAME: Final = AGENT_TYPE

TASK_INDEX_KEY_NAME: Final = "_ng_task_index"
ROLLOUT_INDEX_KEY_NAME: Final = "_ng_rollout_index"
ATTEMPT_INDEX_KEY_NAME: Final = "_ng_attempt_index"
ROLLOUT_ID_KEY_NAME: Final = "_ng_rollout_id"
RESPONSES_CREATE_PARAMS_KEY_NAME: Final = "responses_create_params"
RESPONSE_KEY_NAME: Final = "response"
REWARD_KEY_NAME: Final = "reward"
AGENT_REF_KEY_NAME: Final = "agent_ref"
TASK_SOURCE_KEY_NAME: Final = "task_source"
SKILLS_REF_KEY_NAME: Final = "skills_ref"

DEFAULT_HEAD_SERVER_PORT: Final = 11000
NEMO_GYM_RESERVED_TOP_LEVEL_KEYS: Final = sorted(NEMO_GYM_KEYS | SUITE_KEYS)

_GLOBAL_CONFIG_DICT: DictConfig | None = None


def set_global_config_dict(config: Mapping[str, Any] | None) -> None:
    """Make ``config`` this process's configuration (for embedding and tests); ``None`` clears it."""
    global _GLOBAL_CONFIG_DICT
    _GLOBAL_CONFIG_DICT = None if config is None else _as_dict_config(config)


def get_global_config_dict() -> DictConfig:
    """Return this process's configuration: from its launcher, or else from ``NEMO_GYM_CONFIG_DICT`` (YAML), or else
    composed from the ``key=value`` arguments of the command line. It is read once, then cached."""
    global _GLOBAL_CONFIG_DICT
    if _GLOBAL_CONFIG_DICT is None:
        _GLOBAL_CONFIG_DICT = _load()
    return _GLOBAL_CONFIG_DICT


def maybe_get_global_config_dict() -> DictConfig | None:
    """Return `get_global_config_dict` if there is a configuration, else ``None``: for code that also runs outside of a
    server."""
    if _GLOBAL_CONFIG_DICT is None and not os.environ.get(NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME):
        from nemo_gym.config.launch import current_launch

        if current_launch() is None:
            return None
    return get_global_config_dict()


class GlobalConfigDictParserConfig(BaseModel):
    """The input of `GlobalConfigDictParser.parse`. Only ``initial_global_config_dict`` and its ``config_paths`` are
    used; nothing is loaded from the command line or env.yaml."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    NO_MODEL_GLOBAL_CONFIG_DICT: ClassVar[dict[str, Any]] = {
        "policy_base_url": "http://127.0.0.1:9/v1",
        "policy_api_key": "none",
        "policy_model_name": "none",
    }
    """Values for compositions that are read but not run."""

    initial_global_config_dict: Any = None
    skip_load_from_cli: bool = False
    skip_load_from_dotenv: bool = False
    offline: bool = False


class GlobalConfigDictParser:
    """NeMo Gym's name for composing a configuration in a program."""

    def parse(self, parse_config: GlobalConfigDictParserConfig | None = None) -> DictConfig:
        """Return the composed configuration. If no file defines the policy's model server, it is an OpenAI one."""
        import tempfile
        from pathlib import Path

        import yaml
        from omegaconf import OmegaConf

        from nemo_gym.config.compose import compose
        from nemo_gym.config.overrides import word_of

        initial = parse_config.initial_global_config_dict if parse_config is not None else None
        container = OmegaConf.to_container(OmegaConf.create(initial or {}))
        values: dict[str, Any] = {str(key): value for key, value in dict(container).items()}  # type: ignore[arg-type]
        paths = [*(values.pop(CONFIG_PATHS_KEY_NAME, None) or ())]
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "given.yaml"
            words = [word_of("+config_paths", [str(path) for path in (file, *paths)])]
            file.write_text(yaml.safe_dump({POLICY_MODEL_KEY_NAME: _ANY_MODEL, **values}), encoding="utf-8")
            with contextlib.suppress(ConfigError):
                return _placed(compose(words))
            file.write_text(yaml.safe_dump(values), encoding="utf-8")
            return _placed(compose(words))


def _placed(composition: Composition) -> DictConfig:
    """Return the configuration with an address for every server, as NeMo Gym's parser does."""
    for server in composition.servers.values():
        block = composition.values[server.instance][server.server_type][server.implementation]
        block.update({"host": "127.0.0.1", "port": 0} | block)
    return composition.config


_ANY_MODEL: Final = {
    MODEL_TYPE: {
        "openai_model": {
            "entrypoint": "app.py",
            "openai_base_url": "${policy_base_url}",
            "openai_api_key": "${policy_api_key}",
            "openai_model": "${policy_model_name}",
        }
    }
}


def _load() -> DictConfig:
    from nemo_gym.config.launch import current_launch

    launch = current_launch()
    if launch is not None:
        return _as_dict_config(launch.config)
    if text := os.environ.get(NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME):
        import yaml

        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"{NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME} is not valid YAML", key=NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME
            ) from error
        return _as_dict_config(values or {})
    from nemo_gym.config.compose import compose

    return compose([word for word in sys.argv[1:] if "=" in word or word.startswith("~")]).config


def _as_dict_config(values: Mapping[str, Any]) -> DictConfig:
    from omegaconf import DictConfig, OmegaConf

    config = values if isinstance(values, DictConfig) else OmegaConf.create(dict(values))
    assert isinstance(config, DictConfig)
    return config


def get_first_server_config_dict(global_config_dict: Any, top_level_path: str) -> Any:
    """Return the innermost block of a server instance, whatever its type and implementation. Raises `ConfigError` with
    the nearest name if there is no such instance."""
    try:
        block = global_config_dict[top_level_path]
    except KeyError:
        block = None
    if not isinstance(block, Mapping):
        raise ConfigError(
            f"this configuration has no server instance '{top_level_path}'"
            f"{nearest(top_level_path, global_config_dict)}",
            key=top_level_path,
        )
    for _ in range(2):
        block = next(iter(block.values()))
    return block


def find_open_port() -> int:
    """Return a TCP port of this machine that is free now. Servers of this suite inherit their sockets and never need
    it."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def get_hf_token() -> str | None:
    """Return the configured token of the dataset hub, if any."""
    token = get_global_config_dict().get(HF_TOKEN_KEY_NAME)
    return None if token is None else str(token)


def __getattr__(name: str) -> Any:
    if name in ("DictConfig", "OmegaConf"):  # NeMo Gym's plugins import them from here; loaded on first use
        import omegaconf

        return getattr(omegaconf, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
