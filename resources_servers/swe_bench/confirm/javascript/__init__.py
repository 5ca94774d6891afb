"""Blinded renderings of tests in JavaScript and TypeScript, which leave the records that those of Python leave."""
