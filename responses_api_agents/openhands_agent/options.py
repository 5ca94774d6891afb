"""What the OpenHands SDK is installed from, and the settings of its harness."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from nemo_gym.agent.harness.base import CliPackage, HarnessOptions

PACKAGE = CliPackage(
    name="openhands",
    version="1.58.0",
    command="bin/python",
    runtime="script",
    requirements=Path(__file__).with_name("requirements.lock"),
    pythons=("3.12", "3.13", "3.14"),
    box_commands=("bash",),
)


class OpenHandsOptions(HarnessOptions):
    tools: list[str] = Field(default_factory=lambda: ["terminal", "file_editor", "task_tracker"])
    """Built-in tools the model is offered, beside ``finish`` and ``think``."""
    condense_after_events: int | None = Field(240, gt=10)
    """Events in the conversation after which the SDK has the model summarize the older ones; ``null`` for never."""
    parallel_tool_calls: int = Field(1, gt=0)
    """Tool calls of one answer that run at once."""
    stuck_detection: bool = True
    """Whether the SDK ends a conversation that repeats itself."""
    max_retries: int = Field(5, ge=0)
    """Of one model call, after 429, 5xx, or a broken connection; 1 to 30 seconds between them."""
    request_timeout_s: int = Field(600, gt=0)
    """Per model call."""
