"""The broker's durable records: boxes, leases, doors, execs and images. One code path for SQLite and PostgreSQL."""
