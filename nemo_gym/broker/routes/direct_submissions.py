"""The shortest way to the one route that every command takes.

The framework's way to a route tries each in turn and solves its dependencies, which takes longer than the broker's own
work for a short command. What is not plainly a submission goes the framework's way, to the same function.
"""

from __future__ import annotations

import re
from typing import cast

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from nemo_gym.broker.routes.execs import MAX_ID_LENGTH, submitted
from nemo_gym.broker.service import BrokerService
from nemo_gym.contract.session import IDENTIFIER
from nemo_gym.http.middleware import DirectRoutesMiddleware, Endpoint
from nemo_gym.sandbox.wire.routes import SANDBOXES

_PATH = re.compile(rf"{re.escape(SANDBOXES)}/([^/]+)/execs/([^/]+)")
_QUERY = re.compile(rb"(?:offset=([0-9]{1,18}))?")


class DirectSubmissions(DirectRoutesMiddleware):
    """Innermost of the application's layers."""

    def __init__(self, app: ASGIApp, application: FastAPI) -> None:
        super().__init__(app, application)
        self._state = application.state

    def _find(self, scope: Scope) -> Endpoint | None:
        if scope["method"] != "PUT":
            return None
        path, query = _PATH.fullmatch(scope["path"]), _QUERY.fullmatch(scope["query_string"])
        if path is None or query is None:
            return None
        sandbox_id, exec_id = path.groups()
        if len(exec_id) > MAX_ID_LENGTH or IDENTIFIER.fullmatch(exec_id) is None:
            return None
        broker = cast("BrokerService", self._state.sandbox_broker)
        offset = int(query[1] or 0)

        async def submit(request: Request) -> Response:
            return await submitted(broker, request, sandbox_id, exec_id, offset)

        return submit


def add_direct_submissions(app: FastAPI) -> None:
    """Before the application serves anything; `install` follows once there is a broker."""
    app.user_middleware.append(Middleware(DirectSubmissions, application=app))


def install(app: FastAPI, broker: BrokerService) -> None:
    app.state.sandbox_broker = broker
