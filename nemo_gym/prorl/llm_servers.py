"""The OpenAI-compatible servers of a ProRL server, and the choice of a server for each job."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_gym._util.secrets import without_password
from nemo_gym.contract.errors import ConfigError, NemoGymError
from nemo_gym.http.client import is_server_url


class NoLlmServerError(NemoGymError):
    """No LLM server is configured."""

    code = "no_llm_server"
    status = 503


@dataclass(slots=True)
class _LlmServer:
    address: str
    weight: float
    turn: float
    """The server's virtual time: the lowest is next, and each job adds ``1 / weight``."""


class LlmServers:
    """Weighted round robin over addresses. A server that is added later gets its share of the jobs from then on, and
    does not catch up on earlier ones. Not thread-safe."""

    def __init__(self, addresses: Iterable[Any] | Mapping[str, float] = ()) -> None:
        """``addresses`` are URLs, or pairs of a URL and its weight; the weights of a repeated URL add up. Raises
        `ConfigError` naming a wrong address."""
        self._servers: list[_LlmServer] = []
        if isinstance(addresses, str):
            raise ConfigError(f"llm_server_addresses is a list: ['{addresses}']", key="llm_server_addresses")
        for given in addresses.items() if isinstance(addresses, Mapping) else addresses:
            address, weight = parse_address(given)
            existing = next((server for server in self._servers if server.address == address), None)
            if existing is not None:
                existing.weight += weight
            else:
                self._servers.append(_LlmServer(address, weight, 0.0))

    def add(self, given: Any) -> bool:
        """Add a server, or change the weight of a known one. Return whether it is new."""
        address, weight = parse_address(given)
        for server in self._servers:
            if server.address == address:
                server.weight = weight
                return False
        present = min((server.turn for server in self._servers), default=0.0)
        self._servers.append(_LlmServer(address, weight, present))
        return True

    def clear(self) -> None:
        self._servers.clear()

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self._servers]

    def next(self) -> str:
        """Choose the server for all turns of the next job. Raises `NoLlmServerError`."""
        if not self._servers:
            raise NoLlmServerError(
                "there is no LLM server: give llm_server_addresses=[...], or add one (POST /add_llm_server)",
                retryable=True,
            )
        server = min(self._servers, key=lambda each: each.turn)  # the first of equal ones
        server.turn += 1 / server.weight
        return server.address


def parse_address(given: Any) -> tuple[str, float]:
    """Return the address and weight of one entry. Raises `ConfigError`."""
    address, weight = given if isinstance(given, tuple | list) and len(given) == 2 else (given, 1.0)
    key = "llm_server_addresses"
    if not isinstance(address, str):
        raise ConfigError(f"{key}: an address is a URL or a pair of a URL and its weight, got {given!r}", key=key)
    if not is_server_url(address):
        raise ConfigError(
            f"{key}: '{without_password(address)[:200]}' is no address of a server; give for example"
            " http://127.0.0.1:8000/v1",
            key=key,
        )
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight) or weight <= 0:
        raise ConfigError(f"{key}: the weight of {address} must be a number above 0, got {weight!r}", key=key)
    return address.rstrip("/"), float(weight)
