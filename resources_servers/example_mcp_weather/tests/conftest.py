"""Shared by these tests."""

from __future__ import annotations

from tests.servers.sessions import no_session_left

__all__ = ["no_session_left"]
