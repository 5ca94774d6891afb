"""Engines, servers and doubles that tests of this suite, and of whoever builds on it, drive."""
