"""Seeing a run: the index of its result files, what they mean, and the pages and tables that show it."""
