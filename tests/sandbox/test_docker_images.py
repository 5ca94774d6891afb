from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import docker
import pytest
import pytest_asyncio

from nemo_gym.contract.errors import SandboxError, SandboxLostError
from nemo_gym.sandbox.base import SandboxHandle
from nemo_gym.sandbox.providers.docker import images
from tests.sandbox.docker_boxes import Boxes

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
