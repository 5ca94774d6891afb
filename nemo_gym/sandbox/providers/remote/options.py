"""Options of the remote provider, the brokers that they name, and the abilities of these brokers."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from yarl import URL

from nemo_gym.contract.errors import ConfigError, reject_unknown_keys
from nemo_gym.http.telemetry import Chooser
from nemo_gym.sandbox import wire
from nemo_gym.sandbox.base import SandboxCapabilities
from nemo_gym.sandbox.providers.remote.connection import BrokerConnection, BrokerUnreachableError, answer_as
from nemo_gym.sandbox.wire.models import CapabilitiesView

# -- Options -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RemoteOptions:
    """Options of `RemoteProvider`. Either ``url`` or ``server`` selects the broker. Without both, boxes can be
    borrowed (a reference contains its broker's URL), but not created."""

    url: str | None = None
    """The broker's root, ``http://`` or ``https://``."""
    server: str | Mapping[str, Any] | None = None
    """The broker as a server of the same stack: its instance name, or ``{type: resources_servers, name: …}``. This
    process gets the broker's address and credential at launch."""
    token: str | None = field(default=None, repr=False)
    """One of the broker's ``caller_tokens``, for a process that is not a server of the broker's stack."""
    request_timeout_s: float = 60.0
    """Longest time that the broker may send nothing within a request that does not wait for a box."""
    patience_s: float = 60.0
    """For how long to retry an unreachable broker before its boxes and commands count as lost."""

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
        """The broker's instance name if it is a server of the stack, else ``None``."""
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
    """A broker's address, and the headers with this process's credential."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers for the routes that require a caller's credential; sent to this broker only."""


def find_brokers(options: RemoteOptions) -> Brokers | None:
    """The configured brokers, or ``None``. Raises `ConfigError` if ``server`` is not in this stack."""
    headers = {} if options.token is None else {"Authorization": f"Bearer {options.token}"}
    if options.url is not None:
        return Brokers([Broker(options.url.rstrip("/"), headers)])
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
    return Brokers([Broker(url, headers) for url in ServerClient.load_from_global_config().replica_urls(name)])


# -- Brokers -------------------------------------------------------------------------------------------------------

NEXT_BROKER_AFTER_S = 5.0
"""For how long to retry a broker that cannot be reached, or has no capacity, before trying the next one."""


_CARRIED: Mapping[str, str | None] = {
    "connect": None,
    "idempotent_create": None,
    "endpoint": "a port of a box is reached from the broker's host only; use exec, or a door for the way out",
}
"""Abilities that do not depend on the broker's backend; see `CapabilitiesView.to_capabilities`."""


class Brokers:
    """Brokers with backends of the same kind. A box stays with the broker that made it."""

    def __init__(self, brokers: Sequence[Broker]) -> None:
        self.all = tuple(brokers)
        self._urls = [broker.url for broker in brokers]
        self._chooser = Chooser()
        self.abilities: SandboxCapabilities | None = None
        """What the backend can do, once a broker was asked."""

    def in_order(self, key: str | None = None) -> Iterator[tuple[Broker, float | None]]:
        """Yield each broker and its retry time (``None``: as configured), in the order to try them for a new box. The
        order is the same for the same ``key``; without a key, brokers take turns."""
        *others, last = (self.all[number] for number in self._chooser.order(self._urls, key))
        yield from ((broker, NEXT_BROKER_AFTER_S) for broker in others)
        yield last, None

    def patience_of(self, broker: Broker) -> float | None:
        """For how long to retry a request to a broker where others could serve instead (``None``: as configured)."""
        if len(self.all) == 1:
            return None
        return 0.0 if self._chooser.is_left_out(broker.url) else NEXT_BROKER_AFTER_S

    def unreachable(self, broker: Broker) -> None:
        """For a while, try the other brokers first."""
        self._chooser.unreachable(broker.url)

    def url_of(self, told: str) -> str | None:
        """The configured address of the broker with the URL ``told`` in a reference. A single broker's address may
        differ from ``told`` (between machines, say); several brokers must include ``told``, else return ``None``."""
        if len(self.all) == 1:
            return self.all[0].url
        url = told.rstrip("/")
        return url if url in self._urls else None

    def ask_abilities_blocking(self, connection: BrokerConnection) -> SandboxCapabilities:
        """Like `ask_abilities`, with one attempt per broker and for any thread, also one that runs an event loop."""
        if self.abilities is not None:
            return self.abilities
        with ThreadPoolExecutor(1) as thread:
            own = BrokerConnection(request_timeout_s=connection.request_timeout_s, patience_s=0.0)
            return thread.submit(asyncio.run, self.ask_abilities(own, patience_s=0.0)).result()

    async def ask_abilities(
        self, connection: BrokerConnection, *, patience_s: float | None = None
    ) -> SandboxCapabilities:
        """Return the abilities, for which one broker is asked once. ``patience_s`` overrides for how long to retry a
        broker. Raises `BrokerUnreachableError` if no broker can be reached, or the broker's error."""
        if self.abilities is None:
            for broker, broker_patience_s in self.in_order():
                try:
                    answer = await connection.ask(
                        "GET",
                        broker.url + wire.CAPABILITIES,
                        headers=broker.headers,
                        repeatable=True,
                        patience_s=broker_patience_s if patience_s is None else patience_s,
                    )
                    break
                except BrokerUnreachableError:
                    if broker_patience_s is None:  # it was the last one
                        raise
                    self.unreachable(broker)
            self.abilities = answer_as(CapabilitiesView, answer).to_capabilities(carried=_CARRIED)
        return self.abilities
