"""Trajectories as files: JSONL to read and to stream, npz to train from. Both read back to equal trajectories.

JSONL: one object per trajectory with the fields of `Trajectory`; arrays as lists, ``response_mask`` as 0/1,
``finish_reason`` and ``weights_versions`` added for readers.

npz, for ``n`` trajectories with ``P`` prompt and ``R`` response tokens in all (no pickled objects):

| array | dtype, shape | |
|---|---|---|
| ``prompt_ids`` | int32 [P] | trajectory ``i`` is ``[prompt_offsets[i]:prompt_offsets[i + 1]]`` |
| ``prompt_offsets`` | int64 [n + 1] | |
| ``response_ids`` | int32 [R] | by ``response_offsets`` |
| ``response_mask`` | uint8 [R] | 1 = sampled |
| ``logprobs`` | float32 [R] | 0 where the mask is 0; NaN throughout a trajectory whose engine gave none |
| ``response_offsets`` | int64 [n + 1] | |
| ``rewards`` | float32 [n] | NaN = no reward |
| ``metadata`` | uint8 [bytes] | UTF-8 JSON: a list of the remaining fields of each trajectory |

``multimodal`` is one of the remaining fields: ``{kind, source, message}`` of each image, in the order of the
placeholders among the token ids; ``source`` is a URL or a data URL, as it was sent.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from uuid import uuid4

import orjson

from nemo_gym.contract.errors import RowError
from nemo_gym.gateway.tokens.trajectory import Trajectory, TrajectoryTurn

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

_ARRAYS = ("prompt_ids", "response_ids", "response_mask", "logprobs")


def as_row(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as JSON data."""
    return {
        **_metadata(trajectory),
        "prompt_ids": trajectory.prompt_ids.tolist(),
        "response_ids": trajectory.response_ids.tolist(),
        "response_mask": list(trajectory.response_mask),
        "logprobs": trajectory.logprobs.tolist() if trajectory.logprobs is not None else None,
    }


def from_row(row: Mapping[str, Any]) -> Trajectory:
    """The trajectory of a JSON object. Raises `RowError` naming what is missing, or lengths that differ."""
    try:
        logprobs = row["logprobs"]
        return _assembled(
            row,
            array("i", row["prompt_ids"]),
            array("i", row["response_ids"]),
            bytes(row["response_mask"]),
            array("f", logprobs) if logprobs is not None else None,
        )
    except RowError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RowError(f"trajectory: {type(error).__name__} at {error}; it was not written by this suite") from error


def write_jsonl(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """Write one line per trajectory; the file appears whole or not at all."""

    def write(file: IO[bytes]) -> None:
        for trajectory in trajectories:
            file.write(orjson.dumps(as_row(trajectory), option=orjson.OPT_APPEND_NEWLINE))

    _whole(Path(path), write)


def read_jsonl(path: str | Path) -> list[Trajectory]:
    """Raises `RowError` naming the line that is no trajectory."""
    found = []
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                found.append(from_row(orjson.loads(line)))
            except (orjson.JSONDecodeError, RowError) as error:
                raise RowError(f"{path}, line {number}: {error}", path=str(path), line=number) from error
    return found


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
    _whole(Path(path), lambda file: np.savez(file, **arrays))


def read_npz(path: str | Path) -> list[Trajectory]:
    """Raises `RowError` for a file that `write_npz` did not write."""
    import numpy as np

    def typed(code: str, values: NDArray[Any]) -> array[Any]:
        made: array[Any] = array(code)
        made.frombytes(values.tobytes())
        return made

    with np.load(path, allow_pickle=False) as file:
        try:
            data = {name: file[name] for name in (*_ARRAYS, "prompt_offsets", "response_offsets", "metadata")}
            rows = orjson.loads(data["metadata"].tobytes())
        except (KeyError, orjson.JSONDecodeError) as error:
            raise RowError(f"{path}: not trajectories of this suite ({error})", path=str(path)) from error
    found = []
    for index, row in enumerate(rows):
        prompt = slice(*data["prompt_offsets"][index : index + 2])
        response = slice(*data["response_offsets"][index : index + 2])
        logprobs = data["logprobs"][response] if row["has_logprobs"] else None
        found.append(
            _assembled(
                row,
                typed("i", data["prompt_ids"][prompt]),
                typed("i", data["response_ids"][response]),
                data["response_mask"][response].tobytes(),
                typed("f", logprobs) if logprobs is not None else None,
            )
        )
    return found


def _metadata(trajectory: Trajectory) -> dict[str, Any]:
    turns = [
        {
            "start": turn.start,
            "end": turn.end,
            "finish_reason": turn.finish_reason,
            "weights_version": turn.weights_version,
            "details": dict(turn.details),
        }
        for turn in trajectory.turns
    ]
    return {
        "session_id": trajectory.session_id,
        "index": trajectory.index,
        "turns": turns,
        "finish_reason": trajectory.finish_reason,
        "weights_versions": list(trajectory.weights_versions),
        "split_reason": str(trajectory.split_reason),
        "split_detail": trajectory.split_detail,
        "message_count": trajectory.message_count,
        "reward": trajectory.reward,
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
    return Trajectory(
        session_id=row["session_id"],
        index=row["index"],
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        response_mask=response_mask,
        logprobs=logprobs,
        turns=tuple(TrajectoryTurn(**turn) for turn in row["turns"]),
        split_reason=row["split_reason"],
        split_detail=row["split_detail"],
        message_count=row["message_count"],
        reward=row["reward"],
        reward_info=row["reward_info"],
        identity=row.get("identity") or {},
        multimodal=tuple(row["multimodal"]),
    )


def _whole(path: Path, write: Any) -> None:
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
