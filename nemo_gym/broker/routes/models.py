"""Answers: models as JSON, encoded once."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel
from starlette.responses import Response

from nemo_gym.sandbox.wire.routes import JSON


def reply(body: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body.model_dump_json(), status, headers, JSON)
