"""The sandbox broker: keeps sandboxes for other servers, durably, and leases them out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import PrivateAttr
from starlette.requests import Request

from nemo_gym.broker.access import is_trusted
from nemo_gym.broker.config import BrokerConfig
from nemo_gym.broker.routes import install_routes, invalid_parameter
from nemo_gym.broker.routes.bodies import RequestIdMiddleware, problem_reply
from nemo_gym.broker.routes.execs import add_direct_submissions
from nemo_gym.broker.service import BrokerService
from nemo_gym.contract.credentials import Role
from nemo_gym.contract.errors import ConfigError, CredentialError
from nemo_gym.http.problems import shape_errors
from nemo_gym.http.server import SimpleServer
from nemo_gym.http.telemetry import Reading
from nemo_gym.sandbox.facade import SandboxOwner
from nemo_gym.sandbox.wire.problems import BrokerError


class SandboxBroker(SimpleServer):
    """Serves ``/v1/sandboxes`` over one sandbox provider. See README.md for the API and its rules."""

    config: BrokerConfig
    ROLE: ClassVar[Role] = Role.OPERATOR

    _app: FastAPI = PrivateAttr()
    _broker: BrokerService | None = PrivateAttr(default=None)

    def setup_webserver(self) -> FastAPI:
        # The routes authenticate callers themselves, because some accept a lease instead of a credential. They also
        # limit body sizes themselves, because an archive may exceed the general limit.
        app = self.base_app(authenticates_itself=lambda path: True, limit_bodies=False)
        shape_errors(app, problem_reply)
        app.add_exception_handler(RequestValidationError, invalid_parameter)
        app.add_middleware(RequestIdMiddleware)
        add_direct_submissions(app)
        self._app = app
        return app

    @property
    def broker(self) -> BrokerService:
        """The broker's service. Raises `RuntimeError` before `startup`."""
        if self._broker is None:
            raise RuntimeError("the broker is not started")
        return self._broker

    @property
    def state_dir(self) -> Path:
        directory = self.config.state_dir or (self._launch.state_dir if self._launch is not None else None)
        if directory is None:
            raise ConfigError(
                f"server '{self.config.name}' needs a directory for its registry; set state_dir", key="state_dir"
            )
        return Path(directory).expanduser().resolve()

    async def startup(self) -> None:
        provider = SandboxOwner(self.config.sandbox_provider, self.server_client).provider()
        if provider.name == "remote":
            raise ConfigError(
                f"server '{self.config.name}': the broker's own sandbox_provider is 'remote'; name a backend",
                key="sandbox_provider",
            )
        state_dir = await asyncio.to_thread(lambda: self.state_dir)
        endpoints = self._launch.endpoints if self._launch is not None else ()
        self._broker = BrokerService(self.config, state_dir, provider, self._credentials, endpoints)
        await self._broker.start()
        install_routes(self._app, self._broker)

    async def ready(self) -> dict[str, Any] | None:
        return await self.broker.not_ready()

    def readings(self) -> Iterable[Reading]:
        yield from super().readings()
        yield from self.broker.readings()

    def require_scraper(self, request: Request) -> None:
        """Require the run's token, a trusted role or a caller from the configuration: metrics show all sandboxes."""
        try:
            super().require_scraper(request)
        except CredentialError:
            caller = self.broker.access.caller(request)
            if not is_trusted(caller.role) and not self.broker.access.is_outsider(caller):
                message = f"/metrics is not for '{caller.name}', which is '{caller.role}'"
                raise BrokerError("not_permitted", message) from None

    def facts(self) -> dict[str, Any]:
        return {"provider": self.broker.backend.name, "identity": self.broker.backend.identity}

    async def stopping(self) -> None:
        if self._broker is None:
            return
        self._broker.draining.set()
        self._broker.creations.drain()
        for box in self._broker.boxes.live.values():
            for run in box.execs.values():
                run.notify()  # wakes the readers of the output, which then see that the broker is draining

    async def shutdown(self) -> None:
        if self._broker is not None:
            broker, self._broker = self._broker, None
            await broker.aclose()


if __name__ == "__main__":
    SandboxBroker.run_webserver()
