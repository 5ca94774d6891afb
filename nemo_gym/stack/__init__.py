"""The processes of a run: servers forked, watched and stopped, their ports, environments and hosts."""
