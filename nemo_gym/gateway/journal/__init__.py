"""The gateway's journal on disk: sessions, their committed turns, and how they ended."""

from nemo_gym.gateway.journal.log import (
    Durability,
    JournalBusyError,
    JournalDamagedError,
    JournalError,
    JournalFullError,
    JournalLog,
)
from nemo_gym.gateway.journal.session_journal import (
    DEADLINE_REASON,
    JournaledBody,
    ReplayedSession,
    SessionJournal,
    SessionRecord,
    SessionState,
)

__all__ = [
    "DEADLINE_REASON",
    "Durability",
    "JournalBusyError",
    "JournalDamagedError",
    "JournalError",
    "JournalFullError",
    "JournalLog",
    "JournaledBody",
    "ReplayedSession",
    "SessionJournal",
    "SessionRecord",
    "SessionState",
]
