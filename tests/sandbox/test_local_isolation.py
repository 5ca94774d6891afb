"""What a process in a local box can see and reach: its box, and nothing of the host that could matter."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import nemo_gym
from nemo_gym.contract.errors import ConfigError, SandboxArchiveError, SandboxCreateError
from nemo_gym.contract.sandbox import Mount, NetworkPolicy
from nemo_gym.sandbox.archive import pack_bytes
from nemo_gym.sandbox.base import ExecOutcome, SandboxHandle
from tests.sandbox.local_boxes import LocalPlace, local_place


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[LocalPlace]:
    async with local_place(tmp_path) as made:
        yield made


@pytest.fixture
async def box(place: LocalPlace) -> SandboxHandle:
    return await place.create()


async def test_box_has_only_loopback_and_cannot_reach_the_hosts(place: LocalPlace, box: SandboxHandle) -> None:
    assert (await place.run(box, "tail -n +3 /proc/net/dev | cut -d: -f1")).split() == ["lo"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        refused = f"import socket; socket.create_connection(('127.0.0.1', {port}), 3)"
        done = await place.provider.exec(box, ["python3", "-c", refused])
        assert "ConnectionRefusedError" in (done.stderr or "")
        shared = await place.create(network=NetworkPolicy.OPEN)
        assert (await place.provider.exec(shared, ["python3", "-c", refused])).ok


async def test_box_serves_on_ports_below_1024_without_a_capability(place: LocalPlace, box: SandboxHandle) -> None:
    bind = "import socket; print(socket.create_server(('127.0.0.1', 80)).getsockname()[1])"
    assert (await place.run(box, f'python3 -c "{bind}"')).strip() == "80"


async def test_box_has_no_capabilities_and_cannot_gain_any(place: LocalPlace, box: SandboxHandle) -> None:
    status = await place.run(box, "cat /proc/self/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert fields["NoNewPrivs"] == "1"
    for attempt in ("unshare -U true", "unshare -m true", "mount -t tmpfs x /mnt", "chroot / true", "umount /usr"):
        assert not (await place.provider.exec(box, attempt)).ok, attempt


async def test_box_sees_only_its_own_processes(place: LocalPlace, box: SandboxHandle) -> None:
    beside = await place.create()
    await place.run(beside, "sleep 300 >/dev/null 2>&1 &")
    lines = (await place.run(box, "ps -eo pid,args --no-headers")).splitlines()
    assert lines[0].split()[0] == "1"
    assert len(lines) <= 4
    assert not any("sleep" in line or str(place.base) in line for line in lines)


async def test_host_image_has_no_homes_configuration_or_suite(place: LocalPlace, box: SandboxHandle) -> None:
    checkout = Path(nemo_gym.__file__).parent.parent
    seen = await place.run(box, "ls -A /root /home /mnt /opt /srv /run /tmp")
    assert [line for line in seen.split() if not line.endswith(":")] == ["lock"]
    for path in (checkout, Path.home(), place.base, "/etc/shadow", "/etc/ssh", "/etc/ssl/private", "/etc/gitconfig"):
        listed = await place.provider.exec(box, ["ls", "-A", str(path)])
        assert listed.stdout == "", path
    assert not (await place.provider.exec(box, ["/usr/bin/python3", "-c", "import nemo_gym"])).ok
    assert "root:x:0:0" in await place.run(box, "cat /etc/passwd")


async def test_hosts_environment_does_not_reach_the_box(place: LocalPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_HOST_SECRET", "hidden")
    box = await place.create(env={"FROM_SPEC": "1", "PATH": "/usr/bin:/bin"})
    names = {line.split("=")[0] for line in (await place.run(box, "env", env={"FROM_EXEC": "2"})).splitlines()}
    assert names - {"PWD", "_", "SHLVL", "OLDPWD"} == {
        *("PATH", "HOME", "LANG", "USER", "LOGNAME", "FROM_SPEC", "FROM_EXEC")
    }
    assert "A_HOST_SECRET" not in await place.run(box, "cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'")


async def test_machine_wide_settings_cannot_be_written(place: LocalPlace, box: SandboxHandle) -> None:
    before = Path("/proc/sys/kernel/core_pattern").read_bytes()
    writable = await place.run(
        box,
        "find /proc/sys /proc/fs /proc/irq /proc/bus /proc/sysrq-trigger -type f -perm /222 -exec sh -c"
        ' \'for f; do (: >> "$f") 2>/dev/null && echo "$f"; done\' x {} + 2>/dev/null || true',
    )
    assert writable == ""
    assert Path("/proc/sys/kernel/core_pattern").read_bytes() == before


async def test_system_files_of_the_host_stay_as_they_are(place: LocalPlace, box: SandboxHandle) -> None:
    await place.run(box, "rm -f /usr/bin/env; echo x > /usr/share/made-in-a-box; echo x > /etc/made-in-a-box")
    await place.run(box, "mv /usr/share/doc /usr/share/moved 2>/dev/null || true")
    assert Path("/usr/bin/env").exists()
    for path in ("/usr/share/made-in-a-box", "/etc/made-in-a-box", "/usr/share/moved"):
        assert not Path(path).exists()
    assert "x" not in await place.run(await place.create(), "cat /usr/share/made-in-a-box 2>/dev/null || true")


async def test_supervisors_interpreter_cannot_be_reached_through_a_command(place: LocalPlace) -> None:
    # A shell that is the very program which becomes it: the way out of a container whose starter is in its reach.
    box = await place.create(files={"/srv/steal": "#!/proc/self/exe\n"})
    await place.run(box, "chmod +x /srv/steal; rm -f /srv/exe; ln -s /proc/self/exe /srv/exe")
    write = (
        "import os\n"
        "for pid in [p for p in os.listdir('/proc') if p.isdigit()]:\n"
        "    try:\n"
        "        fd = os.open(f'/proc/{pid}/exe', os.O_WRONLY)\n"
        "        print('opened', os.readlink(f'/proc/{pid}/exe'))\n"
        "    except OSError: pass\n"
    )
    for command in (["/srv/steal"], ["/srv/exe", "-c", write], ["/proc/self/exe", "-c", write]):
        done = await place.provider.exec(box, command, timeout_s=20)
        assert "opened" not in (done.stdout or ""), command


async def test_first_process_can_be_neither_traced_nor_killed_from_inside(
    place: LocalPlace, box: SandboxHandle
) -> None:
    trace = (
        "import ctypes, errno, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "result = libc.ptrace(16, 1, None, None)\n"  # PTRACE_ATTACH
        "print('traced' if result == 0 else errno.errorcode[ctypes.get_errno()])\n"
        "for name in ('mem', 'environ', 'exe'):\n"
        "    try: open('/proc/1/' + name, 'rb').read(1); print(name)\n"
        "    except OSError as error: print(errno.errorcode[error.errno])\n"
    )
    answers = await place.run(box, 'python3 -c "$TRACE"', env={"TRACE": trace})
    assert set(answers.split()) <= {"EPERM", "EACCES"}
    # Without control groups this also ends the command, whose watcher lives in the box: signaled, and not lost.
    done = await place.provider.exec(box, "for s in 9 15 1 2 3 11; do kill -$s 1; kill -$s -1; done 2>/dev/null; true")
    assert done.outcome in (ExecOutcome.EXITED, ExecOutcome.SIGNALED)
    assert await place.run(box, "echo still here") == "still here\n"


async def test_read_only_mount_shows_a_host_directory_that_cannot_be_changed(
    place: LocalPlace, tmp_path: Path
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "tool").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "shared" / "tool").chmod(0o755)
    box = await place.create(mounts=[Mount(str(tmp_path / "shared"), "/opt/cli")])
    assert await place.run(box, "/opt/cli/tool") == "ran\n"
    assert not (await place.provider.exec(box, "echo x > /opt/cli/tool")).ok
    assert not (await place.provider.exec(box, "touch /opt/cli/new")).ok
    with pytest.raises(SandboxCreateError, match="/no/such/dir"):
        await place.create(mounts=[Mount("/no/such/dir", "/opt/x")])


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's boxes have user 0 alone")
async def test_mount_in_a_directory_that_the_image_has_not_is_reached_by_an_ordinary_user(
    place: LocalPlace, tmp_path: Path
) -> None:
    shared = Path(f"/var/tmp/shared-{os.getpid()}")  # below tmp_path only its owner may look
    shared.mkdir(mode=0o755)
    try:
        (shared / "tool").write_text("used by all")
        box = await place.create(mounts=[Mount(str(shared), "/opt/some/where/new")], user="1234")
        assert await place.run(box, "id -u; cat /opt/some/where/new/tool") == "1234\nused by all"
    finally:
        shutil.rmtree(shared)


async def test_archive_into_a_link_that_a_box_made_stays_in_the_box(place: LocalPlace, box: SandboxHandle) -> None:
    async def tar() -> AsyncIterator[bytes]:
        yield pack_bytes("made", b"x")

    target = Path("/var/tmp") / f"escape-{os.getpid()}"
    await place.run(box, f"ln -s {target} /srv/link; ln -s /proc/1/root /srv/root; mkdir {target}")
    await place.provider.put_archive(box, "/srv/link", tar())
    assert not target.exists()
    assert await place.run(box, f"ls {target}") == "made\n"
    with pytest.raises(SandboxArchiveError):
        await place.provider.put_archive(box, "/srv", _escaping())
    assert (await place.provider.exec(box, "test -e /evil")).return_code == 1


async def _escaping() -> AsyncIterator[bytes]:
    yield pack_bytes("../evil", b"x")


async def test_unknown_option_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    from nemo_gym.sandbox.providers.local import LocalProvider

    with pytest.raises(ConfigError, match=r"'statedir' \(did you mean 'state_dir'\?\)"):
        LocalProvider(statedir=str(tmp_path))
