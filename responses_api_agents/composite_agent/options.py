"""The options of a composite agent, and the variables that its command line may use."""

from __future__ import annotations

import re
from string import Template
from typing import Literal

from pydantic import Field, field_validator, model_validator

from nemo_gym._util.suggest import nearest
from nemo_gym.agent.harness.base import HarnessContext, HarnessOptions, Runtime
from nemo_gym.contract.session import AgentOutcome

PROMPT_FILE, TASK_FILE, MCP_FILE = "prompt.txt", "task.json", "mcp.json"
"""Files in the agent's home directory."""
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
"""The ``$word`` variables that commands, environment variables and files may use."""
CLAIMS = (AgentOutcome.COMPLETED, AgentOutcome.MAX_TURNS, AgentOutcome.REFUSED, AgentOutcome.CRASHED)
"""The outcomes that a process may report about itself. All others are observed from outside."""


class CompositeOptions(HarnessOptions):
    name: str = Field("composite", pattern=r"^[a-z][a-z0-9_-]*$")
    """The agent's name in observations and in the box (``/opt/nemo-gym/agents/<name>``)."""
    version: str = "1"
    """The agent's version in observations."""
    program: str | None = None
    """A directory of this host, mounted read-only in the box as ``$program``. A relative path is searched in the
    plugin roots. Leave it out if the image contains the command."""
    command: tuple[str, ...] = Field(min_length=1)
    """The command line. It runs in the work directory."""
    runtime: Runtime = "script"
    """What the image must have: ``python``, ``node``, ``elf-glibc``, or nothing beyond a shell."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables, added to the box's own. They win over variables of the same name."""
    files: dict[str, str] = Field(default_factory=dict)
    """Path in the box → text, written before the command starts."""
    stdin: Literal["prompt", "task", "nothing"] = "prompt"
    """What the command reads: the prompt's text, the task as JSON, or an empty input."""
    outcomes: dict[int, AgentOutcome] = Field(default_factory=dict)
    """Exit status → outcome. By default, 0 means ``completed`` and any other status ``crashed``."""

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
                raise ValueError(f"files: '{path}' is not an absolute path; begin it with / or $home/")
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
        """Return ``text`` with every known word replaced. Other dollar signs stay, for shells."""
        return Template(text).safe_substitute(self._values)
