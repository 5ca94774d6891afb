"""Blinded renderings of JavaScript and TypeScript tests, which write the same kind of records as those of Python."""
