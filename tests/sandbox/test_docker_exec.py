from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nemo_gym.contract.sandbox import SandboxResources, SandboxSpec
from nemo_gym.sandbox.base import ExecEnd, ExecOutcome, ExecOutput, ExecRequest, SandboxHandle
from nemo_gym.sandbox.providers.docker import DockerProvider
from nemo_gym.sandbox.providers.docker.engine import Engine
from nemo_gym.sandbox.providers.docker.execution import BoxControl, DockerBox, DockerExec, box_of
from tests.sandbox.docker_boxes import Boxes, until


def commands(handle: SandboxHandle) -> list[str]:
    """Command lines of all processes in the box but the idle ones, as the host sees them."""
    control = box_of(handle).control
    assert control is not None
    found = []
    for process in control.processes():
        try:
            line = Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        if line and "864000" not in line:
            found.append(line)
    return found


async def test_docker_exec_reports_the_exit_code_and_both_streams(boxes: Boxes, box: SandboxHandle) -> None:
    done = await boxes.provider.exec(box, "echo out; echo err >&2; exit 3")
    assert (done.outcome, done.return_code, done.stdout, done.stderr) == (ExecOutcome.EXITED, 3, "out\n", "err\n")


@pytest.mark.parametrize("code", [126, 127, 129, 130, 255])
def test_docker_exec_code_above_128_is_an_exit_when_programs_choose_it(code: int) -> None:
    from nemo_gym.sandbox.providers.docker.execution import _SIGNAL_CODES

    assert code not in _SIGNAL_CODES


async def test_docker_exec_reports_the_signal_when_the_command_is_killed(boxes: Boxes, box: SandboxHandle) -> None:
    done = await boxes.provider.exec(box, "kill -SEGV $$")
    assert (done.outcome, done.signal, done.return_code) == (ExecOutcome.SIGNALED, signal.SIGSEGV, None)


async def test_docker_exec_that_nobody_reads_holds_no_connection_when_its_box_is_closed(
    boxes: Boxes, box: SandboxHandle
) -> None:
    def sockets() -> set[str]:
        opened = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))  # noqa: PTH208
        return {os.readlink(path) for path in opened if path.is_socket()}  # noqa: PTH115

    before = sockets()
    unread = [await boxes.provider.start_exec(box, ExecRequest(command, timeout_s=60)) for command in ("cat", "yes")]
    opened = sockets() - before  # and some of the SDK's, which stay
    await boxes.provider.close(box)
    await asyncio.sleep(0)
    assert len(opened & sockets()) <= len(opened) - len(unread)
    for process in unread:
        events = [event async for event in process.events()]
        assert isinstance(events[-1], ExecEnd) and events[-1].outcome is ExecOutcome.LOST


async def test_docker_exec_that_ended_in_time_loses_no_output_to_a_slow_reader(
    boxes: Boxes, box: SandboxHandle
) -> None:
    size = 2_420_000  # more than is read ahead, so the engine keeps the rest, although the command has ended
    process = await boxes.provider.start_exec(box, ExecRequest(f"head -c {size} /dev/zero; exit 4", timeout_s=1))
    await asyncio.sleep(0.5)
    got = 0
    async for event in process.events():
        if isinstance(event, ExecOutput):
            if not got:
                await asyncio.sleep(4)
            got += len(event.data)
    assert isinstance(event, ExecEnd)
    assert event.outcome is ExecOutcome.TIMED_OUT or (event.return_code, got) == (4, size)


async def test_docker_exec_that_ended_in_time_is_not_timed_out_when_the_engine_says_so_late(
    monkeypatch: pytest.MonkeyPatch, boxes: Boxes, box: SandboxHandle
) -> None:
    client = boxes.provider._engine.client
    inspect = client.exec_inspect

    def inspect_late(exec_id: str) -> dict[str, Any]:
        # Newer engines lock an exec that has ended until its streams are closed.
        inspection = inspect(exec_id)
        if not inspection["Running"]:
            time.sleep(1.5)
        return dict(inspection)

    monkeypatch.setattr(client, "exec_inspect", inspect_late)
    done = await boxes.provider.exec(box, "sleep 600 & echo done; exit 4", timeout_s=0.5)
    assert (done.outcome, done.return_code, done.stdout) == (ExecOutcome.EXITED, 4, "done\n")


async def test_docker_exec_keeps_bytes_that_are_not_utf8(boxes: Boxes, box: SandboxHandle) -> None:
    data = bytes(range(256)) * 40
    done = await boxes.provider.exec(box, ["cat"], stdin=data)
    assert done.stdout_bytes == data


async def test_docker_exec_moves_megabytes_both_ways_without_deadlock(boxes: Boxes, box: SandboxHandle) -> None:
    data = os.urandom(8 * 1024 * 1024)
    done = await boxes.provider.exec(box, "tee /dev/stderr", stdin=data, timeout_s=60)
    assert done.stdout_bytes == data
    assert done.stderr_bytes == data


async def test_docker_exec_caps_output_and_says_so(boxes: Boxes, box: SandboxHandle) -> None:
    done = await boxes.provider.exec(box, "head -c 3000000 /dev/zero; echo e >&2", max_output_bytes=1000)
    assert (len(done.stdout_bytes), done.stdout_truncated, done.stderr_truncated) == (1000, True, False)
    assert done.return_code == 0


async def test_docker_exec_merges_stderr_in_the_order_written(boxes: Boxes, box: SandboxHandle) -> None:
    done = await boxes.provider.exec(box, "for i in 1 2 3; do echo o$i; echo e$i >&2; done", merge_stderr=True)
    assert (done.stdout, done.stderr) == ("o1\ne1\no2\ne2\no3\ne3\n", "")


async def test_docker_exec_inherits_nothing_of_the_host_and_adds_its_environment(
    boxes: Boxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_ONLY", "leaked")
    handle = await boxes.create(env={"A": "spec", "B": "spec"}, workdir="/made/here", user="nobody")
    done = await boxes.provider.exec(handle, 'echo "$A $B [$HOST_ONLY] $(pwd) $(id -un)"', env={"B": "exec"})
    assert done.stdout == "spec exec [] /made/here nobody\n"


async def test_docker_exec_timeout_kills_the_tree_with_daemons_that_hide(boxes: Boxes, box: SandboxHandle) -> None:
    keeper = await boxes.provider.start_exec(box, ExecRequest(command=["sleep", "4001"]))
    script = (
        "setsid sleep 4002 & (setsid setsid sleep 4003 &) ; "
        "env -i PATH=$PATH sh -c 'sleep 4004 & sleep 4005' & "
        "trap '' TERM INT HUP; sleep 4006"
    )
    done = await boxes.provider.exec(box, script, timeout_s=1.0)
    assert (done.outcome, done.error_type, done.return_code) == (ExecOutcome.TIMED_OUT, "timeout", None)
    assert commands(box) == ["sleep 4001"]
    await keeper.kill()
    assert [type(event) async for event in keeper.events()] == [ExecEnd]


async def test_docker_exec_timeout_kills_a_daemon_without_any_trace_when_it_ran_alone(
    boxes: Boxes, box: SandboxHandle
) -> None:
    await boxes.provider.exec(
        box, "env -i setsid sh -c 'setsid sleep 4010 >/dev/null 2>&1 &' & sleep 60", timeout_s=1.0
    )
    assert commands(box) == []


async def test_docker_exec_keeps_daemons_of_earlier_commands_when_a_later_one_times_out(
    boxes: Boxes, box: SandboxHandle
) -> None:
    await boxes.provider.exec(box, "setsid sleep 4020 >/dev/null 2>&1 &")
    await boxes.provider.exec(box, "sleep 60", timeout_s=0.5)
    assert commands(box) == ["sleep 4020"]


async def test_docker_exec_kills_the_command_when_the_caller_is_cancelled(boxes: Boxes, box: SandboxHandle) -> None:
    task = asyncio.create_task(boxes.provider.exec(box, "sleep 4030"))
    await until(lambda: any("4030" in line for line in commands(box)))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert commands(box) == []


async def test_docker_exec_reports_out_of_memory_when_the_kernel_killed_it(boxes: Boxes) -> None:
    handle = await boxes.create(resources=SandboxResources(memory_mib=64))
    done = await boxes.provider.exec(handle, ["python3", "-c", "x = bytearray(10**9)"])
    assert (done.outcome, done.error_type) == (ExecOutcome.OUT_OF_MEMORY, "oom")
    killed = await boxes.provider.exec(handle, "kill -9 $$")
    assert killed.outcome is ExecOutcome.SIGNALED, "an earlier memory kill must not colour a later exec"


async def test_docker_exec_reports_out_of_memory_when_host_counters_are_hidden(
    boxes: Boxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoxControl, "find", classmethod(lambda *_: None))
    handle = await boxes.create(resources=SandboxResources(memory_mib=64))
    done = await boxes.provider.exec(handle, ["python3", "-c", "x = bytearray(10**9)"])
    assert done.outcome is ExecOutcome.OUT_OF_MEMORY


async def test_docker_exec_timeout_kills_from_inside_when_the_host_hides_the_processes(
    boxes: Boxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(BoxControl, "find", classmethod(lambda *_: None))
        handle = await boxes.create()
    done = await boxes.provider.exec(handle, "setsid sleep 4040 & sleep 4041", timeout_s=1.0)
    assert done.outcome is ExecOutcome.TIMED_OUT
    listed = await boxes.provider.exec(handle, "ps -eo args")
    assert "404" not in (listed.stdout or "")


async def test_docker_exec_enforces_the_process_limit(boxes: Boxes) -> None:
    handle = await boxes.create(resources=SandboxResources(pids=20))
    done = await boxes.provider.exec(handle, "for i in $(seq 60); do sleep 5 & done 2>&1; wait", timeout_s=30)
    assert "fork" in (done.stdout or "") + (done.stderr or "")


async def test_docker_exec_is_lost_when_the_box_dies_under_it(boxes: Boxes, box: SandboxHandle) -> None:
    task = asyncio.create_task(boxes.provider.exec(box, "sleep 4050"))
    await until(lambda: any("4050" in line for line in commands(box)))
    os.kill(box_of(box).init_pid, signal.SIGKILL)
    done = await task
    assert (done.outcome, done.return_code, done.error_type) == (ExecOutcome.LOST, None, "lost")
    assert (await boxes.provider.exec(box, "true")).outcome is ExecOutcome.LOST


async def test_docker_exec_stream_yields_output_as_it_comes_and_one_end(boxes: Boxes, box: SandboxHandle) -> None:
    process = await boxes.provider.start_exec(
        box, ExecRequest(command="echo first; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo second")
    )
    seen: list[bytes] = []
    ends: list[ExecEnd] = []
    async for event in process.events():
        if isinstance(event, ExecEnd):
            ends.append(event)
            continue
        seen.append(event.data)
        if len(seen) == 1:
            await boxes.provider.exec(box, "touch /tmp/go")
    assert b"".join(seen) == b"first\nsecond\n"
    assert [end.return_code for end in ends] == [0]


async def test_docker_exec_waits_for_a_command_that_closed_its_output(boxes: Boxes, box: SandboxHandle) -> None:
    done = await boxes.provider.exec(box, "exec >&- 2>&-; sleep 1; exit 7")
    assert done.return_code == 7


async def test_docker_signal_reaches_the_whole_tree(boxes: Boxes, box: SandboxHandle) -> None:
    process = await boxes.provider.start_exec(box, ExecRequest(command="sleep 4060 & setsid sleep 4061 & wait"))
    await until(lambda: len(commands(box)) == 3)
    await process.signal(signal.SIGTERM)
    await until(lambda: commands(box) == [])
    (end,) = [event async for event in process.events()]
    assert isinstance(end, ExecEnd) and (end.outcome, end.signal) == (ExecOutcome.SIGNALED, signal.SIGTERM)


async def test_docker_execs_run_side_by_side_beyond_the_thread_pool(boxes: Boxes, box: SandboxHandle) -> None:
    waiting = [asyncio.create_task(boxes.provider.exec(box, ["sleep", "300"], timeout_s=100)) for _ in range(60)]
    await until(lambda: commands(box) == ["sleep 300"] * 60)
    done = await boxes.provider.exec(box, "echo still here", timeout_s=10)
    assert done.stdout == "still here\n"
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_docker_box_survives_a_command_that_times_out_right_after_create(boxes: Boxes) -> None:
    for _ in range(3):
        handle = await boxes.create()
        await boxes.provider.exec(handle, "sleep 60", timeout_s=0.01)
        assert (await boxes.provider.exec(handle, "echo alive")).stdout == "alive\n"


async def relayed(context: ssl.SSLContext, engine: str) -> asyncio.Server:
    """A server that reaches a local engine for clients that come over TLS."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ssl.SSLError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
        else:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(engine.removeprefix("unix://"))
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))
        inner_writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)


@pytest.fixture
def certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the certificates of an engine on this machine and its clients, as `DOCKER_CERT_PATH` too."""
    words = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=engine \
        -addext subjectAltName=IP:127.0.0.1 -keyout {tmp_path}/key.pem -out {tmp_path}/cert.pem"
    subprocess.run(words.split(), check=True, capture_output=True)
    (tmp_path / "ca.pem").write_bytes((tmp_path / "cert.pem").read_bytes())
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path))
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # with requests these win over the SDK's own setting
        monkeypatch.delenv(name, raising=False)
    return tmp_path


async def test_docker_exec_has_standard_input_when_the_engine_is_reached_by_tls(
    docker_engine: str, certificates: Path
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
    async with await relayed(context, docker_engine) as server:
        port = server.sockets[0].getsockname()[1]
        provider = DockerProvider(base_url=f"https://127.0.0.1:{port}", watchdog=False)
        handle = await provider.create(SandboxSpec(ttl_s=60))
        try:
            data = os.urandom(3_000_000)
            done = await provider.exec(handle, "cat; exit 3", stdin=data, timeout_s=30)
            assert (done.stdout_bytes == data, done.return_code) == (True, 3)
            done = await provider.exec(handle, ["head", "-c2"], stdin=b"0123" * 40_000, timeout_s=30)
            assert (done.outcome, done.return_code, done.stdout) == (ExecOutcome.EXITED, 0, "01")
            done = await provider.exec(handle, ["cat"], stdin=b"", merge_stderr=True, timeout_s=30)
            assert (done.outcome, done.return_code, done.stdout) == (ExecOutcome.EXITED, 0, "")
        finally:
            await provider.close(handle)
            await provider.aclose()


def frame(data: bytes) -> bytes:
    return b"\1\0\0\0" + len(data).to_bytes(4, "big") + data


class StubEngine:
    """An engine whose command has ended with 0 by the time somebody asks, however its output's connection ended."""

    def __init__(self) -> None:
        self.url = ""
        self.execs = 0
        self.client = SimpleNamespace(
            api_version="1.41", exec_create=self._create, exec_start=lambda _: None, exec_inspect=self._inspect
        )

    def _create(self, *_: Any, **__: Any) -> dict[str, str]:
        self.execs += 1
        return {"Id": "x"}

    def _inspect(self, _: str) -> dict[str, Any]:
        return {"Running": False, "Pid": 0, "ExitCode": 0}

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


def reset(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


CONNECTION_ENDS: dict[str, tuple[bytes, Callable[[asyncio.StreamWriter], None], ExecOutcome]] = {
    "at the end of the output": (frame(b"first\n"), asyncio.StreamWriter.close, ExecOutcome.EXITED),
    "by a reset": (frame(b"first\n"), reset, ExecOutcome.LOST),
    "inside a header": (frame(b"first\n") + b"\1\0", asyncio.StreamWriter.close, ExecOutcome.LOST),
    "inside a frame": (frame(b"first\nsecond\n")[:-7], asyncio.StreamWriter.close, ExecOutcome.LOST),
}


@pytest.mark.parametrize("how", CONNECTION_ENDS)
async def test_docker_exec_is_lost_and_keeps_its_output_when_the_connection_breaks(how: str) -> None:
    sent, end_connection, outcome = CONNECTION_ENDS[how]
    stub, ended = StubEngine(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 UPGRADED\r\n\r\n" + sent)
        await writer.drain()
        await asyncio.sleep(0.05)  # a reset may overtake what was sent before it
        end_connection(writer)
        ended.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        stub.url = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        process = DockerExec(cast(Engine, stub), DockerBox("c", "n", {}, 0, None, False), ExecRequest("pytest"))
        await process.start()
        await ended.wait()
        await asyncio.sleep(0.05)
        *output, end = [event async for event in process.events()]
    assert output == [ExecOutput("stdout", b"first\n")]
    assert isinstance(end, ExecEnd) and end.outcome is outcome
    assert stub.execs == (1 if outcome is ExecOutcome.EXITED else 2), "what still runs in the box must be killed"


async def test_docker_exec_has_exited_when_a_local_engine_closes_on_input_that_was_not_read(tmp_path: Path) -> None:
    stub, path = StubEngine(), tmp_path / "engine.sock"
    stub.url = f"unix://{path}"

    def serve() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            bound.set()
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 101 UPGRADED\r\n\r\n" + frame(b"first\n"))
                connection.recv(1, socket.MSG_PEEK)

    bound = threading.Event()
    serving = asyncio.get_running_loop().run_in_executor(None, serve)
    await asyncio.to_thread(bound.wait)
    request = ExecRequest("head -c0; echo first", stdin=b"x" * 8_000_000)
    process = DockerExec(cast(Engine, stub), DockerBox("c", "n", {}, 0, None, False), request)
    await process.start()
    await serving
    await asyncio.sleep(0.05)
    *output, end = [event async for event in process.events()]
    assert output == [ExecOutput("stdout", b"first\n")]
    assert isinstance(end, ExecEnd) and (end.outcome, end.return_code) == (ExecOutcome.EXITED, 0)
