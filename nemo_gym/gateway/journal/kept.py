"""Where the journal holds the body of a record, for those who read it again instead of keeping it in memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from nemo_gym.gateway.journal.errors import JournalError


@dataclass(frozen=True, slots=True)
class KeptBody:
    """In bytes of a segment's file. It is there for as long as its session is known."""

    path: Path
    start: int

    def read(self, offset: int, length: int) -> bytes:
        """Part of the body. Raises `JournalError` where it is not there any more."""
        try:
            with self.path.open("rb", buffering=0) as file:
                found = os.pread(file.fileno(), length, self.start + offset)
        except OSError as error:
            raise JournalError(f"the journal {self.path} cannot be read: {error}", retryable=True) from error
        if len(found) != length:
            raise JournalError(f"the journal {self.path} has been cut off at byte {self.start + offset + len(found)}")
        return found
