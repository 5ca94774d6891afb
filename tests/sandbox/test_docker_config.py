from __future__ import annotations

from pathlib import Path

import pytest

from nemo_gym.contract.errors import ConfigError, SandboxError
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.sandbox.base import BoxLabel
from nemo_gym.sandbox.providers.docker import DockerProvider, creation, engine, watchdog
from nemo_gym.sandbox.providers.docker.engine import engine_url, tls_certificates


def test_docker_provider_names_the_nearest_key_when_an_option_is_unknown() -> None:
    with pytest.raises(ConfigError, match=r"'default_imag' \(did you mean 'default_image'\?\)"):
        DockerProvider(default_imag="x")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pull": "mising"}, r"pull must be one of never, missing, always, not 'mising' \(did you mean 'missing'\?\)"),
        ({"base_url": "/var/run/docker.sock"}, "base_url must begin with unix://"),
        ({"request_timeout_s": 0}, "request_timeout_s must be a positive number"),
        ({"max_concurrent_creates": "8"}, "max_concurrent_creates must be a positive number"),
    ],
)
def test_docker_provider_refuses_a_value_that_cannot_be_used(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DockerProvider(**options)


async def test_docker_create_says_how_to_start_an_engine_when_none_answers(tmp_path: object) -> None:
    provider = DockerProvider(base_url=f"unix://{tmp_path}/none.sock")
    with pytest.raises(SandboxError, match=r"no Docker Engine answers at .*scripts/dockerd start.*DOCKER_HOST"):
        await provider.create(SandboxSpec())
    await provider.aclose()


def test_docker_engine_url_prefers_configuration_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://elsewhere:1")
    assert engine_url("unix:///x") == "unix:///x"
    assert engine_url(None) == "tcp://elsewhere:1"


@pytest.mark.parametrize(
    ("url", "verify", "secure"),
    [
        ("unix:///x", "1", False),
        ("tcp://engine:2375", "", False),
        ("tcp://engine:2376", "1", True),
        ("https://engine", "", True),
    ],
)
def test_docker_engine_is_reached_by_tls_with_the_same_certificates_by_all_its_callers(
    url: str, verify: str, secure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_TLS_VERIFY", verify)
    monkeypatch.setenv("DOCKER_CERT_PATH", "/certificates")
    command = creation.watchdog_command(Path("engine.lock"), url)
    assert command[-2:] == ([url, "/certificates"] if secure else ["engine.lock", url])
    assert tls_certificates(url) == (Path("/certificates") if secure else None)


@pytest.mark.parametrize("seconds", [1700000000.0, 1700000000.25])
def test_docker_lease_end_comes_from_the_name_once_renewed(seconds: float) -> None:
    name = engine.container_name(None)
    labels = engine.container_labels({}, expires_at=5.0, env={}, idempotency_key=None)
    assert watchdog.lease_end(name, labels) == 5.0
    renewed = engine.renewed_name(engine.renewed_name(name, 7.0), seconds)
    assert seconds <= (watchdog.lease_end(renewed, labels) or 0) < seconds + 1
    assert (watchdog.MANAGED, watchdog.EXPIRES_AT) == (BoxLabel.MANAGED, BoxLabel.EXPIRES_AT)


@pytest.mark.parametrize(
    "image",
    ["debian:bookworm", "swebench/sweb.eval.x86_64.a_1776_b-1:latest", "localhost:5000/a/b@sha256:" + "0" * 64],
)
def test_docker_image_reference_keeps_names_the_engine_accepts(image: str) -> None:
    assert engine.image_reference(image) == image


@pytest.mark.parametrize("image", ["Some Name", "UPPER", "a//b", "x" * 300, "-a"])
def test_docker_image_reference_derives_a_valid_name_from_any_other(image: str) -> None:
    derived = engine.image_reference(image)
    assert derived != image
    assert engine.image_reference(derived) == derived == engine.image_reference(image)
