"""Check that trajectories hold what the engine sampled: each token once, after the prompt it was sampled from.

    report = check_truth(trajectories, log, policy_dir)
    assert report.true, report

or ``python -m nemo_gym_testing.gateway.tiny.truth TRAJECTORIES.jsonl --policy DIR --log FILE...``, which prints the
report as JSON and exits with 1 when it is not true.
"""

from __future__ import annotations

import argparse
import sys
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from nemo_gym.gateway.tokens.trajectories import Trajectory, from_row, read_jsonl
from nemo_gym_testing.gateway.tiny.cover import Covering, Piece, spans
from nemo_gym_testing.gateway.tiny.log import EngineCall, read_log
from nemo_gym_testing.gateway.tiny.model import TinyModel, recompute

TOLERANCE = 1e-4
_FLOAT32_ERROR = 1e-6
"""Largest relative change of a logprob when it is stored in 32 bits."""


@dataclass(slots=True)
class TruthReport:
    """The figures of a comparison, and all differences found."""

    trajectories: int = 0
    calls: int = 0
    """Calls in the engines' logs."""
    answered: int = 0
    resumed: int = 0
    """Broken calls whose tokens another call continued."""
    excused: int = 0
    """Answered calls that were allowed to be missing, and are."""
    sampled_tokens: int = 0
    """Tokens with mask 1, over all trajectories."""
    largest_logprob_error: float = 0.0
    """Largest difference between the trajectories' logprobs and those recomputed with the model."""
    violations: list[str] = field(default_factory=list)

    @property
    def true(self) -> bool:
        return not self.violations

    def __str__(self) -> str:
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2).decode()


def check_truth(
    trajectories: str | Path | Iterable[Trajectory | Mapping[str, Any]],
    log: str | Path | Sequence[str | Path | EngineCall],
    policy_dir: str | Path,
    *,
    excused: Collection[str] = (),
    tolerance: float = TOLERANCE,
) -> TruthReport:
    """Compare trajectories (or rows of `as_row`, or a JSONL file of them) with the log of every engine that answered.

    Each answered call's tokens must occur exactly once with mask 1, in one piece, after exactly the prompt that the
    engine read, with the engine's logprobs; nothing else may have mask 1. A broken call's tokens may occur only where
    another call continued them. ``excused``: request ids of answered calls that may be missing, because the client
    disconnected at that moment. ``tolerance``: the absolute tolerance for recomputed logprobs.
    """
    found = _trajectories(trajectories)
    calls = _calls(log)
    # An excused answer may equal the one that was sampled after it. Excused calls come last, so that they take no
    # tokens from a call that must be found.
    covering = Covering(sorted(calls, key=lambda call: call.request_id in excused))
    model = TinyModel.load(policy_dir)
    report = TruthReport(len(found), len(calls), sum(call.answered for call in calls))
    for number, trajectory in enumerate(found):
        where = f"trajectory {number}"
        report.violations += [f"{where}: {what}" for what in _structure(trajectory)]
        if len(trajectory.response_mask) != len(trajectory.response_ids):
            continue
        report.sampled_tokens += trajectory.sampled_count
        tokens = trajectory.prompt_ids + trajectory.response_ids
        for start, end in spans(trajectory.response_mask, len(trajectory.prompt_ids)):
            pieces, problem = covering.cover(tokens, start, end)
            if problem is not None:
                report.violations.append(f"{where}, tokens {start}–{end}: {problem}")
            report.resumed += sum(piece.broken for piece in pieces)
            report.violations += [f"{where}: {what}" for what in _logprobs(trajectory, pieces)]
        _recompute(trajectory, tokens, model, tolerance, where, report)
    for call in calls:
        if call.answered and call.token_ids and call.key not in covering.used:
            if call.request_id in excused:
                report.excused += 1
            else:
                report.violations.append(
                    f"call {call.request_id}: its {len(call.token_ids)} sampled tokens are in no trajectory"
                )
    return report


def _trajectories(given: str | Path | Iterable[Trajectory | Mapping[str, Any]]) -> list[Trajectory]:
    if isinstance(given, str | Path):
        return read_jsonl(given)
    return [one if isinstance(one, Trajectory) else from_row(one) for one in given]


def _calls(given: str | Path | Sequence[str | Path | EngineCall]) -> list[EngineCall]:
    listed = [given] if isinstance(given, str | Path) else given
    return [call for one in listed for call in ([one] if isinstance(one, EngineCall) else read_log(one))]


def _structure(trajectory: Trajectory) -> Iterable[str]:
    """Yield the contradictions within a trajectory."""
    mask = trajectory.response_mask
    if len(mask) != len(trajectory.response_ids):
        yield f"{len(mask)} mask entries for {len(trajectory.response_ids)} response tokens"
        return
    if trajectory.logprobs is None:
        yield "has no logprobs"
    elif any(value for value, sampled in zip(trajectory.logprobs, mask, strict=False) if not sampled):
        yield "a token that was not sampled has a logprob"
    turns = bytearray(len(mask))
    for turn in trajectory.turns:
        turns[turn.start : turn.end] = b"\1" * (turn.end - turn.start)
    if bytes(turns) != bytes(map(bool, mask)):
        yield "the mask and the turns name different tokens"


def _logprobs(trajectory: Trajectory, pieces: Iterable[Piece]) -> Iterable[str]:
    if trajectory.logprobs is None:
        return
    for piece in pieces:
        start = piece.start - len(trajectory.prompt_ids)
        given = np.array(trajectory.logprobs[start : start + piece.count], dtype=np.float64)
        logged = np.array(piece.call.logprobs[: piece.count])
        if len(given) != len(logged) or not np.all(
            np.abs(given - logged) <= _FLOAT32_ERROR * np.maximum(1, np.abs(logged))
        ):
            yield f"logprobs at tokens {piece.start}–{piece.start + piece.count} are not those of the engine's call"


def _recompute(
    trajectory: Trajectory, tokens: array[int], model: TinyModel, tolerance: float, where: str, report: TruthReport
) -> None:
    ids = np.array(tokens, dtype=np.int64)
    if len(ids) and not 0 <= np.min(ids) <= np.max(ids) < model.shape.vocabulary:
        report.violations.append(f"{where}: holds token ids outside the vocabulary of {model.shape.vocabulary}")
        return
    sampled = np.frombuffer(bytes(trajectory.response_mask), dtype=np.uint8).astype(bool)
    if trajectory.logprobs is None or not sampled.any():
        return
    is_sampled = np.concatenate([np.zeros(len(trajectory.prompt_ids), dtype=bool), sampled])
    recomputed = recompute(model, ids, is_sampled)[is_sampled]
    errors = np.abs(np.array(trajectory.logprobs, dtype=np.float64)[sampled] - recomputed)
    if not np.all(errors <= tolerance):  # also if one of them is NaN
        wrong = int(np.sum(~(errors <= tolerance)))
        report.violations.append(f"{where}: {wrong} logprobs differ from the model's own, by up to {errors.max():.2g}")
    report.largest_logprob_error = max(report.largest_logprob_error, float(errors.max()))


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare exported trajectories with the engines' own logs.")
    parser.add_argument("trajectories", nargs="+", help="JSONL files")
    parser.add_argument("--policy", required=True, metavar="DIR")
    parser.add_argument("--log", required=True, nargs="+", metavar="FILE")
    parser.add_argument("--excused", nargs="*", default=[], metavar="REQUEST_ID")
    given = parser.parse_args()
    trajectories = [trajectory for name in given.trajectories for trajectory in read_jsonl(name)]
    report = check_truth(trajectories, given.log, given.policy, excused=given.excused)
    sys.stdout.write(f"{report}\n")
    return 0 if report.true else 1


if __name__ == "__main__":
    sys.exit(main())
