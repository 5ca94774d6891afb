"""Finds an environment's tools among its routes: ``POST /<tool>`` whose body is one pydantic model, or empty."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel

from nemo_gym.contract.errors import ConfigError

_TOOL_PATH = re.compile(r"/[A-Za-z][A-Za-z0-9_-]{0,63}")
_CATCH_ALL_PATH = re.compile(r"/\{\w+(:path)?\}")
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class RouteTool:
    """One tool as declared by its route."""

    name: str
    path: str
    description: str
    """The handler's docstring."""
    input_schema: dict[str, Any]
    output_schema: dict[str, Any] | None
    """``None`` if the route declares no response model."""


@dataclass(frozen=True, slots=True)
class CatchAll:
    """A route that serves many tools by name (``POST /{tool}``) and so declares none of them."""

    route: APIRoute

    def tool(self, name: str, input_schema: dict[str, Any], description: str | None = None) -> RouteTool:
        """Declare the tool ``name`` of this route. Raises `ConfigError` for an invalid name."""
        if not _TOOL_PATH.fullmatch(f"/{name}"):
            raise ConfigError(
                f"'{name}' cannot be the name of a tool: a letter, then up to 63 letters, digits, '_' or '-'",
                key="mcp_tools",
            )
        return RouteTool(name, f"/{name}", description or "", dict(input_schema), None)


def catch_all_of(routes: Iterable[Any]) -> CatchAll | None:
    """The application's only catch-all route; ``None`` if it has none or several."""
    catch_alls = [
        route
        for route in routes
        if isinstance(route, APIRoute) and "POST" in (route.methods or ()) and _CATCH_ALL_PATH.fullmatch(route.path)
    ]
    return CatchAll(catch_alls[0]) if len(catch_alls) == 1 else None


def tools_of(routes: Iterable[Any]) -> dict[str, RouteTool]:
    """The tools among an application's routes, by name, in the order they were added. The suite's own routes, and
    routes with path, query or header parameters or with several body parameters, are not tools."""
    tools: dict[str, RouteTool] = {}
    for route in routes:
        if isinstance(route, APIRoute) and (tool := _tool(route)) is not None:
            tools.setdefault(tool.name, tool)
    return tools


def _tool(route: APIRoute) -> RouteTool | None:
    if "POST" not in (route.methods or ()) or not _TOOL_PATH.fullmatch(route.path) or not route.include_in_schema:
        return None
    dependant = route.dependant
    if dependant.path_params or dependant.query_params or dependant.header_params or len(dependant.body_params) > 1:
        return None
    schema = _NO_ARGUMENTS
    if dependant.body_params:
        model: Any = dependant.body_params[0].field_info.annotation
        if not _is_model(model):
            return None
        schema = model.model_json_schema()
    return RouteTool(
        name=route.path[1:],
        path=route.path,
        description=inspect.cleandoc(route.description or ""),
        input_schema=schema,
        output_schema=_output_schema(route.response_model),
    )


def _output_schema(response_model: Any) -> dict[str, Any] | None:
    return response_model.model_json_schema(mode="serialization") if _is_model(response_model) else None


def _is_model(annotation: Any) -> Any:
    return inspect.isclass(annotation) and issubclass(annotation, BaseModel)
