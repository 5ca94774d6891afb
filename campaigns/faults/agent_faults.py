"""Faults of an agent CLI, as scripts that run with any CLI, and the outcome that each must have.

The policy's commands run in the CLI's own shell tool, below the CLI in the process tree, as a real agent's do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_gym.contract.session import AgentOutcome
from tests.harness.stage import DONE, task

MEMORY_MIB = 1536
"""The memory of boxes that run out of it: more than any of the CLIs uses by itself."""
FLOOD_BYTES = 30_000_000
KEPT = "kept"
"""The line that the harvested patch must add."""
WORK = f"echo {KEPT} > greeting.txt; "
MARKS = {"{mark1}": "271.{case:06d}", "{mark2}": "272.{case:06d}", "{lines}": "990{case:06d}"}
"""Numbers unique to a case (seconds of sleeps, lines of a tail), which identify its processes on this machine."""
# Finds the CLI itself, not a shell that it started: the topmost ancestor whose program is from the CLI's package.
FIND_CLI = (
    "cli=; p=$$; while [ $p -gt 1 ]; do"
    " case $(readlink /proc/$p/exe) in /opt/nemo-gym/agents/*) cli=$p;; esac;"
    " p=$(sed -n 's/^PPid:[[:space:]]*//p' /proc/$p/status); done; "
)
ALWAYS = 99_999


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    name: str
    outcome: AgentOutcome
    turns: tuple[dict[str, Any], ...] = ()
    """The policy's turns. Placeholders of `MARKS` in commands are replaced with the case's numbers."""
    repeat_last: bool = False
    wall_clock_s: float = 180.0
    reaches_deadline: bool = False
    """Whether the wall-clock limit ends the case; the limit is then the CLI's ``patience_s``."""
    max_turns: int | None = None
    memory_mib: int | None = None
    detail: str = ""
    """Text that the outcome's detail must contain."""
    within_reach: bool = False
    works_first: bool = True
    """Whether the policy changes the world before the fault; the patch must then contain the change."""
    stderr_bytes: int = 0
    """The least number of bytes that the CLI writes to stderr."""
    gone: bool = False
    """No model server answers at all."""
    wrong_mcp_token: bool = False

    def task(self, case: int) -> dict[str, Any]:
        """The policy's task, for the scripted model."""
        marks = {name: mark.format(case=case) for name, mark in MARKS.items()}
        turns = [_marked(turn, marks) for turn in self.turns or (DONE,)]
        return task(self.words(case), *turns, repeat_last=self.repeat_last)

    def words(self, case: int) -> str:
        """The prompt."""
        return f"Do the work of case {case:06d}."


def _marked(turn: dict[str, Any], marks: Mapping[str, str]) -> dict[str, Any]:
    calls = []
    for call in turn.get("tool_calls", ()):
        command = call["shell"]
        for name, mark in marks.items():
            command = command.replace(name, mark)
        calls.append({"shell": command})
    return {**turn, **({"tool_calls": calls} if calls else {})}


def shell(command: str) -> dict[str, Any]:
    return {"text": "Next.", "tool_calls": [{"shell": command}]}


def broken(**fault: Any) -> dict[str, Any]:
    """A model response that the given fault replaces."""
    return {**DONE, "fault": {"times": ALWAYS, **fault}}


WORKED = shell(WORK + "true")
RATE_LIMIT: dict[str, Any] = {"status": 429, "retry_after_s": 0}


def _faults() -> list[Fault]:
    completed, timed_out = AgentOutcome.COMPLETED, AgentOutcome.TIMED_OUT
    crashed, unreachable = AgentOutcome.CRASHED, AgentOutcome.MODEL_UNREACHABLE
    memory: dict[str, Any] = {"memory_mib": MEMORY_MIB}
    return [
        # Some CLIs do not wait for a command to end; the policy then calls it again.
        Fault("tool hangs", timed_out, (shell(WORK + "sleep {mark1}"),), repeat_last=True, reaches_deadline=True),
        Fault("CLI is stopped", timed_out, (shell(WORK + FIND_CLI + "kill -STOP $cli"), DONE), reaches_deadline=True),
        Fault(
            "tool ignores signals",
            timed_out,
            (shell(WORK + "trap '' TERM INT HUP; (trap '' TERM INT HUP; sleep {mark1}); sleep {mark2}"),),
            repeat_last=True,
            reaches_deadline=True,
        ),
        Fault("loops", AgentOutcome.MAX_TURNS, (WORKED, shell("pwd")), repeat_last=True, max_turns=6),
        Fault(
            "floods stderr",
            completed,
            (
                shell(f"{WORK}{FIND_CLI}head -c {FLOOD_BYTES} /dev/zero | tr '\\0' x > /proc/$cli/fd/2"),
                DONE,
            ),
            stderr_bytes=FLOOD_BYTES,
        ),
        Fault(
            "floods its events",
            completed,
            (
                shell(f"{WORK}{FIND_CLI}(echo; head -c {FLOOD_BYTES} /dev/zero | tr '\\0' x; echo) > /proc/$cli/fd/1"),
                DONE,
            ),
        ),
        Fault(
            "forks daemons",
            completed,
            (shell(WORK + "(setsid sleep {mark1} >/dev/null 2>&1 &); sleep {mark2} >/dev/null 2>&1 & true"), DONE),
        ),
        Fault(
            "daemon holds its output",
            completed,
            (
                shell(f"{WORK}{FIND_CLI}(setsid sleep {{mark1}} <&- > /proc/$cli/fd/1 2> /proc/$cli/fd/2 &); true"),
                DONE,
            ),
        ),
        Fault(
            "CLI is killed for memory",
            crashed,
            (shell(f"{WORK}{FIND_CLI}echo 1000 > /proc/$cli/oom_score_adj; tail -n {{lines}} /dev/zero"), DONE),
            detail="out of memory",
            within_reach=True,
            **memory,
        ),
        Fault(
            "tool is killed for memory", completed, (shell(WORK + "tail -n {lines} /dev/zero; true"), DONE), **memory
        ),
        Fault(
            "CLI is killed",
            crashed,
            (shell(WORK + FIND_CLI + "kill -9 $cli; sleep {mark1}"), DONE),
            detail="signal 9",
            within_reach=True,
        ),
        Fault("model: 429", unreachable, (WORKED, broken(**RATE_LIMIT)), detail="429"),
        Fault("model: 429 without Retry-After", unreachable, (WORKED, broken(status=429)), detail="429"),
        Fault("model: 429 at first", unreachable, (broken(**RATE_LIMIT),), detail="429", works_first=False),
        Fault("model: 500", unreachable, (WORKED, broken(status=500)), detail="500"),
        Fault("model: 500 at first", unreachable, (broken(status=500),), detail="500", works_first=False),
        Fault("model: disconnects", unreachable, (WORKED, broken(disconnect=True))),
        Fault("model: gone", unreachable, works_first=False, gone=True),
        Fault("model: silent", timed_out, (WORKED, broken(hang_s=600)), reaches_deadline=True),
        Fault("model: silent at first", unreachable, (broken(hang_s=600),), reaches_deadline=True, works_first=False),
        Fault("model: two 500s", completed, (WORKED, broken(status=500, times=2))),
        Fault("model: two 429s", completed, (WORKED, broken(**RATE_LIMIT, times=2))),
        Fault("model: one disconnect", completed, (WORKED, broken(disconnect=True, times=1))),
        Fault("wrong MCP token", AgentOutcome.MCP_FAILED, (WORKED, DONE), works_first=False, wrong_mcp_token=True),
    ]


FAULTS = {fault.name: fault for fault in _faults()}


@dataclass(frozen=True)
class Seen:
    """The result of one case."""

    sandbox: str
    cli: str
    fault: str
    outcome: str
    detail: str
    seconds: float
    over_s: float
    """Seconds by which the whole act exceeded its wall clock; negative if it ended before."""
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems
