"""What a harness says about its CLI: how it is started, how its output is read, what its ending means.

A harness knows no benchmark, no sandbox and no topology. It is given a `HarnessContext` (paths and URLs as a process
in the box sees them) and answers with a `HarnessCommand`; when the process has ended, it is given a `HarnessEnded`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from nemo_gym.agent.harness.events import EventReader
from nemo_gym.contract.session import AgentOutcome
from nemo_gym.sandbox.base import ExecOutcome
from nemo_gym.sandbox.door_statistics import DoorStatistics

BOX_DIRECTORY = "/opt/nemo-gym/agents"
"""Where packages are mounted in a box, one directory each."""

Runtime = Literal["elf-glibc", "elf-static", "node", "python", "script"]


@dataclass(frozen=True)
class CliPackage:
    """One CLI at one version."""

    name: str
    """Of the mount: ``/opt/nemo-gym/agents/<name>``."""
    version: str
    command: str
    """Path of the program below the installed directory."""
    runtime: Runtime
    """What the program needs to be started: a glibc loader, nothing, a node or Python interpreter, or ``/bin/sh``."""
    npm: Mapping[str, str] = field(default_factory=dict)
    """npm package name → exact version, all unpacked side by side below ``node_modules``."""
    integrity: Mapping[str, str] = field(default_factory=dict)
    """npm package name → Subresource Integrity of its tarball (``sha512-…``); every package in ``npm`` has one."""
    requirements: Path | None = None
    """A pip requirements file with the exact version and the checksums of every PyPI package, installed beside a
    CPython that is taken along from this host. Its ``command`` is ``bin/python`` and its runtime ``script``."""
    pythons: tuple[str, ...] = ()
    """Python versions that ``requirements`` has checksums for, the preferred one first: ``("3.12", "3.13")``."""
    box_commands: tuple[str, ...] = ()
    """Commands that the image has to have for it."""
    directory: Path | None = None
    """A directory of this host that is the package already (beside the plugin, say): nothing is fetched."""

    @property
    def is_fetched(self) -> bool:
        """Whether there is something to fetch before it can be mounted."""
        return self.directory is None and bool(self.npm or self.requirements)

    @property
    def install_dir(self) -> str:
        """The directory in the box."""
        return f"{BOX_DIRECTORY}/{self.name}"

    @property
    def executable(self) -> str:
        """The program in the box."""
        return f"{self.install_dir}/{self.command}"


PLACEHOLDER_KEY = "no-key-needed-behind-this-door"
"""What a CLI that insists on an API key is given; the door puts the real one in its place."""


class HarnessOptions(BaseModel):
    """Settings of a harness in its agent's YAML (``harness: {...}``). Subclass it; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class McpEndpoint:
    """An MCP server (streamable HTTP) as the box sees it. The door adds the token; nothing is needed in a header."""

    name: str
    url: str


@dataclass(frozen=True)
class HarnessContext:
    """Everything a command line can depend on."""

    prompt: str
    system: str
    """Text of the row's system messages; empty when there is none."""
    model: str
    """The model's name as requests must spell it."""
    model_url: str
    """Root URL of the model's door, without ``/v1``: Messages, Responses and Chat Completions are below it."""
    mcp: tuple[McpEndpoint, ...]
    home: str
    """A fresh writable directory in the box, outside of the work directory and of everything harvested; ``HOME`` by
    default. Configuration, caches and temporary files belong here."""
    workdir: str
    install_dir: str
    """The package's read-only mount."""
    executable: str
    """The package's command in the box."""
    session_uuid: str
    max_turns: int | None = None
    wall_clock_s: float | None = None
    api_key: str = PLACEHOLDER_KEY
    max_output_tokens: int | None = None
    """Of one model answer, when the row says so."""


@dataclass(frozen=True)
class HarnessCommand:
    """One process in the box. It runs in ``workdir``; ``home`` exists."""

    argv: tuple[str, ...]
    """Linux takes at most 128 KiB in one argument: give long prompts by ``stdin`` or a file."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Over the box's own, ``HOME`` and ``TMPDIR`` (both below ``home``)."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Absolute path in the box → content, readable by the harness's user alone; directories are made."""
    stdin: bytes | None = None


Judgement = tuple[AgentOutcome, str | None]
"""An outcome, and one sentence about it when it is not ``completed``."""


@dataclass(frozen=True)
class HarnessEnded:
    """How the process ended, and what was seen of it."""

    outcome: ExecOutcome
    return_code: int | None
    signal: int | None
    stderr: str
    """The end of standard error."""
    reader: EventReader
    """The one `CliHarness.reader` made."""
    model_door: DoorStatistics | None = None
    """``None`` where the provider does not count."""
    mcp_doors: Mapping[str, DoorStatistics] = field(default_factory=dict)
    stopped: Judgement | None = None
    """Why the process was stopped from outside, before its deadline and before it ended by itself."""

    @property
    def ok(self) -> bool:
        """Whether the process exited by itself with 0."""
        return self.outcome is ExecOutcome.EXITED and self.return_code == 0

    @property
    def how(self) -> str:
        """A few words for a detail: ``exit status 1`` with the last words of standard error."""
        if self.outcome is ExecOutcome.EXITED:
            ended = f"exit status {self.return_code}"
        else:
            ended = f"signal {self.signal}" if self.signal else str(self.outcome).replace("_", " ")
        said = re.sub(r"\s+", " ", self.stderr).strip()
        return f"{ended}; stderr: {said[-300:]}" if said else ended


class CliHarness(ABC):
    """One CLI. Instances are made once per agent server, hold no state of a run, and are used by many at once."""

    name: str
    package: CliPackage
    options_class: ClassVar[type[HarnessOptions]] = HarnessOptions

    def __init__(self, options: HarnessOptions | None = None) -> None:
        self.options = options or self.options_class()

    @abstractmethod
    def command(self, context: HarnessContext) -> HarnessCommand:
        """The process to run. Must be a function of the context and the options alone."""

    @abstractmethod
    def reader(self) -> EventReader:
        """A new reader for one run."""

    def outcome(self, ended: HarnessEnded) -> Judgement:
        """What the harness's own exit status and events say; only asked when the process ended by itself.

        Exit statuses lie in ways each harness knows. What is the same for all (deadline, out of memory, a model or MCP
        server that does not answer, a harness that never asked the model) is judged in
        `nemo_gym.agent.harness.run`.
        """
        return (AgentOutcome.COMPLETED, None) if ended.ok else (AgentOutcome.CRASHED, ended.how)
