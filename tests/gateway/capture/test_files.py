"""Captured calls on real disks: whole lines, bounded, and never at the cost of a call."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from nemo_gym.contract.errors import ConfigError
from nemo_gym.gateway.capture import (
    CallCapture,
    CallRecord,
    CaptureConfig,
    read_calls,
)


def record(number: int = 0, session: str | None = "s1", **fields: Any) -> CallRecord:
    made = CallRecord(f"{number:032x}", "chat", "/v1/chat/completions", session_id=session, **fields)
    made.mark("sent")
    return made


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.005)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., CallCapture]]:
    made: list[CallCapture] = []

    def start(**settings: Any) -> CallCapture:
        made.append(CallCapture(CaptureConfig(**{"directory": tmp_path / "calls", **settings})))
        return made[-1]

    yield start
    for capture in made:
        capture.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    at = tmp_path / "disk"
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(at)], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def test_calls_are_one_line_each_in_the_file_of_their_session(
    start: Callable[..., CallCapture], tmp_path: Path
) -> None:
    capture = start()
    for number in range(300):
        capture.record(record(number, f"s{number % 3}", request={"n": number}, answer={"ok": True}, status=200))
    capture.record(record(1000, None))
    capture.close()
    for session in range(3):
        calls = list(read_calls(tmp_path / "calls" / f"s{session}.jsonl"))
        assert [call["request"]["n"] for call in calls] == list(range(session, 300, 3))
        assert calls[0]["milliseconds"]["sent"] >= 0 and "began" not in calls[0]
    assert len(list(read_calls(tmp_path / "calls" / "no-session.jsonl"))) == 1
    assert capture.figures() == {"taken": 301, "written": 301, "dropped": 0}


def test_no_bodies_are_kept_when_they_are_not_asked_for(start: Callable[..., CallCapture], tmp_path: Path) -> None:
    capture = start(bodies=False)
    capture.record(record(request={"text": "private"}, answer=b'{"text":"private"}'))
    capture.close()
    text = (tmp_path / "calls" / "s1.jsonl").read_text()
    assert "private" not in text
    assert orjson.loads(text)["answer"]["omitted_bytes"] == len(b'{"text":"private"}')


def test_record_beyond_its_bound_keeps_sizes_and_the_smaller_body(
    start: Callable[..., CallCapture], tmp_path: Path
) -> None:
    capture = start(max_record_bytes=8192)
    long, short = "long text " * 2000, "short text"
    capture.record(record(1, request={"text": long}, answer={"text": short}))
    capture.record(record(2, request={"text": short}, answer={"text": long}))
    capture.close()
    path = tmp_path / "calls" / "s1.jsonl"
    first, second = read_calls(path)
    assert first["answer"] == {"text": short} and first["request"]["omitted_bytes"] > 20_000
    assert second["request"] == {"text": short} and len(second["answer"]["sha256"]) == 64
    assert all(len(line) <= 8192 for line in path.read_bytes().splitlines(keepends=True))


def test_file_is_rotated_and_the_directory_bounded(start: Callable[..., CallCapture], tmp_path: Path) -> None:
    capture = start(max_file_bytes=1 << 16)
    for number in range(60):
        capture.record(record(number, request={"text": "some words " * 400}))
    capture.close()
    files = sorted(path.name for path in (tmp_path / "calls").iterdir())
    assert files == ["s1.1.jsonl", "s1.jsonl"]
    kept = [call["call_id"] for name in files for call in read_calls(tmp_path / "calls" / name)]
    assert kept == [f"{number:032x}" for number in range(60 - len(kept), 60)]
    for number in range(4):
        old = tmp_path / "calls" / f"old{number}.jsonl"
        old.write_bytes(b'{"call_id":"%d"}\n' % number + b" " * (1 << 20))
        os.utime(old, (time.time() - 1000 + number,) * 2)
    start(max_total_bytes=3 << 20, max_age_s=999).close()
    left = {path.name for path in (tmp_path / "calls").iterdir()}
    assert left == {"old2.jsonl", "old3.jsonl", "s1.1.jsonl", "s1.jsonl"}


def test_full_disk_costs_records_but_leaves_whole_lines_and_recovers(
    start: Callable[..., CallCapture], small_disk: Path
) -> None:
    capture = start(directory=small_disk / "calls")
    for number in range(100):
        capture.record(record(number, request={"text": "some words " * 1000}))
    wait_for(lambda: sum(capture.figures()[key] for key in ("written", "dropped")) == 100)
    figures = capture.figures()
    assert figures["dropped"] > 0 and figures["written"] > 5
    path = small_disk / "calls" / "s1.jsonl"
    assert path.read_bytes().endswith(b"\n")
    assert len(list(read_calls(path))) == figures["written"]
    path.unlink()
    capture.record(record(100, "s2", request={"text": "after"}))
    wait_for(lambda: capture.figures()["written"] == figures["written"] + 1)
    assert [call["request"] for call in read_calls(small_disk / "calls" / "s2.jsonl")] == [{"text": "after"}]


def test_disk_that_hangs_blocks_no_call(start: Callable[..., CallCapture], tmp_path: Path) -> None:
    capture = start(max_waiting=50, max_waiting_bytes=1 << 20)
    pipe = tmp_path / "calls" / "stuck.jsonl"
    os.mkfifo(pipe)
    began = time.monotonic()
    for number in range(500):
        capture.record(record(number, "stuck", request={"text": "some words " * 1000}, request_bytes=12_000))
    took = time.monotonic() - began
    wait_for(lambda: capture.figures()["taken"] == 500)
    assert capture.figures()["dropped"] >= 500 - 50 - 64 - 6  # what waits, one batch, and what a pipe holds
    assert took < 10, "records must not wait for the disk"
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    wait_for(lambda: _drained(reader, capture))
    os.close(reader)


def _drained(reader: int, capture: CallCapture) -> bool:
    try:
        os.read(reader, 1 << 20)
    except BlockingIOError:
        pass
    figures = capture.figures()
    return figures["written"] + figures["dropped"] == figures["taken"]


WRITER = """
import sys
from pathlib import Path
from nemo_gym.gateway.capture import CallRecord, CaptureConfig, CallCapture
capture = CallCapture(CaptureConfig(directory=Path(sys.argv[1]), max_record_bytes=1 << 24))
print("ready", flush=True)
for number in range(10**9):
    text = "some words " * 40_000
    record = CallRecord(f"{number:032x}", "chat", "/v1", session_id="s1", request={"n": number, "text": text})
    while capture.figures()["taken"] - capture.figures()["written"] > 8:
        pass
    capture.record(record)
"""


def test_killed_writer_leaves_whole_lines_and_its_successor_goes_on_after_them(tmp_path: Path) -> None:
    path, random_s = tmp_path / "s1.jsonl", random.Random(5)
    seen = 0
    for _ in range(4):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            wait_for(lambda: path.exists() and path.stat().st_size > 1 << 20)
            time.sleep(random_s.uniform(0, 0.2))
            process.send_signal(signal.SIGKILL)
        before = len(list(read_calls(path)))
        assert before > 0
        successor = CallCapture(CaptureConfig(directory=tmp_path))
        successor.record(record(7, request={"n": -1}))
        successor.close()
        data = path.read_bytes()
        assert data.endswith(b"\n")
        calls = [orjson.loads(line) for line in data.splitlines()]
        assert len(calls) == before + 1 and calls[-1]["request"]["n"] == -1
        seen += before
        path.unlink()
    assert seen > 4


def test_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"capture\.directory"):
        CallCapture(CaptureConfig(directory=tmp_path / "file" / "calls"))


def test_session_id_cannot_leave_the_directory(start: Callable[..., CallCapture], tmp_path: Path) -> None:
    capture = start()
    for session in ("../outside", "a/b", ".hidden", "x" * 500):
        capture.record(record(session=session))
    capture.close()
    assert capture.figures()["dropped"] == 4
    assert [path.name for path in tmp_path.rglob("*")] == ["calls"]
