"""What is refused, and that each refusal names the key, the file and the fix."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from nemo_gym.cli.run import _changed_keys
from nemo_gym.config.check import check_everything, notices
from nemo_gym.config.compose import compose
from nemo_gym.config.composition import Composition
from nemo_gym.contract.errors import ConfigError
from nemo_gym.stack.stack import CONFIG_FILE, _save_config

from .conftest import write

GROUPS = ("agent=solver", "environment=mathy", "model=echo")


def checked(root: Path, *words: str) -> Composition:
    repository = Path(__file__).parents[2]
    composition = compose([*GROUPS, *words], roots=[root, repository])
    check_everything(composition)
    return composition


def test_whole_composition_passes(root: Path) -> None:
    assert set(checked(root).servers) == {"policy_model", "mathy", "solver"}


def test_unknown_top_level_key_of_a_file_is_refused(root: Path) -> None:
    write(root / "main.yaml", "num_repeat: 3\n")
    with pytest.raises(ConfigError, match=r"main\.yaml: unknown key 'num_repeat' \(did you mean 'num_repeats'\?\)"):
        checked(root, "+config_paths=[main.yaml]")
    checked(root, "+config_paths=[main.yaml]", "error_on_unknown_keys=false")


def test_added_key_that_resembles_a_known_one_causes_a_notice(root: Path) -> None:
    (notice,) = notices(checked(root, "+num_repeat=3", "+my_own=1"))
    assert notice.startswith("the command line: unknown key 'num_repeat' (did you mean 'num_repeats'?); nothing reads")


def test_attempt_that_may_outlast_its_model_session_causes_a_notice(root: Path) -> None:
    words = ["run_timeout_s=90000", "wall_clock_s=80000"]
    (notice,) = notices(checked(root, *words))
    assert notice.startswith("policy_model: session_ttl_s=21600 is shorter than wall_clock_s=80000")
    assert notices(checked(root, *words, "++policy_model.responses_api_models.echo.session_ttl_s=80000")) == []


def test_added_key_with_a_name_of_its_own_causes_no_notice(root: Path) -> None:
    write(root / "env.yaml", "openai_api_key: abc\njudge_model_name: j\njudge_base_url: http://127.0.0.1:1/v1\n")
    assert notices(checked(root, "+user_model_name=u")) == []


def test_same_configuration_as_that_of_a_stored_run_has_no_changed_keys(root: Path) -> None:
    word = "++mathy.resources_servers.mathy.strictness="
    stored = compose([*GROUPS, f"{word}nan", "++solver.responses_api_agents.solver.max_steps=3"], roots=[root])
    _save_config(stored, root)
    assert _changed_keys(stored, root / CONFIG_FILE) == []
    changed = compose([*GROUPS, f"{word}2", "++solver.responses_api_agents.solver.max_steps=3.0"], roots=[root])
    assert _changed_keys(changed, root / CONFIG_FILE) == ["mathy.resources_servers.mathy.strictness"]


def test_values_that_an_earlier_version_stored_and_that_are_secret_now_are_no_changed_keys(root: Path) -> None:
    block = "++policy_model.responses_api_models.echo"
    words = (
        *GROUPS,
        "policy_api_key=sk-1234567890",
        f"{block}.headers.X-Team=blue",
        f"{block}.args='-k sk-1234567890'",
    )
    composed = compose(words, roots=[root])
    (root / CONFIG_FILE).write_text(yaml.safe_dump(composed.values))
    assert _changed_keys(composed, root / CONFIG_FILE) == []


def test_top_level_variable_that_is_used_is_accepted(root: Path) -> None:
    write(
        root / "main.yaml",
        "my_url: http://x/v1\npolicy_model: {responses_api_models: {echo: {base_url: '${my_url}'}}}\n",
    )
    assert checked(root, "+config_paths=[main.yaml]").servers["policy_model"].values["base_url"] == "http://x/v1"


def test_run_without_an_agent_is_told_to_choose_one(root: Path) -> None:
    words = ("environment=mathy", "model=echo")
    composition = compose([*words, "input=rows.jsonl", "output=out.jsonl"], roots=[root])
    with pytest.raises(ConfigError, match=r"a rollout run needs an agent, and no file defines one; add agent=…"):
        check_everything(composition)
    check_everything(compose(words, roots=[root]))


@pytest.mark.parametrize("words", [["input=rows.jsonl"], ["output=out.jsonl"], ["input=a.jsonl", "output=b.jsonl"]])
def test_service_is_told_that_its_jobs_come_over_http(root: Path, words: list[str]) -> None:
    for how in ("serve={}", "join=http://127.0.0.1:8210"):
        with pytest.raises(ConfigError, match=r"leave out (serve|input=)"):
            checked(root, f"+{how}", *words)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("solver.responses_api_agents.solver.max_step=1", r"unknown key 'max_step' \(did you mean 'max_steps'\?\)"),
        ("mathy.resources_servers.mathy.strictnes=1", r"unknown key 'strictnes' \(did you mean 'strictness'\?\)"),
        ("policy_model.responses_api_models.echo.api_kye=1", r"did you mean 'api_key'\?"),
        ("mathy.resources_servers.mathy.port=ten", "port must be a whole number from 0"),
        ("mathy.resources_servers.mathy.port=70000", "port must be a whole number from 0"),
        (
            "mathy.resources_servers.mathy.num_workers=0",
            "num_workers is the number of server processes; it must be a whole number ≥ 1",
        ),
        ("mathy.resources_servers.mathy.entrypoint=nope.py", r"entrypoint 'nope\.py' does not exist"),
        ("max_restarts=many", "max_restarts must be a number"),
        ("input=rows.jsonl", r"add output="),
        ("topology=agent_in_envv", r"unknown topology 'agent_in_envv' \(did you mean 'agent_in_env'\?\)"),
    ],
)
def test_wrong_setting_is_refused_with_the_fix(root: Path, word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(root, word)


@pytest.mark.parametrize("prefix", ["+", "+serve."])
def test_cap_for_an_instance_that_does_not_exist_is_refused_with_the_nearest_name(root: Path, prefix: str) -> None:
    checked(root, f"{prefix}agent_caps.solver=4", f"{prefix}environment_caps.mathy=4")
    with pytest.raises(ConfigError, match=r"agent_caps: unknown key 'solvr' \(did you mean 'solver'\?\)"):
        checked(root, f"{prefix}agent_caps.solvr=4")
    with pytest.raises(ConfigError, match="environment_caps: unknown key 'solver'; known keys are mathy"):
        checked(root, f"{prefix}environment_caps.solver=4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "x: {resource_servers: {mathy: {entrypoint: app.py}}}\n",
            r"x\.resource_servers is not a server type \(did you mean 'resources_servers'",
        ),
        ("x: {resources_servers: {}}\n", r"x\.resources_servers must hold one implementation"),
        ("x: {resources_servers: {mathy: app.py}}\n", r"x\.resources_servers\.mathy must be a block of keys"),
        ("x: {resources_servers: {mathy: {}}, port: 3}\n", "x holds 'port' beside resources_servers"),
        ("x: {entrypoint: app.py}\n", "x has an 'entrypoint' but neither server type"),
        ("x: {mathy: {entrypoint: app.py}}\n", "x lacks the server type above its implementation"),
    ],
)
def test_almost_server_is_refused_unless_allowed(root: Path, text: str, message: str) -> None:
    write(root / "main.yaml", text)
    with pytest.raises(ConfigError, match=message):
        checked(root, "+config_paths=[main.yaml]")
    compose(["+config_paths=[main.yaml]", "error_on_almost_servers=false"], roots=[root])


def test_reference_to_nobody_is_refused_with_the_nearest_name(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"resources_server: no server instance 'mathi' \(did you mean 'mathy'\?\)"):
        checked(root, "solver.responses_api_agents.solver.resources_server.name=mathi")


def test_reference_to_another_type_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="'policy_model' is one of responses_api_models, not of resources_servers"):
        checked(root, "solver.responses_api_agents.solver.resources_server.name=policy_model")


def test_one_name_for_two_servers_names_both_files(root: Path) -> None:
    write(root / "main.yaml", "mathy: {resources_servers: {other: {entrypoint: app.py}}}\n")
    with pytest.raises(ConfigError, match=r"'mathy' is defined more than once: .*mathy\.yaml\) and .*main\.yaml\)"):
        checked(root, "+config_paths=[main.yaml]")


def test_unknown_implementation_is_refused_with_the_nearest_name(root: Path) -> None:
    write(root / "main.yaml", "x: {resources_servers: {mathyy: {entrypoint: app.py}}}\n")
    with pytest.raises(
        ConfigError, match=r"no implementation 'mathyy' of resources_servers \(did you mean 'mathy'\?\)"
    ):
        checked(root, "+config_paths=[main.yaml]")


def test_every_unset_value_is_reported_at_once(root: Path) -> None:
    write(
        root / "main.yaml",
        "_a: ???\n_b: {c: [1, '???']}\n_d: '${_a}'\n_e: '${nope}'\n_f: '${oc.env:NO_SUCH_VARIABLE}'\n_g: '${nope}'\n",
    )
    with pytest.raises(ConfigError) as error:
        checked(root, "+config_paths=[main.yaml]")
    assert error.value.details["keys"] == ["_a", "_b.c.1", "_d", "_e", "_f", "_g"]
    assert error.value.message.count("add nope=") == 1  # for the two that need it
    assert "_a (" in error.value.message and "main.yaml" in error.value.message
    assert "environment variable NO_SUCH_VARIABLE, which is not set" in error.value.message


def test_nothing_to_run_is_an_error(root: Path) -> None:
    with pytest.raises(ConfigError, match="no file defines a server"):
        check_everything(compose([], roots=[root]))


def test_plugin_that_takes_any_key_is_not_checked(root: Path) -> None:
    app = root / "resources_servers/mathy/app.py"
    app.write_text(
        app.read_text().replace("    strictness", "    model_config = ConfigDict(extra='allow')\n    strictness")
    )
    checked(root, "mathy.resources_servers.mathy.whatever=1")


def test_aliases_of_fields_are_known(root: Path) -> None:
    app = root / "resources_servers/mathy/app.py"
    app.write_text(app.read_text().replace("strictness: int = 1", "strictness: int = Field(1, alias='strict')"))
    checked(root, "mathy.resources_servers.mathy.strict=2")


def test_copied_plugin_whose_file_still_runs_the_original_is_told(root: Path) -> None:
    copied = root / "resources_servers" / "mathy_two"
    shutil.copytree(root / "resources_servers/mathy", copied)
    own = copied / "configs/mathy_two.yaml"
    write(own, mathy_two={"resources_servers": {"mathy": {"entrypoint": "app.py"}}})
    groups = ["agent=solver", "environment=mathy_two", "model=echo"]
    (told,) = notices(compose(groups, roots=[root]))
    assert told == (
        f"{own} runs the plugin 'mathy' and not 'mathy_two', in whose folder it is; to run that one, write"
        " 'resources_servers: {mathy_two: …}' there"
    )
    write(own, mathy_two={"resources_servers": {"mathy_two": {"entrypoint": "app.py"}}})
    assert not notices(compose(groups, roots=[root]))


def test_second_plugin_of_a_name_is_told(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "resources_servers" / "mathy"
    write(other / "app.py", "")
    groups = ["agent=solver", "environment=mathy", "model=echo"]
    (told,) = notices(compose(groups, roots=[root, tmp_path / "other"]))
    assert told == f"there are two plugins 'mathy': {root / 'resources_servers/mathy'} is used, {other} is not"
    assert not notices(compose(groups, roots=[root, root]))


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ("temprature=0.5", r"responses_create_params: unknown key 'temprature' \(did you mean 'temperature'\?\)"),
        ("temperature=abc", "responses_create_params: temperature: Input should be a valid number"),
        ("top_k=5", "responses_create_params: 'top_k' is no parameter of a response; the run key top_k= sets it"),
    ],
)
def test_parameters_of_a_response_are_checked(root: Path, parameter: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(root, f"+responses_create_params.{parameter}")


def test_parameter_that_resembles_none_is_for_the_agent(root: Path) -> None:
    checked(root, "+responses_create_params.my_agents_own=5")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("+serve.port=abc", "^serve.port: Input should be a valid integer"),
        ("sandbox=[local]", r"the command line: sandbox= takes one name, got \['local'\]"),
        ("hosts=5", "^hosts must be a block of keys$"),
        ("observability=5", "^observability must be a block of keys$"),
        ("+observability.traces=5", "^observability.traces must be a block of keys$"),
        ("stop=5", "^stop: must be a text or a list of texts"),
        ("+observability.traces.endpont=x", r"'observability.traces.endpont' \(did you mean 'endpoint'\?\)"),
    ],
)
def test_wrong_value_is_named_by_the_key_that_was_typed(root: Path, word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(root, word)
