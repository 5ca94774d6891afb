"""What is secret, and who sees what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_gym._util.secrets import is_secret_name, public_environment, redact, scrub, secret_values
from nemo_gym.config.compose import compose
from nemo_gym.config.composition import Composition
from nemo_gym.config.visibility import Address, call_targets, pipeline_view, server_view

from .conftest import write

GROUPS = ("agent=solver", "environment=mathy", "model=echo")
ADDRESSES = {
    name: Address("127.0.0.1", 1000 + n) for n, name in enumerate(("policy_model", "mathy", "solver", "judge"))
}


@pytest.mark.parametrize(
    "name",
    ["policy_api_key", "openai_api_key", "API_KEY", "hf_token", "HF_TOKEN", "wandb_api_key", "password",
     "client_secret", "caller_tokens", "AWS_SECRET_ACCESS_KEY", "mlflow_tracking_token",
     "apiKey", "auth-token", "authorization", "token"],
)  # fmt: skip
def test_name_is_secret(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["max_output_tokens", "max_tokens", "eos_token", "token_id_capture", "tokenizer", "prompt_token_ids",
             "keys", "key_metrics", "PATH", "secretary", "tokens"],
)  # fmt: skip
def test_name_is_not_secret(name: str) -> None:
    assert not is_secret_name(name)


def test_redact_hides_values_at_any_depth_and_keeps_the_rest() -> None:
    values = {
        "a": [{"api_key": "sk-1234567890"}],
        "password": {"x": "hunter22"},
        "max_tokens": 5,
        "hf_token": "${x}",
        "database_url": "postgresql://broker:s3cret@db.example:5432/registry?sslmode=require",
        "image": "docker://user/name:tag@sha256",
    }
    assert redact(values) == {
        "a": [{"api_key": "(secret)"}],
        "password": {"x": "(secret)"},
        "max_tokens": 5,
        "hf_token": "${x}",
        "database_url": "postgresql://broker:(secret)@db.example:5432/registry?sslmode=require",
        "image": "docker://user/name:tag@sha256",
    }
    assert secret_values(values) >= {"sk-1234567890", "hunter22"}
    assert scrub("got sk-1234567890 back", secret_values(values)) == "got (secret) back"


def test_headers_are_secret_whatever_their_names_and_ordinary_ones_stay_in_logs() -> None:
    traces = {
        "X-Team": "hcaik_01secretkey0123456789",
        "Authorization": "Bearer own-key-1",
        "Accept": "application/json",
    }
    engine = {"openai_default_headers": {"X-Model": "gpt-4o-mini-2024-07-18", "X-Tenant": 7}, "headers": ["a", "b"]}
    assert redact({"traces": {"headers": traces}, "engines": [engine]}) == {
        "traces": {"headers": dict.fromkeys(traces, "(secret)")},
        "engines": [{"openai_default_headers": {"X-Model": "(secret)", "X-Tenant": 7}, "headers": ["a", "b"]}],
    }
    found = secret_values([{"headers": {**traces, "X-Auth": "Basic ABCDEFGH23456789="}}, engine])
    assert found == {"hcaik_01secretkey0123456789", "Bearer own-key-1", "ABCDEFGH23456789="}


def test_number_is_a_secret_if_it_is_as_long_as_one() -> None:
    values = {"policy_api_key": 987654321012, "price_per_token": 0.002, "token": 7, "password": True}
    assert redact(values) == {**values, "policy_api_key": "(secret)"}
    assert secret_values(values) == {"987654321012"}


def test_known_secret_is_hidden_wherever_it_was_interpolated() -> None:
    values = {"policy_api_key": "sk-1234567890", "command": "serve --key sk-1234567890", "args": ["sk-1234567890"]}
    assert redact(values) == {"policy_api_key": "(secret)", "command": "serve --key (secret)", "args": ["(secret)"]}
    of_a_word = {"db_password": "postgres", "image": "postgres:16"}
    assert redact(of_a_word) == {"db_password": "(secret)", "image": "postgres:16"}


def test_environment_of_servers_holds_no_secret_variable() -> None:
    assert public_environment({"PATH": "/bin", "OPENAI_API_KEY": "x", "HF_TOKEN": "y"}) == {"PATH": "/bin"}


@pytest.fixture
def composition(root: Path, monkeypatch: pytest.MonkeyPatch) -> Composition:
    monkeypatch.setenv("JUDGE_KEY", "judge-secret")
    write(root / "env.yaml", "policy_api_key: policy-secret\nhf_token: hub-secret\nsandbox_api_key: box-secret\n")
    write(
        root / "main.yaml",
        """
        policy_model: {responses_api_models: {echo: {api_key: "${policy_api_key}", headers: {X-Team: team-secret}}}}
        observability: {traces: {endpoint: "http://collector:1", headers: {X-Team: team-secret}}}
        judge: {responses_api_models: {echo: {entrypoint: app.py, api_key: "${oc.env:JUDGE_KEY}"}}}
        mathy: {resources_servers: {mathy: {judge_model_server: {type: responses_api_models, name: judge}}}}
        solver: {responses_api_agents: {solver: {sandbox_provider: box}}}
        box: {docker: {api_key: "${sandbox_api_key}"}, default_metadata: {team: x}}
        """,
    )
    return compose([*GROUPS, "+config_paths=[main.yaml]"], roots=[root])


def test_server_sees_its_own_secrets_only(composition: Composition) -> None:
    del composition.values["observability"]  # which every server sees
    secrets = ("policy-secret", "judge-secret", "hub-secret", "box-secret", "team-secret")
    seen = {
        name: {secret for secret in secrets if secret in json.dumps(server_view(composition, name, ADDRESSES))}
        for name in composition.servers
    }
    assert seen == {
        "policy_model": {"policy-secret", "team-secret"},
        "judge": {"judge-secret"},
        "mathy": set(),
        "solver": {"box-secret"},
    }


def test_server_sees_the_addresses_of_those_it_calls_and_no_other(composition: Composition) -> None:
    view = server_view(composition, "solver", ADDRESSES)
    assert view["mathy"] == {
        "resources_servers": {
            "mathy": {"host": "127.0.0.1", "port": 1001, "url": "http://127.0.0.1:1001", "entrypoint": "app.py"}
        }
    }
    assert "judge" not in view
    assert view["solver"]["responses_api_agents"]["solver"]["port"] == 1002
    assert call_targets(composition, "solver") == ["mathy", "policy_model"]
    assert call_targets(composition, "mathy") == ["judge"]
    assert call_targets(composition, "policy_model") == []


def test_pipeline_sees_every_server_and_no_secret(composition: Composition) -> None:
    view = pipeline_view(composition, ADDRESSES)
    assert set(view) == {*composition.servers, "composition"}
    assert "secret" not in json.dumps(view)


def test_wildcard_host_is_reached_over_loopback() -> None:
    assert Address("0.0.0.0", 5).url == "http://127.0.0.1:5"
    assert Address("::1", 5).url == "http://[::1]:5"
