"""What stands before every route, as plain ASGI: the rollout a request belongs to, and who sent it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from nemo_gym.contract.credentials import CREDENTIAL_HEADER, Caller, Role, ServerCredentials
from nemo_gym.contract.errors import NemoGymError
from nemo_gym.http.correlation import (
    ROLLOUT_ID_HEADER,
    ROLLOUT_ID_PATTERN,
    ROLLOUT_PATH_PREFIX,
    TOKEN_CAPTURE_PATH_SEGMENT,
    rollout_context,
)
from nemo_gym.http.problems import send_problem
from nemo_gym.http.replicas import REPLICAS_HEADER, decode_replicas, replica_context

OPEN_ROUTES = frozenset({"/", "/health", "/ready"})
"""Served to anybody: they say that a server lives, and nothing else."""

TOKEN_CAPTURE = "nemo_gym.token_capture"
_CALLER = "nemo_gym.caller"
_CREDENTIAL_HEADER = CREDENTIAL_HEADER.lower().encode()
_ROLLOUT_HEADER = ROLLOUT_ID_HEADER.lower().encode()
_REPLICAS_HEADER = REPLICAS_HEADER.lower().encode()
_PREFIX = f"/{ROLLOUT_PATH_PREFIX}/"


class RolloutMiddleware:
    """Takes ``/ng-rollout/<id>/`` off the path, or the rollout header, and makes it the current rollout; and goes on
    with the replicas that its caller chose."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        replicas = next((value for name, value in scope["headers"] if name == _REPLICAS_HEADER), None)
        if replicas is not None:
            with replica_context(decode_replicas(replicas.decode("latin-1"))):
                await self._with_rollout(scope, receive, send)
        else:
            await self._with_rollout(scope, receive, send)

    async def _with_rollout(self, scope: Scope, receive: Receive, send: Send) -> None:
        rollout_id: str | None = None
        path: str = scope["path"]
        if path.startswith(_PREFIX):
            rollout_id, _, rest = path[len(_PREFIX) :].partition("/")
            capture = rest.startswith(f"{TOKEN_CAPTURE_PATH_SEGMENT}/")
            rest = "/" + rest.removeprefix(f"{TOKEN_CAPTURE_PATH_SEGMENT}/")
            # As NeMo Gym's prefixed routes show it to a handler.
            prefix = {"rollout_id": rollout_id}
            scope = {**scope, "path": rest, "raw_path": rest.encode(), "path_params": prefix, TOKEN_CAPTURE: capture}
        else:
            for name, value in scope["headers"]:
                if name == _ROLLOUT_HEADER:
                    rollout_id = value.decode("latin-1")
                    break
        if rollout_id is None or not ROLLOUT_ID_PATTERN.match(rollout_id):
            await self.app(scope, receive, send)
            return
        with rollout_context(rollout_id):
            await self.app(scope, receive, send)


class CredentialMiddleware:
    """Refuses every request without a genuine credential for this server.

    ``authenticates_itself`` lets requests on without one whose route checks another kind of token (inference routes);
    what it raises is answered. Without ``credentials`` the server is unsecured: a plugin built by hand, in its own
    tests.
    """

    def __init__(
        self,
        app: ASGIApp,
        credentials: ServerCredentials | None,
        authenticates_itself: Callable[[Scope], bool] | None = None,
    ) -> None:
        self.app = app
        self._credentials = credentials
        self._authenticates_itself = authenticates_itself

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._credentials is None or scope["type"] != "http" or _is_open(scope):
            await self.app(scope, receive, send)
            return
        credential: str | None = None
        for name, value in scope["headers"]:
            if name == _CREDENTIAL_HEADER:
                credential = value.decode("latin-1")
                break
        try:
            if credential is None and self._authenticates_itself is not None and self._authenticates_itself(scope):
                checked = None
            else:
                checked = self._credentials.check(credential)
        except NemoGymError as error:
            await send_problem(scope, receive, send, error)
            return
        if checked is not None:
            scope[_CALLER] = checked
        await self.app(scope, receive, send)


def _is_open(scope: Scope) -> bool:
    return scope["path"] in OPEN_ROUTES and scope["method"] in ("GET", "HEAD")


def caller_of(connection: HTTPConnection) -> Caller | None:
    """Who sent the request; ``None`` on an unsecured server (and on routes with another kind of token)."""
    caller: Any = connection.scope.get(_CALLER)
    return caller if isinstance(caller, Caller) else None


def sent_by_agent(scope: Scope) -> bool:
    """Whether an agent server's credential came with the request."""
    caller = scope.get(_CALLER)
    return isinstance(caller, Caller) and caller.role is Role.AGENT


def require_role(connection: HTTPConnection, *roles: Role) -> Caller | None:
    """The caller, who must have one of ``roles``; ``None`` on an unsecured server. Raises `RoleError`."""
    caller = caller_of(connection)
    if caller is not None:
        caller.require(*roles, route=connection.scope["path"])
    return caller
