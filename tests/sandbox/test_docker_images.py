from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import io
import json
import tarfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import docker
import pytest
import pytest_asyncio
from aiohttp import web

from nemo_gym.contract.errors import SandboxCreateError, SandboxError, SandboxLostError
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.sandbox.base import SandboxHandle
from nemo_gym.sandbox.providers.docker import DockerProvider, images
from nemo_gym.sandbox.providers.docker import provider as docker_provider
from tests.sandbox.docker_boxes import Boxes, until

_PROGRAMS = """
    python3 git bash sh tar patch sed grep find awk gzip diff ps curl setsid xargs sort head tail timeout
"""
PROGRAMS = _PROGRAMS.split()


@pytest_asyncio.fixture
async def image(boxes: Boxes) -> AsyncIterator[str]:
    """The name of an image that is removed after the test."""
    name = f"nemo-gym-test/{uuid.uuid4().hex}:v1"
    yield name
    await boxes.provider.remove_image(name)


async def test_docker_host_image_has_the_programs_of_a_development_machine(boxes: Boxes, box: SandboxHandle) -> None:
    done = await boxes.provider.exec(
        box, f"for p in {' '.join(PROGRAMS)}; do command -v $p >/dev/null || echo $p; done"
    )
    assert done.stdout == ""
    commit = "git -c user.name=a -c user.email=b commit -qm c"
    script = f"cd /tmp && git init -q r && cd r && echo a > f && git add f && {commit}"
    done = await boxes.provider.exec(
        box, f"{script} && git log --format=%s && python3 -m venv --without-pip /tmp/v && echo ok"
    )
    assert done.stdout == "c\nok\n", done.stderr


async def test_docker_host_image_holds_nothing_of_this_machine_but_packages(boxes: Boxes, box: SandboxHandle) -> None:
    done = await boxes.provider.exec(
        box, "ls -A /root /home /opt /srv /mnt /usr/local/bin; cut -d: -f1 /etc/passwd; ls /etc/ssh /etc/docker"
    )
    assert (
        "".join(line for line in (done.stdout or "").splitlines() if line and not line.endswith(":")) == "rootnobody"
    )
    done = await boxes.provider.exec(box, ["python3", "-c", "import nemo_gym"])
    assert "ModuleNotFoundError" in (done.stderr or "")


async def test_docker_host_image_trusts_the_machines_certificates(boxes: Boxes, box: SandboxHandle) -> None:
    done = await boxes.provider.exec(
        box, ["python3", "-c", "import ssl; print(ssl.create_default_context().cert_store_stats()['x509_ca'] > 50)"]
    )
    assert done.stdout == "True\n"


def test_docker_host_image_is_named_by_its_packages() -> None:
    packages = images.closure()
    assert set(images.REQUIRED) <= set(packages)
    assert images.reference(packages) == images.reference(dict(packages))
    assert images.reference({**packages, "git": "another"}) != images.reference(packages)


async def test_docker_commit_keeps_files_and_labels_but_nothing_of_the_box(boxes: Boxes, image: str) -> None:
    builder = await boxes.create(
        env={"SECRET": "of the build"}, metadata={**boxes.labels, "extra": "build"}, workdir="/w"
    )
    await boxes.provider.exec(builder, "echo built > /built")
    assert await boxes.provider.image_labels(image) is None
    await boxes.provider.commit(builder, image, {"digest": "abc", "nemo_gym.run": "as given"})
    assert await boxes.provider.image_labels(image) == {"digest": "abc", "nemo_gym.run": "as given"}
    user = await boxes.create(image=image, metadata=boxes.labels)
    done = await boxes.provider.exec(user, "cat /built; echo [$SECRET]; pwd; command -v python3")
    assert done.stdout == "built\n[]\n/\n/usr/bin/python3\n"
    [info] = [info for info in await boxes.provider.list(boxes.labels) if info.sandbox_id == user.sandbox_id]
    assert set(info.labels) == {"nemo_gym.run", "nemo_gym.managed", "nemo_gym.lease_expires_at"}
    assert await boxes.provider.list({"extra": "build"}) != []
    assert user.sandbox_id not in [info.sandbox_id for info in await boxes.provider.list({"extra": "build"})]


async def test_docker_commit_can_be_used_by_the_plain_tools(
    boxes: Boxes, box: SandboxHandle, image: str, docker_engine: str
) -> None:
    await boxes.provider.commit(box, image, {})
    client = docker.DockerClient(docker_engine)
    try:
        out = client.containers.run(image, ["echo", "plain"], remove=True, network_mode="none")
    finally:
        client.close()
    assert out == b"plain\n"


async def test_docker_commit_takes_any_name(boxes: Boxes, box: SandboxHandle) -> None:
    name = f"Not A Docker Name/{uuid.uuid4().hex}"
    await boxes.provider.exec(box, "echo here > /here")
    await boxes.provider.commit(box, name, {"a": "b"})
    try:
        assert await boxes.provider.image_labels(name) == {"a": "b"}
        handle = await boxes.create(image=name)
        assert (await boxes.provider.exec(handle, "cat /here")).stdout == "here\n"
    finally:
        await boxes.provider.remove_image(name)
    assert await boxes.provider.image_labels(name) is None
    await boxes.provider.remove_image(name)


async def test_docker_commit_refuses_a_lost_box_and_the_base_name(
    boxes: Boxes, box: SandboxHandle, image: str
) -> None:
    with pytest.raises(SandboxError, match="cannot be committed as 'host'"):
        await boxes.provider.commit(box, "host", {})
    await boxes.provider.close(box)
    with pytest.raises(SandboxLostError):
        await boxes.provider.commit(box, image, {})
    assert await boxes.provider.image_labels(image) is None


class Registry:
    """A registry on this machine with one image, whose manifest it sends once ``sends`` is set."""

    def __init__(self) -> None:
        self.sends = asyncio.Event()
        self.asked = 0
        self.needs = ""
        """The credentials that requests must have."""
        self.image = ""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.addfile(tarfile.TarInfo(uuid.uuid4().hex))
        layer = gzip.compress(packed.getvalue())
        digest = f"sha256:{hashlib.sha256(packed.getvalue()).hexdigest()}"
        system = {"architecture": "amd64", "os": "linux", "config": {}}
        config = json.dumps({**system, "rootfs": {"type": "layers", "diff_ids": [digest]}}).encode()
        self._blobs = {f"sha256:{hashlib.sha256(blob).hexdigest()}": blob for blob in (config, layer)}
        kinds = ("application/vnd.docker.container.image.v1+json", "application/vnd.docker.image.rootfs.diff.tar.gzip")
        about = [
            {"mediaType": kind, "size": len(blob), "digest": name}
            for kind, (name, blob) in zip(kinds, self._blobs.items(), strict=True)
        ]
        self._kind = "application/vnd.docker.distribution.manifest.v2+json"
        manifest = {"schemaVersion": 2, "mediaType": self._kind, "config": about[0], "layers": about[1:]}
        self._manifest = json.dumps(manifest).encode()

    async def answer(self, request: web.Request) -> web.Response:
        if self.needs not in request.headers.get("Authorization", ""):
            return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="test"'})
        if "/manifests/" in request.path:
            self.asked += request.method == "HEAD" or "sha256:" not in request.path
            await self.sends.wait()
            digest = f"sha256:{hashlib.sha256(self._manifest).hexdigest()}"
            headers = {"Content-Type": self._kind, "Docker-Content-Digest": digest}
            return web.Response(body=self._manifest, headers=headers)
        if "/blobs/" in request.path:
            return web.Response(body=self._blobs[request.path.rpartition("/")[2]])
        return web.json_response({}, headers={"Docker-Distribution-API-Version": "registry/2.0"})


@pytest_asyncio.fixture
async def registry() -> AsyncIterator[Registry]:
    made = Registry()
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", made.answer)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.image = f"127.0.0.1:{runner.addresses[0][1]}/{uuid.uuid4().hex}:v1"
    yield made
    made.sends.set()
    await runner.cleanup()


@pytest_asyncio.fixture
async def provider(docker_engine: str, registry: Registry) -> AsyncIterator[DockerProvider]:
    """A provider that creates one box at a time."""
    made = DockerProvider(base_url=docker_engine, max_concurrent_creates=1)
    try:
        yield made
    finally:
        await made.aclose()
        made = DockerProvider(base_url=docker_engine)
        await made.remove_image(registry.image)
        await made.aclose()


async def create(provider: DockerProvider, **fields: Any) -> None:
    """Create a box and remove it again."""
    async with asyncio.timeout(60):
        await provider.close(await provider.create(SandboxSpec(ttl_s=300, **fields)))


async def test_docker_create_ends_in_time_and_hinders_no_other_while_a_registry_stalls(
    provider: DockerProvider, registry: Registry
) -> None:
    overdue = [asyncio.create_task(create(provider, image=registry.image, ready_timeout_s=2)) for _ in range(2)]
    cancelled = asyncio.create_task(create(provider, image=registry.image))
    for error in await asyncio.gather(*overdue, return_exceptions=True):
        assert isinstance(error, SandboxCreateError) and error.retryable
        assert "ready_timeout_s=2" in str(error) and f"'{registry.image}' is still being pulled" in str(error)
    await create(provider)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    registry.sends.set()
    await create(provider, image=registry.image)
    assert registry.asked == 1


async def test_docker_create_without_a_limit_of_its_own_waits_for_a_long_pull(
    provider: DockerProvider, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_provider, "DEFAULT_READY_TIMEOUT_S", 5.0)
    creating = asyncio.create_task(create(provider, image=registry.image))
    await asyncio.sleep(6)
    assert not creating.done()
    registry.sends.set()
    await creating


async def test_docker_pull_ends_at_its_own_time_limit_and_changes_no_other(
    docker_engine: str, registry: Registry
) -> None:
    provider = DockerProvider(base_url=docker_engine, pull_timeout_s=1, request_timeout_s=100)
    try:
        for error in await asyncio.gather(
            *(create(provider, image=f"{registry.image}{n}", ready_timeout_s=30) for n in range(2)),
            return_exceptions=True,
        ):
            assert isinstance(error, SandboxCreateError)
            assert f"no image '{registry.image}" in str(error) and "longer than pull_timeout_s=1" in str(error)
        assert provider._engine.client.timeout == 100
    finally:
        await provider.aclose()


async def test_docker_pull_has_the_credentials_of_the_users_configuration(
    provider: DockerProvider, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.sends.set()
    registry.needs = base64.b64encode(b"user:secret").decode()
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    # The SDK looks for the file once, when a client is made.
    configuration = {"auths": {registry.image.partition("/")[0]: {"auth": registry.needs}}}
    with pytest.raises(SandboxCreateError, match=r"asking the registry failed: .*no basic auth"):
        await create(provider, image=registry.image)
    provider._engine.close()
    (tmp_path / "config.json").write_text(json.dumps(configuration))
    await create(provider, image=registry.image)


async def test_docker_pull_that_nobody_waits_for_ends_with_its_provider(
    docker_engine: str, registry: Registry
) -> None:
    provider = DockerProvider(base_url=docker_engine)
    task = asyncio.create_task(create(provider, image=registry.image))
    await until(lambda: registry.asked > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await provider.aclose()
    assert not provider._images.is_pulling(registry.image)
