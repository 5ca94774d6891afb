"""Every route of every server, against every kind of caller."""

from __future__ import annotations

import math

import aiohttp
import pytest

from nemo_gym.config.launch import ServerLaunch, current_launch, set_current_launch, write_launch
from nemo_gym.contract.credentials import (
    CONTROL_TOKEN_HEADER,
    CREDENTIAL_HEADER,
    Role,
    ServerCredentials,
    StackKeys,
    check_control_token,
    issue_control_token,
)
from nemo_gym.contract.errors import ConfigError, CredentialError
from nemo_gym.http.webserver import bind
from responses_api_models.scripted_model.app import ScriptedModel
from tests.servers.plugins import LegacyAgent, PhraseEnvironment, ToolAgent
from tests.servers.stack import Stack, rollout

P, A, E, M, O = Role.PIPELINE, Role.AGENT, Role.ENVIRONMENT, Role.MODEL, Role.OPERATOR  # noqa: E741
PUBLIC_FACTS = {
    *("status", "model", "overrides_run", "row_access", "topologies"),
    *("limits", "needs_prompt", "enforce_row_sampling", "words_prompts", "overrides_metrics"),
}
SCRIPT = "responses_api_models/scripted_model/data/example_script.yaml"

ROUTES: list[tuple[str, str, str, set[Role]]] = [
    ("env", "POST", "/seed_session", {P}),
    ("env", "POST", "/verify", {P, O}),
    ("env", "POST", "/close", {P}),
    ("env", "POST", "/rows", {P, O}),
    ("env", "POST", "/verdict", {P, O}),
    ("env", "POST", "/aggregate_metrics", {P, O, A}),
    ("env", "GET", "/reverify_mode", {P, A, E, M, O}),
    ("agent", "POST", "/act", {P}),
    ("agent", "POST", "/cancel", {P, O}),
    ("agent", "POST", "/run", {P, O}),
    ("agent", "POST", "/v1/responses", {P, A, E, M, O}),
    ("agent", "POST", "/aggregate_metrics", {P, O, A}),
    ("legacy", "POST", "/run", {P, O}),
    ("model", "POST", "/sessions", {P, A}),
    ("model", "POST", "/sessions/x/finalize", {P, A}),
    ("model", "POST", "/sessions/x/abort", {P, A}),
    ("model", "POST", "/v1/chat/completions", {P, A, E, M, O}),
    ("model", "POST", "/v1/responses", {P, A, E, M, O}),
    ("model", "POST", "/v1/messages", {P, A, E, M, O}),
    ("model", "GET", "/v1/models", {P, A, E, M, O}),
]


@pytest.fixture(scope="module")
def matrix() -> object:
    stack = Stack()
    stack.add("env", PhraseEnvironment, Role.ENVIRONMENT)
    refs = {
        "resources_server": {"type": "resources_servers", "name": "env"},
        "model_server": {"type": "responses_api_models", "name": "model"},
    }
    stack.add("agent", ToolAgent, Role.AGENT, ("env", "model"), **refs)
    stack.add("legacy", LegacyAgent, Role.AGENT, ("env", "model"), **refs)
    stack.add("model", ScriptedModel, Role.MODEL, script=SCRIPT)
    yield stack
    stack.close()


async def status(stack: Stack, server: str, method: str, path: str, headers: dict[str, str]) -> int:
    url = stack.url(server) + path
    async with aiohttp.ClientSession() as session:
        async with session.request(method, url, headers=headers, json={} if method == "POST" else None) as reply:
            await reply.read()
            return reply.status


@pytest.mark.parametrize(("server", "method", "path", "roles"), ROUTES, ids=[f"{r[0]}{r[2]}" for r in ROUTES])
async def test_route_serves_its_roles_and_refuses_everybody_else(
    matrix: Stack, server: str, method: str, path: str, roles: set[Role]
) -> None:
    keys = matrix.keys
    genuine = keys.caller(P, "collector", server)
    body, _, mac = genuine.rpartition(".")
    refused = {
        "none": {},
        "empty": {CREDENTIAL_HEADER: ""},
        "another audience": {CREDENTIAL_HEADER: keys.caller(P, "collector", "elsewhere")},
        "another stack": {CREDENTIAL_HEADER: StackKeys.generate().caller(P, "collector", server)},
        "forged signature": {CREDENTIAL_HEADER: f"{body}.{mac[:-2]}{'A' if mac[-2:] != 'AA' else 'B'}A"},
        "changed role": {CREDENTIAL_HEADER: genuine.replace(".pipeline.", ".operator.")},
        "changed caller": {CREDENTIAL_HEADER: genuine.replace(".collector.", ".somebody.")},
        "not a credential": {CREDENTIAL_HEADER: "ngc1.pipeline"},
        "a control token": {CREDENTIAL_HEADER: issue_control_token(b"k" * 32, "environment", rollout())},
        "unknown inference token": {"Authorization": "Bearer ngi1_guess"},
    }
    got = {name: await status(matrix, server, method, path, headers) for name, headers in refused.items()}
    assert got == dict.fromkeys(refused, 401)
    for role in Role:
        answer = await status(matrix, server, method, path, {CREDENTIAL_HEADER: keys.caller(role, "x", server)})
        if role in roles:
            assert answer not in (401, 403) or path.startswith("/sessions/"), (role, answer)
        else:
            assert answer == 403, (role, answer)


@pytest.mark.parametrize("path", ["/", "/health", "/ready"])
@pytest.mark.parametrize("server", ["env", "agent", "model"])
async def test_health_is_open_and_says_nothing_private(matrix: Stack, server: str, path: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(matrix.url(server) + path) as reply:
        assert reply.status == 200
        assert {*(await reply.json())} <= PUBLIC_FACTS


async def test_ready_of_an_agent_says_whether_it_overrides_run(matrix: Stack) -> None:
    said = {}
    for name in ("agent", "legacy"):
        async with aiohttp.ClientSession() as session, session.get(f"{matrix.url(name)}/ready") as reply:
            said[name] = (await reply.json())["overrides_run"]
    assert said == {"agent": False, "legacy": True}


@pytest.mark.parametrize("hook", ["compute_metrics", "compute_repeat_metrics", "get_key_metrics"])
def test_an_agent_says_whether_it_has_metrics_of_its_own(matrix: Stack, hook: str) -> None:
    class Counts(LegacyAgent):
        pass

    assert not Counts.has_own_metrics()
    setattr(Counts, hook, lambda self, found: {})
    assert Counts.has_own_metrics()
    assert matrix.servers["legacy"].facts()["overrides_metrics"] is False


async def test_verify_needs_the_control_token_of_its_attempt(matrix: Stack) -> None:
    client = matrix.client()
    row = {"responses_create_params": {"input": "x"}, "phrase": "p"}
    other = {"_ng_session": {"rollout": rollout("other").model_dump()}}
    seeded = await client.post("env", "/seed_session", json={**row, **other})
    token = (await seeded.json())["control_token"]
    body = {**row, "response": {"output": []}, "_ng_session": {"rollout": rollout("mine").model_dump()}}
    for headers in ({}, {"X-NeMo-Gym-Control-Token": token}, {"X-NeMo-Gym-Control-Token": "ngt1.9999999999.AAAA"}):
        reply = await client.post("env", "/verify", json=body, headers=headers)
        assert reply.status == 401
        closing = await client.post("env", "/close", json={"rollout": rollout("mine").model_dump()}, headers=headers)
        assert closing.status == 401


async def test_control_token_whose_expiry_is_no_time_is_refused(matrix: Stack) -> None:
    client = matrix.client()
    for expiry in ("9" * 5000, "9" * 400, "", "-1", "x"):
        headers = {CONTROL_TOKEN_HEADER: f"ngt1.{expiry}.mac"}
        reply = await client.post("env", "/close", json={"rollout": rollout().model_dump()}, headers=headers)
        assert reply.status == 401, await reply.text()


def test_control_token_is_refused_when_it_expired_or_was_changed() -> None:
    key = b"k" * 32
    token = issue_control_token(key, "environment", rollout())
    check_control_token(key, "environment", rollout(), token)
    expired = issue_control_token(key, "environment", rollout(), ttl_s=-1)
    kind, expiry, mac = token.split(".")
    for wrong, subject, who in (
        (expired, "environment", rollout()),
        (f"{kind}.{int(expiry) + 9}.{mac}", "environment", rollout()),
        (token, "session", rollout()),
        (token, "environment", rollout(attempt=2)),
        (token, "environment", rollout(run_id="another")),
        (None, "environment", rollout()),
        ("nonsense", "environment", rollout()),
    ):
        with pytest.raises(CredentialError):
            check_control_token(key, subject, who, wrong)


def test_credential_survives_names_with_dots_and_slashes() -> None:
    keys = StackKeys.generate()
    server = keys.for_server("a.b/c d", "environment", ())
    caller = server.check(keys.caller("agent", "x.y.ngc1", "a.b/c d"))
    assert (caller.role, caller.name) == (Role.AGENT, "x.y.ngc1")


def test_credentials_are_in_no_representation() -> None:
    keys = StackKeys.generate()
    server = keys.for_server("env", "environment", ("model",))
    launch = ServerLaunch(instance="env", config={"api_key": "secret-key"}, credentials=server)
    shown = f"{keys!r} {server!r} {launch!r}"
    assert keys.to_hex() not in shown and server.audience_key.hex() not in shown
    assert server.outgoing["model"] not in shown and "secret-key" not in shown


def test_launch_arrives_unchanged_over_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = StackKeys.generate().for_server("env", "environment", ("model",))
    launch = ServerLaunch(instance="env", config={"env": {}}, credentials=credentials, run_id="r7", state_dir="/s")
    fd = write_launch(launch)
    set_current_launch(None)
    monkeypatch.setenv("NEMO_GYM_LAUNCH_FD", str(fd))
    try:
        assert current_launch() == launch
    finally:
        set_current_launch(None)


def test_launch_keeps_infinity_and_keys_that_are_numbers() -> None:
    launch = ServerLaunch(instance="env", config={"env": {"timeout_s": math.inf, "logit_bias": {50256: -math.inf}}})
    arrived = ServerLaunch.from_json(launch.to_json())
    assert arrived.config == {"env": {"timeout_s": math.inf, "logit_bias": {"50256": -math.inf}}}


def test_server_refuses_to_listen_for_other_machines_without_credentials() -> None:
    config = PhraseEnvironment.config_from(
        "env", {"env": {"resources_servers": {"env": {"entrypoint": "app.py", "host": "0.0.0.0", "port": 0}}}}
    )
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0"):
        bind(config, secured=False)


def test_server_names_the_port_and_the_fix_when_it_is_in_use(stack: Stack) -> None:
    stack.add("env", PhraseEnvironment, Role.ENVIRONMENT)
    config = stack.servers["env"].config
    with pytest.raises(ConfigError, match=rf"{config.port}.*another 'port'"):
        bind(config, secured=True)


def test_server_credentials_round_trip() -> None:
    credentials = StackKeys.generate().for_server("env", "environment", ("model",))
    assert ServerCredentials.from_dict(credentials.to_dict()) == credentials
