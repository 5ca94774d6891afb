"""The processes of a run: starting, supervising and stopping servers, and their ports, environments and hosts."""
