"""The interface of a CLI harness: how to start the CLI, how to read its output, and how to judge its ending.

A harness is independent of benchmark, sandbox and topology. It turns a `HarnessContext` (paths and URLs as a process
in the box sees them) into a `HarnessCommand`, and judges the `HarnessEnded` of the ended process.
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
"""The directory in a box where packages are mounted, one subdirectory each."""

Runtime = Literal["elf-glibc", "elf-static", "node", "python", "script"]


@dataclass(frozen=True)
class CliPackage:
    """One CLI at one version."""

    name: str
    """The name of the package and of its mount: ``/opt/nemo-gym/agents/<name>``."""
    version: str
    command: str
    """The program's path below the installed directory."""
    runtime: Runtime
    """What the program needs to start: a glibc loader, nothing, a node or Python interpreter, or ``/bin/sh``."""
    npm: Mapping[str, str] = field(default_factory=dict)
    """npm package name → exact version; all packages are unpacked side by side below ``node_modules``."""
    integrity: Mapping[str, str] = field(default_factory=dict)
    """npm package name → Subresource Integrity of its tarball (``sha512-…``); every package in ``npm`` has one."""
    requirements: Path | None = None
    """A pip requirements file with the exact version and checksums of every PyPI package. They are installed beside a
    CPython copied from this host. The ``command`` is then ``bin/python`` and the runtime ``script``."""
    pythons: tuple[str, ...] = ()
    """Python versions that ``requirements`` has checksums for, the preferred one first: ``("3.12", "3.13")``."""
    box_commands: tuple[str, ...] = ()
    """Commands that the package needs in the image."""
    directory: Path | None = None
    """A directory on this host that already contains the package (in the plugin's folder, say); nothing is fetched."""

    @property
    def is_fetched(self) -> bool:
        """Whether the package must be fetched before it can be mounted."""
        return self.directory is None and bool(self.npm or self.requirements)

    @property
    def install_dir(self) -> str:
        """The package's directory in the box."""
        return f"{BOX_DIRECTORY}/{self.name}"

    @property
    def executable(self) -> str:
        """The program's path in the box."""
        return f"{self.install_dir}/{self.command}"


PLACEHOLDER_KEY = "no-key-needed-behind-this-door"
"""The API key for a CLI that requires one; the door replaces it by the real token."""


class HarnessOptions(BaseModel):
    """Settings of a harness in its agent's YAML (``harness: {...}``). Subclass it; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class McpEndpoint:
    """An MCP server (streamable HTTP) as seen from the box. The door adds the token, so no header is needed."""

    name: str
    url: str


@dataclass(frozen=True)
class HarnessContext:
    """Everything that a command line can depend on."""

    prompt: str
    system: str
    """Text of the row's system messages; empty if there is none."""
    model: str
    """The model's name for use in requests."""
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
    """The limit for one model answer, if the row sets it."""


@dataclass(frozen=True)
class HarnessCommand:
    """One process in the box. It runs in ``workdir``; ``home`` exists."""

    argv: tuple[str, ...]
    """Linux allows at most 128 KiB per argument, so pass long prompts through ``stdin`` or a file."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that override the box's own, and the defaults of ``HOME`` and ``TMPDIR`` (both in ``home``)."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Absolute path in the box → content. Only the harness's user can read them; parent directories are created."""
    stdin: bytes | None = None


Judgement = tuple[AgentOutcome, str | None]
"""An outcome, and one sentence about it unless it is ``completed``."""


@dataclass(frozen=True)
class HarnessEnded:
    """How the process ended, and what was observed of it."""

    outcome: ExecOutcome
    return_code: int | None
    signal: int | None
    stderr: str
    """The bounded log of standard error: its beginning and end."""
    reader: EventReader
    """The reader created by `CliHarness.reader`."""
    model_door: DoorStatistics | None = None
    """``None`` if the provider keeps no door statistics."""
    mcp_doors: Mapping[str, DoorStatistics] = field(default_factory=dict)
    stopped: Judgement | None = None
    """Why the process was stopped before its deadline; ``None`` if it was not."""

    @property
    def ok(self) -> bool:
        """Whether the process exited by itself with status 0."""
        return self.outcome is ExecOutcome.EXITED and self.return_code == 0

    @property
    def how(self) -> str:
        """A short text for an outcome's detail: ``exit status 1``, for example, and the end of standard error."""
        if self.outcome is ExecOutcome.EXITED:
            ending = f"exit status {self.return_code}"
        else:
            ending = f"signal {self.signal}" if self.signal else str(self.outcome).replace("_", " ")
        stderr = re.sub(r"\s+", " ", self.stderr).strip()
        return f"{ending}; stderr: {stderr[-300:]}" if stderr else ending


class CliHarness(ABC):
    """One CLI. Each agent server has one instance, shared by many concurrent runs, so it must hold no run's state."""

    name: str
    package: CliPackage
    options_class: ClassVar[type[HarnessOptions]] = HarnessOptions

    def __init__(self, options: HarnessOptions | None = None) -> None:
        self.options = options or self.options_class()

    @abstractmethod
    def command(self, context: HarnessContext) -> HarnessCommand:
        """Return the process to run. It must depend only on the context and the options."""

    @abstractmethod
    def reader(self) -> EventReader:
        """Create a reader for one run."""

    def outcome(self, ended: HarnessEnded) -> Judgement:
        """Judge a run by the harness's own exit status and events. Called only if the process ended by itself.

        Override this for a CLI whose exit status is misleading. `nemo_gym.agent.harness.run` judges what is common to
        all: deadline, out of memory, a model or MCP server that does not respond, a harness that never called a model.
        """
        return (AgentOutcome.COMPLETED, None) if ended.ok else (AgentOutcome.CRASHED, ended.how)
