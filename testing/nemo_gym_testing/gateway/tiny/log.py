"""The engine's own record of every call, with which trajectories are compared.

JSON lines, each written before its tokens are sent, so that a killed engine has recorded everything that it sent:
``{event: "call", key, request_id, prompt_ids, max_tokens, forced, fault}``, then any number of
``{event: "tokens", key, ids, logprobs, finish}``, then ``{event: "end", key, outcome, finish, sent, cached_tokens}``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import orjson

from nemo_gym.contract.errors import RowError


@dataclass(slots=True)
class EngineCall:
    """One inference request."""

    key: str
    """Unique among all logs."""
    request_id: str | None
    prompt_ids: array[int]
    max_tokens: int
    forced: bool = False
    """Whether a script determined the answer."""
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    outcome: str = "killed"
    """``answered``; ``cancelled`` (the client disconnected), ``faulted`` (on purpose), ``refused``, ``failed`` (a
    defect, or a wrong script) or ``killed`` (the log ends before the call does)."""
    finish: str | None = None
    """``stop``, ``length`` or ``abort``, once sampling has ended by itself."""
    sent: int | None = None
    """Tokens written to the client's socket; ``None`` if the engine was killed."""
    fault: str | None = None
    cached_tokens: int | None = None
    """Prompt tokens that came from the prefix cache."""

    @property
    def answered(self) -> bool:
        return self.outcome == "answered"


class EngineLog:
    """Keeps the calls in memory, and appends them to a file if there is one. One line is one write."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.calls: list[EngineCall] = []
        self._path = Path(path) if path is not None else None
        self._file: IO[bytes] | None = self._path.open("ab", buffering=0) if self._path is not None else None

    def begin(
        self, request_id: str | None, prompt_ids: Sequence[int], max_tokens: int, *, forced: bool, fault: str | None
    ) -> EngineCall:
        call = EngineCall(uuid4().hex, request_id, array("i", prompt_ids), max_tokens, forced, fault=fault)
        self.calls.append(call)
        head = {"request_id": request_id, "prompt_ids": call.prompt_ids.tolist(), "max_tokens": max_tokens}
        self._write("call", call, {**head, "forced": forced, "fault": fault})
        return call

    def sampled(self, call: EngineCall, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        call.token_ids.extend(ids)
        call.logprobs.extend(logprobs)
        self._write("tokens", call, {"ids": list(ids), "logprobs": list(logprobs), "finish": call.finish})

    def end(self, call: EngineCall, outcome: str, sent: int) -> None:
        call.outcome, call.sent = outcome, sent
        tail = {"outcome": outcome, "finish": call.finish, "sent": sent, "cached_tokens": call.cached_tokens}
        self._write("end", call, tail)

    def close(self) -> None:
        """Close the file. An engine that is started again appends to the same file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, event: str, call: EngineCall, data: Mapping[str, Any]) -> None:
        if self._path is not None:
            if self._file is None:
                self._file = self._path.open("ab", buffering=0)
            self._file.write(orjson.dumps({"event": event, "key": call.key, **data}, option=orjson.OPT_APPEND_NEWLINE))


def read_log(*paths: str | Path) -> list[EngineCall]:
    """The calls of one or more engines' logs, in order. A line cut off by a kill ends its file.

    Raises `RowError` naming a line that does not belong to an engine's log.
    """
    return [call for path in paths for call in _read(Path(path))]


def _read(path: Path) -> Iterable[EngineCall]:
    calls: dict[str, EngineCall] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                row = orjson.loads(line)
                _apply(row, calls)
            except (orjson.JSONDecodeError, KeyError, TypeError) as error:
                raise RowError(f"{path}, line {number}: is no line of an engine's log ({error})") from error
    return calls.values()


def _apply(row: Mapping[str, Any], calls: dict[str, EngineCall]) -> None:
    key = row["key"]
    if row["event"] == "call":
        prompt = array("i", row["prompt_ids"])
        calls[key] = EngineCall(key, row["request_id"], prompt, row["max_tokens"], row["forced"], fault=row["fault"])
        return
    call = calls[key]
    if row["event"] == "tokens":
        call.token_ids.extend(row["ids"])
        call.logprobs.extend(row["logprobs"])
        call.finish = row["finish"]
    else:
        call.outcome, call.finish, call.sent = row["outcome"], row["finish"], row["sent"]
        call.cached_tokens = row["cached_tokens"]
