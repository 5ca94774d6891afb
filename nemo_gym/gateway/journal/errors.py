"""How a journal can fail. None of these is ever passed over: a gateway without its journal commits nothing."""

from __future__ import annotations

from nemo_gym.contract.errors import ModelError


class JournalError(ModelError):
    """The journal cannot be written or read."""

    code = "journal"
    status = 503


class JournalFullError(JournalError):
    """The disk takes no more. Nothing of what failed with this is kept, neither on the disk nor in memory, and the
    journal goes on by itself once there is room."""

    code = "journal_full"


class JournalBusyError(JournalError):
    """Another process has the journal open."""

    code = "journal_busy"


class JournalDamagedError(JournalError):
    """The journal's files hold something else than what was written: more than the torn end that a crash leaves."""

    code = "journal_damaged"
