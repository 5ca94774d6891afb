"""Prompts that engines send back: compared as bytes, not as a hundred thousand parsed numbers."""

from __future__ import annotations

_KEY = b'"prompt_token_ids":'


def without_echo(raw: bytes | bytearray, prompt_json: bytes | None) -> bytes | bytearray:
    """A JSON text without its ``prompt_token_ids``, where they are ``prompt_json`` to the byte; else as it came.

    ``prompt_json``: the ids as a JSON array without spaces. What is left in says that the echo still has to be
    compared. Within a JSON string the key's quotes would be escaped, so what is found is a key.
    """
    at = raw.find(_KEY) if prompt_json is not None else -1
    if prompt_json is None or at < 0:
        return raw
    start = at + len(_KEY)
    if not raw.startswith(prompt_json, start):
        return raw
    with memoryview(raw) as view:
        return b"".join((view[:start], b"null", view[start + len(prompt_json) :]))
