"""Doubles of sandbox backends, for tests of whoever builds on them."""
