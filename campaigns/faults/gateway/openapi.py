"""The gateway's routes as an OpenAPI document, with request bodies as the official SDKs type them."""

from __future__ import annotations

from typing import Any

from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from pydantic import TypeAdapter

from nemo_gym.gateway.engines import EngineConfig
from nemo_gym.gateway.routes import OpenSession

_NUMBER = {"type": ["number", "null"]}
_REWARD = {
    "type": "object",
    "properties": {"reward": _NUMBER, "reward_info": {"type": ["object", "null"]}},
}
INFERENCE: dict[str, Any] = {
    "/v1/chat/completions": CompletionCreateParamsNonStreaming,
    "/v1/responses": ResponseCreateParamsNonStreaming,
    "/v1/messages": MessageCreateParamsNonStreaming,
    "/v1/messages/count_tokens": MessageCountTokensParams,
}


def document() -> dict[str, Any]:
    """Return every route that takes a body. Names of sessions and engines are parameters."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}

    def route(path: str, schema: dict[str, Any], name: str) -> None:
        definitions = schema.pop("$defs", {})
        schemas.update({f"{name}.{key}": _renamed(value, name) for key, value in definitions.items()})
        content = {"application/json": {"schema": _renamed(schema, name)}}
        names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        paths[path] = {
            "post": {
                "operationId": name,
                "parameters": [
                    {"name": each, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                    for each in names
                ],
                "requestBody": {"required": True, "content": content},
                "responses": {"default": {"description": "any"}},
            }
        }

    for path, body in INFERENCE.items():
        name = path.strip("/").replace("/", "_")
        route(path, TypeAdapter(body).json_schema(), name)
        route(f"/sessions/{{session_id}}{path}", TypeAdapter(body).json_schema(), f"session_{name}")
    route("/sessions", OpenSession.model_json_schema(), "open")
    for action in ("complete", "finalize", "abort"):
        route(f"/sessions/{{session_id}}/{action}", dict(_REWARD), action)
    route("/engines", TypeAdapter(EngineConfig).json_schema(), "add_engine")
    route("/engines/{name}/drain", {"type": "object", "properties": {"timeout_s": {"type": "number"}}}, "drain")
    route("/engines/{name}/undrain", {"type": "object"}, "undrain")
    route("/engines/{name}/weight", {"type": "object", "properties": {"weight": {"type": "number"}}}, "weight")
    weights = {"version": {"type": "string"}, "engines": {"type": "array", "items": {"type": "string"}}}
    route("/weights", {"type": "object", "properties": weights, "required": ["version"]}, "weights")
    return {
        "openapi": "3.1.0",
        "info": {"title": "gateway", "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _renamed(value: Any, name: str) -> Any:
    """Point references to the document's components instead of the schema's own definitions."""
    if isinstance(value, dict):
        return {
            key: f"#/components/schemas/{name}.{inner.rsplit('/', 1)[1]}" if key == "$ref" else _renamed(inner, name)
            for key, inner in value.items()
            if key != "discriminator"
        }
    if isinstance(value, list):
        return [_renamed(inner, name) for inner in value]
    return value
