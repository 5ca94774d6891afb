"""What the broker knows, durably: boxes, leases, doors and execs. One code path for SQLite and PostgreSQL."""
