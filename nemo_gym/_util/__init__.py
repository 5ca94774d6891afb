"""Small helpers that several packages share."""
