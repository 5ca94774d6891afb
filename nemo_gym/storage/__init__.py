"""Writers that commit records to SQLite and PostgreSQL."""
