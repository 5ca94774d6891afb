"""Whether agent, environment, sandbox and topology fit together."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_gym.cli.sandbox_check import check_sandbox
from nemo_gym.config import compatibility, sandbox_blocks
from nemo_gym.config.check import check_everything
from nemo_gym.config.compatibility import Side, check_composition
from nemo_gym.config.compose import compose
from nemo_gym.config.keys import NEMO_GYM_KEYS, UNREAD_NEMO_GYM_KEYS
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.session import Topology
from nemo_gym.gateway.model_calls import ModelCallCaptureConfig
from nemo_gym.sandbox.base import SandboxCapabilities
from nemo_gym.sandbox.providers.local import LocalProvider

from .conftest import write

NONE, OUTSIDE, INSIDE, WHOLE = Topology
ANY = Side("any")
CLI = Side("cli", tuple(Topology), box_topologies=tuple(Topology), tool_access=("mcp",))


def test_default_is_the_environments_first_that_the_agent_serves() -> None:
    environment = Side("env", (INSIDE, OUTSIDE))
    assert check_composition(Side("a", (OUTSIDE, INSIDE)), environment, sandbox="local") is INSIDE
    assert check_composition(Side("a", (OUTSIDE,)), environment, sandbox="local") is OUTSIDE
    assert check_composition(ANY, environment, sandbox="local") is INSIDE
    assert check_composition(ANY, ANY, sandbox=None) is None


@pytest.mark.parametrize(
    ("agent", "environment", "topology", "sandbox", "message"),
    [
        (ANY, Side("env", (INSIDE,)), OUTSIDE, "local", "'env' does not support .*; use topology=agent_in_env"),
        (Side("a", (INSIDE,)), Side("env", (INSIDE, WHOLE)), WHOLE, "local", "'a' cannot run in .*; use topology="),
        (Side("a", (NONE,)), Side("env", (INSIDE,)), None, "local", "no topology in common"),
        (Side("a", (NONE,)), Side("env", (INSIDE,)), INSIDE, "local", "choose another agent or environment"),
        (ANY, Side("env", (INSIDE,)), None, None, "needs a sandbox: add sandbox=local or sandbox=docker"),
        (CLI, Side("env", (NONE, OUTSIDE)), None, None, "'cli' in topology 'none' needs a sandbox: .*docker$"),
        (CLI, Side("env", (INSIDE, OUTSIDE), tool_access=("exec",)), OUTSIDE, "local",
         "'env' is reached by exec, and agent 'cli' can only use mcp; use topology=agent_in_env"),
        (Side("a", (OUTSIDE,), tool_access=("exec",)),
         Side("env", (OUTSIDE,), tool_access=("mcp", "http")), None, None,
         "'env' is reached by mcp or http, and agent 'a' can only use exec; no topology works for this pair"),
    ],
)  # fmt: skip
def test_pair_that_cannot_work_is_refused_with_what_would(
    agent: Side, environment: Side, topology: Topology | None, sandbox: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_composition(agent, environment, sandbox=sandbox, topology=topology)


def test_topology_in_which_the_world_is_out_of_reach_is_not_chosen() -> None:
    environment = Side("env", (OUTSIDE, INSIDE), tool_access=("exec",))
    assert check_composition(CLI, environment, sandbox="local") is INSIDE
    assert (
        check_composition(Side("a", (INSIDE, OUTSIDE), tool_access=("exec",)), environment, sandbox="local") is OUTSIDE
    )


def composition(root: Path, *words: str) -> Topology | None:
    write(root / "configs/sandbox/local.yaml", "sandbox: {local: {}}\n")
    repository = Path(__file__).parents[2]
    return check_everything(
        compose(["agent=solver", "environment=mathy", "model=echo", *words], roots=[root, repository])
    )


def test_class_attribute_declares_what_an_environment_supports(root: Path) -> None:
    assert composition(root) is NONE
    agent = "solver.responses_api_agents.solver"
    assert composition(root, "topology=C", "sandbox=local", f"{agent}.sandbox_provider=sandbox") is INSIDE
    with pytest.raises(ConfigError, match="'mathy' does not support topology 'env_sandboxed'"):
        composition(root, "topology=B")


def test_agent_that_declares_no_access_is_not_paired_with_a_world_that_is_reached_by_commands(root: Path) -> None:
    environment = "+mathy.resources_servers.mathy"
    world = (f"{environment}.topologies=[env_sandboxed]", "topology=B", "error_on_unknown_keys=false")
    assert composition(root, *world, f"{environment}.tool_access=[http]") is OUTSIDE
    with pytest.raises(ConfigError, match="reached by exec, and agent 'solver' can only use mcp or http"):
        composition(root, *world, f"{environment}.tool_access=[exec]")


def test_block_declares_what_an_agent_serves(root: Path) -> None:
    with pytest.raises(
        ConfigError, match="agent 'solver' runs in whole_interaction, environment 'mathy' supports none"
    ):
        composition(root, "solver.responses_api_agents.solver.topologies=[whole_interaction]")


@pytest.mark.parametrize(
    "key",
    [
        "+mathy.resources_servers.mathy.topologies",
        "+mathy.resources_servers.mathy.requires",
        "+solver.responses_api_agents.solver.box_topologies",
        "+solver.responses_api_agents.solver.tool_access",
    ],
)
@pytest.mark.parametrize("value", ["5", "[none,5]", "{a: b}"])
def test_declaration_that_is_no_name_and_no_list_of_names_is_refused(root: Path, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key[1:]} must be a name or a list of names, got "):
        composition(root, f"{key}={value}", "error_on_unknown_keys=false")


@pytest.mark.parametrize("value", ["3", "true", "[sandbox]"])
def test_sandbox_provider_that_is_no_name_and_no_block_is_refused(root: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"mathy\.sandbox_provider: .* must be the name of a block or of a provider"):
        composition(root, f"mathy.resources_servers.mathy.sandbox_provider={value}")


def test_topology_that_needs_a_box_is_refused_without_sandbox(root: Path) -> None:
    with pytest.raises(ConfigError, match="needs a sandbox: add sandbox=local"):
        composition(root, "topology=C", "solver.responses_api_agents.solver.sandbox_provider=sandbox")


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("{locl: {}}", r"unknown sandbox provider 'locl' \(did you mean 'local'\?\)"),
        ("{local: {}, docker: {}}", "it names 'local', 'docker'"),
        ("{}", "must name one provider"),
    ],
)
def test_wrong_sandbox_block_is_refused(root: Path, block: str, message: str) -> None:
    write(root / "main.yaml", f"sandbox: {block}\n")
    with pytest.raises(ConfigError, match=message):
        composition(root, "+config_paths=[main.yaml]", "solver.responses_api_agents.solver.sandbox_provider=sandbox")


def test_sandbox_block_that_does_not_exist_is_refused_with_the_nearest_name(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"'sandbx' is neither a block .* \(did you mean 'sandbox'\?\)"):
        composition(root, "sandbox=local", "solver.responses_api_agents.solver.sandbox_provider=sandbx")


def test_environment_that_needs_boxes_is_refused_without_sandbox(root: Path) -> None:
    with pytest.raises(ConfigError, match="environment 'mathy' needs a sandbox: add sandbox=local"):
        composition(root, "mathy.resources_servers.mathy.sandbox_provider=sandbox")


def sandboxed(root: Path, *words: str) -> None:
    """Compose with boxes, and ask the real provider."""
    write(root / "configs/sandbox/local.yaml", "sandbox: {local: {}}\n")
    repository = Path(__file__).parents[2]
    agent = "solver.responses_api_agents.solver.sandbox_provider=sandbox"
    words = ("agent=solver", "environment=mathy", "model=echo", "sandbox=local", "topology=C", agent, *words)
    composed = compose(words, roots=[root, repository])
    check_sandbox(composed, check_everything(composed))


def test_provider_that_can_do_what_is_asked_passes(root: Path) -> None:
    sandboxed(root)


def test_capability_that_the_provider_lacks_is_refused_with_its_reason(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"'local' cannot serve .* nested_containers: .*\. Others: .*sandbox=docker"):
        sandboxed(root, "mathy.resources_servers.mathy.requires=[nested_containers]")


def test_capability_that_does_not_exist_is_refused_with_its_right_name(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such capability \(did you mean 'nested_containers'\?\); there are"):
        sandboxed(root, "mathy.resources_servers.mathy.requires=[nested_containerz]")
    with pytest.raises(ConfigError, match=r"nested_containerz: there is no such capability"):
        sandboxed(root, "mathy.resources_servers.mathy.requires=nested_containerz")


class MethodProvider(LocalProvider):
    def capabilities(self) -> SandboxCapabilities:  # type: ignore[override]
        return LocalProvider.capabilities.__get__(self)  # type: ignore[no-any-return]


def test_provider_whose_capabilities_are_a_method_is_told_what_they_must_be(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sandbox_blocks.registered_providers, "local", MethodProvider)
    with pytest.raises(ConfigError, match="'local': 'capabilities' must be a property that returns SandboxCap"):
        sandboxed(root)


def test_missing_provider_binary_is_one_error_that_says_what_to_install(root: Path) -> None:
    with pytest.raises(ConfigError) as error:
        sandboxed(root, "sandbox.local.bwrap=no-such-program")
    assert error.value.message.count("no-such-program") == 1
    assert "install the package bubblewrap" in error.value.message


def test_agent_that_the_environment_is_not_made_for_is_refused_by_name(root: Path) -> None:
    mathy = {"entrypoint": "app.py", "allowed_agents": ["simple_agent"]}
    write(root / "configs/environment/mathy.yaml", mathy={"resources_servers": {"mathy": mathy}})
    words = ["agent=solver", "environment=mathy", "model=echo", "topology=none"]
    with pytest.raises(
        ConfigError, match=r"'mathy' is made for agents simple_agent .*allowed_agents.*not for 'solver'"
    ):
        check_everything(compose(words, roots=[root]))
    check_everything(compose([*words, "+allow_unsupported_pairing=true"], roots=[root]))
    key = "mathy.resources_servers.mathy.allowed_agents"
    check_everything(compose([*words, f"{key}=[solver]"], roots=[root]))
    with pytest.raises(ConfigError, match="allowed_agents must be a list"):
        check_everything(compose([*words, f"{key}=solver"], roots=[root]))


def test_model_that_the_environment_is_not_made_for_is_refused_by_name(root: Path) -> None:
    mathy = {"entrypoint": "app.py", "allowed_model_types": ["vllm_model"]}
    write(root / "configs/environment/mathy.yaml", mathy={"resources_servers": {"mathy": mathy}})
    with pytest.raises(ConfigError, match=r"made for models vllm_model .*not for 'policy_model'"):
        check_everything(compose(["agent=solver", "environment=mathy", "model=echo", "topology=none"], roots=[root]))


def test_every_reserved_key_has_a_reader_or_says_what_it_is_elsewhere() -> None:
    sources = Path(compatibility.__file__).parents[1]
    text = "".join(
        path.read_text() for path in sources.rglob("*.py") if path.name not in ("keys.py", "global_config.py")
    )
    # `get_hf_token` reads one; fields of its configuration are what a model server reads.
    elsewhere = {"hf_token", *ModelCallCaptureConfig.model_fields}
    for key in NEMO_GYM_KEYS - set(UNREAD_NEMO_GYM_KEYS) - elsewhere:
        assert f'"{key}"' in text, key
    assert all(meaning for meaning in UNREAD_NEMO_GYM_KEYS.values())
