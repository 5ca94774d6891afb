"""Stores of jobs and their results."""

from nemo_gym.rollouts.store.sql import SqliteJobStore, SqlJobStore

__all__ = ["SqlJobStore", "SqliteJobStore"]
