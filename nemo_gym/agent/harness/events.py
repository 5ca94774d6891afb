"""Readers of a CLI's standard output, and the transcript that they fill.

For a CLI that prints one JSON object per line, subclass `JsonEventReader` and implement ``event``. A CLI's output is
untrusted: a reader accepts any bytes, and an unexpected event becomes a gap in the transcript, not an error.
A `Transcript` records what a harness did, in one format for all harnesses. It provides the agent's Responses object,
the counts for metrics, and an `AgentObservationBundle`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sized
from typing import Any, Literal

import orjson

from nemo_gym.agent.bindings import response_object, text_message
from nemo_gym.rollout_observability import (
    AgentInvocation,
    AgentObservationBundle,
    ContextCompactionObservation,
    ObservationGap,
    ToolCallObservation,
)

MAIN = "main"
"""The invocation of the agent itself; sub-agents have other names."""
MAX_OUTPUT_CHARS = 20_000
"""The limit for one tool's output in the transcript of a CLI. The event log may hold the rest."""
MAX_ITEMS = 5_000
"""The limit for the items in the transcript of a CLI, whose output is untrusted, and likewise for its calls, for its
sub-agents and for its compactions."""
MAX_TRANSCRIPT_BYTES = 32 * 1024 * 1024
"""The limit for all of these together, as JSON. The agent's last message may exceed it."""
MAX_COUNT = 2**53
"""The limit for a number of tokens."""

InvocationStatus = Literal["completed", "failed", "incomplete", "unknown"]


class Transcript:
    """Collects the events of one run. Ids that a harness does not provide are generated.

    Args:
        whole: keep everything, and each tool's output whole. For a loop in the agent server, whose own history holds
            them anyway.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self.items: list[dict[str, Any]] = []
        """Responses items of the main invocation, in order."""
        self.turns = 0
        """Model answers of the main invocation."""
        self.usage: Counter[str] = Counter()
        """``input_tokens``, ``output_tokens`` and ``cached_tokens``, summed over all invocations."""
        self.final_text = ""
        """The agent's last message."""
        self._last_message: dict[str, Any] | None = None
        """The agent's last message, if there was no room for it in `items`."""
        self._bytes = 0
        self._calls: dict[str, ToolCallObservation] = {}
        self._calls_left_out = 0
        self._invocations: dict[str, AgentInvocation] = {MAIN: AgentInvocation(invocation_id=MAIN)}
        self._compactions: list[ContextCompactionObservation] = []
        self._gaps: dict[str, ObservationGap] = {}
        self._started = time.monotonic()

    @property
    def tool_calls(self) -> int:
        return len(self._calls) + self._calls_left_out

    def turn(self, *, input_tokens: int = 0, output_tokens: int = 0, cached_tokens: int = 0) -> None:
        """Count one model answer for the main invocation."""
        self.turns += 1
        self.add_usage(input_tokens=input_tokens, output_tokens=output_tokens, cached_tokens=cached_tokens)

    def add_usage(self, *, input_tokens: int = 0, output_tokens: int = 0, cached_tokens: int = 0) -> None:
        self.set_usage(
            input_tokens=self.usage["input_tokens"] + input_tokens,
            output_tokens=self.usage["output_tokens"] + output_tokens,
            cached_tokens=self.usage["cached_tokens"] + cached_tokens,
        )

    def set_usage(self, *, input_tokens: int = 0, output_tokens: int = 0, cached_tokens: int = 0) -> None:
        """Replace the sums by a harness's own totals."""
        counts = {"input_tokens": input_tokens, "output_tokens": output_tokens, "cached_tokens": cached_tokens}
        self.usage = Counter({name: _count(number) for name, number in counts.items()})

    def says(self, text: str, *, invocation: str = MAIN) -> None:
        """Record a message of the assistant."""
        if text and invocation == MAIN:
            self.final_text = _text(text)
            message = text_message(self.final_text)
            if not self._add(message):
                self._last_message = message

    def thinks(self, text: str, *, invocation: str = MAIN) -> None:
        """Record reasoning that the harness shows."""
        if text and invocation == MAIN:
            self._add(
                {
                    "id": f"rs_{len(self.items)}",
                    "type": "reasoning",
                    "summary": [{"type": "summary_text", "text": _text(text)}],
                }
            )

    def calls(
        self, call_id: str, name: str, arguments: Any, *, invocation: str = MAIN, reported_once: bool = False
    ) -> str:
        """Record the start of a tool call, and return the key under which `returns` finds it.

        Args:
            arguments: JSON text, or a value to encode as JSON.
            reported_once: whether the harness reports each call once, so that a known ``call_id`` is another call, for
                which the policy used the id again. Most CLIs report a call several times, for example while it runs.
        """
        key = call_id
        if key in self._calls and not reported_once:
            return key
        while key in self._calls:
            key = f"{key}_{len(self._calls)}"
        shown_arguments = _text(arguments) if invocation == MAIN else ""
        if not self._has_room(self._calls, [call_id, name, invocation]):
            self._calls_left_out += 1  # also when it is reported again
            return key
        self._calls[key] = ToolCallObservation(
            invocation_id=invocation,
            tool_call_id=call_id,
            tool_name=name,
            started_at=time.time(),
            timing_source="harness",
            status="incomplete",
        )
        if invocation == MAIN:
            self._add(
                {
                    "id": f"fc_{key}",
                    "type": "function_call",
                    "call_id": call_id,
                    "name": name,
                    "arguments": shown_arguments,
                    "status": "completed",
                }
            )
        return key

    def returns(self, key: str, output: Any, *, failed: bool = False) -> None:
        """Record the result of a tool call, by its id or by what `calls` returned; a result without a recorded call
        becomes a gap."""
        call = self._calls.get(key)
        if call is None:
            if not self._calls_left_out:
                self.gap("tool_result_without_call", key)
            return
        now = max(time.time(), call.started_at or 0.0)
        call.completed_at = now
        call.duration_ms = round((now - (call.started_at or now)) * 1000, 1)
        call.status = "failed" if failed else "completed"
        if call.invocation_id == MAIN:
            text = _text(output)
            shown = text if self._whole else _cut(text)
            self._add({"type": "function_call_output", "call_id": call.tool_call_id, "output": shown})

    def invokes(self, invocation: str, *, parent: str = MAIN, by_call: str | None = None) -> None:
        """Record the start of a sub-agent. The main agent becomes its parent if it would be its own ancestor."""
        if invocation in self._invocations or not self._has_room(self._invocations, [invocation, parent, by_call]):
            return
        ancestor: str | None = parent
        while ancestor is not None and ancestor != invocation and ancestor in self._invocations:
            ancestor = self._invocations[ancestor].parent_invocation_id
        if ancestor == invocation:
            self.gap("invocation_is_its_own_ancestor", invocation)
            parent = MAIN
        self._invocations[invocation] = AgentInvocation(
            invocation_id=invocation, parent_invocation_id=parent, spawned_by_tool_call_id=by_call
        )

    def compacts(self, *, trigger: str | None = None, tokens_before: int | None = None) -> None:
        """Record that the harness summarized its history."""
        if not self._has_room(self._compactions, trigger):
            return
        self._compactions.append(
            ContextCompactionObservation(
                invocation_id=MAIN,
                observed_at=time.time(),
                trigger=trigger,
                tokens_before=None if tokens_before is None else _count(tokens_before),
                outcome="completed",
            )
        )

    def gap(self, code: str, detail: str | None = None) -> None:
        """Record that something could not be observed; only the first gap of each code is kept."""
        if code not in self._gaps:
            self._gaps[code] = ObservationGap(code=code, detail=detail and detail[:500])

    def ends(self, status: InvocationStatus, *, error_type: str | None = None) -> None:
        main = self._invocations[MAIN]
        main.status, main.error_type = status, error_type
        main.duration_ms = round((time.monotonic() - self._started) * 1000, 1)

    def response(self, model: str, *, incomplete: str | None = None) -> dict[str, Any]:
        """An OpenAI Responses object of the main invocation; ``incomplete`` as in `response_object`."""
        usage = {key: self.usage[key] for key in ("input_tokens", "output_tokens")}
        output = self.items if self._last_message is None else [*self.items, self._last_message]
        return response_object(output, model=model, usage=usage, incomplete=incomplete)

    def bundle(self, source: str) -> AgentObservationBundle:
        """The observations as a bundle; ``source`` is the harness's name."""
        records = [*self._invocations.values(), *self._calls.values(), *self._compactions]
        return AgentObservationBundle(source=source, records=records, gaps=[*self._gaps.values()])

    def _add(self, item: dict[str, Any]) -> bool:
        has_room = self._has_room(self.items, item)
        if has_room:
            self.items.append(item)
        return has_room

    def _has_room(self, kept: Sized, new: Any) -> bool:
        """Whether ``new`` may be added to ``kept``. What is too large counts too, so that nothing fits after it."""
        if self._whole:
            return True
        if len(kept) < MAX_ITEMS:
            self._bytes += len(orjson.dumps(new))
            if self._bytes <= MAX_TRANSCRIPT_BYTES:
                return True
        self.gap("transcript_too_long", f"more than {MAX_ITEMS} items or {MAX_TRANSCRIPT_BYTES} bytes")
        return False


def _count(number: float) -> int:
    return max(0, min(int(number), MAX_COUNT))


def _text(value: Any) -> str:
    """A CLI's text, or as JSON what it gave in place of one."""
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _cut(text: str) -> str:
    if len(text) <= MAX_OUTPUT_CHARS:
        return text
    half = MAX_OUTPUT_CHARS // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


class BoundedLog:
    """Keeps at most ``max_bytes`` of a stream: three quarters from its beginning, the rest from its end."""

    def __init__(self, max_bytes: int) -> None:
        self._head_room = max_bytes * 3 // 4
        self._tail_room = max_bytes - self._head_room
        self._head = bytearray()
        self._tail = bytearray()
        self.size = 0
        """The total number of bytes written."""

    def write(self, data: bytes) -> None:
        self.size += len(data)
        if room := self._head_room - len(self._head):
            self._head += data[:room]
            data = data[room:]
        if data and self._tail_room:
            self._tail += data[-self._tail_room :]
            # Cut rarely, because each cut copies the remaining bytes.
            if len(self._tail) > 4 * self._tail_room:
                del self._tail[: -self._tail_room]

    def text(self) -> str:
        """The kept bytes as text, with a note of how many are missing between."""
        tail = bytes(self._tail[-self._tail_room :]) if self._tail_room else b""
        left_out = self.size - len(self._head) - len(tail)
        gap_note = f"\n[{left_out} bytes left out]\n".encode() if left_out else b""
        return (bytes(self._head) + gap_note + tail).decode("utf-8", "replace")


MAX_LINE_BYTES = 16 * 1024 * 1024
"""A longer line is dropped and recorded as a gap in the transcript."""


class EventReader(ABC):
    """Reads standard output, one line at a time and in order, into ``transcript``."""

    def __init__(self) -> None:
        self.transcript = Transcript()

    @abstractmethod
    def feed(self, line: bytes) -> None:
        """Read one line, without its newline. Must not raise, whatever the line contains."""

    def finish(self) -> None:  # noqa: B027 - most readers have nothing left to do
        """Handle the end of the output; called once, however the process ended."""


class JsonEventReader(EventReader):
    """Passes each JSON object to ``event``; other lines are only counted."""

    def __init__(self) -> None:
        super().__init__()
        self.other_lines = 0

    def feed(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            event = orjson.loads(line)
        except orjson.JSONDecodeError:
            event = None
        if not isinstance(event, dict):
            self.other_lines += 1
            return
        try:
            self.event(event)
        # An event of another CLI version, or one that the policy made the CLI print, can have any shape.
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            self.transcript.gap("unreadable_event", f"{event.get('type')}: {type(error).__name__}: {error}")

    @abstractmethod
    def event(self, event: dict[str, Any]) -> None:
        """Read one JSON object. Errors from its unexpected shape (`KeyError`, `TypeError`, …) become a gap."""


class TextReader(EventReader):
    """For a CLI that prints nothing but its answer: the last ``MAX_BYTES`` of its output are the agent's message."""

    MAX_BYTES = 64 * 1024

    def __init__(self) -> None:
        super().__init__()
        self._tail = b""

    def feed(self, line: bytes) -> None:
        self._tail = (self._tail + line + b"\n")[-self.MAX_BYTES :]

    def finish(self) -> None:
        self.transcript.says(self._tail.decode("utf-8", "replace").strip())


class LineSplitter:
    """Splits chunks of a stream into lines, with a bound on the length of a line."""

    def __init__(self, reader: EventReader) -> None:
        self._reader = reader
        self._partial_line = bytearray()
        self._dropping = False

    def feed(self, data: bytes) -> None:
        *lines, partial = data.split(b"\n")
        for line in lines:
            if not self._dropping:
                self._reader.feed(bytes(self._partial_line) + line if self._partial_line else line)
            self._partial_line.clear()
            self._dropping = False
        if self._dropping or len(self._partial_line) + len(partial) > MAX_LINE_BYTES:
            if not self._dropping:
                self._reader.transcript.gap("line_too_long", f"a line of more than {MAX_LINE_BYTES} bytes")
            self._dropping = True
            self._partial_line.clear()
        else:
            self._partial_line += partial

    def finish(self) -> None:
        if self._partial_line and not self._dropping:
            self._reader.feed(bytes(self._partial_line))
        self._partial_line.clear()
        self._reader.finish()
