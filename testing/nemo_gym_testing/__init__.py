"""Engines, servers and doubles for the tests of this suite and of projects that build on it."""
