"""Commands: output, ends, signals and limits."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal

import pytest

from nemo_gym.contract.sandbox import SandboxResources
from nemo_gym.sandbox.base import (
    ExecEnd,
    ExecOutcome,
    ExecOutput,
    ExecRequest,
    SandboxProvider,
    SandboxStatus,
    overrun_of,
)
from nemo_gym.sandbox.conformance.base import (
    PATIENCE_S,
    Checks,
    StartBox,
    alive,
    collect,
    dead,
    eventually,
    python,
    sh,
)
from nemo_gym.sandbox.facade import AsyncSandbox

# -- Commands ------------------------------------------------------------------------------------------------------

DAEMON = (
    "setsid sh -c 'trap \"\" TERM HUP INT; while :; do sleep 0.05; : {marker}; done' >/dev/null 2>&1 </dev/null & "
    "sh -c 'trap \"\" TERM; sleep 600; : {marker}' & "
)


class ExecChecks(Checks):
    @pytest.mark.parametrize("code", [0, 1, 3, 126, 255])
    async def test_exit_code_is_reported(self, code: int, box: AsyncSandbox) -> None:
        result = await box.exec(f"exit {code}")
        assert (result.outcome, result.return_code, result.error_type) == (ExecOutcome.EXITED, code, None)
        assert result.ok is (code == 0)
        assert result.signal is None

    async def test_exit_code_that_stands_for_a_signal_is_never_success(self, box: AsyncSandbox) -> None:
        result = await box.exec("exit 137")
        # Shells report a child's death this way, and some backends a command's own death, so both results are right.
        assert (result.outcome, result.return_code, result.signal) in (
            (ExecOutcome.EXITED, 137, None),
            (ExecOutcome.SIGNALED, None, signal.SIGKILL),
        )

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
    async def test_death_by_signal_is_reported_as_a_signal(self, number: signal.Signals, box: AsyncSandbox) -> None:
        result = await box.exec(f"kill -{number.value} $$; sleep 60")
        assert (result.outcome, result.signal, result.return_code) == (ExecOutcome.SIGNALED, number.value, None)
        assert result.error_type == "signal"

    async def test_string_is_a_shell_command_and_a_sequence_is_not(self, box: AsyncSandbox) -> None:
        assert (await box.exec("printf '%s|' a 'b c' | tr '|' '\\n'")).stdout == "a\nb c\n"
        argv = ["printf", "%s|", "$HOME", "a b", "*", "'", "", "ü"]
        assert (await box.exec(argv)).stdout == "$HOME|a b|*|'||ü|"

    async def test_missing_program_and_missing_directory_end_with_a_code(self, box: AsyncSandbox) -> None:
        for result in (await box.exec("no-such-program"), await box.exec(["no-such-program"])):
            assert result.outcome is ExecOutcome.EXITED
            assert result.return_code in (126, 127)
        result = await box.exec("true", cwd="/no/such/directory")
        assert result.outcome is ExecOutcome.EXITED
        assert result.return_code not in (0, None)
        assert (await box.exec("true")).ok

    async def test_timeout_kills_the_whole_tree_with_daemons_that_ignore_term(self, box: AsyncSandbox) -> None:
        marker = "conformance_daemon"
        result = await box.exec(DAEMON.format(marker=marker) + "echo before; sleep 600", timeout_s=1.5)
        assert (result.outcome, result.return_code, result.error_type) == (ExecOutcome.TIMED_OUT, None, "timeout")
        assert result.stdout == "before\n"
        assert result.duration_s >= 1.5
        await eventually(lambda: dead(box, marker), "every process of the timed-out command is dead", 10)

    async def test_box_survives_when_its_first_command_is_timed_out(self, start: StartBox) -> None:
        # Directly after create, a backend might mistake the box's own first processes for the command's.
        for box in await asyncio.gather(*(start() for _ in range(6))):
            result = await box.exec(DAEMON.format(marker="conformance_first") + "sleep 600", timeout_s=0.3)
            assert result.outcome is ExecOutcome.TIMED_OUT
            assert (await box.exec("echo alive")).stdout == "alive\n"

    async def test_timeouts_do_not_harm_commands_that_run_beside_them(self, box: AsyncSandbox) -> None:
        steady = asyncio.create_task(box.exec("sleep 4; echo steady; exit 5", timeout_s=PATIENCE_S))
        for _ in range(4):
            hung = asyncio.create_task(box.exec(DAEMON.format(marker="hung") + "sleep 600", timeout_s=0.4))
            beside = await asyncio.gather(*(box.exec(f"sleep 0.4; echo {n}; exit {n}") for n in range(4)))
            assert [(r.outcome, r.return_code, r.stdout) for r in beside] == [
                (ExecOutcome.EXITED, n, f"{n}\n") for n in range(4)
            ]
            assert (await hung).outcome is ExecOutcome.TIMED_OUT
        result = await steady
        assert (result.outcome, result.return_code, result.stdout) == (ExecOutcome.EXITED, 5, "steady\n")

    async def test_cancelling_exec_kills_the_command(self, box: AsyncSandbox) -> None:
        marker = "conformance_cancelled"
        running = asyncio.create_task(box.exec(DAEMON.format(marker=marker) + "sleep 600", timeout_s=None))
        await eventually(lambda: alive(box, marker), "the command started")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await eventually(lambda: dead(box, marker), "every process of the cancelled command is dead")

    async def test_exec_returns_when_a_background_process_holds_its_output(self, box: AsyncSandbox) -> None:
        async with asyncio.timeout(30):
            result = await box.exec("sleep 300 & echo done; exit 4", timeout_s=None)
        assert (result.outcome, result.return_code, result.stdout) == (ExecOutcome.EXITED, 4, "done\n")

    async def test_exec_that_ended_in_time_is_not_timed_out_for_what_it_left(self, box: AsyncSandbox) -> None:
        marker = "conformance_left"
        result = await box.exec(f"sh -c 'sleep 600; : {marker}' & echo done; exit 4", timeout_s=1.9)
        assert (result.outcome, result.return_code, result.stdout) == (ExecOutcome.EXITED, 4, "done\n")
        assert await alive(box, marker)

    async def test_background_process_lives_on_after_its_exec(self, box: AsyncSandbox) -> None:
        await sh(box, "(while :; do date +%s%N > /tmp/beat; sleep 0.05; done) >/dev/null 2>&1 &")

        async def beats() -> bool:
            before = (await box.exec("cat /tmp/beat")).stdout
            await asyncio.sleep(0.3)
            return bool(before) and before != (await box.exec("cat /tmp/beat")).stdout

        await eventually(beats, "a process left in the background goes on")

    async def test_background_process_that_writes_to_its_execs_output_lives_on(
        self, provider: SandboxProvider, box: AsyncSandbox
    ) -> None:
        self.needs(provider, "background_output")
        command = (
            "text=$(head -c 100000 /dev/zero | tr '\\0' x); "
            'while :; do echo "$text"; echo "$text" >&2; date +%s%N > /tmp/beat; sleep 0.05; done & sleep 0.1'
        )
        await sh(box, command)

        async def beats() -> bool:
            before = (await box.exec("cat /tmp/beat")).stdout
            await asyncio.sleep(0.3)
            return bool(before) and before != (await box.exec("cat /tmp/beat")).stdout

        for _ in range(5):
            await eventually(beats, "a process that writes in the background goes on", 10)

    async def test_standard_input_is_given_and_empty_otherwise(self, box: AsyncSandbox) -> None:
        assert (await box.exec("cat", stdin=b"one\ntwo")).stdout == "one\ntwo"
        assert (await box.exec("cat; echo end")).stdout == "end\n"
        assert (await box.exec("cat; echo end", stdin=b"")).stdout == "end\n"

    async def test_large_binary_input_and_output_pass_unchanged(self, box: AsyncSandbox) -> None:
        data = os.urandom(3_000_000)
        result = await box.exec("cat", stdin=data, timeout_s=PATIENCE_S)
        assert hashlib.sha256(result.stdout_bytes).digest() == hashlib.sha256(data).digest()

    async def test_command_that_does_not_read_its_input_still_ends(self, box: AsyncSandbox) -> None:
        result = await box.exec("exit 5", stdin=b"x" * 2_000_000, timeout_s=PATIENCE_S)
        assert (result.outcome, result.return_code) == (ExecOutcome.EXITED, 5)

    async def test_streams_are_kept_apart_and_merged_in_order_on_request(self, box: AsyncSandbox) -> None:
        command = "for i in 1 2 3 4 5 6 7 8; do echo o$i; echo e$i >&2; done"
        result = await box.exec(command)
        assert result.stdout == "".join(f"o{i}\n" for i in range(1, 9))
        assert result.stderr == "".join(f"e{i}\n" for i in range(1, 9))
        merged = await box.exec(command, merge_stderr=True)
        assert merged.stdout == "".join(f"o{i}\ne{i}\n" for i in range(1, 9))
        assert not merged.stderr

    async def test_exec_has_its_own_directory_and_environment_over_the_specs(self, start: StartBox) -> None:
        box = await start(env={"A": "spec", "B": "spec"}, workdir="/usr")
        command = 'echo "$PWD $A $B $C"'
        assert (
            await box.exec(command, cwd="/tmp", env={"B": "exec", "C": "x=y z"})
        ).stdout == "/tmp spec exec x=y z\n"
        assert (await box.exec(command)).stdout == "/usr spec spec \n"

    async def test_exec_runs_as_the_given_user(self, provider: SandboxProvider, box: AsyncSandbox) -> None:
        self.needs(provider, "exec_user")
        result = await box.exec("id -un", user="nobody")
        assert result.stdout == "nobody\n", result
        default_uid = await sh(box, "id -u")
        assert (await box.exec("id -u", user=default_uid.strip())).stdout == default_uid

    async def test_bytes_that_are_not_text_survive(self, box: AsyncSandbox) -> None:
        result = await box.exec(r"printf '\377\376\000x\303' ; printf '\200' >&2")
        assert result.stdout_bytes == b"\xff\xfe\x00x\xc3"
        assert result.stderr_bytes == b"\x80"

    async def test_output_is_capped_per_stream_and_says_so(self, box: AsyncSandbox) -> None:
        command = "head -c 30000000 /dev/zero | tr '\\0' a; echo short >&2; exit 7"
        result = await box.exec(command, max_output_bytes=10_000, timeout_s=PATIENCE_S)
        assert (result.outcome, result.return_code) == (ExecOutcome.EXITED, 7)
        assert result.stdout_bytes == b"a" * 10_000
        assert (result.stdout_truncated, result.stderr_truncated) == (True, False)
        assert result.stderr == "short\n"
        exact = await box.exec("printf 12345", max_output_bytes=5)
        assert (exact.stdout, exact.stdout_truncated) == ("12345", False)

    async def test_output_arrives_before_the_command_ends(self, box: AsyncSandbox) -> None:
        command = "echo one; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo two"
        process = await box.start_exec(ExecRequest(command))
        events = process.events()
        async with asyncio.timeout(PATIENCE_S):
            first = await anext(events)
            assert isinstance(first, ExecOutput)
            assert (first.stream, first.data) == ("stdout", b"one\n")
            await sh(box, "touch /tmp/go")
            remaining = [event async for event in events]
        assert b"".join(event.data for event in remaining if isinstance(event, ExecOutput)) == b"two\n"
        assert isinstance(remaining[-1], ExecEnd)
        assert (remaining[-1].outcome, remaining[-1].return_code) == (ExecOutcome.EXITED, 0)

    async def test_stream_has_exactly_one_terminal_event_and_it_is_the_last(self, box: AsyncSandbox) -> None:
        for command, outcome in (("echo a; echo b >&2; exit 3", "exited"), ("kill -9 $$", "signaled")):
            process = await box.start_exec(ExecRequest(command))
            _, _, ends = await collect(process)
            assert [end.outcome for end in ends] == [outcome]
        process = await box.start_exec(ExecRequest("sleep 600", timeout_s=0.5))
        _, _, ends = await collect(process)
        assert [end.outcome for end in ends] == ["timed_out"]

    async def test_kill_ends_the_command_and_is_idempotent(self, box: AsyncSandbox) -> None:
        marker = "conformance_killed"
        process = await box.start_exec(ExecRequest(DAEMON.format(marker=marker) + "echo up; sleep 600"))
        events = process.events()
        async with asyncio.timeout(PATIENCE_S):
            await anext(events)
            await asyncio.gather(process.kill(), process.kill())
            ends = [event async for event in events if isinstance(event, ExecEnd)]
        assert [(end.outcome, end.signal) for end in ends] == [(ExecOutcome.SIGNALED, 9)]
        await process.kill()
        await eventually(lambda: dead(box, marker), "every process of the killed command is dead")

    async def test_killed_shell_never_outlives_its_child_and_exits(self, box: AsyncSandbox) -> None:
        async def killed() -> ExecEnd:
            process = await box.start_exec(ExecRequest("sh -c 'sleep 600; :' & echo up; sleep 600; :"))
            events = process.events()
            await anext(events)
            await process.kill()
            (end,) = [event async for event in events if isinstance(event, ExecEnd)]
            return end

        async with asyncio.timeout(PATIENCE_S):
            ends = await asyncio.gather(*(killed() for _ in range(24)))
        assert {(end.outcome, end.signal) for end in ends} == {(ExecOutcome.SIGNALED, 9)}

    async def test_signal_reaches_the_whole_tree(self, box: AsyncSandbox) -> None:
        child = "sh -c 'trap \"echo child; exit\" USR1; echo up; while :; do sleep 0.05; done'"
        command = f"trap 'echo parent' USR1; {child} & wait; wait"
        process = await box.start_exec(ExecRequest(command))
        events = process.events()
        output = b""
        async with asyncio.timeout(PATIENCE_S):
            async for event in events:
                if isinstance(event, ExecOutput) and event.stream == "stdout":
                    output += event.data
                    if output == b"up\n":
                        await process.signal(signal.SIGUSR1)
        assert sorted(output.split()) == [b"child", b"parent", b"up"]

    async def test_twenty_execs_run_at_once(self, box: AsyncSandbox) -> None:
        await sh(box, "mkdir -p /tmp/meet")
        # Each command waits for all others, so they end only if they really run at the same time.
        command = 'touch /tmp/meet/{n}; while [ "$(ls /tmp/meet | wc -l)" -lt 20 ]; do sleep 0.1; done; echo {n}'
        results = await asyncio.gather(*(box.exec(command.format(n=n), timeout_s=PATIENCE_S) for n in range(20)))
        assert [result.stdout for result in results] == [f"{n}\n" for n in range(20)]

    async def test_hundred_short_execs_each_end_as_they_should(self, box: AsyncSandbox) -> None:
        for first in range(0, 100, 10):
            codes = range(first, first + 10)
            results = await asyncio.gather(*(box.exec(f"echo {n}; exit {n}") for n in codes))
            assert [(r.return_code, r.stdout) for r in results] == [(n, f"{n}\n") for n in codes]

    async def test_zombies_and_orphans_do_not_pile_up(self, box: AsyncSandbox) -> None:
        await sh(box, "for i in 1 2 3 4 5 6 7 8 9 10; do (sleep 0.01 &) ; done")

        async def reaped() -> bool:
            return "Z" not in await sh(box, "cat /proc/[0-9]*/stat 2>/dev/null | sed 's/.*) //' | cut -c1")

        await eventually(reaped, "orphans that ended are reaped")


# -- Limits --------------------------------------------------------------------------------------------------------

EAT_MEMORY = "x = []\nwhile True: x.append(b'x' * 1000000)"


class LimitChecks(Checks):
    @pytest.fixture
    async def small_box(self, provider: SandboxProvider, start: StartBox) -> AsyncSandbox:
        self.needs(provider, "memory_limit")
        return await start(resources=SandboxResources(memory_mib=96))

    async def test_memory_limit_ends_the_command_as_out_of_memory_and_the_box_survives_or_says_so(
        self, small_box: AsyncSandbox
    ) -> None:
        result = await small_box.exec(["python3", "-c", EAT_MEMORY], timeout_s=PATIENCE_S)
        assert (result.outcome, result.return_code, result.error_type) == (ExecOutcome.OUT_OF_MEMORY, None, "oom")
        await self._survives_or_says_so(small_box)

    async def test_out_of_memory_in_a_child_is_seen_when_the_shell_fails_of_it(self, small_box: AsyncSandbox) -> None:
        result = await small_box.exec(f'echo begin; python3 -c "{EAT_MEMORY}"; exit $?', timeout_s=PATIENCE_S)
        assert result.outcome is ExecOutcome.OUT_OF_MEMORY
        assert result.stdout == "begin\n"
        # A command that handles its child's death is a success.
        coped = await small_box.exec(f'python3 -c "{EAT_MEMORY}" || echo coped', timeout_s=PATIENCE_S)
        assert (coped.outcome, coped.return_code, coped.stdout) == (ExecOutcome.EXITED, 0, "coped\n")
        # A later command that fails is not reported as out of memory.
        assert (await small_box.exec("exit 137")).outcome is not ExecOutcome.OUT_OF_MEMORY

    async def test_files_in_memory_count_towards_the_memory_limit(self, small_box: AsyncSandbox) -> None:
        for place in ("/dev/shm", "/tmp"):
            if "tmpfs" in await sh(small_box, f"stat -f -c %T {place}"):
                filled = await small_box.exec(f"head -c 300000000 /dev/zero > {place}/big", timeout_s=PATIENCE_S)
                assert not filled.ok, place
                await small_box.exec(f"rm -f {place}/big")

    async def test_memory_of_one_box_does_not_harm_another(self, small_box: AsyncSandbox, box: AsyncSandbox) -> None:
        eaten = small_box.exec(["python3", "-c", EAT_MEMORY], timeout_s=PATIENCE_S)
        result, other = await asyncio.gather(eaten, box.exec("sleep 1; echo fine"))
        assert result.outcome is ExecOutcome.OUT_OF_MEMORY
        assert (other.outcome, other.stdout) == (ExecOutcome.EXITED, "fine\n")

    async def test_pids_limit_stops_a_fork_bomb_and_the_box_survives_or_says_so(
        self, provider: SandboxProvider, start: StartBox
    ) -> None:
        self.needs(provider, "pids_limit")
        box = await start(resources=SandboxResources(pids=40))
        bomb = (
            "import os, time\n"
            "count = 0\n"
            "try:\n"
            "    while count < 500:\n"
            "        if os.fork() == 0:\n"
            "            time.sleep(300); os._exit(0)\n"
            "        count += 1\n"
            "except OSError: pass\n"
            "print(count, flush=True); time.sleep(300)"
        )
        result = await box.exec(["python3", "-c", bomb], timeout_s=5)
        assert result.outcome is ExecOutcome.TIMED_OUT
        assert 0 < int(result.stdout or "0") < 40
        await self._survives_or_says_so(box)

    async def test_cpu_limit_holds(self, provider: SandboxProvider, start: StartBox) -> None:
        self.needs(provider, "cpu_limit")
        box = await start(resources=SandboxResources(cpu=0.25))
        code = (
            "import json, time\n"
            "end = time.monotonic() + 2\n"
            "while time.monotonic() < end: pass\n"
            "print(json.dumps(time.process_time() / 2))"
        )
        assert await python(box, code) < 0.45

    async def test_disk_limit_holds_and_a_box_that_it_ends_is_told_from_a_lost_one(
        self, provider: SandboxProvider, start: StartBox
    ) -> None:
        self.needs(provider, "disk_limit")
        box = await start(resources=SandboxResources(disk_gib=0.05))
        assert await overrun_of(provider, box.handle) is None
        written = await box.exec("head -c 200000000 /dev/zero > /var/big", timeout_s=PATIENCE_S)
        if written.ok or written.outcome is ExecOutcome.LOST:
            await eventually(lambda: self._ended(box), "a box that wrote more than its disk limit ends")
            assert "disk_gib" in (await overrun_of(provider, box.handle) or "")

    async def test_box_without_limits_in_its_spec_has_the_providers(
        self, provider: SandboxProvider, start: StartBox
    ) -> None:
        limits = provider.capabilities.default_limits
        if provider.capabilities.pids_limit:
            assert limits.pids is not None or "pids" in limits.unlimited
        if limits.pids is None:
            return
        box = await start()
        count = (
            "import threading, time\n"
            "started = 0\n"
            "try:\n"
            f"    while started < {limits.pids + 10}:\n"
            "        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
            "        started += 1\n"
            "except (RuntimeError, MemoryError): pass\n"
            "print(started, flush=True)\n"
            "import os; os._exit(0)"
        )
        started = await python(box, count)
        assert limits.pids - 20 <= started < limits.pids

    @staticmethod
    async def _ended(box: AsyncSandbox) -> bool:
        return await box.status() is not SandboxStatus.RUNNING

    async def _survives_or_says_so(self, box: AsyncSandbox) -> None:
        async def honest() -> bool:
            after = await box.exec("echo alive")
            return after.stdout == "alive\n" or await self._ended(box)

        await eventually(honest, "the box works again, or its status says that it does not run")
