"""Model calls of rollouts, written by NeMo Gym's model servers: ``observability_enabled`` and
``model_call_capture_dir`` of a configuration.

The gateway has another capture (`nemo_gym.gateway.capture`), which does not delay calls. A plugin's server writes a
call before its reply ends, so that a client that has read the reply finds the record. Both hide the same secrets.
"""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson
import structlog
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym._util.files import append_lines, open_lines
from nemo_gym.config_types import ROLLOUT_PATH_PREFIX, ModelServerRef
from nemo_gym.gateway.capture import read_calls, redacted_json
from nemo_gym.gateway.dialects import PATHS, Dialect
from nemo_gym.http.middleware import RolloutMiddleware
from nemo_gym.http.telemetry import ROLLOUT_ID_HEADER, ROLLOUT_ID_PATTERN, maybe_rollout_id_from_run_body
from nemo_gym.rollout_observability import (
    AgentObservationBundle,
    ModelCallRecord,
    ObservationGap,
    join_model_call_observations,
)

CAPTURE_KEY = "ng_model_call_capture"
OBSERVATIONS_KEY = "ng_agent_observations"
_SESSION_HEADERS = ("x-session-id", "x-claude-code-session-id", "session_id")
_PREFIX = f"/{ROLLOUT_PATH_PREFIX}/"
_INFERENCE_PATH = re.compile(r"/v1/(?:chat/completions|responses|messages)$")
_SOURCE = re.compile(r"[a-z][a-z0-9_]{0,63}")
log = structlog.get_logger(__name__)


class ModelCallCaptureConfig(BaseModel):
    """Whether a model server writes its calls, and where."""

    observability_enabled: bool = False
    model_call_capture_dir: Path | None = None

    @property
    def directory(self) -> Path | None:
        return self.model_call_capture_dir if self.observability_enabled else None


class CaptureStore:
    """Captured calls: ``<root>/<rollout id>/<server>-<process>.jsonl``, so that each file has one writer."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def record(self, rollout_id: str, call: Mapping[str, Any]) -> None:
        """Append one call. Raises `ValueError` for an invalid rollout id, and the disk's `OSError`."""
        server = (call.get("model_ref") or {}).get("name") or "calls"
        directory = self._directory(rollout_id)
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = open_lines(directory / f"{re.sub('[^A-Za-z0-9_-]', '-', server)}-{os.getpid()}.jsonl", 0o600)
        try:
            append_lines(fd, redacted_json(dict(call)) + b"\n")
        finally:
            os.close(fd)

    def calls(self, rollout_id: str) -> list[dict[str, Any]]:
        """Return the calls of a rollout, in the order in which they began."""
        files = sorted(self._directory(rollout_id).glob("*.jsonl"))
        calls = [call for file in files for call in read_calls(file)]
        return sorted(calls, key=lambda call: call.get("started_at") or 0.0)

    def _directory(self, rollout_id: str) -> Path:
        if not ROLLOUT_ID_PATTERN.match(rollout_id):
            raise ValueError(f"{rollout_id[:80]!r} is not a rollout id")
        return self.root / rollout_id


def read_model_call_records(store: CaptureStore, rollout_id: str) -> list[ModelCallRecord]:
    """Return the calls of a rollout, numbered."""
    return _numbered(store.calls(rollout_id))


def _numbered(calls: Iterable[Mapping[str, Any]]) -> list[ModelCallRecord]:
    return [ModelCallRecord.model_validate({**call, "call_index": index}) for index, call in enumerate(calls)]


def aggregate_model_call_metrics(store: CaptureStore, rollout_id: str) -> dict[str, Any]:
    """Return counts and sums over a rollout's calls; a sum is ``None`` if any call lacks the number."""
    return _metrics(read_model_call_records(store, rollout_id))


def _metrics(calls: Sequence[ModelCallRecord]) -> dict[str, Any]:
    def total(name: str) -> float | None:
        values = [getattr(call, name) for call in calls]
        return None if not values or None in values else sum(values)

    return {
        "num_calls": len(calls),
        "num_failed_calls": sum(call.error_category is not None for call in calls),
        **{name: total(name) for name in ("tokens_in", "tokens_out", "tokens_reasoning", "cached_tokens")},
        "duration_ms": total("duration_ms"),
    }


# Recording calls while they are served.


def install_model_call_capture(app: FastAPI, config: ModelCallCaptureConfig, *, model_server_name: str) -> None:
    """Record the calls of rollouts on ``app``'s inference routes, if ``config`` asks for it."""
    if config.directory is None:
        return
    layers: list[Any] = [layer.cls for layer in app.user_middleware]
    if RolloutMiddleware not in layers:
        app.add_middleware(RolloutMiddleware)
    app.add_middleware(CallWriter, store=CaptureStore(config.directory), server=model_server_name)


class CallWriter:
    """Records each inference call that names its rollout. A disk error loses records, but never fails a call."""

    def __init__(self, app: ASGIApp, *, store: CaptureStore, server: str) -> None:
        self.app = app
        self._store = store
        self._model_ref = ModelServerRef(type="responses_api_models", name=server).model_dump(mode="json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rollout_and_dialect = _rollout_and_dialect_of(scope)
        if rollout_and_dialect is None:
            await self.app(scope, receive, send)
            return
        rollout_id, dialect = rollout_and_dialect
        headers = Headers(scope=scope)
        call: dict[str, Any] = {
            "model_call_id": uuid4().hex,
            "model_ref": self._model_ref,
            "client_session_id": next((headers[name] for name in _SESSION_HEADERS if name in headers), None),
            "dialect": str(dialect),
            "started_at": time.time(),
        }
        began = time.monotonic()
        request_body, response_body = bytearray(), bytearray()
        streamed = False

        async def reading() -> Message:
            message = await receive()
            request_body.extend(message.get("body", b""))
            return message

        async def finished(error: str | None = None) -> None:
            took = time.monotonic() - began
            call.update(duration_ms=round(took * 1000, 3), completed_at=call["started_at"] + took)
            try:
                facts = _reply_facts(dialect, bytes(response_body), streamed, call.get("status_code"))
                call.update(facts, request=_json(request_body), **({"error_category": error} if error else {}))
                self._store.record(rollout_id, call)
            except Exception as problem:  # noqa: BLE001 - no malformed reply and no disk error may fail a call
                log.warning("model call not captured", directory=str(self._store.root), error=str(problem))

        async def writing(message: Message) -> None:
            nonlocal streamed
            if message["type"] == "http.response.start":
                call["status_code"] = message["status"]
                streamed = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
            else:
                response_body.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    await finished()
            await send(message)

        try:
            await self.app(scope, reading, writing)
        except Exception as error:
            if "duration_ms" not in call:
                await finished(type(error).__name__)
            raise


def _rollout_and_dialect_of(scope: Scope) -> tuple[str, Dialect] | None:
    """Return the rollout id and the dialect of a request that is to be recorded, otherwise ``None``."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    path: str = scope["path"]
    route = _INFERENCE_PATH.search(path)
    if route is None:
        return None
    if path.startswith(_PREFIX):
        rollout_id = path[len(_PREFIX) :].partition("/")[0]
    else:
        rollout_id = Headers(scope=scope).get(ROLLOUT_ID_HEADER, "")
    return (rollout_id, PATHS[route[0]]) if ROLLOUT_ID_PATTERN.match(rollout_id) else None


def _json(data: bytes | bytearray) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return data.decode("utf-8", "replace") or None


def _reply_facts(dialect: Dialect, body: bytes, streamed: bool, status: int | None) -> dict[str, Any]:
    """Return the fields of a record that come from the reply."""
    reply = reply_of_events(dialect, body) if streamed else _json(body)
    facts: dict[str, Any] = {"response": reply}
    if status is None or not 200 <= status < 300:
        return {**facts, "error_category": f"http_{status}" if status is not None else "no_answer"}
    if not isinstance(reply, dict):
        return {**facts, "error_category": "incomplete_stream" if streamed else "no_json"}
    usage: dict[str, Any] = reported if isinstance(reported := reply.get("usage"), dict) else {}
    details = {
        which: detail if isinstance(detail := usage.get(f"{which}_tokens_details"), dict) else {}
        for which in ("input", "prompt", "output", "completion")
    }
    choices = reply.get("choices") or [{}]
    return {
        **facts,
        "error_category": None,
        "response_id": reply.get("id"),
        "model": reply.get("model"),
        "response_status": reply.get("status"),
        "finish_reason": choices[0].get("finish_reason") if dialect is Dialect.CHAT else reply.get("stop_reason"),
        "tokens_in": usage.get("input_tokens", usage.get("prompt_tokens")),
        "tokens_out": usage.get("output_tokens", usage.get("completion_tokens")),
        "tokens_reasoning": (details["output"] or details["completion"]).get("reasoning_tokens"),
        "cached_tokens": (details["input"] or details["prompt"]).get(
            "cached_tokens", usage.get("cache_read_input_tokens")
        ),
    }


def reply_of_events(dialect: Dialect, stream: bytes) -> dict[str, Any] | None:
    """Return the reply that a stream of server-sent events amounts to; ``None`` for an incomplete stream."""
    reply: dict[str, Any] = {}
    partial: dict[int, str] = {}
    complete = False
    for line in stream.splitlines():
        event = _json(line[5:].strip()) if line.startswith(b"data:") else None
        if event == "[DONE]":
            complete = True
        if not isinstance(event, dict):
            continue
        if dialect is Dialect.RESPONSES:
            if event.get("type") in ("response.completed", "response.incomplete", "response.failed"):
                return dict(event["response"])
        elif dialect is Dialect.CHAT:
            _add_chunk(reply, event)
        else:
            complete = _add_message_event(reply, partial, event) or complete
    return reply if complete and reply else None


def _add_chunk(reply: dict[str, Any], chunk: Mapping[str, Any]) -> None:
    for key in ("id", "model", "created", "usage"):
        if chunk.get(key) is not None:
            reply[key] = chunk[key]
    reply["object"] = "chat.completion"
    choices = reply.setdefault("choices", [{"index": 0, "message": {"role": "assistant"}, "finish_reason": None}])
    message = choices[0]["message"]
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                message[name] = (message.get(name) or "") + delta[name]
        for piece in delta.get("tool_calls") or ():
            calls = message.setdefault("tool_calls", [])
            if piece.get("index", 0) >= len(calls):
                calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
            call, function = calls[piece.get("index", 0)], piece.get("function") or {}
            call["id"] = piece.get("id") or call["id"]
            call["function"]["name"] = function.get("name") or call["function"]["name"]
            call["function"]["arguments"] += function.get("arguments") or ""
        choices[0]["finish_reason"] = choice.get("finish_reason") or choices[0]["finish_reason"]


def _add_message_event(reply: dict[str, Any], partial: dict[int, str], event: Mapping[str, Any]) -> bool:
    """Add an event to ``reply``. Returns whether the message is complete."""
    kind, index = event.get("type"), event.get("index", 0)
    if kind == "message_start":
        reply.update(event["message"], content=[])
    elif kind == "content_block_start":
        reply["content"].append(dict(event["content_block"]))
    elif kind == "content_block_delta":
        block, delta = reply["content"][index], event["delta"]
        for name in ("text", "thinking", "signature"):
            if name in delta:
                block[name] = block.get(name, "") + delta[name]
        partial[index] = partial.get(index, "") + delta.get("partial_json", "")
    elif kind == "content_block_stop" and partial.get(index):
        reply["content"][index]["input"] = _json(partial.pop(index).encode())
    elif kind == "message_delta":
        reply.update(event.get("delta") or {})
        reply["usage"] = {**(reply.get("usage") or {}), **(event.get("usage") or {})}
    return kind == "message_stop"


# Captured calls and the row of their rollout.


def merge_model_call_capture_into_record(
    record: dict[str, Any], directories: Iterable[str | Path], include_payloads: bool = False
) -> None:
    """Add a rollout's captured calls and their counts to its result row, and join them to its agent's observations.
    Bodies only with ``include_payloads``. The row of a rollout without calls stays unchanged."""
    rollout_id = maybe_rollout_id_from_run_body(record)
    if rollout_id is None:
        return
    captured = [call for directory in directories for call in CaptureStore(directory).calls(rollout_id)]
    calls = _numbered(sorted(captured, key=lambda call: call.get("started_at") or 0.0))
    if not calls:
        return
    left_out = set() if include_payloads else {"request", "response"}
    shown = [call.model_dump(mode="json", exclude=left_out) for call in calls]
    record[CAPTURE_KEY] = {"calls": shown, "metrics": _metrics(calls)}
    if record.get(OBSERVATIONS_KEY) is not None:
        observations = AgentObservationBundle.model_validate(record[OBSERVATIONS_KEY])
        joined = join_model_call_observations(observations, calls)
        record[OBSERVATIONS_KEY] = _with_compactions(joined, calls).model_dump(mode="json")


def _with_compactions(observations: AgentObservationBundle, calls: list[ModelCallRecord]) -> AgentObservationBundle:
    """Let an agent's own module mark the calls that are its compactions: ``associate_<source>_compaction_calls`` of
    ``responses_api_agents.<source>_agent.observability``, if it exists."""
    source = observations.source
    if not _SOURCE.fullmatch(source):
        return observations
    try:
        module = importlib.import_module(f"responses_api_agents.{source}_agent.observability")
    except ImportError:
        return observations
    associate = getattr(module, f"associate_{source}_compaction_calls", None)
    if associate is None:
        return observations
    try:
        associated: AgentObservationBundle = associate(observations, calls)
    except Exception as error:  # noqa: BLE001 - an error in a plugin must not lose the row
        log.warning("compactions not joined", agent=source, error=f"{type(error).__name__}: {error}")
        gap = ObservationGap(code="compaction_model_call_join_failed", detail=type(error).__name__)
        return observations.model_copy(update={"gaps": [*observations.gaps, gap]})
    return associated
