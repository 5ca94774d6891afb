"""The names that configurations are made of. Imports nothing heavy: the command line reads it first."""

from __future__ import annotations

from typing import Final

MODEL_TYPE: Final = "responses_api_models"
ENVIRONMENT_TYPE: Final = "resources_servers"
AGENT_TYPE: Final = "responses_api_agents"
SERVER_TYPES: Final = (ENVIRONMENT_TYPE, AGENT_TYPE, MODEL_TYPE)
DEFAULT_MODEL: Final = "gateway"
"""The model of a composition that needs one and names none: ``configs/model/gateway.yaml``."""

GROUPS: Final = {
    "model": MODEL_TYPE,
    "sandbox": None,
    "environment": ENVIRONMENT_TYPE,
    "agent": AGENT_TYPE,
    "run": None,
}
"""Group → the server type whose plugins may also provide the group's files. In order of precedence, lowest first."""

COMPOSITION: Final = "composition"
CONFIG_PATHS: Final = "config_paths"
TOPOLOGY: Final = "topology"
HOSTS: Final = "hosts"
HOST: Final = "host"

INHERIT_FROM: Final = "_inherit_from"
COPY: Final = "_copy"
DELETE_KEY: Final = "_delete_key"

SUITE_KEYS: Final = frozenset(
    {
        CONFIG_PATHS,
        TOPOLOGY,
        HOSTS,
        HOST,
        "run_dir",
        "run_id",
        "default_host",
        "startup_timeout_s",
        "shutdown_timeout_s",
        "max_restarts",
        "pass_env",
        "policy_base_url",
        "policy_api_key",
        "policy_model_name",
        "error_on_almost_servers",
        "error_on_unknown_keys",
        "validation",
    }
)
"""Top-level keys that this suite reads itself."""

NEMO_GYM_KEYS: Final = frozenset(
    {
        "entrypoint",
        "head_server",
        "disallowed_ports",
        "head_server_deps",
        "python_version",
        "pip_install_verbose",
        "use_absolute_ip",
        "uv_pip_set_python",
        "skip_venv_if_present",
        "hf_token",
        "ray_head_node_address",
        "port_range_low",
        "port_range_high",
        "dry_run",
        "model_endpoint_readiness_timeout_seconds",
        "allow_openai_version_skew",
        "uv_cache_dir",
        "uv_venv_dir",
        "results_dir",
        "cache_dir",
        "nemo_gym_log_dir",
        "verbose",
        "json",
        "query",
        "observability_enabled",
        "model_call_capture_dir",
        "token_id_capture",
        "component_name",
        "skip_verification",
        "skip_verification_reward",
        "telemetry",
        "allow_unsupported_pairing",
        "environment_server_name",
        "environment_server_routes",
        "environment_routing_mode",
        "tasksets",
        "rollout_input",
        "agent_bindings",
    }
)
"""Top-level keys that NeMo Gym reserves; configurations written for it may hold them."""

SERVER_KEYS: Final = frozenset(
    {
        "entrypoint",
        "host",
        "port",
        "num_workers",
        "domain",
        "verified",
        "verified_url",
        "description",
        "value",
        "datasets",
        "allowed_agents",
        "allowed_model_types",
        "topologies",
        "sandbox_provider",
        "requires",
        "row_access",
    }
)
"""Keys every server block may hold, beside those of its implementation's config class."""
