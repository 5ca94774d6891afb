"""A limit is enforced or refused, and passing it is reported as what it is."""

from __future__ import annotations

import asyncio

from nemo_gym.contract.sandbox import SandboxResources
from nemo_gym.sandbox.base import ExecOutcome, SandboxProvider, SandboxStatus
from nemo_gym.sandbox.conformance.base import PATIENCE_S, Checks, StartBox, eventually, python, sh
from nemo_gym.sandbox.facade import AsyncSandbox

EAT_MEMORY = "x = []\nwhile True: x.append(b'x' * 1000000)"


class LimitChecks(Checks):
    async def test_memory_limit_ends_the_command_as_out_of_memory_and_the_box_survives_or_says_so(
        self, provider: SandboxProvider, start: StartBox
    ) -> None:
        self.needs(provider, "memory_limit")
        box = await start(resources=SandboxResources(memory_mib=96))
        result = await box.exec(["python3", "-c", EAT_MEMORY], timeout_s=PATIENCE_S)
        assert (result.outcome, result.return_code, result.error_type) == (ExecOutcome.OUT_OF_MEMORY, None, "oom")
        await self._survives_or_says_so(box)

    async def test_out_of_memory_in_a_child_is_seen_when_the_shell_fails_of_it(
        self, provider: SandboxProvider, start: StartBox
    ) -> None:
        self.needs(provider, "memory_limit")
        box = await start(resources=SandboxResources(memory_mib=96))
        result = await box.exec(f'echo begin; python3 -c "{EAT_MEMORY}"; exit $?', timeout_s=PATIENCE_S)
        assert result.outcome is ExecOutcome.OUT_OF_MEMORY
        assert result.stdout == "begin\n"
        # A command that copes with its child's death has done what it wanted.
        coped = await box.exec(f'python3 -c "{EAT_MEMORY}" || echo coped', timeout_s=PATIENCE_S)
        assert (coped.outcome, coped.return_code, coped.stdout) == (ExecOutcome.EXITED, 0, "coped\n")
        # And what fails later has nothing to do with it.
        assert (await box.exec("exit 137")).outcome is not ExecOutcome.OUT_OF_MEMORY

    async def test_files_in_memory_count_towards_the_memory_limit(
        self, provider: SandboxProvider, start: StartBox
    ) -> None:
        self.needs(provider, "memory_limit")
        box = await start(resources=SandboxResources(memory_mib=96))
        for place in ("/dev/shm", "/tmp"):
            if "tmpfs" in await sh(box, f"stat -f -c %T {place}"):
                filled = await box.exec(f"head -c 300000000 /dev/zero > {place}/big", timeout_s=PATIENCE_S)
                assert not filled.ok, place
                await box.exec(f"rm -f {place}/big")

    async def test_memory_of_one_box_does_not_harm_another(self, provider: SandboxProvider, start: StartBox) -> None:
        self.needs(provider, "memory_limit")
        greedy, calm = await asyncio.gather(start(resources=SandboxResources(memory_mib=96)), start())
        eaten = greedy.exec(["python3", "-c", EAT_MEMORY], timeout_s=PATIENCE_S)
        result, other = await asyncio.gather(eaten, calm.exec("sleep 1; echo fine"))
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

    async def test_disk_limit_holds(self, provider: SandboxProvider, start: StartBox) -> None:
        self.needs(provider, "disk_limit")
        box = await start(resources=SandboxResources(disk_gib=0.05))
        written = await box.exec("head -c 200000000 /dev/zero > /var/big", timeout_s=PATIENCE_S)

        async def ended() -> bool:
            return await box.status() is not SandboxStatus.RUNNING

        if written.ok:
            await eventually(ended, "a box that wrote more than its disk limit ends")

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
    async def _survives_or_says_so(box: AsyncSandbox) -> None:
        async def honest() -> bool:
            after = await box.exec("echo alive")
            return after.stdout == "alive\n" or await box.status() is not SandboxStatus.RUNNING

        await eventually(honest, "the box works again, or its status says that it does not run")
