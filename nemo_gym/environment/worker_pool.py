"""Runs computations of unbounded time or memory in worker processes, one call at a time, and kills overdue ones.

A regular expression or symbolic algebra over an agent's output can run for hours while it holds the interpreter's
lock, so neither an event loop nor a thread can bound it. A process can be killed. Starting one costs a few hundred
milliseconds of imports, so a process that has answered waits for the next call.

This file is both sides: the pool, and, run as a program, the worker process. They exchange length-prefixed JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import json
import logging
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import IO, Any

STARTUP_TIMEOUT_S = 60.0
"""The limit for a new process's imports and first answer; generous, for a busy machine."""
MEMORY_BYTES = 2 * 1024**3
"""The address space limit of one process."""
_LENGTH = struct.Struct("!Q")
_PR_SET_PDEATHSIG = 1


class Ending(StrEnum):
    """How a question ended."""

    ANSWERED = "answered"
    FAILED = "failed"
    """The function raised an error, ``MemoryError`` included."""
    TIMED_OUT = "timed_out"
    DIED = "died"
    """The process ended without answering: it was killed from outside, or the interpreter crashed."""


@dataclass(frozen=True)
class Answer:
    ending: Ending
    value: Any = None
    said: str = ""
    """The function's error text, for ``failed``."""


class _Turn:
    """One question's hold on a process. The timer and a cancelled caller may end it from their own threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: Ending | None = None

    def hold(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._process = process
            if self._ended is not None:
                process.kill()

    def end(self, ending: Ending) -> None:
        """Kill the process, unless it has answered already."""
        with self._lock:
            self._ended = self._ended or ending
            if self._process is not None:
                self._process.kill()

    def let_go(self) -> Ending | None:
        """Release the process. Returns ``None`` if it may serve other questions, else how the turn was ended."""
        with self._lock:
            self._process = None
            return self._ended


class WorkerPool:
    """Calls ``function`` in at most ``workers`` processes, started on demand. Not tied to an event loop.

    Args:
        function: the ``module:name`` to call; its keyword arguments and result are JSON.
        warm_up: arguments of a first call in each new process, so that imports do not count against a caller's limit.
        missing: advice for the error message if the function cannot be imported or the first call fails.
    """

    def __init__(
        self,
        function: str,
        *,
        workers: int,
        warm_up: Mapping[str, Any],
        missing: str,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self.function = function
        self._warm_up, self._missing, self._memory_bytes = warm_up, missing, memory_bytes
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=function)
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._generation = 0

    async def ask(self, question: Mapping[str, Any], *, timeout_s: float) -> Answer:
        """Call the function in one process. The time limit starts when a process gets the question; if the caller is
        cancelled, the process is killed.

        Raises:
            VerifierError: no process can be started, or the function raised an error of this suite.
        """
        turn, future = self._submit(question, timeout_s)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            turn.end(Ending.DIED)
            raise

    def ask_now(self, question: Mapping[str, Any], *, timeout_s: float) -> Answer:
        """`ask` for a thread without an event loop."""
        turn, future = self._submit(question, timeout_s)
        try:
            return future.result()
        except BaseException:
            turn.end(Ending.DIED)
            raise

    def close(self) -> None:
        """End idle processes now and busy ones once they have answered. A later call starts new processes."""
        with self._lock:
            self._generation += 1
            idle, self._idle = self._idle, []
        for process in idle:
            _discard(process)

    def _submit(self, question: Mapping[str, Any], timeout_s: float) -> tuple[_Turn, Future[Answer]]:
        turn = _Turn()
        return turn, self._threads.submit(self._answer, turn, question, timeout_s)

    def _answer(self, turn: _Turn, question: Mapping[str, Any], timeout_s: float) -> Answer:
        with self._lock:
            generation = self._generation
            process = self._idle.pop() if self._idle else None
        if process is not None and process.poll() is not None:  # it died while idle
            _discard(process)
            process = None
        process = process or self._start(turn)
        answer = _ask(turn, process, question, timeout_s)
        with self._lock:
            reusable = answer.ending in (Ending.ANSWERED, Ending.FAILED) and generation == self._generation
            if reusable:
                self._idle.append(process)
        if not reusable:
            _discard(process)
        if answer.ending is Ending.FAILED and answer.value == "refused":
            raise _verifier_error(answer.said)
        return answer

    def _start(self, turn: _Turn) -> subprocess.Popen[bytes]:
        """Start a process and wait for its first answer. Only an executor's thread may do this: the kernel kills the
        process when the thread that started it ends."""
        process = subprocess.Popen(
            [sys.executable, "-P", "-X", "utf8", __file__, self.function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"LANG": "C.UTF-8"},  # no credential of this server
        )
        hello = {"path": sys.path, "memory_bytes": self._memory_bytes, "warm_up": dict(self._warm_up)}
        answer = _ask(turn, process, hello, STARTUP_TIMEOUT_S)
        if answer.ending is Ending.ANSWERED:
            return process
        _discard(process)
        if answer.ending is Ending.FAILED:
            why = f"cannot start: {answer.said}; {self._missing}"
        elif answer.ending is Ending.TIMED_OUT:
            why = f"did not start within {STARTUP_TIMEOUT_S:g} s"
        else:
            why = f"ended with status {process.returncode} when it was started"
        raise _verifier_error(f"the process for {self.function} {why}")


def _verifier_error(message: str) -> Exception:
    from nemo_gym.contract.errors import VerifierError  # imported here, because the worker starts without the suite

    return VerifierError(message)


def _ask(turn: _Turn, process: subprocess.Popen[bytes], question: Mapping[str, Any], timeout_s: float) -> Answer:
    assert process.stdin is not None and process.stdout is not None
    reply: dict[str, Any] | None = None
    turn.hold(process)
    clock = threading.Timer(timeout_s, turn.end, (Ending.TIMED_OUT,))
    clock.daemon = True
    clock.start()
    try:
        _write(process.stdin, question)
        reply = _read(process.stdout)
    except OSError:
        pass  # it has ended
    finally:
        clock.cancel()
        ended = turn.let_go()
    if ended is not None:
        return Answer(ended)
    if reply is None:
        return Answer(Ending.DIED)
    return Answer(Ending(reply["ending"]), reply.get("value"), reply.get("said", ""))


def _discard(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # raised if buffered data cannot be flushed
            pipe.close()


def _write(stream: IO[bytes], message: Mapping[str, Any]) -> None:
    body = json.dumps(message).encode()  # not orjson: logs and scripts may hold lone surrogates
    stream.write(_LENGTH.pack(len(body)))
    stream.write(body)
    stream.flush()


def _read(stream: IO[bytes]) -> dict[str, Any] | None:
    """Read the next message; ``None`` at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = stream.read(length)
    message: dict[str, Any] | None = json.loads(body) if len(body) == length else None
    return message


# ------------------------------------------------------------------------------------------------ inside the process


def _serve(function: str) -> None:
    """Answer questions until the pool closes the pipe."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    questions, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    devnull = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # keep the function's own output out of the replies
        os.dup2(devnull, descriptor)
    hello = _read(questions)
    if hello is None:
        return
    sys.path[:] = hello["path"]
    resource.setrlimit(resource.RLIMIT_AS, (hello["memory_bytes"], hello["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)  # logs would repeat an agent's text
    module, _, name = function.partition(":")
    try:
        called_function = getattr(importlib.import_module(module), name)
        called_function(**hello["warm_up"])
    except Exception as error:  # noqa: BLE001 - the pool reports any error
        _write(replies, {"ending": Ending.FAILED, "said": _error_text(error)})
        return
    _write(replies, {"ending": Ending.ANSWERED})
    from nemo_gym.contract.errors import NemoGymError

    while (question := _read(questions)) is not None:
        try:
            reply = {"ending": Ending.ANSWERED, "value": called_function(**question)}
        except NemoGymError as error:
            reply = {"ending": Ending.FAILED, "value": "refused", "said": error.message}
        except Exception as error:  # noqa: BLE001 - the boundary of code that reads an agent's text
            reply = {"ending": Ending.FAILED, "said": _error_text(error)}
        _write(replies, reply)


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


if __name__ == "__main__":
    _serve(sys.argv[1])
