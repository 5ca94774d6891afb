"""The names and arguments of each harness's tools, so that one script works with any harness.

A script may name an action instead of a harness's tool: ``shell: <command>``, ``tool: <tool of the environment>`` and,
on a turn, ``ends: true``. A file in the agent's folder maps these actions to the tool calls of its harness.
"""

from __future__ import annotations

from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nemo_gym._util.suggest import validation_problems
from nemo_gym.contract.errors import ConfigError

if TYPE_CHECKING:
    from responses_api_models.scripted_model.script import ToolCall

COMMAND = "$command"


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
            return type(call)(name=spelling.name, arguments=arguments)
        if call.tool is not None:
            spelling = self._spelling_of("environment", f"tool: {call.tool}")
            try:
                name = Template(spelling.name).substitute(tool=call.tool, **({"server": server} if server else {}))
            except KeyError:
                raise ValueError(f"'tool: {call.tool}' needs the name of the MCP server; give mcp_server=") from None
            script_arguments = call.arguments if isinstance(call.arguments, dict) else {}
            return type(call)(name=name, arguments={**spelling.arguments, **script_arguments})
        return call

    def _spelling_of(self, name: str, action: str) -> Spelling:
        spelling: Spelling | None = getattr(self, name)
        if spelling is None:
            raise ValueError(f"the script has '{action[:60]}', and the harness's tools have no '{name}'")
        return spelling
