"""Trajectories, a trainer's data: exact tokens, which of them were sampled, and why each trajectory exists."""

from __future__ import annotations

import os
from array import array
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from uuid import uuid4

import orjson

from nemo_gym.contract.errors import RowError
from nemo_gym.gateway.tokens.forest import TokenForest
from nemo_gym.gateway.tokens.turns import SplitReason, Turn, extended

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray


FIRST_WEIGHTS = "first_weights_version"
"""Key in the details of a turn during which the weights changed; its ``weights_version`` is the last version."""


@dataclass(frozen=True, slots=True)
class TrajectoryTurn:
    """One sampled answer: ``response_ids[start:end]``."""

    start: int
    end: int
    finish_reason: str
    weights_version: str | None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One conversation's tokens. ``P`` prompt tokens, ``R`` response tokens.

    Every sampled token of a session is marked in exactly one of its trajectories. If conversations share a beginning,
    its sampled tokens are marked in the longest, and the others have the beginning in their prompt.
    """

    session_id: str
    index: int
    """Index among the session's trajectories, in order of their last turn."""
    prompt_ids: array[int]
    """``int32 [P]``: all tokens before the first one that this trajectory trains on."""
    response_ids: array[int]
    """``int32 [R]``: sampled tokens, and the tokens of messages between them."""
    response_mask: bytes
    """``uint8 [R]``: 1 = sampled by the policy, 0 = given."""
    logprobs: array[float] | None
    """``float32 [R]``: natural logarithms as the engine returned them, 0 where the mask is 0. ``None`` if the engine
    returned none for one or more turns of this trajectory."""
    turns: tuple[TrajectoryTurn, ...]
    split_reason: str
    """Why this is a separate trajectory, a `SplitReason`; ``initial`` for a session's first conversation."""
    split_detail: str | None = None
    message_count: int = 0
    """Number of messages of the whole conversation, including the last answer."""
    reward: float | None = None
    """The verdict's reward; ``None`` if there is none yet, or if it is invalid."""
    reward_info: Mapping[str, Any] = field(default_factory=dict)
    identity: Mapping[str, Any] = field(default_factory=dict)
    """The trajectory's rollout, in an exported run: ``rollout_id``, ``task_id``, ``task_index``, ``rollout_index``,
    ``attempt_index``, ``agent``."""
    multimodal: tuple[Mapping[str, Any], ...] = ()
    """``{kind, source, message}`` of each image, audio or video in the conversation, in order; ``source`` as it was
    sent (a URL or data), ``message`` the index of its message in the first request with it."""

    @property
    def finish_reason(self) -> str:
        """Why the last answer ended."""
        return self.turns[-1].finish_reason

    @property
    def weights_versions(self) -> tuple[str, ...]:
        """The versions that sampled this, in order of first use; several if the weights changed meanwhile."""
        versions = [
            version for turn in self.turns for version in (turn.details.get(FIRST_WEIGHTS), turn.weights_version)
        ]
        return tuple(dict.fromkeys(version for version in versions if version is not None))

    @property
    def sampled_count(self) -> int:
        """The number of sampled tokens."""
        return self.response_mask.count(1)


# A turn as plain data and back, for a journal: a restarted gateway need not sample any committed turn again.

_COPIED = (
    "turn_id",
    "finish_reason",
    "weights_version",
    "message",
    "has_tools",
    "has_system",
    "has_reasoning",
    "reason_detail",
    "message_count",
)


def record_of(turn: Turn) -> dict[str, Any]:
    """Return JSON data with this turn's own tokens, without its parents'. Arrays are the base64 of their bytes, in
    this machine's byte order."""
    return {
        **{name: getattr(turn, name) for name in _COPIED},
        "parent": turn.parent.turn_id if turn.parent is not None else None,
        "context_ids": _text(turn.tokens[turn.start : turn.context_end]),
        "sampled_ids": _text(turn.sampled_ids),
        "logprobs": _text(turn.logprobs) if turn.logprobs is not None else None,
        "details": dict(turn.details),
        "reason": str(turn.reason) if turn.reason is not None else None,
        "media": [dict(item) for item in turn.media],
        "key": turn.key.hex(),
        "stopped_key": turn.stopped_key.hex() if turn.stopped_key is not None else None,
        "request_key": turn.request_key.hex(),
        "tools": turn.tools.hex(),
        "entries": [digest.hex() for digest in turn.entries],
        "reminders": sorted(digest.hex() for digest in turn.reminders),
    }


def restore(forest: TokenForest, records: Iterable[Mapping[str, Any]]) -> None:
    """Put recorded turns into an empty forest, in the order they were committed.

    Raises `RowError` for a record whose parent is missing, or that is out of order.
    """
    for record in records:
        number, parent_id = record["turn_id"], record["parent"]
        if number != len(forest.turns) or (parent_id is not None and parent_id >= number):
            raise RowError(f"turn {number}: recorded out of order; {len(forest.turns)} turns precede it")
        parent = forest.turns[parent_id] if parent_id is not None else None
        logprobs = record["logprobs"]
        turn = Turn(
            **{name: record[name] for name in _COPIED},
            **extended(parent, _array("i", record["context_ids"]), _array("i", record["sampled_ids"])),
            logprobs=_array("f", logprobs) if logprobs is not None else None,
            details=record["details"],
            key=bytes.fromhex(record["key"]),
            stopped_key=bytes.fromhex(record.get("stopped_key") or "") or None,
            request_key=bytes.fromhex(record["request_key"]),
            tools=bytes.fromhex(record["tools"]),
            entries=tuple(map(bytes.fromhex, record["entries"])),
            reminders=frozenset(map(bytes.fromhex, record["reminders"])),
            reason=SplitReason(record["reason"]) if record["reason"] is not None else None,
            media=tuple(record["media"]),
            media_count=len(record["media"]) + (parent.media_count if parent is not None else 0),
        )
        forest.add(turn)


def _text(values: array[Any]) -> str:
    return b2a_base64(values, newline=False).decode("ascii")


def _array(typecode: str, text: str) -> array[Any]:
    values: array[Any] = array(typecode)
    values.frombytes(a2b_base64(text))
    return values


# Trajectories as files: JSONL for reading and streaming, npz for training. Both read back to equal trajectories.
#
# JSONL: one object per trajectory with the fields of `Trajectory`; arrays as lists, ``response_mask`` as 0/1,
# ``finish_reason`` and ``weights_versions`` added for readers.
#
# npz, for ``n`` trajectories with ``P`` prompt and ``R`` response tokens in all (no pickled objects):
#
# | array | dtype, shape | |
# |---|---|---|
# | ``prompt_ids`` | int32 [P] | trajectory ``i`` is ``[prompt_offsets[i]:prompt_offsets[i + 1]]`` |
# | ``prompt_offsets`` | int64 [n + 1] | |
# | ``response_ids`` | int32 [R] | by ``response_offsets`` |
# | ``response_mask`` | uint8 [R] | 1 = sampled |
# | ``logprobs`` | float32 [R] | 0 where the mask is 0; NaN throughout a trajectory whose engine gave none |
# | ``response_offsets`` | int64 [n + 1] | |
# | ``rewards`` | float32 [n] | NaN = no reward |
# | ``metadata`` | uint8 [bytes] | UTF-8 JSON: a list of the remaining fields of each trajectory |
#
# ``multimodal`` is one of the remaining fields: ``{kind, source, message}`` of each image, in the order of the
# placeholders among the token ids; ``source`` is the URL or data URL that was sent.

_PLAIN = ("session_id", "index", "split_detail", "message_count", "reward")
_ARRAYS = ("prompt_ids", "response_ids", "response_mask", "logprobs")


def as_row(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as JSON data."""
    return {
        **_metadata(trajectory),
        "prompt_ids": trajectory.prompt_ids.tolist(),
        "response_ids": trajectory.response_ids.tolist(),
        "response_mask": list(trajectory.response_mask),
        "logprobs": trajectory.logprobs.tolist() if trajectory.logprobs is not None else None,
    }


def from_row(row: Mapping[str, Any]) -> Trajectory:
    """Return the trajectory of a JSON object. Raises `RowError` for a missing or damaged field or unequal lengths."""
    try:
        logprobs = row["logprobs"]
        return _assembled(
            row,
            array("i", row["prompt_ids"]),
            array("i", row["response_ids"]),
            array("B", row["response_mask"]).tobytes(),
            array("f", logprobs) if logprobs is not None else None,
        )
    except RowError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise RowError(f"trajectory: {type(error).__name__} at {error}; it was not written by this suite") from error


def write_jsonl(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """Write one line per trajectory; the file appears whole or not at all."""
    with _whole(Path(path)) as file:
        for trajectory in trajectories:
            file.write(orjson.dumps(as_row(trajectory), option=orjson.OPT_APPEND_NEWLINE))


def read_jsonl(path: str | Path) -> list[Trajectory]:
    """Read a file of `write_jsonl`. Raises `RowError` that names a line without a trajectory."""
    trajectories = []
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                trajectories.append(from_row(orjson.loads(line)))
            except (orjson.JSONDecodeError, RowError) as error:
                raise RowError(f"{path}, line {number}: {error}", path=str(path), line=number) from error
    return trajectories


def write_npz(path: str | Path, trajectories: Sequence[Trajectory]) -> None:
    """Write the arrays described above; the file appears whole or not at all."""
    import numpy as np

    def joined(parts: Iterable[Any], dtype: str) -> NDArray[Any]:
        pieces = [np.frombuffer(part, dtype=dtype) for part in parts]
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=dtype)

    def offsets(lengths: Iterable[int]) -> NDArray[numpy.int64]:
        return np.cumsum([0, *lengths], dtype=np.int64)

    nothing = float("nan")
    logprobs = (
        each.logprobs if each.logprobs is not None else array("f", [nothing]) * len(each.response_ids)
        for each in trajectories
    )
    rewards = [nothing if each.reward is None else each.reward for each in trajectories]
    arrays: dict[str, Any] = {
        "prompt_ids": joined((each.prompt_ids for each in trajectories), "int32"),
        "prompt_offsets": offsets(len(each.prompt_ids) for each in trajectories),
        "response_ids": joined((each.response_ids for each in trajectories), "int32"),
        "response_mask": joined((each.response_mask for each in trajectories), "uint8"),
        "logprobs": joined(logprobs, "float32"),
        "response_offsets": offsets(len(each.response_ids) for each in trajectories),
        "rewards": np.array(rewards, dtype=np.float32),
        "metadata": np.frombuffer(orjson.dumps([_metadata(each) for each in trajectories]), dtype=np.uint8),
    }
    with _whole(Path(path)) as file:
        np.savez(file, **arrays)


def read_npz(path: str | Path) -> list[Trajectory]:
    """Read a file of `write_npz`. Raises `RowError` for any other file."""
    import numpy as np

    def typed(code: str, values: NDArray[Any]) -> array[Any]:
        result: array[Any] = array(code)
        result.frombytes(values.tobytes())
        return result

    with np.load(path, allow_pickle=False) as file:
        try:
            data = {name: file[name] for name in (*_ARRAYS, "prompt_offsets", "response_offsets", "metadata")}
            rows = orjson.loads(data["metadata"].tobytes())
        except (KeyError, orjson.JSONDecodeError) as error:
            raise RowError(f"{path}: not trajectories of this suite ({error})", path=str(path)) from error
    trajectories = []
    for index, row in enumerate(rows):
        prompt = slice(*data["prompt_offsets"][index : index + 2])
        response = slice(*data["response_offsets"][index : index + 2])
        logprobs = data["logprobs"][response] if row["has_logprobs"] else None
        trajectories.append(
            _assembled(
                row,
                typed("i", data["prompt_ids"][prompt]),
                typed("i", data["response_ids"][response]),
                data["response_mask"][response].tobytes(),
                typed("f", logprobs) if logprobs is not None else None,
            )
        )
    return trajectories


def _metadata(trajectory: Trajectory) -> dict[str, Any]:
    return {
        **{name: getattr(trajectory, name) for name in _PLAIN},
        "turns": [asdict(turn) for turn in trajectory.turns],
        "finish_reason": trajectory.finish_reason,
        "weights_versions": list(trajectory.weights_versions),
        "split_reason": str(trajectory.split_reason),
        "reward_info": dict(trajectory.reward_info),
        "identity": dict(trajectory.identity),
        "multimodal": [dict(item) for item in trajectory.multimodal],
        "has_logprobs": trajectory.logprobs is not None,
    }


def _assembled(
    row: Mapping[str, Any],
    prompt_ids: array[int],
    response_ids: array[int],
    response_mask: bytes,
    logprobs: array[float] | None,
) -> Trajectory:
    lengths = {len(response_ids), len(response_mask), len(response_ids) if logprobs is None else len(logprobs)}
    if len(lengths) > 1:
        raise RowError("trajectory: response_ids, response_mask and logprobs differ in length")
    if response_mask.translate(None, b"\0\1"):
        raise RowError("trajectory: response_mask holds other numbers than 0 and 1")
    for name, ids in (("prompt_ids", prompt_ids), ("response_ids", response_ids)):
        if min(ids, default=0) < 0:
            raise RowError(f"trajectory: {name} holds a negative token id")
    turns = tuple(TrajectoryTurn(**turn) for turn in row["turns"])
    if not turns or not all(0 <= turn.start <= turn.end <= len(response_ids) for turn in turns):
        raise RowError("trajectory: its turns are no spans of response_ids")
    trajectory = Trajectory(
        **{name: row[name] for name in (*_PLAIN, "split_reason")},
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        response_mask=response_mask,
        logprobs=logprobs,
        turns=turns,
        reward_info=dict(row["reward_info"]),
        identity=dict(row.get("identity") or {}),
        multimodal=tuple(map(dict, row["multimodal"])),
    )
    if not all(isinstance(version, str) for version in trajectory.weights_versions):
        raise RowError("trajectory: a weights_version is no text")
    return trajectory


@contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


# From a forest of turns to trajectories: one per conversation, each sampled token in exactly one.


def trajectories_of(
    turns: Sequence[Turn],
    session_id: str,
    *,
    reward: float | None = None,
    reward_info: Mapping[str, Any] | None = None,
) -> list[Trajectory]:
    """Return a trajectory for each turn that no other turn continues, ordered by that turn.

    A turn that several conversations share is marked only in the longest of them (of equally long ones, in the
    latest); the others have it in their prompt. Every trajectory has the session's ``reward`` and ``reward_info``.
    """
    leaves = [turn for turn in turns if not turn.children]
    owned: set[int] = set()
    marked: dict[int, list[Turn]] = {}
    paths = {leaf.turn_id: leaf.path() for leaf in leaves}
    for leaf in sorted(leaves, key=lambda leaf: (len(paths[leaf.turn_id]), leaf.turn_id), reverse=True):
        marked[leaf.turn_id] = [turn for turn in paths[leaf.turn_id] if turn.turn_id not in owned]
        owned.update(turn.turn_id for turn in marked[leaf.turn_id])
    return [
        _trajectory(paths[leaf.turn_id], marked[leaf.turn_id], session_id, index, reward, dict(reward_info or {}))
        for index, leaf in enumerate(sorted(leaves, key=lambda leaf: leaf.turn_id))
    ]


def _trajectory(
    path: Sequence[Turn],
    marked: Sequence[Turn],
    session_id: str,
    index: int,
    reward: float | None,
    reward_info: Mapping[str, Any],
) -> Trajectory:
    first, leaf = marked[0], marked[-1]
    offset = first.context_end
    mask = bytearray(leaf.end - offset)
    logprobs: array[float] | None = array("f", bytes(4 * len(mask)))
    if any(turn.logprobs is None for turn in marked):
        logprobs = None  # zeros in place of unknown logprobs would mean certainty
    spans = []
    for turn in marked:
        start, end = turn.context_end - offset, turn.end - offset
        mask[start:end] = b"\1" * (end - start)
        if logprobs is not None and turn.logprobs is not None:
            logprobs[start:end] = turn.logprobs
        spans.append(TrajectoryTurn(start, end, turn.finish_reason, turn.weights_version, turn.details))
    reason, detail = _reason(first)
    return Trajectory(
        session_id=session_id,
        index=index,
        prompt_ids=leaf.tokens[:offset],
        response_ids=leaf.tokens[offset : leaf.end],
        response_mask=bytes(mask),
        logprobs=logprobs,
        turns=tuple(spans),
        split_reason=reason,
        split_detail=detail,
        message_count=leaf.message_count,
        reward=reward,
        reward_info=reward_info,
        multimodal=tuple(item for turn in path for item in turn.media),
    )


def _reason(first: Turn) -> tuple[str, str | None]:
    if first.reason is not None:
        return first.reason, first.reason_detail
    # This is the plain continuation of its parent, but a sibling's conversation is longer: the sibling has the reason.
    siblings = first.parent.children if first.parent is not None else []
    later = next((turn for turn in siblings if turn.reason is not None), None)
    return (later.reason if later is not None and later.reason else SplitReason.BRANCH), None
