"""Providers are found by name, and a wrong name, setting or block says what would be right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_gym import sandbox
from nemo_gym.config.sandbox_blocks import list_providers, resolve_provider_config, resolve_provider_metadata
from nemo_gym.contract.errors import ConfigError
from nemo_gym.sandbox.facade import create_provider, get_provider_class, register_provider
from nemo_gym.sandbox.utils import cpu_cap_env, rewrite_image

pytestmark = pytest.mark.usefixtures("clean_registry")


class Remote:
    name = "mine"

    def __init__(self, *, url: str = "", retries: int = 3) -> None:
        self.url, self.retries = url, retries


def test_built_in_providers_are_listed_beside_registered_ones() -> None:
    register_provider("mine", Remote)
    assert {"local", "docker", "mine"} <= set(list_providers())


def test_registered_class_is_stronger_than_an_installed_one() -> None:
    register_provider("docker", Remote)
    assert get_provider_class("docker") is Remote


def test_registering_a_name_twice_raises_unless_overridden() -> None:
    register_provider("mine", Remote)
    register_provider("mine", Remote)
    with pytest.raises(ConfigError, match="override=True"):
        register_provider("mine", dict)  # type: ignore[arg-type]
    register_provider("mine", dict, override=True)  # type: ignore[arg-type]
    assert get_provider_class("mine") is dict


def test_unknown_provider_names_the_nearest_and_the_installed_ones() -> None:
    with pytest.raises(ConfigError, match=r"'dokcer' \(did you mean 'docker'\?\); installed are .*docker.*local"):
        get_provider_class("dokcer")


def test_create_provider_passes_settings_and_keyword_arguments() -> None:
    register_provider("mine", Remote)
    made: Any = create_provider({"mine": {"url": "http://x", "retries": 1}}, retries=9)
    assert (made.url, made.retries) == ("http://x", 9)
    assert isinstance(create_provider("mine"), Remote)
    assert isinstance(create_provider({"mine": None}), Remote)


def test_create_provider_raises_when_a_setting_is_unknown_or_the_shape_is_wrong() -> None:
    register_provider("mine", Remote)
    with pytest.raises(ConfigError, match=r"unknown key 'retrys' \(did you mean 'retries'\?\)"):
        create_provider({"mine": {"retrys": 1}})
    with pytest.raises(ConfigError, match=r"\{name: settings\}"):
        create_provider({"mine": {}, "docker": {}})


@pytest.mark.parametrize("name", ["docker", "opensandbox"])
def test_settings_of_nemo_gyms_provider_are_named_as_such(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"create, operations are settings of NeMo Gym's.*choose sandbox={name}"):
        create_provider({name: {"operations": {"retries": 5}, "create": {"timeout_s": 9}}})


def test_misspelt_setting_of_a_provider_that_extends_another_is_named_with_its_own_block() -> None:
    class Small(get_provider_class("local")):  # type: ignore[misc]
        def __init__(self, memory_mib: int = 512, **options: Any) -> None:
            super().__init__(**options)

    register_provider("small", Small)
    with pytest.raises(ConfigError, match=r"'small': unknown key 'memory_mb' \(did you mean 'memory_mib'\?\)"):
        create_provider({"small": {"memory_mb": 3}})
    with pytest.raises(ConfigError, match=r"unknown key 'bwrp' \(did you mean 'bwrap'\?\)"):
        create_provider({"small": {"bwrp": "x"}})


def test_wrong_value_in_a_setting_of_the_extended_provider_is_no_unknown_key() -> None:
    class Base(get_provider_class("local")):  # type: ignore[misc]
        def __init__(self, memory: int, **options: Any) -> None:
            raise ConfigError(f"sandbox provider 'base': 'memory' must be positive, not {memory}")

    class Small(Base):
        def __init__(self, memory_mib: int = 512, **options: Any) -> None:
            super().__init__(**options)

    register_provider("small", Small)
    with pytest.raises(ConfigError, match=r"^sandbox provider 'base': 'memory' must be positive"):
        create_provider({"small": {"memory": -1}})


def test_installed_provider_that_cannot_be_imported_names_what_to_install(tmp_path: Path) -> None:
    site = tmp_path / "site"
    info = site / "acme_boxes-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-boxes\nVersion: 1\nProvides-Extra: acme\n")
    (info / "entry_points.txt").write_text(
        "[nemo_gym.sandbox_providers]\nacme = acme_boxes:Acme\ntypo = acme_types:Nothing\nplain = acme_boxes:Plain\n"
    )
    (site / "acme_boxes.py").write_text("import acme_sdk_that_is_not_here\n")
    (site / "acme_types.py").touch()
    code = (
        "from nemo_gym.sandbox.facade import get_provider_class\n"
        "for name in ('acme', 'typo', 'plain'):\n"
        "    try: get_provider_class(name)\n"
        "    except ValueError as error: print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": f"{site}:{Path.cwd()}"}, capture_output=True, text=True
    )
    acme, typo, plain = run.stdout.splitlines()
    assert "acme_sdk_that_is_not_here" in acme
    assert acme.endswith("pip install 'acme-boxes[acme]'")
    assert plain.endswith("pip install 'acme-boxes'")
    assert "'acme_types:Nothing' does not exist in the module" in typo


CONFIG = {
    "sandbox": {"docker": {"create": {"timeout_s": 3}}, "default_metadata": {"team": "a", "n": 1}},
    "two": {"docker": {}, "local": {}},
    "my_agent": {"responses_api_agents": {}},
}


@pytest.mark.parametrize("config", [CONFIG, OmegaConf.create(CONFIG)], ids=["dict", "omegaconf"])
def test_block_resolves_to_one_provider_and_its_metadata(config: Any) -> None:
    resolved = resolve_provider_config("sandbox", config)
    assert resolved == {"docker": {"create": {"timeout_s": 3}}}
    assert type(resolved["docker"]["create"]) is dict
    assert resolve_provider_metadata("sandbox", config) == {"team": "a", "n": "1"}


def test_inline_block_and_bare_provider_name_resolve() -> None:
    assert resolve_provider_config({"local": None, "default_metadata": {}}) == {"local": {}}
    assert resolve_provider_config("local", {}) == {"local": {}}
    assert resolve_provider_metadata("local", {}) == {}


def test_interpolations_in_a_block_are_resolved() -> None:
    config = OmegaConf.create({"home": "/h", "sandbox": {"local": {"images": ["${home}/a"]}}})
    assert resolve_provider_config("sandbox", config) == {"local": {"images": ["/h/a"]}}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("sandbx", r"'sandbx' is neither a block .* \(did you mean 'sandbox'\?\); blocks are sandbox, two"),
        ("two", "two must name one provider.*'docker', 'local'"),
        ({"default_metadata": {}}, "must name one provider.*none"),
        (3, "sandbox_provider must be the name of a block or of a provider, or a block, got 3"),
        (["sandbox"], "sandbox_provider must be the name of a block"),
        ({"local": 3}, "sandbox_provider.local must be a mapping of settings, not int"),
    ],
)
def test_wrong_block_raises_and_says_what_would_be_right(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_provider_config(given, CONFIG)


def test_nested_default_metadata_raises() -> None:
    with pytest.raises(ConfigError, match="flat mapping"):
        resolve_provider_metadata({"local": {}, "default_metadata": {"a": {"b": 1}}})


def test_every_exported_name_exists_and_the_package_imports_nothing_by_itself() -> None:
    for name in sandbox.__all__:
        assert getattr(sandbox, name) is not None
    assert sandbox.ExecResult is sandbox.SandboxExecResult
    with pytest.raises(AttributeError):
        _ = sandbox.Sandboxx  # type: ignore[attr-defined]
    code = "import sys, nemo_gym.sandbox; print([m for m in sys.modules if m.split('.')[0] in ('aiohttp', 'docker')])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_cpu_cap_env_follows_the_limit() -> None:
    assert cpu_cap_env(None) == {}
    assert cpu_cap_env(0.5)["OMP_NUM_THREADS"] == "1"
    assert cpu_cap_env(2.5)["GOMAXPROCS"] == "2"  # as NeMo Gym's plugins expect


def test_rewrite_image_replaces_the_first_prefix_that_fits() -> None:
    rewrites = [{"from": "docker.io/", "to": "mirror/"}, {"from": "docker", "to": "x"}]
    assert rewrite_image("docker.io/a:1", rewrites) == "mirror/a:1"
    assert rewrite_image("other", rewrites) == "other"
    assert rewrite_image(None, rewrites) is None


def test_nemo_gyms_module_paths_give_the_same_objects() -> None:
    from nemo_gym.sandbox.api import AsyncSandbox, Sandbox
    from nemo_gym.sandbox.providers import SandboxSpec, base
    from nemo_gym.sandbox.providers import create_provider as of_the_package
    from nemo_gym.sandbox.providers import registry as provider_registry

    assert (AsyncSandbox, Sandbox) == (sandbox.AsyncSandbox, sandbox.Sandbox)
    assert base.SandboxSpec is sandbox.SandboxSpec
    assert base.ConnectableProvider is sandbox.Connectable
    assert provider_registry.create_provider is of_the_package is create_provider
    assert SandboxSpec is sandbox.SandboxSpec
