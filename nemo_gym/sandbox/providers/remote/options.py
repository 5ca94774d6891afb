"""What can be configured about the remote provider."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from yarl import URL

from nemo_gym.contract.errors import ConfigError, reject_unknown_keys


@dataclass(frozen=True)
class RemoteOptions:
    """Options of `RemoteProvider`. One of ``url`` and ``server`` says where the broker is; without either, boxes can
    be borrowed (a reference names its broker) and none created."""

    url: str | None = None
    """The broker's root, ``http://`` or ``https://``."""
    server: str | Mapping[str, Any] | None = None
    """The broker as a server of the same stack: its instance name, or ``{type: resources_servers, name: …}``. Its
    address and the credential for it come with this process's launch."""
    token: str | None = field(default=None, repr=False)
    """Of a caller that is no server of the broker's stack; one of the broker's ``caller_tokens``."""
    request_timeout_s: float = 60.0
    """Longest silence of the broker within a request that does not wait for a box."""
    patience_s: float = 60.0
    """How long a broker that cannot be reached is tried again, until what ran behind it counts as lost."""

    def __post_init__(self) -> None:
        if self.url is not None and self.server is not None:
            raise ConfigError("remote sandbox: give 'url' or 'server', not both", key="url")
        if self.url is not None:
            url = URL(self.url)
            if url.scheme not in ("http", "https") or not url.host:
                raise ConfigError(f"remote sandbox: url '{self.url}' is not an http:// or https:// URL", key="url")
        for name in ("request_timeout_s", "patience_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ConfigError(f"remote sandbox: {name} must be a positive number of seconds, not {value!r}")
        if self.server is not None and not self.server_name:
            raise ConfigError("remote sandbox: server must be an instance's name, or {type, name}", key="server")

    @property
    def server_name(self) -> str | None:
        """The broker's instance name, where it is a server of the stack."""
        if isinstance(self.server, Mapping):
            return str(self.server.get("name") or "") or None
        return self.server or None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> RemoteOptions:
        """Build from configuration; an unknown key raises `ConfigError` with the nearest right name."""
        reject_unknown_keys(values, [f.name for f in dataclasses.fields(cls)], where="remote sandbox")
        return cls(**values)


@dataclass(frozen=True)
class Broker:
    """Where a broker is, and what this process shows it as a caller."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """For the routes that take a caller's credential; sent to this broker only."""


def find_broker(options: RemoteOptions) -> Broker | None:
    """The configured broker; ``None`` when none is. Raises `ConfigError` when a ``server`` is not of this stack."""
    headers = {} if options.token is None else {"Authorization": f"Bearer {options.token}"}
    if options.url is not None:
        return Broker(options.url.rstrip("/"), headers)
    name = options.server_name
    if name is None:
        return None
    from nemo_gym.config.launch import current_launch
    from nemo_gym.contract.credentials import CREDENTIAL_HEADER
    from nemo_gym.http.client import ServerClient

    launch = current_launch()
    credential = None
    if launch is not None and launch.credentials is not None:
        credential = launch.credentials.outgoing.get(name)
    if credential is not None:
        headers[CREDENTIAL_HEADER] = credential
    return Broker(ServerClient.load_from_global_config().base_url(name), headers)
