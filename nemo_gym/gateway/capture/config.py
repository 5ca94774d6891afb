"""What is captured of calls, and how much of it is kept."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from nemo_gym.config_types import CommandPath


class CaptureConfig(BaseModel):
    """Capture of a gateway's calls into ``<directory>/<session id>.jsonl``."""

    model_config = ConfigDict(extra="forbid")

    directory: CommandPath
    """Made when missing. One gateway at a time writes to it."""
    bodies: bool = True
    """Whether request and answer bodies are kept, redacted; otherwise only their sizes."""
    max_record_bytes: int = Field(1 << 20, ge=4096)
    """Of one line. A longer one leaves out the request's body, then the answer's; their sizes and digests stay."""
    max_file_bytes: int = Field(64 << 20, ge=1 << 16)
    """Of one session's file; then it becomes ``<session id>.1.jsonl``, in place of an older one."""
    max_total_bytes: int = Field(4 << 30, ge=1 << 20)
    """Of the directory; then the files that were written to longest ago are removed."""
    max_age_s: float = Field(7 * 24 * 3600.0, gt=0)
    """Files that were not written to for so long are removed."""
    max_waiting: int = Field(4096, gt=0)
    """Records that wait for the disk; further ones are dropped and counted."""
    max_waiting_bytes: int = Field(128 << 20, gt=0)
    """Of the bodies that wait for the disk, as they came over the wire."""
