"""Which values are secret, and what is shown in their place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, AnyStr

REDACTED = "(secret)"

_SECRET_NAME = re.compile(
    r"(^|_)(api_?keys?|secrets?(_key)?|secret_access_key|passwords?|passwd|credentials?|private_keys?|authorization|bearer)$"
    r"|(^|_)(access_|auth_|api_|hf_|session_|tracking_|bearer_|inference_|control_)?token$"
    r"|(^|_)(auth|access|caller)_tokens$",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"ngi1_[\w-]{8,}|ngc1\.[^\s\"'\\/,;]+|ngt1\.\d+\.[\w-]+", re.ASCII)
_URL_PASSWORD = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s:/@]*:)[^\s/@]+@", re.IGNORECASE)
_TOKEN_BYTES = re.compile(_TOKEN.pattern.encode())
_NOT_SECRET = frozenset({"eos_token", "bos_token", "pad_token", "unk_token", "stop_token", "per_token"})


def is_secret_name(name: str) -> bool:
    """Whether a key or an environment variable of that name holds a secret (``policy_api_key``, ``HF_TOKEN``, …).
    Counts of tokens (``max_output_tokens``) and a tokenizer's markers (``eos_token``) do not."""
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    return plain not in _NOT_SECRET and _SECRET_NAME.search(plain) is not None


def redact(values: Any) -> Any:
    """A copy whose secret values are replaced. Interpolations and unset values stay: they hold no secret."""
    if isinstance(values, Mapping):
        return {
            key: _mask(value) if isinstance(key, str) and is_secret_name(key) else redact(value)
            for key, value in values.items()
        }
    if isinstance(values, list | tuple):
        return [redact(value) for value in values]
    return without_password(values) if isinstance(values, str) else values


def without_password(text: str) -> str:
    """``text`` without the passwords of URLs (``postgresql://user:password@host/name``)."""
    return _URL_PASSWORD.sub(rf"\1{REDACTED}@", text)


def _mask(value: Any) -> Any:
    if value is None or value == "" or value == "???" or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str) and value.startswith("${") and value.endswith("}") and "oc.env" not in value:
        return value
    if isinstance(value, Mapping):
        return {key: _mask(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mask(item) for item in value]
    return REDACTED


def secret_values(values: Any) -> set[str]:
    """The secret strings themselves, to keep them out of logs and messages."""
    found: set[str] = set()
    if isinstance(values, Mapping):
        for key, value in values.items():
            if isinstance(key, str) and is_secret_name(key):
                found.update(_strings(value))
            else:
                found |= secret_values(value)
    elif isinstance(values, list | tuple):
        for value in values:
            found |= secret_values(value)
    return found


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        # Shorter strings are placeholders ("EMPTY", "x") that would blot out ordinary words.
        if len(value) >= 8:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def scrub(text: str, secrets: Iterable[str]) -> str:
    """``text`` without the given secrets."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return text


def redact_tokens(text: AnyStr) -> AnyStr:
    """``text`` without this suite's own tokens and credentials, wherever they stand: in a header, a URL's path, a
    message."""
    if isinstance(text, bytes):
        return _TOKEN_BYTES.sub(REDACTED.encode(), text)
    return _TOKEN.sub(REDACTED, text)


def public_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables a server process inherits: all but those whose names say that they are secret."""
    return {name: value for name, value in environ.items() if not is_secret_name(name)}
