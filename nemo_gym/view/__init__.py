"""Viewing a run: the index of its result files, their interpretation, and the pages and tables that show it."""
