"""The implementation of agent servers: acts, sessions, topology bindings and harnesses."""
