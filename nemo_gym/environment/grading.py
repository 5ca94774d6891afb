"""From what a hook decided to what stands in a result row: one shape, and no reward without a valid verdict."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from nemo_gym.contract.errors import NemoGymError
from nemo_gym.contract.rows import NG_FAILURE_CLASS_KEY, PARAMS_KEY, RESPONSE_KEY
from nemo_gym.contract.session import Artifact
from nemo_gym.contract.verdict import FailureKind, Verdict


def work_digest(response: Any, artifacts: Sequence[Artifact]) -> str:
    """What identifies the work of an attempt: its response and what was harvested."""
    digest = hashlib.sha256(orjson.dumps(response, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS))
    for artifact in artifacts:
        content = artifact.sha256 or hashlib.sha256(artifact.data.encode()).hexdigest()
        digest.update(orjson.dumps([artifact.name, artifact.kind, content, artifact.truncated, artifact.error]))
    return digest.hexdigest()


def verdict_fields(verdict: Verdict) -> dict[str, Any]:
    """A verdict as fields of a result row."""
    optional = {"official", "details", "reward_reason", "evaluation_log"}
    fields = verdict.model_dump(mode="json", exclude=optional)
    fields["mask_sample"] = not verdict.valid
    return fields | {name: value for name in sorted(optional) if (value := getattr(verdict, name))}


def verdict_of_reply(reply: Mapping[str, Any]) -> Verdict:
    """The verdict in what a NeMo Gym ``verify`` returned. A masked sample, a declared failure and a reward that is no
    finite number are invalid."""
    failure_class = reply.get(NG_FAILURE_CLASS_KEY)
    if reply.get("mask_sample") or failure_class:
        said = reply.get("failure_reason") or reply.get("failure_kind") or failure_class
        reason = said or "masked by the environment"
        kind = str(reply.get("failure_kind"))
        known = FailureKind(kind) if kind in [*FailureKind] else FailureKind.VERIFIER_FAILED
        return Verdict.invalid(known, str(reason))
    reward = reply.get("reward")
    if isinstance(reward, bool | int | float) and math.isfinite(reward):
        return Verdict.of(float(reward))
    return Verdict.invalid(FailureKind.VERIFIER_FAILED, f"verify returned the reward {reward!r}, not a finite number")


def reply_fields(reply: Mapping[str, Any]) -> dict[str, Any]:
    """What a NeMo Gym ``verify`` returned, with its verdict made explicit and without the request it repeats."""
    fields = {key: value for key, value in reply.items() if key not in (PARAMS_KEY, RESPONSE_KEY)}
    return {**fields, **verdict_fields(verdict_of_reply(reply))}


_KIND_OF_CODE = {
    "sandbox_lost": FailureKind.SANDBOX_LOST,
    "exec_lost": FailureKind.EXEC_LOST,
    "model": FailureKind.MODEL_UNREACHABLE,
}


def failed_verdict(error: NemoGymError) -> Verdict:
    """The invalid verdict for an error of this suite. Its details may hold ``kind`` and ``evaluation_log``."""
    fallback = FailureKind.SANDBOX_FAILED if error.code.startswith("sandbox") else FailureKind.VERIFIER_FAILED
    named = error.details.get("kind")
    kind = FailureKind(str(named)) if named in [*FailureKind] else _KIND_OF_CODE.get(error.code, fallback)
    return Verdict.invalid(kind, error.message, evaluation_log=error.details.get("evaluation_log"))
