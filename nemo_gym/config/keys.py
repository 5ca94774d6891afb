"""The key names of configurations. Imports nothing heavy, because every command imports it first."""

from __future__ import annotations

import re
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
DISPATCH: Final = "dispatch"
RAY: Final = "ray"
SERVE: Final = "serve"
"""The block that makes a stack a rollout service."""
OBSERVABILITY: Final = "observability"
"""The block that says where traces go."""

INHERIT_FROM: Final = "_inherit_from"
COPY: Final = "_copy"
DELETE_KEY: Final = "_delete_key"
DIRECTIVE_VALUE: Final = re.compile(r"^\$\{(?P<word>inherit_from|copy):(?P<path>[^}]+)\}$")
"""A value in whose place another one goes, moved or copied."""

AGENT_WIDE_KEYS: Final = ("skip_verification", "skip_verification_reward")
"""Top-level keys that hold for every agent whose block does not set them."""

SUITE_KEYS: Final = frozenset(
    {
        CONFIG_PATHS,
        TOPOLOGY,
        HOSTS,
        HOST,
        DISPATCH,
        RAY,
        SERVE,
        OBSERVABILITY,
        "join",
        "run_dir",
        "run_id",
        "default_host",
        "startup_timeout_s",
        "shutdown_timeout_s",
        "max_restarts",
        "pass_env",
        "dry_run",
        "allow_unsupported_pairing",
        "policy_base_url",
        "policy_api_key",
        "policy_model_name",
        "error_on_almost_servers",
        "error_on_unknown_keys",
        "validation",
        "dataset",
        "split",
        "disallowed_ports",
        "port_range_low",
        "port_range_high",
        *AGENT_WIDE_KEYS,
    }
)
"""Top-level keys that this suite reads itself."""

UNREAD_NEMO_GYM_KEYS: Final = {
    "entrypoint": "one server of its own as a whole configuration; here a server is a block",
    "head_server": "the address of its head server; here there is none, ng_status lists what runs",
    "head_server_deps": "what is installed beside each server; here what its requirements.txt says",
    "python_version": "the interpreter of servers' environments; here they run on this command's",
    "pip_install_verbose": "how much installing prints",
    "use_absolute_ip": "whether servers listen on the machine's address; here a `hosts` block says where",
    "uv_pip_set_python": "whether uv is told the interpreter to install for; here each environment's pip installs",
    "skip_venv_if_present": "whether environments are built again; here they are when their requirements change",
    "ray_head_node_address": "the Ray cluster that its servers join; here `ray.address`",
    "model_endpoint_readiness_timeout_seconds": "how long it waits for the model; here `startup_timeout_s`",
    "allow_openai_version_skew": "whether servers may have another openai; here as their requirements.txt says",
    "uv_cache_dir": "uv's cache; here pip installs, whose cache `$PIP_CACHE_DIR` moves",
    "uv_venv_dir": "where servers' environments are; here below `$NEMO_GYM_CACHE_DIR`",
    "results_dir": "where its swe_agents server and W&B write; rollouts go to `output`, there and here",
    "cache_dir": "its cache; here `$NEMO_GYM_CACHE_DIR`",
    "nemo_gym_log_dir": "where logs go; here the directory `logs` of `run_dir`",
    "verbose": "how much its commands print",
    "json": "how its commands print; here `--json` of ng_validate and ng_status",
    "query": "what its lists are searched for",
    "token_id_capture": "token ids of all agents; here the gateway keeps them for every session",
    "component_name": "which agent, environment or benchmark its lists show",
    "telemetry": "reports to its makers; here nothing is reported",
    "environment_server_name": "the environment of its 0.7 session protocol; here `resources_server` of the agent",
    "environment_server_routes": "which environment serves which rows; here each agent has one environment",
    "environment_routing_mode": "how rows find their environment; here by their agent",
    "tasksets": "data sets by name; here `input`",
    "rollout_input": "its rows; here `input`",
    "agent_bindings": "which agent works in which environment; here `agent` and `environment`",
    "skills": "the directory of skills that all agents may use",
    "agent_map": "which agent runs the rows of another; here `agent_name` or the rows' `agent_ref`",
    "fan_out": "which agents run each row; here a run for each agent",
    "interleave_repeats": "the order in which repeats begin",
    "rollout_collection_driver": "the function that runs the rollouts; here the pipeline does",
    "require_complete": "whether missing rollouts fail the run; here the exit status 3 tells of them",
    "count_failure_classes_as_zero": "which failures count as a reward of 0; here none does",
    "count_missing_rollouts_as_zero": "whether rollouts without a result count as a reward of 0; here none does",
}
"""Top-level keys of NeMo Gym that nothing here reads → their meaning there, and what replaces them here.
Configurations written for NeMo Gym may hold them; a notice names those that are set."""

NEMO_GYM_KEYS: Final = frozenset(
    {*UNREAD_NEMO_GYM_KEYS, "hf_token", "observability_enabled", "model_call_capture_dir"}
)
"""Top-level keys that NeMo Gym reserves; configurations written for it may hold them. Its model servers write their
calls below ``model_call_capture_dir``; the gateway's block has `capture`."""

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
