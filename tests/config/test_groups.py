"""Choosing files by group, and what the composition says was chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_gym.config.check import notices
from nemo_gym.config.compose import compose
from nemo_gym.contract.errors import ConfigError

from .conftest import write

GROUPS = ("agent=solver", "environment=mathy", "model=echo")


def test_groups_are_wired_together_by_instance_name(root: Path) -> None:
    composition = compose(GROUPS, roots=[root])
    assert composition.chosen == {"agent": "solver", "environment": "mathy", "model": "policy_model"}
    block = composition.servers["solver"].values
    assert block["resources_server"] == {"type": "resources_servers", "name": "mathy"}
    assert block["model_server"] == {"type": "responses_api_models", "name": "policy_model"}


def test_plugin_own_file_serves_as_group_file(root: Path) -> None:
    write(
        root / "resources_servers/mathy/configs/mathy.yaml",
        "from_plugin: {resources_servers: {mathy: {entrypoint: app.py}}}\n",
    )
    (root / "configs/environment/mathy.yaml").unlink()
    assert compose(GROUPS, roots=[root]).chosen["environment"] == "from_plugin"


def test_nearer_root_wins(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    write(other / "configs/model/echo.yaml", "mine: {responses_api_models: {echo: {entrypoint: app.py}}}\n")
    assert compose(GROUPS, roots=[other, root]).chosen["model"] == "mine"


def test_group_may_be_a_path(root: Path) -> None:
    write(root / "elsewhere.yaml", "mine: {responses_api_models: {echo: {entrypoint: app.py}}}\n")
    assert compose(["model=elsewhere.yaml"], roots=[root]).chosen["model"] == "mine"


def test_unknown_choice_is_an_error_that_lists_what_there_is(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown environment 'mathi' \(did you mean 'mathy'\?\); there are: mathy"):
        compose(["environment=mathi"], roots=[root])


def test_missing_choice_is_an_error_that_names_the_group(root: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"solver\.responses_api_agents\.solver\.resources_server\.name .*add environment="
    ):
        compose(["agent=solver", "model=echo"], roots=[root])


def test_run_file_chooses_groups_and_the_command_line_wins(root: Path) -> None:
    write(root / "configs/run/nightly.yaml", "agent: solver\nenvironment: mathy\nmodel: nothing\nnum_repeats: 4\n")
    composition = compose(["run=nightly", "model=echo"], roots=[root])
    assert composition.chosen["model"] == "policy_model"
    assert composition.run_values()["num_repeats"] == 4


def test_run_file_wins_over_agent_and_agent_over_environment(root: Path) -> None:
    write(root / "configs/run/r.yaml", "_x: run\n")
    agent = (root / "configs/agent/solver.yaml").read_text()
    environment = (root / "configs/environment/mathy.yaml").read_text()
    write(root / "configs/agent/solver.yaml", agent + "_x: agent\n_y: agent\n")
    write(root / "configs/environment/mathy.yaml", environment + "_x: env\n_y: env\n_z: env\n")
    values = compose([*GROUPS, "run=r"], roots=[root]).values
    assert (values["_x"], values["_y"], values["_z"]) == ("run", "agent", "env")


def test_environment_own_agent_steps_aside_for_a_chosen_one(root: Path) -> None:
    write(
        root / "configs/environment/mathy.yaml",
        """
        mathy: {resources_servers: {mathy: {entrypoint: app.py}}}
        mathy_simple_agent:
          responses_api_agents:
            solver:
              entrypoint: app.py
              resources_server: {type: resources_servers, name: mathy}
              model_server: {type: responses_api_models, name: policy_model}
        """,
    )
    assert compose(["environment=mathy", "model=echo"], roots=[root]).chosen["agent"] == "mathy_simple_agent"
    assert set(compose(GROUPS, roots=[root]).servers) == {"solver", "mathy", "policy_model"}


def test_unset_reference_names_are_filled_with_the_choice(root: Path) -> None:
    write(
        root / "configs/agent/solver.yaml",
        """
        solver:
          responses_api_agents:
            solver:
              entrypoint: app.py
              resources_server: {type: resources_servers, name: "???"}
              model_server: {type: responses_api_models, name: "???"}
        """,
    )
    assert compose(GROUPS, roots=[root]).servers["solver"].values["resources_server"]["name"] == "mathy"


def test_group_file_with_two_instances_is_an_error_unless_one_has_its_name(root: Path) -> None:
    two = "{a}: {{resources_servers: {{mathy: {{entrypoint: app.py}}}}}}\nb: {{resources_servers: {{other: {{}}}}}}\n"
    write(root / "configs/environment/mathy.yaml", two.format(a="mathy"))
    assert compose(["environment=mathy"], roots=[root]).chosen["environment"] == "mathy"
    write(root / "configs/environment/pair.yaml", two.format(a="a"))
    with pytest.raises(ConfigError, match=r"environment=pair must define one instance .* found several \(a, b\)"):
        compose(["environment=pair"], roots=[root])


def test_agent_may_name_an_instance_of_a_given_file(root: Path) -> None:
    config = (root / "configs/agent/solver.yaml").read_text()
    write(root / "main.yaml", config.replace("solver:\n  responses_api_agents", "mine:\n  responses_api_agents", 1))
    composition = compose(["+config_paths=[main.yaml]", "agent=mine", *GROUPS[1:]], roots=[root])
    assert composition.chosen["agent"] == "mine"
    assert composition.run_values() == {"agent_name": "mine"}  # of every row, as in NeMo Gym


def test_sandbox_group_makes_a_block_and_a_mapping_stays_one(root: Path) -> None:
    write(root / "configs/sandbox/local.yaml", "sandbox: {local: {}}\n")
    config = (root / "configs/agent/solver.yaml").read_text()
    write(root / "configs/agent/solver.yaml", config + "      sandbox_provider: sandbox\n")
    composition = compose([*GROUPS, "sandbox=local"], roots=[root])
    assert composition.values["sandbox"] == {"local": {}}
    assert composition.chosen["sandbox"] == "sandbox"


def test_variable_of_a_group_file_is_legal_on_the_command_line_and_required(root: Path) -> None:
    config = (root / "configs/agent/solver.yaml").read_text()
    write(root / "configs/agent/solver.yaml", config + "      max_steps: ${steps}\nsteps: ???\n")
    assert compose([*GROUPS, "steps=4"], roots=[root]).servers["solver"].values["max_steps"] == 4
    with pytest.raises(ConfigError, match=r"steps .* is not set: add steps="):
        compose(GROUPS, roots=[root])


def test_model_is_the_gateway_when_a_server_needs_one_and_none_is_chosen(root: Path) -> None:
    write(
        root / "configs/model/gateway.yaml",
        policy_model={"responses_api_models": {"echo": {"entrypoint": "app.py", "base_url": "by default"}}},
    )
    composition = compose(["agent=solver", "environment=mathy"], roots=[root])
    assert composition.chosen["model"] == "policy_model"
    assert composition.servers["policy_model"].values["base_url"] == "by default"
    assert "model" not in compose(["environment=mathy"], roots=[root]).chosen


def test_default_model_steps_aside_for_a_model_that_a_file_defines(root: Path) -> None:
    write(root / "configs/model/gateway.yaml", policy_model={"responses_api_models": {"none_such": {}}})
    write(root / "mine.yaml", policy_model={"responses_api_models": {"echo": {"entrypoint": "app.py"}}})
    composition = compose(["agent=solver", "environment=mathy", "+config_paths=[mine.yaml]"], roots=[root])
    assert composition.servers["policy_model"].implementation == "echo"


def test_extra_root_that_does_not_exist_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", f"{root}:{root}/no-such-folder")
    composition = compose(["agent=solver", "environment=mathy", "model=echo"])
    assert f"NEMO_GYM_EXTRA_ROOTS names '{root}/no-such-folder', which is no folder" in notices(composition)
    with pytest.raises(ConfigError, match=r"NEMO_GYM_EXTRA_ROOTS .*no-such-folder does not exist"):
        compose(["agent=no_such_agent"])
