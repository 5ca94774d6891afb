"""Runs one suite of tests without a network; this program's arguments are those of pytest.

Only the loopback device exists. This file imports nothing of the core under test, which ``PYTHONPATH`` selects.
"""

import ctypes
import fcntl
import os
import socket
import struct
import sys

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1


def leave_network() -> bool:
    """Move this process into a new network namespace; return ``False`` if the kernel does not allow it."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags = CLONE_NEWNET if os.geteuid() == 0 else CLONE_NEWNET | CLONE_NEWUSER
    if libc.unshare(flags) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        fcntl.ioctl(device, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))
    return True


if __name__ == "__main__":
    if not leave_network():
        sys.exit("cannot create a network namespace, without which the tests would reach the network")
    sys.path.insert(0, "")
    import pytest

    sys.exit(pytest.main(sys.argv[1:]))
