"""Where a reward's validity is decided."""

from __future__ import annotations

import math
from typing import Any

import pytest

from nemo_gym.contract.verdict import FailureKind, Finding, StageName, Verdict, decide_validity, failure_of_reply


@pytest.mark.parametrize("reward", [0, 1, 0.5, -2.0, True])
def test_reply_is_valid_when_its_reward_is_a_finite_number(reward: float) -> None:
    verdict = decide_validity({"reward": reward})
    assert (verdict.valid, verdict.reward) == (True, float(reward))


@pytest.mark.parametrize("reward", [None, "1", math.nan, math.inf, [1], 10**400])
def test_reply_is_invalid_when_its_reward_is_no_finite_number(reward: Any) -> None:
    verdict = decide_validity({"reward": reward, "valid": True})
    assert (verdict.valid, verdict.reward, verdict.failure_kind) == (False, None, FailureKind.VERIFIER_FAILED)


@pytest.mark.parametrize(
    "declared",
    [
        {"valid": False},
        {"mask_sample": True},
        {"_ng_no_persist": True},
        {"_ng_failure_class": "boom"},
        {"failure_kind": "boom"},
        {"failure_kind": "boom", "mask_sample": None},
        {"failure_kind": "boom", "mask_sample": False, "_ng_failure_class": "boom"},
    ],
)
def test_reply_is_invalid_when_it_declares_a_failure_beside_a_reward(declared: dict[str, Any]) -> None:
    verdict = decide_validity({"reward": 1.0, **declared}, FailureKind.AGENT_CRASHED)
    assert (verdict.valid, verdict.reward, verdict.failure_kind) == (False, None, FailureKind.AGENT_CRASHED)


@pytest.mark.parametrize("valid", [0, 1, "false", "true", []])
def test_reply_is_invalid_and_says_so_when_its_valid_is_no_boolean(valid: Any) -> None:
    verdict = decide_validity({"reward": 0.0, "valid": valid, "failure_reason": "judge down"})
    assert (verdict.valid, verdict.failure_kind) == (False, FailureKind.VERIFIER_FAILED)
    assert verdict.failure_reason == f"'valid' must be true, false or absent, not {valid!r}; judge down"


def test_reply_without_a_word_about_its_validity_keeps_its_reward_and_its_reason() -> None:
    verdict = decide_validity({"reward": 0.0, "valid": None, "failure_kind": None, "failure_reason": "judge down"})
    assert (verdict.valid, verdict.reward, verdict.failure_reason) == (True, 0.0, "judge down")


@pytest.mark.parametrize("name", ["judge_unparseable", "sums:no_unit", "boom"])
def test_failure_kind_beside_a_sample_that_is_not_masked_is_a_remark(name: str) -> None:
    verdict = decide_validity({"reward": 0.5, "mask_sample": False, "failure_kind": name, "failure_reason": "no JSON"})
    assert (verdict.valid, verdict.reward, verdict.failure_reason) == (True, 0.5, "no JSON")


@pytest.mark.parametrize("kind", [FailureKind.SANDBOX_LOST, "sandbox_lost"])
def test_failure_kind_of_this_suite_is_a_failure_whatever_the_mask_says(kind: str) -> None:
    verdict = decide_validity({"reward": 0.0, "mask_sample": False, "failure_kind": kind})
    assert (verdict.valid, verdict.failure_kind) == (False, FailureKind.SANDBOX_LOST)


def test_failure_kind_of_an_environments_own_stays_in_the_reason() -> None:
    verdict = decide_validity({"reward": 0.0, "failure_kind": "sums:no_judge", "failure_reason": "it is down"})
    assert (verdict.failure_kind, verdict.failure_reason) == (
        FailureKind.VERIFIER_FAILED,
        "sums:no_judge: it is down",
    )


def test_failure_keeps_the_kind_and_the_reason_that_the_reply_names() -> None:
    reply = {"reward": None, "valid": False, "failure_kind": "sandbox_lost", "failure_reason": "the host is gone"}
    failure = failure_of_reply(StageName.EVAL, reply)
    assert failure is not None
    assert (failure.kind, failure.reason) == (FailureKind.SANDBOX_LOST, "the host is gone")
    assert (failure.retryable, failure.new_attempt) == (True, False)


def test_failure_is_final_when_nemo_gyms_marker_says_so() -> None:
    failure = failure_of_reply(StageName.RUN, {"_ng_failure_class": "bad_row", "_ng_failure_terminal": True})
    assert failure is not None and not failure.retryable and failure.new_attempt
    assert failure.details == {"failure_class": "bad_row"}


@pytest.mark.parametrize(("reward", "counts"), [(1.0, 0.0), (0.0, 0.0), (-0.5, -0.5)])
def test_finding_leaves_nothing_of_a_reward_and_of_a_penalty_everything(reward: float, counts: float) -> None:
    verdict = Verdict.of(reward, findings=[Finding(kind="peeked", detail="it looked")], official={"resolved": True})
    assert (verdict.valid, verdict.reward, verdict.official) == (True, counts, {"resolved": True})


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_verdict_refuses_a_reward_that_is_not_finite(reward: float) -> None:
    with pytest.raises(ValueError, match=f"the reward is {reward}, not a finite number"):
        Verdict.of(reward)
