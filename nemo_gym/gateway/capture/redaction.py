"""Bodies as they may be shown: without secrets, and without megabytes of base64.

Works on JSON text, since a tree walk in Python would cost more than the call itself: one pass of each pattern.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from typing import Any

import orjson

from nemo_gym._util.secrets import REDACTED, is_secret_name, redact_tokens

_BLOB = re.compile(rb"[A-Za-z0-9+/_-]{1024,}={0,2}")
"""What runs on for a kibibyte without a space is a picture, an archive or a key, and no text."""
_NAME = rb"([\w.-]*(?:key|token|secret|passw(?:or)?d|credential|authorization|bearer|cookie)s?)"
_MEMBER = re.compile(rb'(")' + _NAME + rb'("\s*:\s*")((?:[^"\\]|\\.)*)', re.IGNORECASE)
"""A member whose name may be a secret's."""
_NESTED_MEMBER = re.compile(
    rb'(\\")' + _NAME + rb'(\\"\s*:\s*\\")((?:[^"\\]|\\\\(?:\\.|[^"\\])|\\[^"\\])*)', re.IGNORECASE
)
"""The same in JSON text that is a string of the body, such as a tool call's arguments."""
_KEY = re.compile(
    rb"(?<![A-Za-z0-9])(?:(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
    rb"|AKIA[A-Z0-9]{16}|xox[abpr]-[A-Za-z0-9-]{10,}|AIza[A-Za-z0-9_-]{30,})"
)
"""Keys of well-known services, by their form."""
_BEARER = re.compile(rb"\b(Bearer|Basic)(\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_URL = re.compile(rb"([?&](?:api[_-]?key|key|token|access_token|sig|signature)=)[^&\s\"'\\]+", re.IGNORECASE)
_USER = re.compile(rb"(\w://[^\s/:@\"'\\]*:)[^\s/@\"'\\]+@")
_MASK = REDACTED.encode()


def redacted_json(body: Any, secrets: Collection[str] = ()) -> bytes:
    """``body`` (data, or JSON as bytes) as JSON text that may be shown. ``secrets`` are further strings to hide."""
    if isinstance(body, bytes):
        try:
            body = orjson.loads(body)
        except orjson.JSONDecodeError:
            body = body.decode("utf-8", "replace")
    try:
        data = orjson.dumps(body, default=str, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # nested deeper than it can be written, or text that is no Unicode
        data = orjson.dumps({"omitted": "cannot be written as JSON"})
    data = _BLOB.sub(_digest_of, data)
    data = _NESTED_MEMBER.sub(_member, _MEMBER.sub(_member, data))
    data = _KEY.sub(_MASK, data)
    data = _BEARER.sub(rb"\1\2" + _MASK, data)
    data = _USER.sub(rb"\1" + _MASK + b"@", _URL.sub(rb"\1" + _MASK, data))
    for secret in sorted((secret for secret in secrets if secret), key=len, reverse=True):
        data = data.replace(orjson.dumps(secret)[1:-1], _MASK)
    return redact_tokens(data)


def _digest_of(found: re.Match[bytes]) -> bytes:
    blob = found[0]
    return b"(%d bytes, sha256 %s)" % (len(blob), hashlib.sha256(blob).hexdigest()[:32].encode())


def _member(found: re.Match[bytes]) -> bytes:
    name = found[2].decode("ascii", "replace").replace(".", "_")
    secret = is_secret_name(name) or name.lower().replace("-", "_").endswith(("cookie", "cookies"))
    return found[1] + found[2] + found[3] + _MASK if secret and found[4] else found[0]
