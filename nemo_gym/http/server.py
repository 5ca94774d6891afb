"""The base classes of every server: configuration, FastAPI application, and startup."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from copy import copy
from importlib.metadata import version
from typing import Any, ClassVar, Self, cast, get_args

import structlog
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError
from pydantic_core import PydanticUndefined
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from nemo_gym._util.suggest import validation_problems
from nemo_gym.config.launch import ServerLaunch, current_launch
from nemo_gym.config_types import BaseRunServerInstanceConfig
from nemo_gym.contract.credentials import Role, ServerCredentials
from nemo_gym.contract.errors import ConfigError, NemoGymError
from nemo_gym.http import telemetry
from nemo_gym.http.client import ServerClient, close_global_aiohttp_client, server_config_of, server_path
from nemo_gym.http.middleware import (
    Application,
    BodyLimitMiddleware,
    BodyLimits,
    CredentialMiddleware,
    DirectRoutesMiddleware,
    ObserveMiddleware,
    RolloutMiddleware,
    SessionGuard,
    SessionMiddleware,
    UnknownErrorMiddleware,
)
from nemo_gym.http.observability import configure_plain_logging, require_scraper
from nemo_gym.http.problems import install_problem_handlers
from nemo_gym.http.requests import CookieCodec, JsonResponse, caller_of
from nemo_gym.http.telemetry import CONTENT_TYPE, METRICS_PATH, Reading, render

CONFIG_PATH_ENV = "NEMO_GYM_CONFIG_PATH"
"""The variable that names the instance, for a server started by hand or by NeMo Gym's own tools."""
_NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False}
"""Turns off FastAPI's own telemetry, which would reveal private fields in errors and looks up its providers with every
request. FastAPI versions without telemetry ignore this."""


class BaseServer(BaseModel):
    """The base class of anything with a server configuration."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    config: BaseRunServerInstanceConfig

    @classmethod
    def config_class(cls) -> type[BaseRunServerInstanceConfig]:
        return cast("type[BaseRunServerInstanceConfig]", cls.model_fields["config"].annotation)

    @classmethod
    def load_config_from_global_config(cls) -> BaseRunServerInstanceConfig:
        """Validate this process's instance block. Raises `ConfigError`, which names every wrong key."""
        launch = current_launch()
        if launch is not None:
            instance, global_config = launch.instance, launch.config
        else:
            from nemo_gym.global_config import get_global_config_dict

            instance = os.environ.get(CONFIG_PATH_ENV, "")
            if not instance:
                raise ConfigError(
                    f"{cls.__name__} does not know which instance it is; start it with ng_run, or set"
                    f" {CONFIG_PATH_ENV}",
                    key=CONFIG_PATH_ENV,
                )
            global_config = get_global_config_dict()
        return cls.config_from(instance, global_config)

    @classmethod
    def config_from(cls, instance: str, global_config: Any) -> BaseRunServerInstanceConfig:
        block: Any = server_config_of(global_config, instance)
        if not isinstance(block, dict):
            from omegaconf import DictConfig, OmegaConf

            block = OmegaConf.to_container(block, resolve=True) if isinstance(block, DictConfig) else dict(block)
        # A null value counts as a missing key, unless the field accepts null.
        fields = cls.config_class().model_fields
        nullable = {name for name, field in fields.items() if type(None) in get_args(field.annotation)}
        settings = {key: value for key, value in block.items() if value is not None or key in nullable}
        try:
            return cls.config_class().model_validate({"host": "127.0.0.1", "port": 0, **settings, "name": instance})
        except ValidationError as error:
            where = server_path(global_config, instance)
            raise ConfigError(validation_problems(error, fields, where=where), key=where) from None


class SimpleServer(BaseServer):
    """A server with one FastAPI application. Subclasses override ``setup_webserver`` to add routes to super's
    application or to build their own; ``application`` adds what every server has around either."""

    server_client: ServerClient

    ROLE: ClassVar[Role] = Role.OPERATOR
    """The role in which this server calls others."""
    HEALTH_PATHS: ClassVar[tuple[str, ...]] = ("/", "/health")
    ray_enabled: ClassVar[bool | None] = None
    """Whether a NeMo Gym server joins a Ray cluster. NeMo Gym plugins set it; this suite ignores it."""

    _credentials: ServerCredentials | None = PrivateAttr(default=None)
    _launch: ServerLaunch | None = PrivateAttr(default=None)
    _startup_error: NemoGymError | None = PrivateAttr(default=None)
    _local_key: bytes = PrivateAttr(default_factory=lambda: secrets.token_bytes(32))
    _contract: Application | None = PrivateAttr(default=None)
    _plugin_app: FastAPI | None = PrivateAttr(default=None)

    def __init__(self, **data: Any) -> None:
        super().__init__(**data)
        if self.__pydantic_private__ is None:  # some plugins' tests replace ``model_post_init``, which sets these
            self.__pydantic_private__ = {}
            for name, private in self.__private_attributes__.items():
                factory: Any = private.default_factory
                if factory is not None or private.default is not PydanticUndefined:
                    self.__pydantic_private__[name] = copy(private.default) if factory is None else factory()

    def contract_app(self) -> Application:
        """Build the application with the fixed routes of this type of server."""
        return self.base_app()

    def setup_webserver(self) -> FastAPI:
        """Return the application to serve; a hook of NeMo Gym's."""
        return self.contract_app()

    def application(self) -> FastAPI:
        """Build the application to serve: that of ``setup_webserver``, inside the layers that every server has.

        An application that a plugin built itself gets the requests that match no route of the contract, behind the
        same checks.
        """
        app = self.setup_webserver()
        if app is self._contract:
            return app
        contract = self._contract or self.contract_app()
        contract.answer_the_rest_with(self.around(app))
        self._plugin_app = app
        return contract

    def around(self, app: FastAPI) -> ASGIApp:
        """Wrap an application that a plugin built itself; the result runs inside the contract's layers."""
        return app

    def secure(self, credentials: ServerCredentials, launch: ServerLaunch | None = None) -> None:
        """Require credentials from callers, and use them for own calls. Call this before ``setup_webserver``."""
        self._credentials = credentials
        self._launch = launch
        if isinstance(self.server_client, ServerClient):
            self_credential = {credentials.instance: credentials.for_self(self.ROLE)}
            self.server_client.use_credentials({**credentials.outgoing, **self_credential})

    @property
    def secured(self) -> bool:
        return self._credentials is not None

    def own_credential(self) -> str | None:
        """The credential with which this process calls its own routes; ``None`` on an unsecured server."""
        return self._credentials.for_self(self.ROLE) if self._credentials is not None else None

    def derive_key(self, purpose: str) -> bytes:
        """This server's key for ``purpose``. It survives restarts under one stack; without credentials it is random
        for each process."""
        if self._credentials is not None:
            return self._credentials.derive(purpose)
        import hashlib
        import hmac

        return hmac.digest(self._local_key, purpose.encode(), hashlib.sha256)

    def get_session_middleware_key(self) -> str:
        """The session cookie's name."""
        return f"{type(self).__name__}___{self.config.name}"

    def base_app(
        self,
        *,
        session_guard: SessionGuard | None = None,
        authenticates_itself: Callable[[Scope], bool] | None = None,
        limit_bodies: bool = True,
    ) -> Application:
        """Build an application with what every server has: health, readiness, metrics, credentials, problems, session
        cookies, and a bound on bodies unless ``limit_bodies`` is false because the routes set their own bounds."""
        app = Application(
            title=self.config.name,
            lifespan=self._lifespan,
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
            telemetry=_NO_TELEMETRY,
        )
        self._contract = app
        install_problem_handlers(app)
        codec = CookieCodec(self.derive_key("session-cookie"))
        # Layers are added from the inside out. A plugin built by hand, in its own tests, gets its errors raised.
        app.add_middleware(DirectRoutesMiddleware, application=app)
        self.setup_exception_middleware(app)
        if self.secured or self._launch is not None:
            app.add_middleware(UnknownErrorMiddleware)
        if limit_bodies:
            config = self.config
            agent_limits = BodyLimits(
                min(config.max_body_bytes, config.max_agent_body_bytes),
                "max_agent_body_bytes" if config.max_agent_body_bytes < config.max_body_bytes else "max_body_bytes",
                config.max_agent_body_values,
                "max_agent_body_values",
            )
            limits = BodyLimits(config.max_body_bytes)
            app.add_middleware(BodyLimitMiddleware, limits=limits, agent_limits=agent_limits)
        app.add_middleware(
            SessionMiddleware, cookie_name=self.get_session_middleware_key(), codec=codec, guard=session_guard
        )
        app.state.nemo_gym_session_middleware_installed = True
        app.add_middleware(
            CredentialMiddleware, credentials=self._credentials, authenticates_itself=authenticates_itself
        )
        app.add_middleware(RolloutMiddleware)
        app.add_middleware(ObserveMiddleware, follows_anybody=not self.secured)
        for path in self.HEALTH_PATHS:
            app.router.routes.append(Route(path, _health, methods=["GET"]))
        app.router.routes.append(Route("/ready", self._ready_route, methods=["GET"]))
        app.router.routes.append(Route(METRICS_PATH, self._metrics_route, methods=["GET"]))
        return app

    def setup_session_middleware(self, app: FastAPI) -> None:
        """Add sessions to an application that a NeMo Gym plugin built and serves without this suite, in its own tests.
        Elsewhere the application runs inside the session layer of `base_app`."""
        if getattr(app.state, "nemo_gym_session_middleware_installed", False):
            return
        app.state.nemo_gym_session_middleware_installed = True
        codec = CookieCodec(self.derive_key("session-cookie"))
        app.add_middleware(SessionMiddleware, cookie_name=self.get_session_middleware_key(), codec=codec)

    def setup_exception_middleware(self, app: FastAPI) -> None:
        """Add a plugin's own layers that format errors; a hook of NeMo Gym's. Default: none, `base_app` does it."""

    async def startup(self) -> None:
        """Runs in the server's event loop before the first request. Override for background work."""

    async def stopping(self) -> None:
        """Runs when the server is told to stop, before it waits for open requests. End those that would stay open."""

    async def shutdown(self) -> None:
        """Runs in the server's event loop after the last request. Override to release what ``startup`` acquired."""

    def facts(self) -> dict[str, Any]:
        """Public facts about this server, shown by ``/ready``."""
        return {}

    async def ready(self) -> dict[str, Any] | None:
        """Return ``None`` if the server can work, else plain data that explains why not."""
        return None

    def readings(self) -> Iterable[Reading]:
        """This server's metrics beyond the counters and histograms of its process."""
        run_id = self._launch.run_id if self._launch is not None else ""
        labels = {"server": self.config.name, "run_id": run_id, "version": version("nemo-gym-suite")}
        yield Reading("nemo_gym_server_info", "Which server this is; always 1", [(labels, 1.0)])

    def require_scraper(self, request: Request) -> None:
        """Raise unless the sender may read this server's metrics."""
        token = self._launch.metrics_token if self._launch is not None else None
        require_scraper(request, caller_of(request), token, secured=self.secured)

    def metrics_text(self) -> bytes:
        """The metrics of this process, in Prometheus' text format."""
        return render(self.readings())

    async def _metrics_route(self, request: Request) -> Response:
        self.require_scraper(request)
        return Response(self.metrics_text(), media_type=CONTENT_TYPE)

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[Mapping[str, Any]]:
        try:
            await self.startup()
        except NemoGymError as error:
            self._startup_error = error
            raise
        try:
            if self._plugin_app is None:
                yield {}
            else:
                async with self._plugin_app.router.lifespan_context(self._plugin_app) as state:
                    yield state or {}
        finally:
            await self.shutdown()
            await close_global_aiohttp_client()
            await telemetry.shut_down()

    async def _ready_route(self, request: Request) -> Response:
        not_ready = await self.ready()
        if not_ready is None:
            return JsonResponse({"status": "ready", **self.facts()})
        return JsonResponse({"status": "not_ready", **self.facts(), **not_ready}, status_code=503)

    @classmethod
    def from_launch(cls, launch: ServerLaunch | None = None) -> Self:
        """Create the server that this process was started for."""
        config = cls.config_from(launch.instance, launch.config) if launch else cls.load_config_from_global_config()
        server = cls(config=config, server_client=ServerClient.load_from_global_config())
        if launch is not None and launch.credentials is not None:
            server.secure(launch.credentials, launch)
        elif launch is not None:
            server._launch = launch
        return server

    @classmethod
    def run_webserver(cls) -> FastAPI | None:
        """Serve until told to stop. Plugins call this under ``if __name__ == "__main__"``."""
        from nemo_gym.http.webserver import serve

        if not structlog.is_configured():
            configure_plain_logging()
        launch = current_launch()
        server = cls.from_launch(launch)
        try:
            serve(
                server.application(),
                server.config,
                launch,
                slow_request_timeout_s=server.config.slow_request_timeout_s,
                on_stop=server.stopping,
            )
        except SystemExit:
            if server._startup_error is not None:
                # uvicorn reports only that startup failed; raise the cause so that the parent process can show it.
                raise server._startup_error from None
            raise
        return None


async def _health(request: Request) -> Response:
    return JsonResponse({"status": "ok"})
