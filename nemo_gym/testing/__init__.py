"""Helpers for tests of plugins."""
