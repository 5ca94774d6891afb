"""Keeps pytest out of the example repositories, whose tests run in boxes of their own."""

collect_ignore_glob = ["*"]
