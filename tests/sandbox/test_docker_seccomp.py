"""What namespaces do not confine, the system call profile refuses; what programs need still works."""

from __future__ import annotations

import json

import pytest

from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.sandbox.providers.docker import DockerProvider, creation
from nemo_gym.sandbox.providers.docker.engine import DockerConfig

PROBE = """
import ctypes, errno, json, platform, socket, subprocess, threading

def family(number):
    try:
        socket.socket(number, socket.SOCK_STREAM).close()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "open"

libc = ctypes.CDLL(None, use_errno=True)

def call(number, *arguments):
    return "done" if libc.syscall(number, *arguments) >= 0 else errno.errorcode[ctypes.get_errno()]

numbers = {"x86_64": (272, 250, 425), "aarch64": (97, 219, 425)}[platform.machine()]
ran = []
thread = threading.Thread(target=ran.append, args=(1,))
thread.start(); thread.join()
print(json.dumps({
    "vm_sockets": family(40), "kernel_crypto": family(38), "internet": family(2), "unix": family(1),
    "new_user_namespace": call(numbers[0], 0x10000000), "keyring": call(numbers[1], 0, 0),
    "io_uring": call(numbers[2], 1, 0), "threads": len(ran),
    "children": subprocess.run(["echo", "hello"], capture_output=True, text=True).stdout.strip(),
}))
"""


async def test_profile_refuses_what_namespaces_do_not_confine(docker_engine: str) -> None:
    provider = DockerProvider(base_url=docker_engine)
    box = await provider.create(SandboxSpec(image="host"))
    try:
        result = await provider.exec(box, ["/usr/bin/python3", "-c", PROBE])
        assert result.ok, result.stderr
        assert json.loads(result.stdout or "") == {
            "vm_sockets": "EAFNOSUPPORT",
            "kernel_crypto": "EAFNOSUPPORT",
            "internet": "open",
            "unix": "open",
            "new_user_namespace": "EPERM",
            "keyring": "EPERM",
            "io_uring": "ENOSYS",
            "threads": 1,
            "children": "hello",
        }
    finally:
        await provider.close(box)
        await provider.aclose()


@pytest.mark.parametrize(
    ("version", "supported"),
    [("20.10.24+dfsg1", True), ("20.10.9", False), ("28.5", True), ("19.03.1", False), ("", False)],
)
def test_profile_is_given_to_engines_that_can_answer_with_its_errors(version: str, supported: bool) -> None:
    assert creation.supports_profile(version) is supported


def test_unknown_profile_is_an_error_that_names_the_choices() -> None:
    with pytest.raises(ConfigError, match="suite or engine"):
        DockerConfig.from_mapping({"seccomp": "unconfined"})
