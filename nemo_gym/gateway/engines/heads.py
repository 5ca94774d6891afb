"""What stands above the bodies of an engine's requests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote, urlsplit

from nemo_gym.contract.errors import ConfigError
from nemo_gym.gateway.engines.connections import Origin

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NO_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")
_OURS = frozenset({"content-length", "expect", "transfer-encoding", "upgrade"})
"""They say where a request ends: another word on that would make two requests of one."""
_IN_PATHS = "/%!$&'()*+,;=:@~"


class RequestHeads:
    """The heads of requests to one engine; all but the first line and the length is the same in each."""

    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        """``headers`` replace those that are sent anyway, if their names are equal but for upper and lower case.
        Raises `ConfigError` for what cannot be sent."""
        parts = urlsplit(base_url)
        try:
            port, host = parts.port, (parts.hostname or "").encode("idna" if not base_url.isascii() else "ascii")
        except ValueError as error:
            raise ConfigError(f"'{base_url[:200]}' is no URL of a server ({error})") from error
        tls = parts.scheme == "https"
        self.origin = Origin(parts.hostname or "", port or (443 if tls else 80), tls)
        name = f"[{host.decode()}]" if b":" in host else host.decode()
        sent = {
            "host": ("Host", f"{name}:{port}" if port else name),
            "accept": ("Accept", "application/json, text/event-stream"),
            "accept-encoding": ("Accept-Encoding", "identity"),
            "content-type": ("Content-Type", "application/json"),
        }
        sent |= {name.lower(): (name, value) for name, value in headers.items()}
        for name, value in sent.values():
            if name.lower() in _OURS:
                raise ConfigError(f"header {name!r} is the gateway's own; leave it out of the engine's 'headers'")
            if not _NAME.fullmatch(name):
                raise ConfigError(f"header {name[:40]!r} is no name of a header; give for example 'X-Tenant'")
            if _NO_VALUE.search(value):
                raise ConfigError(f"header {name[:40]!r}: a line break or control character in it cannot be sent")
        self._path = quote(parts.path, safe=_IN_PATHS)
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in sent.values()).encode()

    def of(self, method: str, route: str, length: int) -> bytes:
        """``length``: of the body, in bytes."""
        line = f"{method} {self._path}{route} HTTP/1.1\r\n".encode()
        return b"%b%bContent-Length: %d\r\n\r\n" % (line, self._headers, length)
