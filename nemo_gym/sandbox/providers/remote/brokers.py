"""The brokers that a provider may ask: one, or the replicas of one, each with boxes of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nemo_gym.http.correlation import Chooser
from nemo_gym.sandbox.providers.remote.options import Broker, RemoteOptions, find_broker

NEXT_BROKER_AFTER_S = 5.0
"""How long a broker that cannot be reached, or has no room, is tried while there is another one."""


def find_brokers(options: RemoteOptions) -> Brokers | None:
    """The configured brokers; ``None`` when none are. Raises `ConfigError` when a ``server`` is not of this stack."""
    first = find_broker(options)
    if first is None:
        return None
    if options.server_name is None:
        return Brokers([first])
    from nemo_gym.http.client import ServerClient

    urls = ServerClient.load_from_global_config().replica_urls(options.server_name)
    return Brokers([Broker(url, first.headers) for url in urls])


class Brokers:
    """Brokers with backends of the same kind. A box stays with the broker that made it."""

    def __init__(self, brokers: Sequence[Broker]) -> None:
        self.all = tuple(brokers)
        self._urls = [broker.url for broker in brokers]
        self._chooser = Chooser()

    def in_order(self, key: str | None = None) -> Iterator[tuple[Broker, float | None]]:
        """Each broker, with how patient to be with it (``None``: as configured), in the order to be tried for
        something new: the same for the same ``key``, in turn without one."""
        *others, last = (self.all[number] for number in self._chooser.order(self._urls, key))
        yield from ((broker, NEXT_BROKER_AFTER_S) for broker in others)
        yield last, None

    def patience_of(self, broker: Broker) -> float | None:
        """How patient to be with one that is asked although another could do (``None``: as configured)."""
        if len(self.all) == 1:
            return None
        return 0.0 if self._chooser.is_left_out(broker.url) else NEXT_BROKER_AFTER_S

    def unreachable(self, broker: Broker) -> None:
        """Ask the others first for a while."""
        self._chooser.unreachable(broker.url)

    def url_of(self, told: str) -> str | None:
        """Where a broker is that a reference calls ``told``: of one broker, the address that is configured here (an
        address may differ between machines); of several, that one; ``None`` for one that is not configured."""
        if len(self.all) == 1:
            return self.all[0].url
        url = told.rstrip("/")
        return url if url in self._urls else None
