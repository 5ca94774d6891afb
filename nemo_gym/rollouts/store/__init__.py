"""Where jobs and their results are kept."""

from nemo_gym.rollouts.store.sql import SqliteJobStore, SqlJobStore

__all__ = ["SqlJobStore", "SqliteJobStore"]
