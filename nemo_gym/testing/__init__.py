"""What tests of plugins use."""
