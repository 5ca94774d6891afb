"""What stands behind an agent server: the act, binding by topology, harnesses."""
