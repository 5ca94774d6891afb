"""Mathematics without tools: a question, and an expected answer that math-verify compares with the model's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fastapi import FastAPI
from pydantic import Field, PrivateAttr

from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer
from nemo_gym.contract.errors import RowError, VerifierError
from nemo_gym.contract.session import Artifact, RolloutIdentity, SessionDescriptor, Topology
from nemo_gym.contract.verdict import FailureKind, Verdict
from nemo_gym.environment.mcp.answers import answered_text
from nemo_gym.environment.worker_pool import Ending, WorkerPool

ANSWER_CHARS = 20_000
"""Only this many characters at the end of an answer are compared, because the result stands there."""
COMPARE = "resources_servers.math.comparison:compare"
QUESTION = "{question}\n\nGive the answer inside \\boxed{{}}."


@dataclass(frozen=True)
class Comparison:
    ending: Ending
    right: bool = False
    read: str | None = None
    """The part of the text that was taken as the answer."""


class MathConfig(BaseResourcesServerConfig):
    """Configuration."""

    timeout_s: float = Field(10.0, gt=0)
    """The limit for one comparison. An answer that takes longer twice is wrong, unless comparing the expected answer
    with itself takes longer too."""
    workers: int = Field(2, gt=0)
    """The number of concurrent comparisons. Each runs in its own process of about 80 MiB."""


class MathEnvironment(SimpleResourcesServer):
    """Rows hold ``expected_answer`` (private) and, if they have no prompt, ``question``. A right answer earns a reward
    of 1."""

    config: MathConfig
    topologies: ClassVar[tuple[Topology, ...]] = (Topology.NONE,)

    _comparers: WorkerPool = PrivateAttr()
    _checked: set[str] = PrivateAttr(default_factory=set)

    def setup_webserver(self) -> FastAPI:
        self._comparers = WorkerPool(
            COMPARE,
            workers=self.config.workers,
            warm_up={"expected": "1", "answer": "1"},
            missing="install the packages of requirements.txt (the extra 'math')",
        )
        return super().setup_webserver()

    def public_row(self, row: dict[str, Any]) -> dict[str, Any]:
        public = super().public_row(row)
        params = dict(public.get("responses_create_params") or {})
        if not params.get("input") and isinstance(row.get("question"), str):
            params["input"] = [{"role": "user", "content": QUESTION.format(question=row["question"])}]
        return {**public, "responses_create_params": params}

    async def open_session(self, row: dict[str, Any], rollout: RolloutIdentity) -> SessionDescriptor:
        """Refuse a row whose expected answer math-verify does not accept as an answer to itself.

        Raises:
            RowError: the expected answer is refused.
            VerifierError: that comparison was broken off, which the row or a busy machine may have caused.
        """
        expected = _expected(row)
        if expected not in self._checked:
            comparison = await self._compare(expected, _boxed(expected))
            if comparison.ending in (Ending.TIMED_OUT, Ending.DIED):
                raise VerifierError(
                    f"the comparison of field 'expected_answer' with itself {comparison.ending.replace('_', ' ')}; the"
                    " machine is short of time or memory, or the answer is too hard to compare. If only this row fails"
                    " so, simplify its answer or raise timeout_s",
                    retryable=True,
                    field="expected_answer",
                )
            if not comparison.right:
                raise RowError(
                    "field 'expected_answer' cannot be compared by math-verify; write it as a number, an expression"
                    " or LaTeX",
                    field="expected_answer",
                )
            self._checked.add(expected)
        return await super().open_session(row, rollout)

    async def grade(
        self, row: dict[str, Any], response: dict[str, Any], artifacts: Sequence[Artifact], rollout: RolloutIdentity
    ) -> Verdict:
        expected, answer = _expected(row), answered_text(response)[-ANSWER_CHARS:]
        comparison = self._obvious(expected, answer) or await self._compare(expected, answer)
        if comparison.ending is not Ending.ANSWERED:
            comparison = await self._final_comparison(expected, answer, comparison)
        details = {"comparison": str(comparison.ending), "answer": comparison.read}
        return Verdict.of(float(comparison.right), details=details, reward_reason=_reward_reason(comparison, answer))

    async def gold_solution(self, row: dict[str, Any]) -> dict[str, Any] | None:
        return {"text": _boxed(_expected(row))}

    async def shutdown(self) -> None:
        await super().shutdown()
        await asyncio.to_thread(self._comparers.close)

    async def _compare(self, expected: str, answer: str) -> Comparison:
        """Compare in a worker process, which is killed when it takes too long.

        Raises:
            VerifierError: no process can be started, or it cannot import math-verify.
        """
        question = {"expected": expected, "answer": answer}
        reply = await self._comparers.ask(question, timeout_s=self.config.timeout_s)
        return Comparison(reply.ending, **(reply.value if reply.ending is Ending.ANSWERED else {}))

    def _obvious(self, expected: str, answer: str) -> Comparison | None:
        """Return the outcome without math-verify (0.45 ms of CPU) if it is certain: the answer is blank, or its only
        box holds exactly the expected answer, which is known to be accepted as an answer to itself."""
        if not answer.strip():
            return Comparison(Ending.ANSWERED)
        boxes = answer.count("boxed") + answer.count("fbox")
        if expected in self._checked and boxes == 1 and _boxed(expected) in answer:
            return Comparison(Ending.ANSWERED, right=True, read=expected)
        return None

    async def _accepts_itself(self, expected: str) -> bool:
        return (await self._compare(expected, _boxed(expected))).right

    async def _final_comparison(self, expected: str, answer: str, first: Comparison) -> Comparison:
        """Compare once more where ``first`` has no outcome: this machine may have stalled. A second failure counts as
        a wrong answer. Raises `VerifierError` if even the expected answer cannot be compared with itself."""
        if not await self._accepts_itself(expected):
            raise VerifierError(
                f"no verdict: the comparison {first.ending.replace('_', ' ')}, and so does that of the expected answer"
                " with itself; the machine is short of time or memory, or the row's answer is too hard to compare",
                kind=FailureKind.CONTROL_RUN_FAILED,
            )
        return await self._compare(expected, answer)


def _reward_reason(comparison: Comparison, answer: str) -> str | None:
    if comparison.right:
        return None
    if comparison.ending is not Ending.ANSWERED:
        return f"the comparison {comparison.ending.replace('_', ' ')}"
    if comparison.read is None:
        return "no answer found in the response" if answer.strip() else "the response has no text"
    return "wrong answer"


def _expected(row: dict[str, Any]) -> str:
    expected = row.get("expected_answer")
    if isinstance(expected, int | float) and not isinstance(expected, bool):
        return str(expected)
    if not isinstance(expected, str) or not expected.strip():
        raise RowError("field 'expected_answer' must be a number or text", field="expected_answer")
    return expected.strip().removeprefix("$").removesuffix("$").strip()


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


if __name__ == "__main__":
    MathEnvironment.run_webserver()
