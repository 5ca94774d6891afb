"""Where jobs and their results are kept."""

from nemo_gym.rollouts.store.sql import SqlJobStore
from nemo_gym.rollouts.store.sqlite import SqliteJobStore

__all__ = ["SqlJobStore", "SqliteJobStore"]
