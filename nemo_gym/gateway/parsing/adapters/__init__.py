"""Parsers that other packages keep, imported on use: engines' own, transformers', and third parties'."""
