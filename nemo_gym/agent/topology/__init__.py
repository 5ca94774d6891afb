"""Topology bindings, used by every agent server: they place a harness in relation to its descriptor's world."""
