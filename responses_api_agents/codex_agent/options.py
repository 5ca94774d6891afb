"""What is fetched of Codex, and its settings."""

from __future__ import annotations

from pydantic import Field

from nemo_gym.agent.harness.base import CliPackage, HarnessOptions

BUILD = "@openai/codex-linux-x64"
INTEGRITY = "sha512-o05NyAOCDygSPRo1yinzxvkRSdmsZyBD9E7mbpmjRanSfM8lypqWtQgEo4XfNkwhuCR2aFu8mlGOsQGFXVbVww=="

PACKAGE = CliPackage(
    name="codex",
    version="0.169.0",
    command=f"node_modules/{BUILD}/vendor/x86_64-unknown-linux-musl/bin/codex",
    runtime="elf-static",
    npm={BUILD: "npm:@openai/codex@0.169.0-linux-x64"},
    integrity={BUILD: INTEGRITY},
)


class CodexOptions(HarnessOptions):
    context_tokens: int | None = Field(None, gt=0)
    """The model's context; Codex guesses it for a model that it does not know."""
    compact_at_tokens: int | None = Field(None, gt=0)
    """The length at which Codex summarizes the conversation."""
    reasoning_effort: str | None = None
    """``minimal``, ``low``, ``medium``, ``high`` or what else the model takes; not sent by default."""
    max_retries: int = Field(4, ge=0)
    """Of one request, and of one stream that broke off: together up to (1 + max_retries)² tries."""
    idle_timeout_s: float = Field(600.0, gt=0)
    """How long a stream may be silent before it is asked for again."""
    tool_timeout_s: float = Field(300.0, gt=0)
    """How long one call of an MCP tool may take."""
