"""What is fetched of Claude Code, and its settings."""

from __future__ import annotations

from pydantic import Field

from nemo_gym.agent.harness.base import CliPackage, HarnessOptions

BUILD = "@anthropic-ai/claude-code-linux-x64"
INTEGRITY = "sha512-+n4lu1ubYAp02Y0X/MAUnxw9yY6SHHZ77F+IoW+V0wVoFuiI9opdH6gofjf14gXJCEYMTNpks7Gn1i8XZTKAWA=="

PACKAGE = CliPackage(
    name="claude-code",
    version="2.1.329",
    command=f"node_modules/{BUILD}/claude",
    runtime="elf-glibc",
    box_commands=("bash",),  # without it, no command of the model would run
    npm={BUILD: "2.1.329"},
    integrity={BUILD: INTEGRITY},
)


class ClaudeCodeOptions(HarnessOptions):
    bare: bool = False
    """The smallest prompt, and only the tools Bash, Edit and Read beside the environment's."""
    tools: list[str] | None = None
    """Built-in tools the model is offered; all by default, none for an empty list."""
    context_tokens: int | None = Field(None, gt=0)
    """The model's context; the CLI takes a million for a model that it does not know."""
    compaction: bool = True
    """Whether the CLI summarizes a conversation that nears ``context_tokens``."""
    max_retries: int = Field(10, ge=0)
    """Of one request to the model, after 429, 5xx, or a broken connection."""
    request_timeout_s: float = Field(600.0, gt=0)
    """How long the CLI waits for an answer to begin."""
