"""Compare what clients received, what trajectories hold and what the engine logged: all three must agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaigns.faults.gateway.clients import Client
from nemo_gym.gateway.tokens import PolicyTokenizer
from nemo_gym_testing.gateway.tiny.log import EngineCall, read_log
from nemo_gym_testing.gateway.tiny.truth import TruthReport, check_truth


@dataclass
class Ledger:
    """Differences by kind; each entry names its session."""

    lost: list[str] = field(default_factory=list)
    """Responses that a client received and no trajectory holds."""
    doubled: list[str] = field(default_factory=list)
    """Responses that trajectories hold or clients received more than once, or that no client received."""
    changed: list[str] = field(default_factory=list)
    """Responses whose text is not that of their tokens."""
    split: list[str] = field(default_factory=list)
    """Conversations that did not stay one chain."""
    unexplained: list[str] = field(default_factory=list)
    """Responses sampled to the end that no trajectory holds and no kill or failure explains."""
    resampled: int = 0
    """Responses that were lost with the gateway before their commit, and were sampled again."""
    truth: TruthReport = field(default_factory=TruthReport)


def compare(clients: Sequence[Client], summaries: Sequence[Mapping[str, Any]], log: Path, policy_dir: Path) -> Ledger:
    """``summaries[i]`` is the response to finalizing the session of ``clients[i]``."""
    ledger = Ledger()
    policy = PolicyTokenizer.load(policy_dir)
    committed: set[str] = set()
    for client, summary in zip(clients, summaries, strict=True):
        turns = [
            (turn["details"]["call_id"], row["response_ids"][turn["start"] : turn["end"]])
            for row in summary["trajectories"]
            for turn in row["turns"]
        ]
        counts = Counter(call_id for call_id, _ in turns)
        committed |= set(counts)
        received = [answer.call_id for answer in client.received]
        ledger.lost += [f"{client.tag}: {call}" for call in received if call not in counts]
        ledger.doubled += [f"{client.tag}: {call} × {n}" for call, n in counts.items() if n > 1]
        ledger.doubled += [f"{client.tag}: {call} was never received" for call in counts if call not in received]
        ledger.doubled += [f"{client.tag}: {call} received twice" for call, n in Counter(received).items() if n > 1]
        if len(summary["trajectories"]) != 1:
            reasons = [row["split_reason"] for row in summary["trajectories"]]
            ledger.split.append(f"{client.tag}: {reasons}")
        texts = dict(turns)
        for answer in client.received:
            ids = [token for token in texts.get(answer.call_id, []) if token not in policy.stop_ids]
            if answer.call_id in texts and answer.text.strip() not in policy.decode(ids):
                ledger.changed.append(f"{client.tag}: {answer.text!r} is not {policy.decode(ids)!r}")
    calls = read_log(log)
    excused = _excused(calls, committed, clients, policy, ledger)
    rows = [row for summary in summaries for row in summary["trajectories"]]
    ledger.truth = check_truth(rows, [log], policy_dir, excused=excused)
    return ledger


def _excused(
    calls: Sequence[EngineCall],
    committed: set[str],
    clients: Sequence[Client],
    policy: PolicyTokenizer,
    ledger: Ledger,
) -> set[str]:
    """Return request ids of responses that may be missing: at most one of a session for each of its hits."""
    missing: dict[str, list[EngineCall]] = {}
    for call in calls:
        if call.answered and str(call.request_id)[:32] not in committed:
            prompt = policy.decode(call.prompt_ids.tolist())
            at = prompt.rfind("session-")
            missing.setdefault(prompt[at : at + 12], []).append(call)
    hits = {client.tag: client.hits for client in clients}
    excused: set[str] = set()
    for tag, lost in missing.items():
        allowed = hits.get(tag, 0)
        ledger.unexplained += [f"{tag}: {call.request_id}" for call in lost[allowed:]]
        excused |= {str(call.request_id) for call in lost[:allowed]}
    ledger.resampled = len(excused)
    return excused
