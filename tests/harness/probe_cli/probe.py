"""Looks around in a box as hostile code would, and prints what it found as one JSON object; standard library only.

    python3 probe.py < settings.json

Settings: ``model_url``, ``model``, ``words`` (what the model is asked), ``mcp`` (URLs), ``addresses``
(``[host, port]`` to connect to), ``abstract_sockets`` (names), ``host_files`` (paths to read), ``secrets`` (name → the
secret's bytes, inverted and in hex, so that it is nowhere but in this process), ``read_only`` (directories to write
into).
"""
# Paths of processes that come and go, and of files with any name:
# ruff: noqa: PTH112, PTH113, PTH114, PTH110, PTH115, PTH116, PTH118, PTH123, PTH208

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path

TIMEOUT_S = 3
DOORS_TIMEOUT_S = 60
FILES_AT_MOST = 20_000
CHUNK = 1 << 20
FLAGS = {"newns": 0x20000, "newuser": 0x10000000, "newpid": 0x20000000, "newnet": 0x40000000}
SYSCALLS = {"pivot_root": 155, "kexec_load": 246, "add_key": 248, "perf_event_open": 298, "bpf": 321}
libc = ctypes.CDLL(None, use_errno=True)


def pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


def text(path: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


# -------------------------------------------------------------------------------------------------------- network


def network(settings: dict) -> dict:
    return {
        "interfaces": [line.split(":")[0].strip() for line in text("/proc/net/dev").splitlines()[2:]],
        "routes": [line.split()[1] for line in text("/proc/net/route").splitlines()[1:]],
        # The kernel's own entry that refuses the rest is no route: its flags say so.
        "routes_v6": [
            fields[0] + "/" + fields[1]
            for fields in map(str.split, text("/proc/net/ipv6_route").splitlines())
            if fields[9] != "lo"
        ],
        "connected": [f"{host}:{port}" for host, port in settings["addresses"] if connects(host, port)],
        "abstract_sockets": [name for name in settings["abstract_sockets"] if connects_abstract(name)],
        "resolved": [name for name in ("example.com", "registry.npmjs.org") if resolves(name)],
        "datagrams": [f"{host}:53" for host in ("8.8.8.8", "2001:4860:4860::8888") if sends(host)],
        "sockets": [name for name in ("AF_VSOCK", "AF_PACKET") if opens(name)] + raw(),
        "unix_sockets": [line.split()[7] for line in text("/proc/net/unix").splitlines() if len(line.split()) > 7],
    }


def connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), TIMEOUT_S).close()
    except OSError:
        return False
    return True


def connects_abstract(name: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex("\0" + name) == 0


def resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, 443)
    except OSError:
        return False
    return True


def sends(host: str) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as client:
            client.sendto(b"\0" * 12, (host, 53))
    except OSError:
        return False
    return True


def opens(family: str) -> bool:
    kind = socket.SOCK_STREAM if family == "AF_VSOCK" else socket.SOCK_RAW
    try:
        with socket.socket(getattr(socket, family), kind) as client:
            if family == "AF_VSOCK":
                client.settimeout(TIMEOUT_S)
                client.connect((2, 1024))  # the host of a virtual machine
    except OSError as error:
        # A host that refuses has been reached.
        return family == "AF_VSOCK" and error.errno == errno.ECONNRESET
    return True


def raw() -> list:
    try:
        socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close()
    except OSError:
        return []
    return ["SOCK_RAW"]


# ---------------------------------------------------------------------------------------------------------- files


def files(settings: dict) -> dict:
    roots = [
        "",
        "/proc/self/root",
        *(f"/proc/{pid}/{link}" for pid in pids() for link in ("root", "cwd/" + "../" * 12)),
    ]
    read = [f"{root}{path}" for path in settings["host_files"] for root in roots if text(f"{root}{path}")]
    return {
        "host_files": read,
        "mounts": [line.split()[3:5] + line.split(" - ")[1].split()[:1] + [line.split()[5]] for line in mountinfo()],
        "written": [path for path in [*settings["read_only"], *MACHINE_WIDE] if writes(path)],
        "devices": [name for name in sorted(os.listdir("/dev")) if is_device(f"/dev/{name}")],
        "descriptors": [os.readlink(f"/proc/self/fd/{fd}") for fd in inherited()],
    }


MACHINE_WIDE = (
    "/proc/sys/kernel/core_pattern",
    "/proc/sysrq-trigger",
    "/sys/power/state",
    "/sys/kernel/uevent_helper",
)


def mountinfo() -> list:
    return text("/proc/self/mountinfo").splitlines()


def writes(path: str) -> bool:
    target = os.path.join(path, "made-by-the-probe") if os.path.isdir(path) else path
    try:
        with open(target, "ab"):
            return True
    except OSError:
        return False


def is_device(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode >> 12
    except OSError:
        return False
    return mode in (2, 6) and not path.endswith("/ptmx")


def inherited() -> list:
    return [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and os.path.exists(f"/proc/self/fd/{fd}")]


# ------------------------------------------------------------------------------------------------------ privileges


def privileges() -> dict:
    names = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
    status = {}
    for pid in pids():
        fields = dict(line.split(":\t", 1) for line in text(f"/proc/{pid}/status").splitlines() if ":\t" in line)
        if fields:
            status[pid] = {name: fields[name] for name in names}
    return {"status": status, "gained": [name for name, attempt in attempts().items() if in_child(attempt)]}


def attempts() -> dict:
    def syscall(name: str, *values: object) -> int:
        return libc.syscall(SYSCALLS[name], *values)

    def mknod() -> int:
        os.mknod("/tmp/probe-device", 0o60600, os.makedev(254, 0))
        return 0

    def join(kind: str) -> int:
        return libc.setns(os.open(f"/proc/1/ns/{kind}", os.O_RDONLY), 0)

    handle = ctypes.create_string_buffer(b"\x08\0\0\0\x01\0\0\0\x02\0\0\0\0\0\0\0", 64)  # inode 2: a disk's root
    zeros = ctypes.create_string_buffer(128)
    return {
        **{f"unshare {name}": (lambda flag=flag: libc.unshare(flag)) for name, flag in FLAGS.items()},
        **{f"setns {kind}": (lambda kind=kind: join(kind)) for kind in ("mnt", "net", "pid", "user")},
        "mount": lambda: libc.mount(b"none", b"/mnt", b"tmpfs", 0, None),
        "bind mount": lambda: libc.mount(b"/", b"/mnt", None, 4096, None),
        "umount": lambda: libc.umount2(b"/proc", 2),
        "chroot": lambda: libc.chroot(b"/tmp"),
        "pivot_root": lambda: syscall("pivot_root", b"/", b"/mnt"),
        "mknod": mknod,
        "ptrace of the first process": lambda: libc.ptrace(16, 1, None, None),
        "open_by_handle_at": lambda: min(libc.open_by_handle_at(os.open("/", os.O_RDONLY), handle, 0), 0),
        "bpf": lambda: min(syscall("bpf", 0, zeros, 72), 0),
        "perf_event_open": lambda: min(syscall("perf_event_open", zeros, -1, 0, -1, 0), 0),
        "kexec_load": lambda: syscall("kexec_load", 0, 0, None, 0),
        "add_key": lambda: min(syscall("add_key", b"user", b"probe", b"x", 1, -3), 0),
        "sethostname": lambda: libc.sethostname(b"probe", 5),
        "iopl": lambda: libc.iopl(3),
    }


def in_child(attempt: object) -> bool:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if attempt() == 0 else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --------------------------------------------------------------------------------------------------------- secrets


def secrets(settings: dict) -> dict:
    """Where secrets are: name → places."""
    wanted = {name: bytes(255 - byte for byte in bytes.fromhex(value)) for name, value in settings["secrets"].items()}
    found: dict = {name: [] for name in wanted}
    own = str(os.getpid())
    for pid in pids():
        for part in ("environ", "cmdline"):
            _note(wanted, found, text(f"/proc/{pid}/{part}").encode(), f"{part} of {pid}")
        if pid != own:
            for data in memory(pid):
                _note(wanted, found, data, f"memory of {pid}")
    for path in every_file():
        try:
            with open(path, "rb") as file:
                while data := file.read(CHUNK):
                    _note(wanted, found, data, path)
        except OSError:
            continue
    return found


def _note(wanted: dict, found: dict, data: bytes, where: str) -> None:
    for name, secret in wanted.items():
        if secret in data and where not in found[name]:
            found[name].append(where)


def memory(pid: str):
    """Readable memory of another process."""
    try:
        with open(f"/proc/{pid}/mem", "rb", 0) as file:
            for line in text(f"/proc/{pid}/maps").splitlines():
                bounds, rights = re.match(r"([0-9a-f]+-[0-9a-f]+) (\S+)", line).groups()
                if "w" not in rights:
                    continue
                begin, end = (int(bound, 16) for bound in bounds.split("-"))
                while begin < end:
                    try:
                        file.seek(begin)
                        yield file.read(min(16 * CHUNK, end - begin))
                    except (OSError, ValueError, OverflowError):
                        break
                    begin += 16 * CHUNK - 256  # a secret may lie across two pieces
    except OSError:
        return


def every_file():
    """What a rollout could have written, and what is mounted for it."""
    count = 0
    for top in ("/root", "/home", "/tmp", "/var", "/run", "/dev/shm", "/srv", "/repo", "/etc", "/mnt"):
        for directory, _, names in os.walk(top):
            for name in names:
                path = os.path.join(directory, name)
                if not os.path.islink(path) and os.path.isfile(path):
                    count += 1
                    if count > FILES_AT_MOST:
                        return
                    yield path


# ----------------------------------------------------------------------------------------------------------- doors


def doors(settings: dict) -> dict:
    root, made_up = settings["model_url"], {"Authorization": "Bearer made-up"}
    chat = {"model": settings["model"], "messages": [{"role": "user", "content": settings["words"]}]}
    listing = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    return {
        # The credential is the door's, whatever the box sends.
        "model": post(
            f"{root}/v1/chat/completions", chat, {"Authorization": "Bearer made-up", "x-api-key": "made-up"}
        ),
        "model_refuses": {
            path: post(f"{root}{path}", {})[0]
            for path in (
                "/sessions",
                "/sessions/another/v1/chat/completions",
                "/v1/../sessions",
                "/v1/%2e%2e/sessions",
                "/seed_session",
                "/metrics",
            )
        },
        "mcp": {url: post(url, listing, made_up) for url in settings["mcp"]},
        "mcp_refuses": {
            url + path: post(url.removesuffix("/mcp") + path, {})[0]
            for url in settings["mcp"]
            for path in ("/verify", "/seed_session", "/close", "/get_weather")
        },
    }


def post(url: str, body: dict, headers: dict | None = None) -> list:
    accept = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    request = urllib.request.Request(url, json.dumps(body).encode(), {**accept, **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=DOORS_TIMEOUT_S) as reply:
            return [reply.status, reply.read(2000).decode("utf-8", "replace")]
    except urllib.error.HTTPError as error:
        return [error.code, ""]
    except OSError as error:
        return [0, str(error)]


def main() -> None:
    settings = json.load(sys.stdin)
    report = {
        "files": files(settings),
        "network": network(settings),
        "privileges": privileges(),
        "secrets": secrets(settings),
        "environ": sorted({entry for pid in pids() for entry in text(f"/proc/{pid}/environ").split("\0") if entry}),
        "doors": doors(settings),
    }
    print(json.dumps(report), flush=True)


main()
