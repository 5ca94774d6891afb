"""Why a turn does not simply continue the conversation before it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

from nemo_gym.gateway.tokens.history import Reading


class SplitReason(StrEnum):
    """Recorded on the turn that starts a sibling, and on its trajectory."""

    INITIAL = "initial"
    """The session's first conversation."""
    RESAMPLE = "resample"
    """The same request again, after its first answer was kept."""
    BRANCH = "branch"
    """Another continuation of a shared prefix; no answer was edited."""
    EDITED_HISTORY = "edited_history"
    """The history differs from what was sampled or shown, at the same length or longer."""
    COMPACTION = "compaction"
    """The conversation starts as before, and the rest was replaced by less."""
    SUB_AGENT = "sub_agent"
    """A conversation of its own: another system prompt, or a start with other tools."""
    TOOLS_CHANGED = "tools_changed"
    """The same history with other tools, which are part of the prompt."""
    TEMPLATE = "template"
    """The chat template cannot be continued here without changing earlier tokens."""
    REASONING_DROPPED = "reasoning_dropped"
    """The chat template leaves out earlier reasoning, and the session follows the template (`History.TEMPLATE`)."""


def continuation_reason(reading: Reading, shared: int, siblings: Iterable[bytes]) -> SplitReason | None:
    """Why a turn that continues the first ``shared`` entries is a sibling; nothing if it is the first to.

    ``siblings``: the keys of the requests that continued the same turn before.
    """
    before = set(siblings)
    if not before:
        return None
    if reading.key in before:
        return SplitReason.RESAMPLE
    edited = any(entry.role == "assistant" for entry in reading.entries[shared:])
    return SplitReason.EDITED_HISTORY if edited else SplitReason.BRANCH


def start_reason(
    reading: Reading, earlier: Sequence[tuple[bytes, Sequence[bytes]]], asked_before: bool, other_tools: bool
) -> SplitReason:
    """Why a conversation starts that continues none.

    ``earlier``: tools and entry digests of the session's conversations so far. ``asked_before``: the very request
    was answered. ``other_tools``: a turn with this history exists, with other tools.
    """
    if not earlier:
        return SplitReason.INITIAL
    if asked_before:
        return SplitReason.RESAMPLE
    if other_tools:
        return SplitReason.TOOLS_CHANGED
    own = [entry.digest for entry in reading.entries if entry.digest is not None]
    fresh = not any(entry.role == "assistant" for entry in reading.entries)
    alike = [(tools, path) for tools, path in earlier if _common(own, path)]
    if alike:
        if fresh and reading.tools not in {tools for tools, _ in alike}:
            return SplitReason.SUB_AGENT  # one that starts with the main agent's own instructions
        longer = any(len(path) > len(own) for _, path in alike)
        return SplitReason.COMPACTION if longer else SplitReason.EDITED_HISTORY
    if not fresh and any(_common(own[1:], path[1:]) > 1 for _, path in earlier):
        return SplitReason.EDITED_HISTORY  # the same conversation under other instructions
    starts_with_system = bool(reading.entries) and reading.entries[0].role == "system"
    if starts_with_system or reading.tools not in {tools for tools, _ in earlier}:
        return SplitReason.SUB_AGENT
    return SplitReason.COMPACTION if any(len(path) > len(own) for _, path in earlier) else SplitReason.SUB_AGENT


def _common(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
