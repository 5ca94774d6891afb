"""Configuration: composition, includes, overrides, strict keys, secrets."""
