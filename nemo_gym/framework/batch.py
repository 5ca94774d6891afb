"""Reads a trainer's batch of prompts, a TensorDict or plain columns, as samples."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_gym.contract.errors import RowError

_UNSAFE = re.compile(r"[^A-Za-z0-9.-]+")
_BATCH_KEYS = frozenset({"validate", "global_steps", "do_sample"})
_SESSIONS = "__rollout_n__"
CARRIED = ("uid", "raw_prompt", "data_source", "reward_model", "extra_info", "tools_kwargs", "agent_name")
"""Columns of a sample that are copied to its trajectories, for the trainer."""


@dataclass(frozen=True, slots=True)
class PromptSample:
    """One prompt of a batch."""

    uid: str
    index: int
    fields: Mapping[str, Any]

    @property
    def raw_prompt(self) -> Any:
        return self.fields["raw_prompt"]

    @property
    def tools_kwargs(self) -> Any:
        return self.fields.get("tools_kwargs")

    @property
    def greedy(self) -> bool:
        return "__do_sample__" in self.fields and not bool(self.fields["__do_sample__"])

    @property
    def safe_uid(self) -> str:
        """A name for sessions and folders, unique in the batch."""
        name = _UNSAFE.sub("-", self.uid).strip("-.")[:64]
        digest = hashlib.sha256(self.uid.encode()).hexdigest()[:8]
        return f"{name or 'uid'}-{digest}"

    def sessions(self, default: int) -> int:
        """Return the number of sessions: ``default``, unless the prompt sets verl's ``__rollout_n__``."""
        requested = self.fields.get(_SESSIONS)
        return default if requested is None else int(requested)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of prompts."""

    samples: tuple[PromptSample, ...]
    partition: str
    """``train`` or ``val``."""
    global_steps: int | None


def uids_of(prompts: Any) -> list[str]:
    """Return the uids of a batch. Raises `RowError` for a uid that TransferQueue's readers could not extract from
    the keys of its trajectories."""
    columns = _columns(prompts)
    if "uid" not in columns:
        raise RowError("prompts: 'uid' is missing; trajectories are stored by it", field="uid")
    uids = _of_column(columns["uid"], _length(columns))
    for index, uid in enumerate(uids):
        if not isinstance(uid, str) or not uid:
            raise RowError(f"prompts['uid'][{index}] must be a string that is not empty, got {uid!r}", field="uid")
        if "_" in uid:
            raise RowError(
                f"prompts['uid'][{index}] is {uid!r}: readers take what stands before the first '_' of a trajectory's"
                " key for its uid; use a name without one",
                field="uid",
            )
    if len(set(uids)) < len(uids):
        twice = next(uid for uid in uids if uids.count(uid) > 1)
        raise RowError(f"prompts['uid']: {twice!r} comes twice; the trajectories would overwrite each other")
    return uids


def partition_of(prompts: Any) -> str:
    """Return ``val`` for a batch that validates, else ``train``."""
    return "val" if _scalar(_columns(prompts).get("validate"), default=False) else "train"


def read_batch(prompts: Any) -> Batch:
    """Return the samples of a batch. Raises `RowError` naming what is missing."""
    uids = uids_of(prompts)
    columns = _columns(prompts)
    if not uids:
        raise RowError("prompts: the batch is empty")
    if "raw_prompt" not in columns:
        raise RowError(
            "prompts: 'raw_prompt' is missing; set data.return_raw_chat=True, so that runners get the messages",
            field="raw_prompt",
        )
    partition = partition_of(prompts)
    steps = _scalar(columns.get("global_steps"), default=None)
    if steps is None and partition == "train":
        raise RowError("prompts: 'global_steps' is missing; training needs it to tell stale trajectories")
    if steps is not None:
        _check_whole(steps, "prompts['global_steps']")
    values = {
        name: _of_column(column, len(uids))
        for name, column in columns.items()
        if name not in _BATCH_KEYS and name != "uid"
    }
    for index, sessions in enumerate(values.get(_SESSIONS, ())):
        if sessions is not None:
            _check_whole(sessions, f"prompts['{_SESSIONS}'][{index}]", 1)
    samples = tuple(
        PromptSample(uid, index, {"uid": uid, **{name: column[index] for name, column in values.items()}})
        for index, uid in enumerate(uids)
    )
    return Batch(samples, partition, None if steps is None else int(steps))


def _check_whole(value: Any, label: str, least: int | None = None) -> None:
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not is_whole or (least is not None and value < least):
        bound = "" if least is None else f" from {least}"
        raise RowError(f"{label} must be a whole number{bound}, got {value!r}")


@dataclass(frozen=True, slots=True)
class _Whole:
    """A value that belongs to the whole batch."""

    value: Any


def _columns(prompts: Any) -> dict[str, Any]:
    """Return the columns by name, with a TensorDict's non-tensor columns unpacked. These are recognized by the name
    of their class, so that a batch of plain columns does not need torch."""
    columns: dict[str, Any] = {}
    for name, column in prompts.items():
        kind = type(column).__name__
        if kind == "NonTensorStack":
            column = column.tolist()
        elif kind == "NonTensorData":
            column = _Whole(column.data.item() if getattr(column.data, "ndim", None) == 0 else column.data)
        elif getattr(column, "ndim", None) == 0:
            column = _Whole(column.item())
        columns[str(name)] = column
    return columns


def _length(columns: Mapping[str, Any]) -> int:
    for name in ("uid", "raw_prompt"):
        column = columns.get(name)
        if column is not None and _has_rows(column):
            return len(column)
    return 1


def _has_rows(column: Any) -> bool:
    return hasattr(column, "__len__") and not isinstance(column, str | bytes | Mapping | _Whole)


def _of_column(column: Any, length: int) -> list[Any]:
    """Return one value per row of a column; a value of the whole batch is repeated."""
    if isinstance(column, _Whole):
        return [column.value] * length
    if not _has_rows(column):
        return [column] * length
    if len(column) != length:
        raise RowError(f"prompts: a column has {len(column)} rows, 'uid' has {length}")
    return [value.item() if getattr(value, "ndim", None) == 0 else value for value in column]


def _scalar(column: Any, *, default: Any) -> Any:
    """Return a value of the whole batch, also if each row repeats it."""
    if column is None:
        return default
    values = _of_column(column, len(column) if _has_rows(column) else 1)
    return values[0] if values else default
