"""What the gateway has committed, on disk: sessions, their turns and their ends."""

from nemo_gym.gateway.journal.errors import (
    JournalBusyError,
    JournalDamagedError,
    JournalError,
    JournalFullError,
)
from nemo_gym.gateway.journal.kept import KeptBody
from nemo_gym.gateway.journal.log import Durability, JournalLog
from nemo_gym.gateway.journal.records import ReplayedSession, SessionRecord, TurnRecord
from nemo_gym.gateway.journal.sessions import DEADLINE_REASON, SessionJournal
from nemo_gym.gateway.journal.states import SessionState

__all__ = [
    "DEADLINE_REASON",
    "Durability",
    "JournalBusyError",
    "JournalDamagedError",
    "JournalError",
    "JournalFullError",
    "JournalLog",
    "KeptBody",
    "ReplayedSession",
    "SessionJournal",
    "SessionRecord",
    "SessionState",
    "TurnRecord",
]
