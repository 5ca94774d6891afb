"""Small things that exist once."""
