"""Runs mini-swe-agent's own loop on a box and the policy endpoint.

The package's `DefaultAgent` is synchronous. It runs in a greenlet on the server's event loop. `BoxEnvironment` and
`PolicyModel` here are its environment and its model: each of their calls passes an awaitable to the event loop and
returns when it is done. A thread is not used, because switching threads at each call took a fifth of an attempt's
time.
"""

from __future__ import annotations

import asyncio
import functools
import os
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import greenlet
from jinja2 import Template
from pydantic import BaseModel

from nemo_gym.agent.acts import ContextExceededError, PolicyClient
from nemo_gym.agent.bindings import output_items, response_object
from nemo_gym.agent.world import HarnessRun, World
from nemo_gym.contract.errors import AgentError
from nemo_gym.contract.session import AgentOutcome
from nemo_gym.sandbox.base import ExecOutcome

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
# On import, the package creates its settings directory and reads a .env from it. A server must use neither, so it gets
# an empty one for the time of the import.
with tempfile.TemporaryDirectory(prefix="mini-swe-agent-") as _settings:
    os.environ.setdefault("MSWEA_GLOBAL_CONFIG_DIR", _settings)
    from minisweagent.agents import default
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.exceptions import FormatError, LimitsExceeded, Submitted
    from minisweagent.models.utils import actions_toolcall
    from minisweagent.models.utils.actions_toolcall import (
        BASH_TOOL,
        format_toolcall_observation_messages,
        parse_toolcall_actions,
    )

T = TypeVar("T")
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
CONTEXT_EXCEEDED = "ContextExceeded"
FIRST_CONTEXT_EXCEEDED = "FirstContextExceeded"
EXIT_OUTCOMES = {
    "Submitted": AgentOutcome.COMPLETED,
    "LimitsExceeded": AgentOutcome.MAX_TURNS,
    CONTEXT_EXCEEDED: AgentOutcome.MAX_TURNS,
    FIRST_CONTEXT_EXCEEDED: AgentOutcome.CONTEXT_EXCEEDED,
    "TimeExceeded": AgentOutcome.TIMED_OUT,
    "RepeatedFormatError": AgentOutcome.REFUSED,
}
ROW_SYSTEM = "{{ row_system }}"
"""The template of a row's system text. The text itself must never be one: templates run code in this server."""
MAX_ARGUMENT_BYTES = 100_000
"""Longer commands go through standard input: the kernel accepts at most 128 KiB in one argument."""


# Cache compiled templates. The package compiles one for each prompt and observation, which takes 0.6 ms of CPU for the
# two prompts of an attempt and 1.4 ms for each observation.
for _module in (default, actions_toolcall):
    _module.Template = functools.lru_cache(maxsize=64)(Template)  # type: ignore[attr-defined]


def await_from_loop(awaitable: Coroutine[Any, Any, T]) -> T:
    """Pass ``awaitable`` to `run_synchronous` and return its result. Call it from the package's synchronous loop."""
    parent = greenlet.getcurrent().parent
    if parent is None:
        raise RuntimeError("await_from_loop works inside run_synchronous alone")
    result: T = parent.switch(awaitable)
    return result


async def run_synchronous(function: Callable[..., T], *args: Any) -> T:
    """Run ``function`` in a greenlet of this task and await what it passes to `await_from_loop`.

    A cancellation is raised inside ``function`` where it waits. Everything that it wants to await later is refused.
    """
    worker = greenlet.greenlet(function)
    awaitable = worker.switch(*args)
    stopped = False
    while not worker.dead:
        try:
            if stopped:
                awaitable.close()
                raise AgentError("the attempt was stopped")
            value = await awaitable
        except BaseException as error:  # noqa: BLE001 - the greenlet handles it, even a cancellation
            stopped = stopped or isinstance(error, asyncio.CancelledError)
            awaitable = worker.throw(error)
        else:
            awaitable = worker.switch(value)
    result: T = awaitable
    return result


class BoxEnvironmentConfig(BaseModel):
    cwd: str
    timeout: float = 60.0
    """Seconds one command may take."""


class BoxEnvironment:
    """mini-swe-agent's environment protocol over a box: every action is a fresh ``bash -c``."""

    def __init__(self, world: World, *, timeout_s: float, env: Mapping[str, str]) -> None:
        self.config = BoxEnvironmentConfig(cwd=world.workdir, timeout=timeout_s)
        self._world, self._env = world, dict(env)

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        """Run one action. Raises `Submitted` if it succeeds and the first line of its output is `SUBMIT`."""
        try:
            argv, stdin = _shell(action["command"])
        except ValueError as error:
            return {"output": "", "returncode": 126, "exception_info": str(error)}
        result = await_from_loop(
            self._world.exec(
                argv,
                cwd=cwd or self.config.cwd,
                env=self._env,
                timeout_s=self.config.timeout,
                stdin=stdin,
                merge_stderr=True,
            )
        )
        text = result.stdout_bytes.decode("utf-8", "replace")
        output = {"output": text, "returncode": _return_code(result), "exception_info": ""}
        if result.outcome is ExecOutcome.TIMED_OUT:
            output["exception_info"] = f"The command was killed after {self.config.timeout:g} seconds."
        elif result.outcome is ExecOutcome.OUT_OF_MEMORY:
            output["exception_info"] = "The command was killed: the box ran out of memory."
        lines = text.lstrip().splitlines(keepends=True)
        if lines and lines[0].strip() == SUBMIT and output["returncode"] == 0:
            submission = "".join(lines[1:])
            extra = {"exit_status": "Submitted", "submission": submission}
            raise Submitted({"role": "exit", "content": submission, "extra": extra})
        return output

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        return {**self.config.model_dump(), "topology": str(self._world.topology), **kwargs}

    def serialize(self) -> dict[str, Any]:
        return {"info": {"config": {"environment": self.config.model_dump(mode="json")}}}


class PolicyModelConfig(BaseModel):
    model_name: str
    observation_template: str
    format_error_template: str


class PolicyModel:
    """mini-swe-agent's model protocol over the attempt's inference endpoint (Chat Completions with a bash tool)."""

    def __init__(self, client: PolicyClient, config: PolicyModelConfig, sampling: Mapping[str, Any]) -> None:
        self.config = config
        self._client, self._sampling = client, sampling
        self.usage = {"input_tokens": 0, "output_tokens": 0}
        self.answers = 0
        self.stopped_by: str | None = None
        """The endpoint's message, if it ended the loop."""

    def query(self, messages: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
        history = [{key: value for key, value in message.items() if key != "extra"} for message in messages]
        try:
            body = {"messages": history, "tools": [BASH_TOOL], **self._sampling}
            completion = await_from_loop(self._client.ask("/chat/completions", body))
        except ContextExceededError as error:
            status = CONTEXT_EXCEEDED if self.answers else FIRST_CONTEXT_EXCEEDED
            self.stopped_by = error.message
            extra: dict[str, Any] = {"exit_status": status, "submission": ""}
            raise LimitsExceeded({"role": "exit", "content": error.message, "extra": extra}) from None
        self.answers += 1
        usage = completion.get("usage") or {}
        self.usage["input_tokens"] += usage.get("prompt_tokens") or 0
        self.usage["output_tokens"] += usage.get("completion_tokens") or 0
        choice = completion["choices"][0]
        message = {key: value for key, value in choice["message"].items() if value is not None}
        try:
            actions = parse_toolcall_actions(
                [_ToolCall(call) for call in message.get("tool_calls") or []],
                format_error_template=self.config.format_error_template,
                template_kwargs={"finish_reason": choice.get("finish_reason")},
            )
        except FormatError as error:
            # The history must contain the policy's message before the complaint about it.
            error.messages = ({**message, "extra": {"cost": 0.0}}, *_answers(message, error.messages))
            raise
        extra = {"actions": actions, "cost": 0.0, "timestamp": time.time()}
        return {"content": "", **message, "extra": extra}

    def format_message(self, **kwargs: Any) -> dict[str, Any]:
        return kwargs

    def format_observation_messages(
        self, message: dict[str, Any], outputs: list[dict[str, Any]], template_vars: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        observations: list[dict[str, Any]] = format_toolcall_observation_messages(
            actions=message.get("extra", {}).get("actions", []),
            outputs=outputs,
            observation_template=self.config.observation_template,
            template_vars=template_vars,
        )
        return observations

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        return {"model_name": self.config.model_name, **kwargs}

    def serialize(self) -> dict[str, Any]:
        return {"info": {"config": {"model": self.config.model_dump(mode="json")}}}


async def drive(
    run: HarnessRun,
    texts: Mapping[str, str],
    policy: PolicyModel,
    environment: BoxEnvironment,
    agent: Mapping[str, Any],
) -> None:
    """Run the loop to its end and fill ``run``, even if the loop is interrupted. ``texts`` holds the row's texts, for
    the templates: ``task`` and ``row_system``; ``agent`` the settings of mini-swe-agent's loop."""
    harness = DefaultAgent(policy, environment, **agent)
    try:
        info = await run_synchronous(functools.partial(harness.run, **texts))
        status = info.get("exit_status", "")
        run.outcome = EXIT_OUTCOMES.get(status, AgentOutcome.CRASHED)
        if run.outcome is not AgentOutcome.COMPLETED:
            reason = f": {policy.stopped_by}" if policy.stopped_by else ""
            run.detail = f"mini-swe-agent stopped with {status or 'no exit status'}{reason}"
    finally:
        items = output_items(harness.messages)
        run.response = response_object(items, model=policy.config.model_name, usage=policy.usage)
        run.observations.update(turns=harness.n_calls, tool_calls=_count_actions(harness.messages), **policy.usage)


def _shell(command: Any) -> tuple[list[str], bytes | None]:
    """Return the argument list and standard input that run ``command``. No command may make the harness fail.

    Raises `ValueError` for a command that cannot be passed to a shell.
    """
    if not isinstance(command, str):
        raise ValueError(f"'command' must be a string, not {type(command).__name__}")  # noqa: TRY004 - shown as output
    try:
        script = command.encode()
    except UnicodeEncodeError:
        raise ValueError("the command holds a lone surrogate, which is not a character") from None
    if b"\0" in script:
        raise ValueError("the command holds a NUL byte")
    if len(script) < MAX_ARGUMENT_BYTES:
        return ["bash", "-c", command], None
    return ["bash", "-c", 'eval "$(cat)"'], script


class _ToolCall:
    """A tool call with attributes, as the package's parser reads it."""

    def __init__(self, call: Mapping[str, Any]) -> None:
        self.id = call["id"]
        self.function = _Function(call["function"]["name"], call["function"]["arguments"])


class _Function:
    def __init__(self, name: str, arguments: str) -> None:
        self.name, self.arguments = name, arguments


def _answers(message: Mapping[str, Any], complaints: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """Return the complaint, as tool results if the message has tool calls: each call needs a result in the history."""
    calls = message.get("tool_calls") or []
    if not calls:
        return complaints
    complaint = complaints[0]
    extra = complaint.get("extra", {})
    return tuple(
        {"role": "tool", "tool_call_id": call["id"], "content": complaint["content"], "extra": extra} for call in calls
    )


def _return_code(result: Any) -> int:
    """Return the exit code as a shell would report it."""
    if result.return_code is not None:
        return int(result.return_code)
    return 128 + (result.signal or 9)


def _count_actions(messages: list[dict[str, Any]]) -> int:
    return sum(len(message.get("extra", {}).get("actions", [])) for message in messages)
