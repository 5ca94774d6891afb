"""The sandbox broker: leases, boxes and execs behind HTTP. `resources_servers/sandbox` serves it."""
