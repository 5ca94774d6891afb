"""Scripts: files that define which answer follows which conversation, and how each harness spells their actions.

A script is a pure function of the conversation and the sample index. The turn is the number of assistant messages so
far, and a branch depends on the messages that followed each of them. Replaying a conversation gives the same answers
in any process.

A script may name an action instead of a harness's tool: ``shell: <command>``, ``tool: <tool of the environment>`` and,
on a turn, ``ends: true``. A file in the agent's folder maps these actions to the tool calls of its harness.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from nemo_gym._util.suggest import validation_problems
from nemo_gym.contract.errors import ConfigError, ModelError

ChatMessage = Mapping[str, Any]
PROMPT_CHARS_SHOWN = 120
COMMAND = "$command"


class ScriptError(ModelError):
    """The script has no answer for a conversation."""

    code = "script"
    status = 422


def _compiled(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return re.compile(value, re.DOTALL)
        except re.error as error:
            raise ValueError(f"'{value}' is not a valid regular expression: {error}") from None
    return value


Regex = Annotated[re.Pattern[str], BeforeValidator(_compiled)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class ToolCall(_Part):
    """A function call; ``arguments`` are an object, or JSON text that is sent unchanged."""

    name: str = ""
    """The tool's name in the harness. Instead, give ``shell`` or ``tool``, which `HarnessTools` translates."""
    shell: str | None = None
    """A command to run in the world."""
    tool: str | None = None
    """A tool of the environment, by the environment's name for it."""
    arguments: dict[str, Any] | str = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if sum([bool(self.name), self.shell is not None, self.tool is not None]) != 1:
            raise ValueError("a tool call has exactly one of: name, shell, tool")
        if self.shell is not None and self.arguments:
            raise ValueError("'shell' takes no arguments")
        return self


class Fault(_Part):
    """A failure in place of an answer, for the first ``times`` requests for that answer in a session."""

    status: int | None = Field(None, ge=400, le=599)
    retry_after_s: float | None = None
    hang_s: float | None = Field(None, gt=0)
    """Wait this long, then answer."""
    disconnect: bool = False
    """Close the connection in the middle of the response."""
    malformed: bool = False
    """Respond with status 200 and invalid JSON."""
    times: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = [self.status is not None, self.hang_s is not None, self.disconnect, self.malformed]
        if sum(kinds) != 1:
            raise ValueError("a fault is exactly one of: status, hang_s, disconnect, malformed")
        return self


class Branch(_Part):
    """The turn to go to if the messages after this turn match ``observed``; without ``observed``, always."""

    observed: Regex | None = None
    goto: str


class Turn(_Part):
    """One answer of the model."""

    id: str | None = None
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    delay_s: float = Field(0.0, ge=0)
    fault: Fault | None = None
    then: tuple[Branch, ...] = ()
    """The first matching branch decides the next turn. If none matches, the next turn in the list follows."""
    ends: bool = False
    """The work is done. If the harness needs a tool call to end, that call is made."""

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if not self.text and not self.tool_calls:
            raise ValueError("a turn needs 'text' or 'tool_calls'")
        if self.ends and self.tool_calls:
            raise ValueError("a turn that 'ends' has a 'text' and no 'tool_calls'")
        return self

    @property
    def is_spelled(self) -> bool:
        """Whether any harness understands the turn without translation by `HarnessTools`."""
        return not self.ends and all(call.name for call in self.tool_calls)

    def spelled(self, tools: HarnessTools, server: str | None) -> Turn:
        calls = [tools.spelled(call, server) for call in self.tool_calls]
        if self.ends and tools.end is not None:
            calls = [ToolCall(name=tools.end.name, arguments=tools.end.arguments)]
        return self.model_copy(update={"tool_calls": tuple(calls), "ends": False})


class When(_Part):
    """The conversations that a task answers. All patterns that are set must match."""

    user: Regex | None = None
    """Searched in the user messages before the first answer. The answers refer to its named groups as ``$name``."""
    system: Regex | None = None
    """Searched in the system prompt."""
    sample: int | None = Field(None, ge=0)
    """The index of a sample within its group. A conversation outside a rollout has index 0."""


class Task(_Part):
    """The answers to one task."""

    name: str
    when: When = Field(default_factory=When)
    turns: tuple[Turn, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    """Recorded Chat Completions messages, in place of ``turns``. Their assistant messages are replayed in order."""
    repeat_last: bool = False
    """Repeat the last turn forever. Otherwise a request after the last turn is an error."""

    _index: dict[str, int] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _turns_are_linked(self) -> Self:
        if self.turns and self.messages:
            raise ValueError(f"task '{self.name}': give 'turns' or 'messages', not both")
        if self.messages:
            self.turns = tuple(_turn_of_message(m) for m in self.messages if m.get("role") == "assistant")
        if not self.turns:
            raise ValueError(f"task '{self.name}' has no turns")
        self._index = {turn.id: number for number, turn in enumerate(self.turns) if turn.id is not None}
        for turn in self.turns:
            for branch in turn.then:
                if branch.goto not in self._index:
                    raise ValueError(f"task '{self.name}': goto '{branch.goto}' names no turn id")
        return self

    def matches(self, user: str, system: str, sample: int) -> dict[str, str] | None:
        """Return the named groups of the patterns, or ``None`` if the task does not answer this conversation."""
        if self.when.sample is not None and self.when.sample != sample:
            return None
        groups: dict[str, str] = {}
        for pattern, text in ((self.when.user, user), (self.when.system, system)):
            if pattern is None:
                continue
            match = pattern.search(text)
            if match is None:
                return None
            groups |= {name: value for name, value in match.groupdict().items() if value is not None}
        return groups

    def spelled(self, tools: HarnessTools, server: str | None) -> Task:
        try:
            turns = tuple(turn.spelled(tools, server) for turn in self.turns)
        except ValueError as error:
            raise ConfigError(f"task '{self.name}': {error}", key="tools") from None
        return self.model_copy(update={"turns": turns})

    def turn_after(self, observations: Sequence[str]) -> Turn:
        """Return the next turn. ``observations`` has one text per turn answered so far."""
        position = 0
        for answered, observed in enumerate(observations, 1):
            branches = (b for b in self.turns[position].then if b.observed is None or b.observed.search(observed))
            if (branch := next(branches, None)) is not None:
                position = self._index[branch.goto]
            elif position + 1 < len(self.turns):
                position += 1
            elif not self.repeat_last:
                raise ScriptError(
                    f"task '{self.name}' has ended after {answered} turns; the harness asked for another one",
                    task=self.name,
                )
        return self.turns[position]


def _turn_of_message(message: Mapping[str, Any]) -> Turn:
    calls = [
        ToolCall(name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    return Turn(text=message.get("content") or "", tool_calls=tuple(calls))


class Answer(BaseModel):
    """A script's answer to one conversation."""

    task: str
    turn: int
    text: str
    tool_calls: list[ToolCall]
    delay_s: float
    fault: Fault | None


class Script(_Part):
    """A file of tasks. The first task that matches a conversation answers it."""

    model: str = "scripted"
    """The model name in responses."""
    tasks: tuple[Task, ...] = Field(min_length=1)

    @classmethod
    def load(cls, path: Path) -> Script:
        """Read YAML or JSON. Raises `ConfigError` that names the file and the mistake in it."""
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
            return cls.model_validate(data)
        except OSError as error:
            raise ConfigError(
                f"script '{path}' cannot be read: {error.strerror}; give another with script=", key="script"
            ) from error
        except yaml.YAMLError as error:
            raise ConfigError(f"script '{path}' is no YAML: {error}", key="script") from error
        except ValidationError as error:
            problems = validation_problems(error, cls.model_fields)
            raise ConfigError(f"script '{path}': {problems}", key="script") from None

    @property
    def is_spelled(self) -> bool:
        """Whether the script works without `HarnessTools`."""
        return all(turn.is_spelled for task in self.tasks for turn in task.turns)

    def spelled(self, tools: HarnessTools, server: str | None = None) -> Script:
        """Return the script translated for one harness, with the harness's own tasks first.

        Args:
            server: the name of the environment's MCP server.
        """
        harness_tasks = [Task.model_validate(task) for task in tools.tasks]
        return self.model_copy(
            update={"tasks": (*harness_tasks, *(task.spelled(tools, server) for task in self.tasks))}
        )

    def answer(self, messages: Sequence[ChatMessage], sample: int = 0) -> Answer:
        """Return the next answer in a conversation of chat messages. Raises `ScriptError` if there is none.

        Args:
            sample: the index of the conversation's sample within its group.
        """
        # Some harnesses describe the environment in a separate message before the task.
        opening = itertools.takewhile(lambda message: message.get("role") != "assistant", messages)
        user = "\n".join(text_of(message) for message in opening if message.get("role") == "user")
        system = "\n".join(text_of(m) for m in messages if m.get("role") in ("system", "developer"))
        for task in self.tasks:
            groups = task.matches(user, system, sample)
            if groups is not None:
                return _answer(task, groups, _observations(messages))
        beginning = " ".join(user.split())[:PROMPT_CHARS_SHOWN]
        raise ScriptError(
            f"no task of the script is meant for a conversation that begins '{beginning}'; its tasks are"
            f" {', '.join(task.name for task in self.tasks)}"
        )


def _answer(task: Task, groups: Mapping[str, str], observations: Sequence[str]) -> Answer:
    turn = task.turn_after(observations)
    calls = [
        ToolCall(name=call.name, arguments=_filled(call.arguments, groups)) if groups else call
        for call in turn.tool_calls
    ]
    return Answer(
        task=task.name,
        turn=len(observations),
        text=_filled(turn.text, groups) if groups else turn.text,
        tool_calls=calls,
        delay_s=turn.delay_s,
        fault=turn.fault,
    )


def _filled(value: Any, groups: Mapping[str, str]) -> Any:
    """Replace ``$name`` with the text that the named group matched. Other dollar signs stay."""
    if isinstance(value, str):
        return Template(value).safe_substitute(groups)
    if isinstance(value, dict):
        return {key: _filled(item, groups) for key, item in value.items()}
    return [_filled(item, groups) for item in value] if isinstance(value, list) else value


def text_of(message: ChatMessage) -> str:
    """Return the text of a chat message, whose content is a string or a list of parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, Mapping))
    return content or ""


def _observations(messages: Sequence[ChatMessage]) -> list[str]:
    """Return the text of the messages after each assistant message, one text per assistant message."""
    observed: list[list[str]] = []
    for message in messages:
        if message.get("role") == "assistant":
            observed.append([])
        elif observed:
            observed[-1].append(text_of(message))
    return ["\n".join(texts) for texts in observed]


class Spelling(BaseModel):
    """The harness's tool call for one kind of action."""

    model_config = ConfigDict(extra="forbid")

    name: str
    """The tool's name. For the environment's tools it is a template with ``$server``, the MCP server's name, and
    ``$tool``, the environment's name for the tool."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """For ``shell``, the value ``$command`` is replaced by the command. For the environment's tools, the arguments in
    the script are added to these."""


class HarnessTools(BaseModel):
    """``scripted_tools.yaml`` of an agent's folder. Actions that the harness does not support are left out."""

    model_config = ConfigDict(extra="forbid")

    shell: Spelling | None = None
    """Runs a command in the world."""
    environment: Spelling | None = None
    """A tool of the environment."""
    end: Spelling | None = None
    """The call that ends the work, for harnesses that do not end at an answer of text alone."""
    tasks: list[dict[str, Any]] = Field(default_factory=list)
    """Tasks, as in a script, for the harness's side conversations (a title, a plan). They are matched before the
    script's own tasks."""

    @classmethod
    def load(cls, path: Path) -> HarnessTools:
        """Read the file. Raises `ConfigError` that names the file and the mistake in it."""
        try:
            return cls.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
        except OSError as error:
            raise ConfigError(
                f"the script names actions, and '{path}', which maps them to tool calls of the agent's harness, cannot"
                f" be read: {error.strerror}; give another file with script_tools=",
                key="tools",
            ) from error
        except yaml.YAMLError as error:
            raise ConfigError(f"'{path}' is not valid YAML: {error}", key="tools") from error
        except ValidationError as error:
            raise ConfigError(f"'{path}': {validation_problems(error, cls.model_fields)}", key="tools") from None

    def spelled(self, call: ToolCall, server: str | None) -> ToolCall:
        """Return the call in the harness's form. Raises ``ValueError`` if the harness has no such tool."""
        if call.shell is not None:
            spelling = self._spelling_of("shell", f"shell: {call.shell}")
            arguments = {key: call.shell if value == COMMAND else value for key, value in spelling.arguments.items()}
            return ToolCall(name=spelling.name, arguments=arguments)
        if call.tool is not None:
            spelling = self._spelling_of("environment", f"tool: {call.tool}")
            try:
                name = Template(spelling.name).substitute(tool=call.tool, **({"server": server} if server else {}))
            except KeyError:
                raise ValueError(f"'tool: {call.tool}' needs the name of the MCP server; give mcp_server=") from None
            script_arguments = call.arguments if isinstance(call.arguments, dict) else {}
            return ToolCall(name=name, arguments={**spelling.arguments, **script_arguments})
        return call

    def _spelling_of(self, name: str, action: str) -> Spelling:
        spelling: Spelling | None = getattr(self, name)
        if spelling is None:
            raise ValueError(f"the script has '{action[:60]}', and the harness's tools have no '{name}'")
        return spelling
