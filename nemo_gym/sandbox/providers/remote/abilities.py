"""What boxes behind a broker can do: its backend's word, as far as the wire carries it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from nemo_gym.contract.errors import SandboxCreateError
from nemo_gym.sandbox.base import SandboxCapabilities
from nemo_gym.sandbox.providers.remote.brokers import Brokers
from nemo_gym.sandbox.providers.remote.connection import BrokerConnection, BrokerUnreachableError
from nemo_gym.sandbox.providers.remote.options import Broker
from nemo_gym.sandbox.wire import routes
from nemo_gym.sandbox.wire.capabilities import CapabilitiesView
from nemo_gym.sandbox.wire.problems import error_of, parse_problem

_CARRIED: Mapping[str, str | None] = {
    "connect": None,
    "idempotent_create": None,
    "endpoint": "a port of a box is reached from the broker's host only; use exec, or a door for the way out",
}
"""Abilities that do not depend on the broker's backend: see `CapabilitiesView.to_capabilities`."""


class Abilities:
    """Asks once, whichever broker answers: those of one provider have backends of the same kind."""

    def __init__(self, connection: BrokerConnection) -> None:
        self._connection = connection
        self.known: SandboxCapabilities | None = None

    def ask_blocking(self, brokers: Brokers) -> SandboxCapabilities:
        """For who has no event loop. Raises `BrokerUnreachableError`, or what the broker answers."""
        for broker, patience_s in brokers.in_order():
            try:
                return self._ask_blocking(broker)
            except BrokerUnreachableError:
                if patience_s is None:
                    raise
                brokers.unreachable(broker)
        raise AssertionError("unreachable: the last broker answers or raises")

    def _ask_blocking(self, broker: Broker) -> SandboxCapabilities:
        if self.known is None:
            request = urllib.request.Request(broker.url + routes.CAPABILITIES, headers=dict(broker.headers))
            # As the asynchronous connections: no proxy of the environment's, and a credential follows no redirection.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirection)
            try:
                with opener.open(request, timeout=self._connection.request_timeout_s) as answer:
                    self.known = _read(answer.read())
            except urllib.error.HTTPError as error:
                raise error_of(parse_problem(error.code, error.read())) from error
            except OSError as error:
                raise BrokerUnreachableError(
                    f"the broker at {broker.url} cannot be asked what it can do: {error}", retryable=True, started="no"
                ) from error
        return self.known

    async def ask(self, brokers: Brokers) -> SandboxCapabilities:
        """Raises `SandboxCreateError` when no broker can be reached: it is asked for the sake of a box."""
        if self.known is not None:
            return self.known
        for broker, patience_s in brokers.in_order():
            try:
                answer = await self._connection.ask(
                    "GET",
                    broker.url + routes.CAPABILITIES,
                    headers=broker.headers,
                    repeatable=True,
                    patience_s=patience_s,
                )
            except BrokerUnreachableError as error:
                if patience_s is None:
                    raise SandboxCreateError(str(error), retryable=True, provider="remote") from error
                brokers.unreachable(broker)
            else:
                self.known = _read(answer)
                return self.known
        raise AssertionError("unreachable: the last broker answers or raises")


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **options: Any) -> None:
        return None


def _read(answer: bytes) -> SandboxCapabilities:
    return CapabilitiesView.model_validate(json.loads(answer)).to_capabilities(carried=_CARRIED)
