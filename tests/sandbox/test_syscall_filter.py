"""What no namespace confines is filtered: sockets of the hypervisor's, kernel keyrings, rings that make sockets."""

from __future__ import annotations

import platform
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nemo_gym.sandbox import linux
from tests.sandbox.local_boxes import LocalPlace, local_place

_ATTEMPTS = """
import ctypes, errno, socket
for family in (socket.AF_VSOCK, socket.AF_ALG, socket.AF_BLUETOOTH, socket.AF_TIPC):
    try:
        socket.socket(family, socket.SOCK_STREAM if family == socket.AF_VSOCK else socket.SOCK_SEQPACKET)
        print(family.name, "made")
    except OSError as error:
        print(family.name, errno.errorcode[error.errno])
libc = ctypes.CDLL(None, use_errno=True)
for name, number, *arguments in CALLS:
    ctypes.set_errno(0)
    result = libc.syscall(number, *arguments)
    print(name, "answered" if result >= 0 else errno.errorcode[ctypes.get_errno()])
for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK):
    socket.socket(family, socket.SOCK_DGRAM if family != socket.AF_NETLINK else socket.SOCK_RAW).close()
[end.close() for end in socket.socketpair()]
print("usual sockets", "made")
"""
_CALLS = {
    "x86_64": {"keyctl": (250, 0, -3, 0), "bpf": (321, 0, 0, 0), "io_uring_setup": (425, 1, 0), "x32": (0x40000027,)},
    "aarch64": {"keyctl": (219, 0, -3, 0), "bpf": (280, 0, 0, 0), "io_uring_setup": (425, 1, 0)},
}


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[LocalPlace]:
    async with local_place(tmp_path) as made:
        yield made


async def test_box_cannot_make_what_its_namespaces_do_not_confine(place: LocalPlace) -> None:
    calls = [(name, *numbers) for name, numbers in _CALLS[platform.machine()].items()]
    box = await place.create()
    done = await place.provider.exec(box, ["python3", "-c", f"CALLS = {calls!r}\n{_ATTEMPTS}"], timeout_s=60)
    assert done.ok, done
    answers = dict(line.rsplit(" ", 1) for line in (done.stdout or "").splitlines())
    assert {answers.pop(name) for name in ("AF_VSOCK", "AF_ALG", "AF_BLUETOOTH", "AF_TIPC")} == {"EAFNOSUPPORT"}
    assert answers.pop("usual sockets") == "made"
    assert answers == {
        name: "ENOSYS" if name in ("io_uring_setup", "x32") else "EPERM" for name in _CALLS[platform.machine()]
    }


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filter_jumps_stay_inside_and_every_path_ends_when_built(machine: str) -> None:
    code = list(struct.iter_unpack("<HBBI", linux.program(machine)))
    for place, (operation, if_true, if_false, _) in enumerate(code):
        if operation in (0x15, 0x35):
            assert place + 1 + max(if_true, if_false) < len(code)
    assert code[-1][0] == 0x06


def test_filter_refuses_processors_it_does_not_know() -> None:
    with pytest.raises(NotImplementedError, match="riscv64"):
        linux.program("riscv64")
