"""The one seam for seeing a rollout at work: `step`, put around what takes time.

    with step("verify", server=name) as verifying:
        ...
        verifying.set(reward=1.0)

A step is counted for ``/metrics`` (`nemo_gym.http.metrics`). Where traces are on it is a span as well, and the calls
made inside it carry its context to other servers as W3C ``traceparent``. Where they are off nothing of OpenTelemetry
is imported, and a step costs its two looks at the clock.

Every span of an attempt belongs to one trace, whose id is the digest of the attempt's identity: a server that knows
for which attempt it works (from a session, a token) needs no header to find the trace, also after a restart. So an
agent in a box, which sends no header and could forge any, cannot choose where its calls appear.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from enum import IntEnum
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from nemo_gym.http.correlation import current_rollout_id
from nemo_gym.http.metrics import Histogram

TRACEPARENT = "traceparent"
_TRACEPARENT = re.compile(r"^00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})$")

STEP_SECONDS = Histogram(
    "nemo_gym_step_seconds",
    "Steps of rollouts in this process, by how they ended: ok, or the type of the error",
    ("step", "outcome"),
)

Value = str | int | float | bool | tuple[str, ...]


class SpanKind(IntEnum):
    """As OTLP numbers them."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


class SpanContext(NamedTuple):
    """Which span others belong to."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 of them."""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-01"


@dataclass(slots=True)
class Span:
    """One step as it is exported. Times are Unix nanoseconds."""

    name: str
    context: SpanContext
    parent_id: str | None
    kind: SpanKind
    start_ns: int
    attributes: dict[str, Any] = field(default_factory=dict)
    end_ns: int = 0
    error: str | None = None
    """Why it failed."""


class Exporter(Protocol):
    """Takes finished spans."""

    def take(self, span: Span) -> None:
        """Never waits, never raises."""

    def close(self) -> None:
        """Send what is left, within seconds."""


_exporter: Exporter | None = None
_sample = 1.0
_current: ContextVar[SpanContext | None] = ContextVar("nemo_gym_span", default=None)


def install(exporter: Exporter | None, sample: float = 1.0) -> None:
    """Have the spans of this process exported from now on; ``None`` turns traces off. ``sample``: the share of
    attempts that are traced, the same ones on every server."""
    global _exporter, _sample
    _exporter, _sample = exporter, sample


async def shut_down() -> None:
    """Send what is left, and turn traces off."""
    if (exporter := _exporter) is not None:
        install(None)
        await asyncio.to_thread(exporter.close)


def is_on() -> bool:
    return _exporter is not None


def current() -> SpanContext | None:
    """The span that is being worked in."""
    return _current.get()


def inject(headers: MutableMapping[str, str]) -> None:
    """Add ``traceparent`` where a span is open."""
    if _exporter is not None and (context := _current.get()) is not None:
        headers.setdefault(TRACEPARENT, context.traceparent)


def extract(header: str | None) -> SpanContext | None:
    """The context in a ``traceparent``; ``None`` for none, one that cannot be read, or one that is not sampled."""
    if header is None or (match := _TRACEPARENT.match(header)) is None or not int(match[3], 16) & 1:
        return None
    return SpanContext(match[1], match[2])


def context_of_attempt(run_id: str, rollout_id: str, attempt: int) -> SpanContext:
    """The root span of an attempt."""
    digest = hashlib.sha256(f"{run_id}\n{rollout_id}\n{attempt}".encode()).hexdigest()
    return SpanContext(digest[:32], digest[32:48])


def attempt_context(rollout: Any, header: str | None = None) -> SpanContext | None:
    """What a span for ``rollout`` belongs to: the span that ``header`` names, where that is of the same attempt, else
    the attempt's root. ``None`` where traces are off, or the attempt is not sampled.

    Args:
        rollout: `RolloutIdentity`, an attempt's key, or their plain data.
    """
    if _exporter is None:
        return None
    if isinstance(rollout, Mapping):
        run_id, rollout_id, attempt = rollout.get("run_id", "run"), rollout["rollout_id"], rollout.get("attempt", 1)
    else:
        run_id, rollout_id, attempt = rollout.run_id, rollout.rollout_id, rollout.attempt
    root = context_of_attempt(run_id, rollout_id, attempt)
    if int(root.trace_id[:8], 16) >= _sample * 0x100000000:
        return None
    given = extract(header)
    return given if given is not None and given.trace_id == root.trace_id else root


def enter(context: SpanContext) -> None:
    """Everything that the running task does from now on belongs to ``context``."""
    _current.set(context)


@contextmanager
def within(context: SpanContext | None) -> Iterator[None]:
    """Steps inside belong to ``context``; to nothing where it is ``None``."""
    reset = _current.set(context)
    try:
        yield
    finally:
        _current.reset(reset)


class step:  # noqa: N801 - reads as a verb: `with step("seed")`
    """A timed piece of a rollout's work.

    Args:
        name: one of a few, since it is a label of metrics.
        title: the span's name, where it says more.
        parent: instead of the span that is open; see `attempt_context`.
        has_span: whether it is a span at all; what is short in every rollout is counted only.
        attributes: of the span.
    """

    __slots__ = (
        "_attributes",
        "_has_span",
        "_kind",
        "_parent",
        "_reset",
        "_start",
        "_title",
        "name",
        "outcome",
        "span",
    )

    def __init__(
        self,
        name: str,
        *,
        title: str | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: SpanContext | None = None,
        has_span: bool = True,
        **attributes: Any,
    ) -> None:
        self.name = name
        self.outcome = "ok"
        """Set it where a step fails without raising."""
        self.span: Span | None = None
        self._title, self._kind, self._parent, self._has_span = title, kind, parent, has_span
        self._attributes = attributes
        self._reset: Token[SpanContext | None] | None = None
        self._start = 0.0

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        if _exporter is not None and self._has_span and (parent := self._parent or _current.get()) is not None:
            self.span = begin(self._title or self.name, parent, self._kind, **self._attributes)
            self._reset = _current.set(self.span.context)
        return self

    def set(self, **attributes: Any) -> None:
        """More attributes of the span, where there is one."""
        if self.span is not None:
            self.span.attributes.update(attributes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and self.outcome == "ok":
            self.outcome = kind.__name__
        STEP_SECONDS.observe(time.perf_counter() - self._start, self.name, self.outcome)
        if self._reset is not None:
            _current.reset(self._reset)
        if self.span is not None:
            end(self.span, None if self.outcome == "ok" else str(error) or self.outcome)


def tool_call(name: str, **options: Any) -> step:
    """The step around a call of a tool."""
    named: dict[str, Any] = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name,
        "gen_ai.tool.type": "function",
    }
    return step("tool_call", title=f"execute_tool {name}", **named, **options)


def begin(
    name: str,
    parent: SpanContext,
    kind: SpanKind = SpanKind.INTERNAL,
    *,
    is_root: bool = False,
    **attributes: Any,
) -> Span:
    """A span that does not end where it was begun; give it to `end`."""
    context = parent if is_root else SpanContext(parent.trace_id, f"{random.getrandbits(64) or 1:016x}")
    if "rollout_id" not in attributes:
        attributes["rollout_id"] = current_rollout_id()
    return Span(name, context, None if is_root else parent.span_id, kind, time.time_ns(), attributes)


def end(span: Span, error: str | None = None) -> None:
    """Hand ``span`` over for export."""
    span.end_ns = time.time_ns()
    span.error = error
    if _exporter is not None:
        _exporter.take(span)
