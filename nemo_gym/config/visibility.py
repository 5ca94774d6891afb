"""Which parts of the configuration each server process receives.

A server gets its own block, resolved; of every other server it refers to, only the address and kind; shared top-level
values, secrets among them only if its own block uses them; and top-level blocks, whole if its own block names them
(``sandbox_provider: sandbox``), otherwise without their secrets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_gym._util.secrets import is_secret, without_password
from nemo_gym.config.composition import Composition
from nemo_gym.config.keys import COMPOSITION, ENVIRONMENT_TYPE, HOSTS, MODEL_TYPE, OBSERVABILITY
from nemo_gym.config.layers import interpolated_keys, leaves, lookup
from nemo_gym.config.servers import references


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str
    port: int
    scheme: str = "http"

    @property
    def url(self) -> str:
        """``http://host:port``, or ``https``; a wildcard host is reached over loopback."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        return f"{self.scheme}://[{host}]:{self.port}" if ":" in host else f"{self.scheme}://{host}:{self.port}"


def call_targets(composition: Composition, instance: str) -> list[str]:
    """Return the instances that a server may call: those that its block refers to, directly or through a top-level
    block that it names (a ``sandbox`` behind a broker)."""
    server = composition.servers[instance]
    found = [*references(server.values), *references(named_blocks(composition, instance))]
    return list(dict.fromkeys(reference.name for reference in found if reference.name != instance))


def named_blocks(composition: Composition, instance: str) -> dict[str, Any]:
    """Return the top-level blocks, except servers, that a server's block names (``sandbox_provider: sandbox``)."""
    named = {value for _, value in leaves(composition.servers[instance].values) if isinstance(value, str)}
    return {
        key: value
        for key, value in composition.values.items()
        if key in named and isinstance(value, Mapping) and key not in composition.servers and key != COMPOSITION
    }


Replicas = Mapping[str, Sequence[Address]]
"""Where each server of a composition on several hosts runs; empty on one host."""


def server_view(
    composition: Composition, instance: str, addresses: Mapping[str, Address], replicas: Replicas | None = None
) -> dict[str, Any]:
    """The configuration for one server's launch, as plain data."""
    used = _used_keys(composition, instance)
    named = named_blocks(composition, instance)
    view: dict[str, Any] = {}
    for key, value in composition.values.items():
        if key in composition.servers or key == HOSTS:
            continue
        if key in used or key in named or key == OBSERVABILITY:  # whole: every server sends its own spans
            view[key] = value
        elif not is_secret(key, value):
            view[key] = _without_secrets(value)
    for name in (instance, *call_targets(composition, instance)):
        server, address = composition.servers[name], addresses[name]
        place = {"host": address.host, "port": address.port}
        block = {**server.values, **place} if name == instance else {**place, **_urls(name, address, replicas)}
        if name != instance:
            block["entrypoint"] = str(server.values.get("entrypoint", "app.py"))
        view[name] = {server.server_type: {server.implementation: block}}
    return view


def endpoints(
    composition: Composition, instance: str, addresses: Mapping[str, Address], replicas: Replicas | None = None
) -> tuple[str, ...]:
    """Base URLs of all other model servers and environments."""
    urls = [
        url
        for name, server in composition.servers.items()
        if name != instance and server.server_type in (MODEL_TYPE, ENVIRONMENT_TYPE)
        for place in (_urls(name, addresses[name], replicas),)
        for url in (place["url"], *place.get("urls", ()))
    ]
    return tuple(dict.fromkeys(urls))


def pipeline_view(
    composition: Composition, addresses: Mapping[str, Address], replicas: Replicas | None = None
) -> dict[str, Any]:
    """Return what a caller needs: the servers' blocks with addresses and without secrets, and what was chosen."""
    view: dict[str, Any] = {COMPOSITION: dict(composition.values.get(COMPOSITION) or {})}
    for name, server in composition.servers.items():
        address = addresses[name]
        place = {"host": address.host, "port": address.port, **_urls(name, address, replicas)}
        block = {**_without_secrets(server.values), **place}
        view[name] = {server.server_type: {server.implementation: block}}
    return view


def _urls(name: str, address: Address, replicas: Replicas | None) -> dict[str, Any]:
    """``url``, and ``urls`` where there are several replicas to choose from."""
    places = (replicas or {}).get(name, ())
    if len(places) < 2:
        return {"url": address.url}
    return {"url": places[0].url, "urls": [place.url for place in places]}


def _used_keys(composition: Composition, instance: str) -> set[str]:
    """Top-level keys that the server's unresolved block interpolates, directly or through other keys."""
    pending: list[Any] = [lookup(composition.unresolved, composition.servers[instance].path)]
    used: set[str] = set()
    while pending:
        for _, value in leaves(pending.pop()):
            for dotted in interpolated_keys(value) if isinstance(value, str) else ():
                key = dotted.split(".")[0]
                if key not in used and key not in composition.servers and key in composition.unresolved:
                    used.add(key)
                    pending.append(composition.unresolved[key])
    return used


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_secrets(item) for key, item in value.items() if not is_secret(key, item)}
    if isinstance(value, list | tuple):
        return [_without_secrets(item) for item in value]
    return without_password(value) if isinstance(value, str) else value
