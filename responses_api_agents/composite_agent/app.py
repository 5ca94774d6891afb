"""An agent server that runs any command, for agents of several processes and agents without a harness of their own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from string import Template
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from nemo_gym._util.files import cache_root
from nemo_gym._util.suggest import nearest
from nemo_gym.agent.harness.agent import CliAgent
from nemo_gym.agent.harness.base import (
    CliHarness,
    CliPackage,
    HarnessCommand,
    HarnessContext,
    HarnessEnded,
    HarnessOptions,
    Judgement,
    Runtime,
)
from nemo_gym.agent.harness.events import MAIN, JsonEventReader
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.session import AgentOutcome
from nemo_gym.prompt import resolve_path

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
MAX_TEXT_BYTES = 64 * 1024
EXAMPLE = Path(__file__).with_name("example")


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


class CompositeReader(JsonEventReader):
    """Reads the events that the command prints, one JSON object a line; the README shows their format. An event
    belongs to the part named in ``agent``, or to the main agent if it has no ``agent``."""

    def __init__(self) -> None:
        super().__init__()
        self.claim: AgentOutcome | None = None
        """The outcome in the last ``end`` event."""
        self.detail: str | None = None
        self._text = b""
        self._events = 0

    def feed(self, line: bytes) -> None:
        before = self.other_lines
        super().feed(line)
        if self.other_lines > before:
            self._text = (self._text + line + b"\n")[-MAX_TEXT_BYTES:]

    def finish(self) -> None:
        """If the command printed no events, take its output as its message."""
        if not self._events:
            self.transcript.says(self._text.decode("utf-8", "replace").strip())

    def event(self, event: dict[str, Any]) -> None:
        invocation = self._invocation(event)
        match event["type"]:
            case "answer":
                self._answer(event, invocation)
            case "call":
                self.transcript.calls(str(event["id"]), event["name"], event["arguments"], invocation=invocation)
            case "result":
                self.transcript.returns(str(event["id"]), event["output"], failed=bool(event.get("failed")))
            case "say":
                self.transcript.says(event["text"], invocation=invocation)
            case "end":
                claim = AgentOutcome(event["outcome"])
                if claim not in CLAIMS:
                    raise ValueError(f"'{claim}' is not the agent's to say")
                self.claim, self.detail = claim, event.get("detail") and str(event["detail"])[:500]
            case other:
                raise ValueError(f"unknown type '{other}'")
        self._events += 1

    def _invocation(self, event: dict[str, Any]) -> str:
        part = event.get("agent")
        if part is None:
            return MAIN
        parent = event.get("parent")
        self.transcript.invokes(str(part), parent=str(parent) if parent is not None else MAIN)
        return str(part)

    def _answer(self, event: dict[str, Any], invocation: str) -> None:
        usage = event.get("usage") or {}
        names = ("input_tokens", "output_tokens", "cached_tokens")
        tokens = {name: int(usage.get(name) or 0) for name in names}
        if invocation == MAIN:
            self.transcript.turn(**tokens)
        else:
            self.transcript.add_usage(**tokens)
        self.transcript.thinks(str(event.get("reasoning") or ""), invocation=invocation)
        self.transcript.says(str(event.get("text") or ""), invocation=invocation)


class Composite(CliHarness):
    name = "composite"
    package = CliPackage(name="composite", version="1", command="planner.py", runtime="python", directory=EXAMPLE)
    options_class = CompositeOptions
    options: CompositeOptions

    def __init__(self, options: CompositeOptions) -> None:
        super().__init__(options)
        self.name = options.name
        self.package = CliPackage(
            name=options.name, version=options.version, command=".", runtime=options.runtime, directory=self._program()
        )

    def _program(self) -> Path:
        if self.options.program is None:
            # Every agent has a mount, so mount an empty directory. It lies where a broker allows agents' mounts.
            empty_directory = cache_root() / "agents" / ".nothing"
            try:
                empty_directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"the cache {cache_root()} cannot be written to ({error.strerror}); set NEMO_GYM_CACHE_DIR",
                    key="NEMO_GYM_CACHE_DIR",
                ) from error
            return empty_directory
        directory = resolve_path(self.options.program)
        if not directory.is_dir():
            raise ConfigError(
                f"agent '{self.options.name}': harness.program: there is no directory {directory}",
                key="harness.program",
            )
        return directory

    def command(self, context: HarnessContext) -> HarnessCommand:
        words, options = Words(context), self.options
        task = {
            "prompt": context.prompt,
            "system": context.system,
            "model": context.model,
            "model_url": context.model_url,
            "api_key": context.api_key,
            "mcp": {server.name: server.url for server in context.mcp},
            "workdir": context.workdir,
            "home": context.home,
            "max_turns": context.max_turns,
            "wall_clock_s": context.wall_clock_s,
            "max_output_tokens": context.max_output_tokens,
            "session": context.session_uuid,
        }
        servers = {server.name: {"type": "http", "url": server.url} for server in context.mcp}
        prompt, task_json = context.prompt.encode(), json.dumps(task).encode()
        return HarnessCommand(
            argv=tuple(words.fill(part) for part in options.command),
            env={key: words.fill(value) for key, value in options.env.items()},
            files={
                f"{context.home}/{PROMPT_FILE}": prompt,
                f"{context.home}/{TASK_FILE}": task_json,
                f"{context.home}/{MCP_FILE}": json.dumps({"mcpServers": servers}).encode(),
                **{words.fill(path): words.fill(text).encode() for path, text in options.files.items()},
            },
            stdin={"prompt": prompt, "task": task_json, "nothing": None}[options.stdin],
        )

    def reader(self) -> CompositeReader:
        return CompositeReader()

    def outcome(self, ended: HarnessEnded) -> Judgement:
        reader = ended.reader
        assert isinstance(reader, CompositeReader)
        if ended.return_code in self.options.outcomes:
            outcome = self.options.outcomes[ended.return_code]
        elif ended.ok:
            outcome = reader.claim or AgentOutcome.COMPLETED
        else:
            # A failed program may report that it gave up, but its report of success does not count.
            gave_up = reader.claim in (AgentOutcome.MAX_TURNS, AgentOutcome.REFUSED)
            outcome = reader.claim if gave_up and reader.claim else AgentOutcome.CRASHED
        return outcome, None if outcome is AgentOutcome.COMPLETED else reader.detail or ended.how


class CompositeAgent(CliAgent):
    harness_class = Composite


if __name__ == "__main__":
    CompositeAgent.run_webserver()
