"""Multiple-choice questions: the answer is the last letter in brackets, or the last single capital letter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from nemo_gym.base_resources_server import BaseResourcesServerConfig, ReverifyMode, SimpleResourcesServer
from nemo_gym.contract.session import Artifact, RolloutIdentity
from nemo_gym.contract.verdict import Verdict

_ANSWER = re.compile(r"\[([A-Z])\]|\b([A-Z])\b")


class ChoiceQuestions(SimpleResourcesServer):
    """Rows have ``expected_answer``, a letter."""

    config: BaseResourcesServerConfig
    REVERIFY_MODE = ReverifyMode.STATELESS

    async def grade(
        self, row: dict[str, Any], response: dict[str, Any], artifacts: Sequence[Artifact], rollout: RolloutIdentity
    ) -> Verdict:
        text = "".join(
            part.get("text", "")
            for item in response.get("output", ())
            if item.get("type") == "message"
            for part in item["content"]
        )
        found = _ANSWER.findall(text)
        chosen = next((letter for pair in reversed(found) for letter in pair if letter), None)
        return Verdict.of(float(chosen == row["expected_answer"]), details={"extracted_answer": chosen})

    async def gold_solution(self, row: dict[str, Any]) -> dict[str, Any] | None:
        return {"text": f"[{row['expected_answer']}]"}


if __name__ == "__main__":
    ChoiceQuestions.run_webserver()
