"""One class per CLI: how it is configured, started and resumed without a terminal, and how it says that it is done."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tests.acceptance.clis.place import Endpoint, Place, installed


@dataclass(frozen=True)
class Outcome:
    """What a CLI's own output says about a run."""

    completed: bool
    detail: str
    thread: str | None = None
    """What `Cli.arguments` takes to resume this conversation."""


class Cli(ABC):
    """One CLI in one place."""

    name: ClassVar[str]
    dialect: ClassVar[str]
    """Of the requests it sends: ``chat``, ``responses`` or ``messages``."""
    command: ClassVar[str]
    resumes: ClassVar[bool] = True
    """Whether a conversation can be gone on with after its process has died."""
    delegates: ClassVar[bool] = True
    """Whether it has sub-agents."""
    compact_above_tokens: ClassVar[int | None] = None
    """A length that the scripted run reaches, and that is well above the first prompt's; nothing where the CLI cannot
    compact."""

    def __init__(
        self, place: Place, endpoint: Endpoint, *, compact_at_tokens: int | None = None, timeout_s: float = 120.0
    ) -> None:
        """``compact_at_tokens``: the length of a conversation that is to be compacted, about; nothing: none is.
        ``timeout_s``: how long it waits for an answer, or for more of one, before it tries again."""
        self.place, self.endpoint = place, endpoint
        self.compact_at_tokens, self.timeout_s = compact_at_tokens, timeout_s
        self.directory = installed(self.name)
        self.configure()

    @property
    def executable(self) -> str:
        return str(self.directory / self.command)

    @abstractmethod
    def configure(self) -> None:
        """Write what the CLI reads."""

    @abstractmethod
    def arguments(self, prompt: str, resume: str | None = None) -> list[str]:
        """The command line of one run."""

    @abstractmethod
    def outcome(self, status: int, events: Sequence[Mapping[str, Any]], text: str) -> Outcome:
        """What a finished run says. ``events``: the JSON objects of its output, ``text`` all of it."""

    def environment(self) -> dict[str, str]:
        own = self.place.environment()
        return {**own, "PATH": f"{installed('node') / 'bin'}:{own['PATH']}", **self.variables()}

    def variables(self) -> dict[str, str]:
        """Environment variables beyond those of every CLI."""
        return {}


class ClaudeCode(Cli):
    name = "claude-code"
    dialect = "messages"
    command = "node_modules/.bin/claude"
    compact_above_tokens = 38_000
    _CONTEXT_TOKENS = 200_000
    _WINDOW_TOKENS = 180_000
    """Of the context, what a summary leaves."""

    def configure(self) -> None:
        (self.place.home / ".claude").mkdir(exist_ok=True)

    def arguments(self, prompt: str, resume: str | None = None) -> list[str]:
        return [
            self.executable,
            "-p",
            prompt,
            *("--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"),
            *("--max-turns", "60"),
            *(("--resume", resume) if resume else ()),
        ]

    def variables(self) -> dict[str, str]:
        percent = (self.compact_at_tokens or 0) * 100 // self._WINDOW_TOKENS
        return {
            "ANTHROPIC_BASE_URL": self.endpoint.base_url,
            "ANTHROPIC_API_KEY": self.endpoint.token,
            "ANTHROPIC_MODEL": self.endpoint.model,
            "ANTHROPIC_SMALL_FAST_MODEL": self.endpoint.model,
            "CLAUDE_CONFIG_DIR": str(self.place.home / ".claude"),
            "CLAUDE_CODE_TMPDIR": str(self.place.scratch),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "8000",
            "API_TIMEOUT_MS": str(int(self.timeout_s * 1000)),
            "IS_SANDBOX": "1",  # as root it refuses to skip permissions otherwise
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(self._CONTEXT_TOKENS),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(self._CONTEXT_TOKENS),
            **({"CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": str(percent)} if percent else {}),
        }

    def outcome(self, status: int, events: Sequence[Mapping[str, Any]], text: str) -> Outcome:
        thread = next((str(event["session_id"]) for event in events if event.get("session_id")), None)
        result = next((event for event in reversed(events) if event.get("type") == "result"), None)
        if result is None:
            return Outcome(False, f"no result, exit status {status}: {text[-300:]}", thread)
        completed = status == 0 and result.get("subtype") == "success" and not result.get("is_error")
        return Outcome(completed, str(result.get("result") or result.get("subtype"))[:300], thread)


class Codex(Cli):
    name = "codex"
    dialect = "responses"
    command = "node_modules/.bin/codex"
    compact_above_tokens = 19_000

    def configure(self) -> None:
        directory = self.place.home / ".codex"
        directory.mkdir(exist_ok=True)
        (directory / "config.toml").write_text(
            f'''model = "{self.endpoint.model}"
model_provider = "policy"
model_context_window = 120000
model_auto_compact_token_limit = {self.compact_at_tokens or 110_000}
web_search = "disabled"
check_for_update_on_startup = false
[analytics]
enabled = false
[features]
plugins = false
apps = false
[model_providers.policy]
name = "policy"
base_url = "{self.endpoint.base_url}/v1"
env_key = "POLICY_KEY"
wire_api = "responses"
request_max_retries = 6
stream_max_retries = 6
stream_idle_timeout_ms = {int(self.timeout_s * 1000)}
'''
        )

    def arguments(self, prompt: str, resume: str | None = None) -> list[str]:
        options = ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        if resume:
            return [self.executable, "exec", *options, "resume", resume, prompt]
        return [self.executable, "exec", *options, prompt]

    def variables(self) -> dict[str, str]:
        return {"CODEX_HOME": str(self.place.home / ".codex"), "POLICY_KEY": self.endpoint.token}

    def outcome(self, status: int, events: Sequence[Mapping[str, Any]], text: str) -> Outcome:
        thread = next((str(event["thread_id"]) for event in events if event.get("thread_id")), None)
        turns = [event for event in events if str(event.get("type", "")).startswith("turn.")]
        last: Mapping[str, Any] = turns[-1] if turns else {}
        completed = status == 0 and last.get("type") == "turn.completed"
        return Outcome(completed, json.dumps(last)[:300] if last else text[-300:], thread)


class Opencode(Cli):
    name = "opencode-ai"
    dialect = "chat"
    command = "node_modules/.bin/opencode"
    compact_above_tokens = 21_000
    _ANSWER_TOKENS = 4096

    def configure(self) -> None:
        model = {
            "name": self.endpoint.model,
            "tool_call": True,
            "limit": {
                "context": (self.compact_at_tokens or 110_000) + self._ANSWER_TOKENS,
                "output": self._ANSWER_TOKENS,
            },
        }
        self._config.write_text(
            json.dumps(
                {
                    "autoupdate": False,
                    "share": "disabled",
                    "permission": "allow",
                    "model": f"policy/{self.endpoint.model}",
                    "small_model": f"policy/{self.endpoint.model}",
                    "provider": {
                        "policy": {
                            "npm": "@ai-sdk/openai-compatible",
                            "name": "policy",
                            "options": {
                                "baseURL": f"{self.endpoint.base_url}/v1",
                                "apiKey": self.endpoint.token,
                                "timeout": int(self.timeout_s * 1000),
                            },
                            "models": {self.endpoint.model: model},
                        }
                    },
                }
            )
        )

    @property
    def _config(self) -> Path:
        return self.place.home / "opencode.json"

    def arguments(self, prompt: str, resume: str | None = None) -> list[str]:
        thread = ["--session", resume] if resume else ["--title", "acceptance"]
        return [self.executable, "run", "--pure", "--format", "json", *thread, prompt]

    def variables(self) -> dict[str, str]:
        return {"OPENCODE_CONFIG": str(self._config), "OPENCODE_DISABLE_MODELS_FETCH": "1"}

    def outcome(self, status: int, events: Sequence[Mapping[str, Any]], text: str) -> Outcome:
        thread = next((str(event["sessionID"]) for event in events if event.get("sessionID")), None)
        last: Mapping[str, Any] = events[-1] if events else {}
        ended = last.get("type") == "step_finish" and last.get("part", {}).get("reason") == "stop"
        return Outcome(status == 0 and ended, json.dumps(last)[:300] if last else text[-300:], thread)


class QwenCode(Cli):
    name = "qwen-code"
    dialect = "chat"
    command = "node_modules/.bin/qwen"
    compact_above_tokens = 38_000
    _RESERVED_TOKENS = 31_500
    """Of the context, for answers and summaries."""

    def configure(self) -> None:
        directory = self.place.home / ".qwen"
        directory.mkdir(exist_ok=True)
        (directory / "settings.json").write_text(
            json.dumps(
                {
                    "privacy": {"usageStatisticsEnabled": False},
                    "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
                    "model": {
                        "generationConfig": {
                            "contextWindowSize": (self.compact_at_tokens or 90_000) + self._RESERVED_TOKENS,
                            "timeout": int(self.timeout_s * 1000),
                        }
                    },
                }
            )
        )

    def arguments(self, prompt: str, resume: str | None = None) -> list[str]:
        thread = ["--resume", resume] if resume else []
        return [
            self.executable,
            *("--yolo", "--output-format", "stream-json", "--auth-type", "openai"),
            *thread,
            *("-p", prompt),
        ]

    def variables(self) -> dict[str, str]:
        return {
            "OPENAI_API_KEY": self.endpoint.token,
            "OPENAI_BASE_URL": f"{self.endpoint.base_url}/v1",
            "OPENAI_MODEL": self.endpoint.model,
            "QWEN_SANDBOX": "false",
        }

    def outcome(self, status: int, events: Sequence[Mapping[str, Any]], text: str) -> Outcome:
        thread = next((str(event["session_id"]) for event in events if event.get("session_id")), None)
        result = next((event for event in reversed(events) if event.get("type") == "result"), None)
        if result is None:
            return Outcome(False, f"no result, exit status {status}: {text[-300:]}", thread)
        completed = status == 0 and not result.get("is_error")
        return Outcome(completed, str(result.get("result") or result)[:300], thread)


class MiniSweAgent(Cli):
    name = "mini-swe-agent"
    dialect = "chat"
    command = "bin/mini"
    resumes = False
    delegates = False

    def configure(self) -> None:
        self._settings.mkdir(exist_ok=True)
        (self.place.home / "mini.yaml").write_text(
            json.dumps(  # JSON is YAML
                {
                    "agent": {"step_limit": 60, "cost_limit": 0, "mode": "yolo", "confirm_exit": False},
                    "model": {
                        "model_class": "litellm",
                        "cost_tracking": "ignore_errors",
                        "model_kwargs": {
                            "api_base": f"{self.endpoint.base_url}/v1",
                            "api_key": self.endpoint.token,
                            "custom_llm_provider": "openai",
                            "timeout": self.timeout_s,
                        },
                    },
                }
            )
        )

    @property
    def _settings(self) -> Path:
        return self.place.home / "mini-swe-agent"

    def arguments(self, prompt: str, resume: str | None = None) -> list[str]:
        """It cannot resume: another run is another conversation."""
        configs = ["-c", "mini.yaml", "-c", str(self.place.home / "mini.yaml")]
        output = str(self.place.home / "trajectory.json")
        model = f"openai/{self.endpoint.model}"
        return [self.executable, "-y", "--exit-immediately", *configs, "-m", model, "-t", prompt, "-o", output]

    def variables(self) -> dict[str, str]:
        return {
            "MSWEA_GLOBAL_CONFIG_DIR": str(self._settings),
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }

    def outcome(self, status: int, events: Sequence[Mapping[str, Any]], text: str) -> Outcome:
        written = self.place.home / "trajectory.json"
        if not written.exists():
            return Outcome(False, f"no trajectory, exit status {status}: {text[-300:]}")
        ended = json.loads(written.read_text()).get("info", {}).get("exit_status")
        return Outcome(status == 0 and ended == "Submitted", str(ended))


CLIS: Mapping[str, type[Cli]] = {cli.name: cli for cli in (ClaudeCode, Codex, Opencode, QwenCode, MiniSweAgent)}
