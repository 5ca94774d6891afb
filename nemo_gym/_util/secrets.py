"""Detection of secret values, and their removal from output."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, AnyStr

REDACTED = "(secret)"

_SECRET_NAME = re.compile(
    r"(^|_)(api_?keys?|secrets?(_key)?|secret_access_key|passwords?|passwd|credentials?|private_keys?|authorization|bearer)$"
    r"|(^|_)(access_|auth_|api_|hf_|session_|tracking_|bearer_|inference_|control_)?token$"
    r"|(^|_)(auth|access|caller)_tokens$",
    re.IGNORECASE,
)
_RANDOM = re.compile(r"(?=[a-z]*[0-9])[a-z0-9]{12}", re.IGNORECASE)
_TOKEN = re.compile(r"ngi1_[\w-]{8,}|ngc1\.[^\s\"'\\/,;]+|ngt1\.\d+\.[\w-]+", re.ASCII)
_URL_PASSWORD = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s:/@]*:)[^\s/@]+@", re.IGNORECASE)
_TOKEN_BYTES = re.compile(_TOKEN.pattern.encode())
_NOT_SECRET = frozenset({"eos_token", "bos_token", "pad_token", "unk_token", "stop_token", "per_token"})


def is_secret_name(name: str) -> bool:
    """Return whether a key or environment variable of this name holds a secret (``policy_api_key``, ``HF_TOKEN``, …).
    Counts of tokens (``max_output_tokens``) and a tokenizer's special tokens (``eos_token``) are not secret."""
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    return plain not in _NOT_SECRET and _SECRET_NAME.search(plain) is not None


def is_secret(name: Any, value: Any) -> bool:
    """Whether the value of this key of a configuration is secret. Headers are, whatever their names: every collector
    and every provider names the header of its key differently."""
    if not isinstance(name, str):
        return False
    return is_secret_name(name) or (isinstance(value, Mapping) and name.lower().endswith("headers"))


def redact(values: Any, known: Iterable[str] = ()) -> Any:
    """Return a copy with secret values replaced, also where another text contains one, or one of ``known``.
    Interpolations and unset values stay, as they contain no secret."""
    # A password that is a word ("postgres") would be missing in other texts, such as an image's name.
    return _redacted(values, {secret for secret in {*secret_values(values), *known} if re.search(r"\d", secret)})


def _redacted(values: Any, secrets: Collection[str]) -> Any:
    if isinstance(values, Mapping):
        return {
            key: _mask(value) if is_secret(key, value) else _redacted(value, secrets) for key, value in values.items()
        }
    if isinstance(values, list | tuple):
        return [_redacted(value, secrets) for value in values]
    return scrub(without_password(values), secrets) if isinstance(values, str) else values


def without_password(text: str) -> str:
    """Return ``text`` with the passwords of URLs replaced (``postgresql://user:password@host/name``)."""
    return _URL_PASSWORD.sub(rf"\1{REDACTED}@", text)


def _mask(value: Any) -> Any:
    if value is None or value == "" or value == "???":
        return value
    if isinstance(value, bool | int | float):
        return REDACTED if _is_key(value) else value
    if isinstance(value, str) and value.startswith("${") and value.endswith("}") and "oc.env" not in value:
        return value
    if isinstance(value, Mapping):
        return {key: _mask(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mask(item) for item in value]
    return REDACTED


def _is_key(value: Any) -> bool:
    """Whether a number may be a key that was written without quotes, and not a price or a count."""
    return isinstance(value, int) and value >= 10**7


def secret_values(values: Any) -> set[str]:
    """Return the secret strings themselves, so that `scrub` can keep them out of logs and messages."""
    found: set[str] = set()
    if isinstance(values, Mapping):
        for key, value in values.items():
            if not is_secret(key, value):
                found |= secret_values(value)
            elif is_secret_name(key):
                found.update(_strings(value))
            else:
                # Of headers, only the words that look like keys: most others ("application/json", the name of a tenant
                # or a model) are ordinary words, which would be missing elsewhere.
                found |= secret_values(value)
                found.update(word for text in _strings(value) for word in text.split() if _RANDOM.search(word))
    elif isinstance(values, list | tuple):
        for value in values:
            found |= secret_values(value)
    return found


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        # Shorter strings are placeholders ("EMPTY", "x"); scrubbing them would also replace ordinary words.
        if len(value) >= 8:
            yield value
    elif _is_key(value):
        yield str(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def scrub(text: str, secrets: Iterable[str]) -> str:
    """Return ``text`` with the given secrets replaced."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return text


def redact_tokens(text: AnyStr) -> AnyStr:
    """Return ``text`` with this suite's own tokens and credentials replaced, wherever they occur: in a header, a URL's
    path, a message."""
    if isinstance(text, bytes):
        return _TOKEN_BYTES.sub(REDACTED.encode(), text)
    return _TOKEN.sub(REDACTED, text)


def public_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a server process inherits: those without a secret name."""
    return {name: value for name, value in environ.items() if not is_secret_name(name)}
