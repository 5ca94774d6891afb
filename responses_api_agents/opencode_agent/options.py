"""What opencode is mounted from, and the settings of its harness."""

from __future__ import annotations

from pydantic import Field

from nemo_gym.agent.harness.base import CliPackage, HarnessOptions

# The build for processors without AVX2, which runs on all of x86-64.
BUILD = "opencode-linux-x64-baseline"
INTEGRITY = "sha512-1KQGBiiDDeL/VHHbHkOvvFo8Jr97WT5+C1tear+p7IcDTnXgVHXqIjU4O4jM4mHQzykTP2i884FCnW5LDa+zCA=="
PACKAGE = CliPackage(
    name="opencode-ai",
    version="1.18.33",
    command=f"node_modules/{BUILD}/bin/opencode",
    runtime="elf-glibc",
    npm={BUILD: "1.18.33"},
    integrity={BUILD: INTEGRITY},
)


class OpencodeOptions(HarnessOptions):
    context_tokens: int = Field(131_072, gt=0)
    """Of the model; opencode summarizes a conversation that comes near."""
    output_tokens: int = Field(16_384, gt=0)
    """Of one answer, where the row sets no limit."""
    request_timeout_s: float = Field(600.0, gt=0)
    """Per model call, its whole answer included."""
