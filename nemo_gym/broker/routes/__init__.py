"""The HTTP API, one file per kind of resource."""
