"""What a composite agent is told to run, and the words its command line may use."""

from __future__ import annotations

import re
from string import Template
from typing import Literal

from pydantic import Field, field_validator, model_validator

from nemo_gym._util.suggest import nearest
from nemo_gym.agent.harness.base import HarnessContext, HarnessOptions, Runtime
from nemo_gym.contract.session import AgentOutcome

PROMPT_FILE, TASK_FILE, MCP_FILE = "prompt.txt", "task.json", "mcp.json"
"""In the agent's home."""
WORDS = (
    "program",
    "home",
    "workdir",
    "prompt_file",
    "task_file",
    "mcp_file",
    "model",
    "model_url",
    "api_key",
    "max_turns",
    "session",
)
"""``$word`` in commands, variables, and files."""
CLAIMS = (AgentOutcome.COMPLETED, AgentOutcome.MAX_TURNS, AgentOutcome.REFUSED, AgentOutcome.CRASHED)
"""What a process may say of its own end. The rest is seen from outside."""


class CompositeOptions(HarnessOptions):
    name: str = Field("composite", pattern=r"^[a-z][a-z0-9_-]*$")
    """Of the agent, in observations and in the box (``/opt/nemo-gym/agents/<name>``)."""
    version: str = "1"
    """In observations."""
    program: str | None = None
    """A directory of this host that the box sees read-only as ``$program``; a relative path is looked for in the
    plugin roots. Nothing for a command that the image has."""
    command: tuple[str, ...] = Field(min_length=1)
    """The command line. It runs in the work directory."""
    runtime: Runtime = "script"
    """What the image must have: ``python``, ``node``, ``elf-glibc``, or nothing beyond a shell."""
    env: dict[str, str] = Field(default_factory=dict)
    """Over the box's own variables."""
    files: dict[str, str] = Field(default_factory=dict)
    """Path in the box → text, written before the command starts."""
    stdin: Literal["prompt", "task", "nothing"] = "prompt"
    """What the command reads: the prompt's text, the task as JSON, or an empty input."""
    outcomes: dict[int, AgentOutcome] = Field(default_factory=dict)
    """Exit status → outcome, beside 0 (``completed``) and all others (``crashed``)."""

    @field_validator("outcomes")
    @classmethod
    def _may_be_claimed(cls, outcomes: dict[int, AgentOutcome]) -> dict[int, AgentOutcome]:
        for status, outcome in outcomes.items():
            if outcome not in CLAIMS:
                raise ValueError(f"exit status {status} cannot mean '{outcome}'; it can mean {', '.join(CLAIMS)}")
        return outcomes

    @model_validator(mode="after")
    def _words_are_known(self) -> CompositeOptions:
        for text in (*self.command, *self.env.values(), *self.files):
            for word in re.findall(r"(?<!\$)\$\{?([a-z][a-z_]*)", text):
                if word not in WORDS and (hint := nearest(word, WORDS)):
                    raise ValueError(f"'${word}' in '{text}' is not known{hint}; '$$' is a dollar")
        for path in self.files:
            if not path.startswith(("/", "$home/", "${home}/")):
                raise ValueError(f"files: '{path}' is no absolute path; begin it with / or $home/")
        return self


class Words:
    """The values of `WORDS` in one run."""

    def __init__(self, context: HarnessContext) -> None:
        self._values = {
            "program": context.install_dir,
            "home": context.home,
            "workdir": context.workdir,
            "prompt_file": f"{context.home}/{PROMPT_FILE}",
            "task_file": f"{context.home}/{TASK_FILE}",
            "mcp_file": f"{context.home}/{MCP_FILE}",
            "model": context.model,
            "model_url": context.model_url,
            "api_key": context.api_key,
            "max_turns": "" if context.max_turns is None else str(context.max_turns),
            "session": context.session_uuid,
        }

    def fill(self, text: str) -> str:
        """With every known word in its place; other dollars are left alone, for shells."""
        return Template(text).safe_substitute(self._values)
