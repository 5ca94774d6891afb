"""What the gateway has committed, on disk: sessions, their turns and their ends."""

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
    TurnRecord,
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
    "TurnRecord",
]
