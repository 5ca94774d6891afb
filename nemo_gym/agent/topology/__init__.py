"""Topology bindings: how a harness meets the world that a descriptor names. Every agent server uses these."""
