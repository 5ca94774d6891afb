"""Read one line of a result file into the columns of a table, without building what a table does not show.

Lines are untrusted text. Whatever a line holds, reading it yields a row, or one sentence that says why it is not one.
Skipping the rest saves nothing on rows without tokens; rows of 1.1 MB with 30,000 tokens are read at 718 MB/s, and at
272 MB/s if they are built whole.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from nemo_gym.contract.verdict import (
    ATTEMPT_INDEX_KEY,
    NG_FAILURE_CLASS_KEY,
    NG_NO_PERSIST_KEY,
    PARAMS_KEY,
    ROLLOUT_ID_KEY,
    ROLLOUT_INDEX_KEY,
    TASK_INDEX_KEY,
)
from nemo_gym.rollouts.result_rows import RolloutSummary, same_way

TEXT_CHARS = 8 * 1024
"""Full-text search covers this many characters at the start of the prompt, and as many at the end of the answer."""
REASON_CHARS = 1000
_TEXT_KEYS = frozenset({"text", "content", "arguments", "input", "output", "summary"})
_SEARCHED_DEPTH = 6
_LARGEST = 1e300


class NoResultRow(ValueError):
    """A line that is no result row; the message says why, in a few words."""


@dataclass(frozen=True, slots=True)
class IndexedLine:
    """The columns of one row, in the order of `COLUMNS`, and the text that is searched."""

    values: tuple[Any, ...]
    text: str
    is_foreign: bool
    """Whether the row lacks this suite's keys, as rows of NeMo Gym or of another version do."""


COLUMNS = (
    *("rollout_id", "task_id", "task_index", "sample_index", "agent", "reward", "outcome", "findings", "kinds"),
    *("turns", "seconds", "attempts", "reason", "log", "tokens_in", "tokens_out", "rank", "label", "way", "chains"),
)


class _Usage(msgspec.Struct, gc=False):
    input_tokens: Any = None
    output_tokens: Any = None


class _Session(msgspec.Struct, gc=False):
    turns: Any = None
    usage: _Usage | None = None


class _Observations(msgspec.Struct, gc=False):
    turns: Any = None


class _Chain(msgspec.Struct, gc=False):
    index: Any = None


class _Item(msgspec.Struct, gc=False):
    """An item of a response. Tool output is left out, because it is not searched."""

    type: Any = None
    content: Any = None
    summary: Any = None
    arguments: Any = None


class _Response(msgspec.Struct, gc=False):
    output: list[_Item] | None = None
    usage: _Usage | None = None


class _Params(msgspec.Struct, gc=False):
    input: Any = None


class _Row(msgspec.Struct, gc=False):
    """The fields that a table shows. All others are skipped."""

    reward: Any = msgspec.UNSET
    valid: Any = msgspec.UNSET
    mask_sample: Any = msgspec.UNSET
    no_persist: Any = msgspec.field(default=msgspec.UNSET, name=NG_NO_PERSIST_KEY)
    failure_class: Any = msgspec.field(default=msgspec.UNSET, name=NG_FAILURE_CLASS_KEY)
    failure_kind: Any = msgspec.UNSET
    failure_reason: Any = msgspec.UNSET
    reward_reason: Any = msgspec.UNSET
    outcome: Any = msgspec.UNSET
    outcome_detail: Any = msgspec.UNSET
    findings: Any = msgspec.UNSET
    timings: Any = msgspec.UNSET
    task_id: Any = msgspec.UNSET
    task_index: Any = msgspec.field(default=msgspec.UNSET, name=TASK_INDEX_KEY)
    sample_index: Any = msgspec.field(default=msgspec.UNSET, name=ROLLOUT_INDEX_KEY)
    attempt_index: Any = msgspec.field(default=msgspec.UNSET, name=ATTEMPT_INDEX_KEY)
    rollout_id: Any = msgspec.field(default=msgspec.UNSET, name=ROLLOUT_ID_KEY)
    agent_ref: Any = msgspec.UNSET
    evaluation_log: Any = msgspec.UNSET
    ng_model_session: _Session | None = None
    ng_agent_observations: _Observations | None = None
    ng_trajectory: list[_Chain] | None = None
    response: _Response | None = None
    params: _Params | None = msgspec.field(default=None, name=PARAMS_KEY)


_DECODER = msgspec.json.Decoder(_Row)
_NAMES = {field.name: field.encode_name for field in msgspec.structs.fields(_Row)}


def index_line(line: bytes) -> IndexedLine:
    """Return the columns of a line. Raises `NoResultRow`."""
    row = _decoded(line)
    for key in (TASK_INDEX_KEY, ROLLOUT_INDEX_KEY):
        if int_of(row.get(key)) is None or not isinstance(row[key], int):
            raise NoResultRow(f"it has no '{key}'")
    if not {"reward", "valid", NG_FAILURE_CLASS_KEY, "response"} & row.keys():
        raise NoResultRow("it has neither a 'reward' nor a 'response', as an input has")
    summary = RolloutSummary.of_row(with_known_types(row))
    rollout_id = row.get(ROLLOUT_ID_KEY)
    is_foreign = not isinstance(rollout_id, str) or "valid" not in row
    if not isinstance(rollout_id, str):
        rollout_id = f"{summary.task_index}-{summary.sample_index}"
    usage = _usage(row)
    reason = summary.reason and summary.reason[:REASON_CHARS]
    label = summary.label
    values = (
        *(_clean(rollout_id), _clean(summary.task_id), summary.task_index, summary.sample_index),
        *(_clean(summary.agent), summary.reward, _clean(summary.outcome), summary.findings),
        *(_clean(", ".join(summary.kinds)), int_of(summary.turns), summary.seconds, summary.attempts),
        *(_clean(reason), _clean(summary.log), int_of(usage.get("input_tokens")), int_of(usage.get("output_tokens"))),
        *(summary.rank, _clean(label), _clean(same_way(label, reason, (summary.task_id,)) if label else None)),
        len(list_of(row.get("ng_trajectory"))),
    )
    return IndexedLine(values, _searchable_text(row), is_foreign)


def load_row(line: bytes) -> dict[str, Any]:
    """Return the whole row of a line, with unreadable characters replaced. Raises `NoResultRow`."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        try:
            # Halves of surrogate pairs and invalid UTF-8 become question marks.
            tolerant = json.loads(line.decode("utf-8", "replace"))
            row = orjson.loads(json.dumps(tolerant, ensure_ascii=False).encode("utf-8", "replace"))
        except (ValueError, RecursionError):
            raise NoResultRow(f"it is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise NoResultRow("it is no JSON object")
    return row


def _decoded(line: bytes) -> dict[str, Any]:
    try:
        decoded = _DECODER.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        # Other types than this suite writes, invalid UTF-8, or no JSON at all: the slow parser tells them apart.
        return load_row(line)
    row = {
        _NAMES[name]: value
        for name in decoded.__struct_fields__
        if (value := getattr(decoded, name)) is not msgspec.UNSET and value is not None
    }
    if decoded.reward is None:
        row["reward"] = None
    return row


def with_known_types(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row whose fields have the types that a summary reads; values of other types are left out."""
    timings, agent = mapping_of(row.get("timings")), row.get("agent_ref")
    return {
        **row,
        **({"reward": _shown_reward(row["reward"])} if isinstance(row.get("reward"), int | float) else {}),
        "timings": {key: seconds for key, value in timings.items() if (seconds := float_of(value)) is not None},
        "findings": list_of(row.get("findings")),
        "agent_ref": {"name": _text(agent.get("name") if isinstance(agent, Mapping) else agent)},
        ATTEMPT_INDEX_KEY: int_of(row.get(ATTEMPT_INDEX_KEY)) or 0,
        "ng_agent_observations": _turns(row.get("ng_agent_observations")),
        "ng_model_session": _turns(row.get("ng_model_session")),
    }


def _turns(value: Any) -> dict[str, Any]:
    return {"turns": _member(value, "turns")}


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _usage(row: Mapping[str, Any]) -> dict[str, Any]:
    for source in (row.get("ng_model_session"), row.get("response")):
        usage = _member(source, "usage")
        if usage is not None:
            return {name: _member(usage, name) for name in ("input_tokens", "output_tokens")}
    return {}


def _searchable_text(row: Mapping[str, Any]) -> str:
    prompt = "\n".join(_texts(_member(row.get(PARAMS_KEY), "input"), TEXT_CHARS))
    output = _member(row.get("response"), "output")
    answers: list[str] = []
    chars = 0
    for item in reversed(list_of(output)):
        for name in ("content", "summary", "arguments"):
            for text in _texts(_member(item, name), TEXT_CHARS - chars):
                answers.append(text)
                chars += len(text)
        if chars >= TEXT_CHARS:
            break
    return _clean(f"{prompt[:TEXT_CHARS]}\n{chr(10).join(answers)[-TEXT_CHARS:]}") or ""


def _texts(value: Any, chars: int, depth: int = 0) -> Iterator[str]:
    """Yield the texts of messages and their parts, until they have ``chars`` characters in all."""
    if depth > _SEARCHED_DEPTH or chars <= 0:
        return
    if isinstance(value, str):
        yield value[:chars]
    elif isinstance(value, list):
        for part in value:
            for text in _texts(part, chars, depth + 1):
                yield text
                chars -= len(text)
            if chars <= 0:
                return
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if key in _TEXT_KEYS:
                yield from _texts(part, chars, depth + 1)


def mapping_of(value: Any) -> Mapping[str, Any]:
    """Return a value of a row that should be a mapping; an empty one if it is not."""
    return value if isinstance(value, Mapping) else {}


def list_of(value: Any) -> list[Any]:
    """Return a value of a row that should be a list; an empty one if it is not."""
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _clean(text: str | None) -> str | None:
    """Return text that a database accepts: JSON may hold halves of surrogate pairs."""
    if text is None or text.isascii():
        return text
    return text.encode("utf-8", "replace").decode()


def int_of(value: Any) -> int | None:
    """Return a number as an integer that a database can hold; ``None`` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if abs(value) < 2**62 else None


def float_of(value: Any) -> float | None:
    """Return a finite number; ``None`` for one whose sum over rows would not be finite, and for anything else."""
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST else None


def _shown_reward(reward: float) -> float | None:
    """Return a finite reward. One whose sum over rows would not be finite is a verdict too: it is shown as ±1e300."""
    return max(-_LARGEST, min(_LARGEST, float(reward))) if abs(reward) <= sys.float_info.max else None
