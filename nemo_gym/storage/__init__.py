"""How records reach the disk."""
