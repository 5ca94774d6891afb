"""Scripts as YAML or JSON files: the first rule that fits a call determines the answer.

    rules:
      - name: compaction
        when: "(?i)summar(y|ise|ize) .*conversation"    # a regular expression, searched in the prompt's end
        where: tail                                      # tail (default), head or prompt
        chars: 4000                                      # of the prompt, for tail and head
        steps: [{say: "We are at MARK-$mark of it."}]
        captures: {mark: 'MARK-(\\d+)'}                  # the last match's first group, in the whole prompt
      - name: work
        tools: [Bash]                                    # names that the prompt must define
        step: 'MARK-(\\d+)'                              # the step: last such number + 1; default: answers so far
        steps:
          - {think: "First look.", say: "I look.", call: {name: Bash, arguments: {command: "echo MARK-0"}}}
          - {calls: [{name: Read, arguments: {file_path: "$path"}}]}
          - {say: "Done."}
        after: repeat                                    # after the last step: repeat it (default), or sample

A step is ``{say, think, call | calls}``, or ``{text: ...}`` (forced unchanged), or ``{sample: true}``. ``$name`` in
its strings is replaced by a named group of ``when`` or a capture; other dollar signs are kept. ``limit`` bounds how
often a rule answers. A call that no rule fits is sampled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from nemo_gym.contract.errors import ConfigError
from nemo_gym_testing.gateway.tiny.script import CallView, Script

# Not `string.Template`, which reads two dollar signs as one: they are a shell's process id.
_NAME = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Call(_Strict):
    name: str
    arguments: dict[str, Any] | str = Field(default_factory=dict)


class Step(_Strict):
    """One answer."""

    say: str = ""
    think: str | None = None
    call: _Call | None = None
    calls: list[_Call] = Field(default_factory=list)
    text: str | None = None
    sample: bool = False

    def answer(self, found: Mapping[str, str]) -> Mapping[str, Any] | str | None:
        if self.sample:
            return None
        if self.text is not None:
            return str(_filled(self.text, found))
        calls = [*([self.call] if self.call else []), *self.calls]
        message: dict[str, Any] = {"content": self.say, "tool_calls": [call.model_dump() for call in calls]}
        if self.think is not None:
            message["reasoning_content"] = self.think
        filled: Mapping[str, Any] = _filled(message, found)
        return filled


class Rule(_Strict):
    """The conditions under which a rule fits a call, and its answers."""

    name: str = ""
    when: re.Pattern[str] | None = None
    where: Literal["tail", "head", "prompt"] = "tail"
    chars: int = Field(4000, gt=0)
    tools: list[str] = Field(default_factory=list)
    no_tools: bool = False
    """Whether the rule fits only prompts that define no tool."""
    captures: dict[str, re.Pattern[str]] = Field(default_factory=dict)
    step: re.Pattern[str] | None = None
    steps: list[Step] = Field(min_length=1)
    after: Literal["repeat", "sample"] = "repeat"
    limit: int | None = Field(None, gt=0)

    @field_validator("step")
    @classmethod
    def _has_a_group(cls, pattern: re.Pattern[str] | None) -> re.Pattern[str] | None:
        if pattern is not None and not pattern.groups:
            raise ValueError("needs a group that matches the number, such as 'MARK-(\\d+)'")
        return pattern

    @model_validator(mode="after")
    def _captures_have_groups(self) -> Rule:
        for name, pattern in self.captures.items():
            if not pattern.groups:
                raise ValueError(f"captures.{name}: needs a group")
        return self

    def fits(self, view: CallView) -> dict[str, str] | None:
        """Return the captures from a call that the rule fits, or ``None`` if it does not fit."""
        if (self.no_tools and view.tools) or not {*self.tools} <= {*view.tools}:
            return None
        captured: dict[str, str] = {}
        if self.when is not None:
            text = {"tail": view.prompt[-self.chars :], "head": view.prompt[: self.chars], "prompt": view.prompt}
            match = self.when.search(text[self.where])
            if match is None:
                return None
            captured = {name: value for name, value in match.groupdict().items() if value is not None}
        for name, pattern in self.captures.items():
            if matches := [*pattern.finditer(view.prompt)]:
                captured[name] = matches[-1][1]
        return captured

    def at(self, view: CallView) -> Step | None:
        """Return the step that answers a call, or ``None`` if the call is to be sampled."""
        number = view.answers
        if self.step is not None:
            matches = [*self.step.finditer(view.prompt)]
            number = int(matches[-1][1]) + 1 if matches else 0
        if number >= len(self.steps) and self.after == "sample":
            return None
        return self.steps[min(number, len(self.steps) - 1)]


class _File(_Strict):
    rules: list[Rule]


def load_script(path: str | Path) -> Script:
    """Load the script of a YAML or JSON file. Raises `ConfigError` naming the entry that is wrong."""
    try:
        given = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        return rules_script(_File.model_validate(given).rules)
    except OSError as error:
        raise ConfigError(f"script: '{path}' cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"script: '{path}': {error}") from error


def rules_script(rules: list[Rule]) -> Script:
    """Return a script in which the first rule that fits answers; ``limit`` counts the answers of this script."""
    used = [0] * len(rules)

    def script(view: CallView) -> Mapping[str, Any] | str | None:
        for number, rule in enumerate(rules):
            if rule.limit is not None and used[number] >= rule.limit:
                continue
            captured = rule.fits(view)
            if captured is None:
                continue
            used[number] += 1
            step = rule.at(view)
            return step.answer(captured) if step is not None else None
        return None

    return script


def _filled(value: Any, captured: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return _NAME.sub(lambda match: captured.get(match[1] or match[2], match[0]), value)
    if isinstance(value, Mapping):
        return {key: _filled(item, captured) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, captured) for item in value]
    return value
