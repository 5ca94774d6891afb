"""Multiple-choice questions without tools: the answer names one of the row's options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr

from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer
from nemo_gym.contract.errors import RowError, VerifierError
from nemo_gym.contract.session import Artifact, RolloutIdentity, SessionDescriptor, Topology
from nemo_gym.contract.verdict import FailureKind, Verdict
from nemo_gym.environment.mcp.answers import answered_text
from nemo_gym.environment.worker_pool import Ending, WorkerPool
from resources_servers.mcqa.extraction import ANSWER_CHARS, Grading, choice, lenient_choice

_ASKED = {
    Grading.STRICT_SINGLE_LETTER_BOXED: "Give the letter of the right option inside \\boxed{}.",
    Grading.LENIENT_BOXED: "Give the right option inside \\boxed{}.",
    Grading.LENIENT_ANSWER_COLON: "End with a line 'Answer: ' and the letter of the right option.",
}


class McqaConfig(BaseResourcesServerConfig):
    """Configuration."""

    grading_mode: Grading = Grading.STRICT_SINGLE_LETTER_BOXED
    """The mode of rows without a ``grading_mode``."""
    regex_timeout_s: float = Field(5.0, gt=0)
    """The time limit for searching one answer with the row's own regular expression. If the search takes longer twice,
    the answer chooses no option."""


class McqaEnvironment(SimpleResourcesServer):
    """Rows hold ``options`` and ``expected_answer`` (private) and, if they have no prompt, ``question``. The right
    choice earns a reward of 1."""

    config: McqaConfig
    topologies: ClassVar[tuple[Topology, ...]] = (Topology.NONE,)

    _searchers: WorkerPool | None = PrivateAttr(default=None)

    def public_row(self, row: dict[str, Any]) -> dict[str, Any]:
        public = super().public_row(row)
        params = dict(public.get("responses_create_params") or {})
        if not params.get("input") and isinstance(row.get("question"), str):
            option_lines = "\n".join(f"{letter}. {text}" for letter, text in _options(row).items())
            instruction = _ASKED[self._mode(row)]
            params["input"] = [{"role": "user", "content": f"{row['question']}\n\n{option_lines}\n\n{instruction}"}]
        return {**public, "responses_create_params": params}

    async def open_session(self, row: dict[str, Any], rollout: RolloutIdentity) -> SessionDescriptor:
        """Refuse a row whose expected answer is not one of its options."""
        _expected(row, _options(row))
        self._mode(row)
        _patterns(row)
        return await super().open_session(row, rollout)

    async def grade(
        self, row: dict[str, Any], response: dict[str, Any], artifacts: Sequence[Artifact], rollout: RolloutIdentity
    ) -> Verdict:
        options, text = _options(row), answered_text(response)
        expected = _expected(row, options)
        chosen = await self._chosen(row, text, options)
        reason = None if chosen == expected else "wrong choice" if chosen else "no choice found in the response"
        if not text.strip():
            reason = "the response has no text"
        return Verdict.of(float(chosen == expected), details={"chosen": chosen}, reward_reason=reason)

    async def gold_solution(self, row: dict[str, Any]) -> dict[str, Any] | None:
        options = _options(row)
        expected = _expected(row, options)
        text = f"\\boxed{{{expected}}}\nAnswer: {expected}"
        # A text that matches an arbitrary regular expression cannot be derived from that expression.
        if await self._chosen(row, text, options) != expected:
            return None
        return {"text": text}

    async def shutdown(self) -> None:
        await super().shutdown()
        if self._searchers is not None:
            self._searchers.close()

    def _mode(self, row: Mapping[str, Any]) -> Grading:
        mode = row.get("grading_mode") or self.config.grading_mode
        try:
            return Grading(mode)
        except ValueError:
            raise RowError(
                f"field 'grading_mode' is {mode!r}; it is one of {', '.join(Grading)}", field="grading_mode"
            ) from None

    async def _chosen(self, row: Mapping[str, Any], text: str, options: Mapping[str, str]) -> str | None:
        """Return the option that the row's own regular expressions find, else the one that its mode finds."""
        if patterns := _patterns(row):
            found = await self._found(patterns, text[-ANSWER_CHARS:])
            if found is None:
                return None
            chosen = next(filter(None, (lenient_choice(each, options) for each in found)), None)
            if chosen is not None:
                return chosen
        return choice(text, options, self._mode(row))

    async def _found(self, patterns: list[str], text: str) -> list[str] | None:
        """Return what the row's own regular expressions find, or ``None`` if that takes too long. A worker searches,
        so it can be killed."""
        if self._searchers is None:
            self._searchers = WorkerPool(
                "resources_servers.mcqa.extraction:last_matches",
                workers=1,
                warm_up={"patterns": ["a"], "text": "a"},
                missing="install this suite",
            )
        question, timeout_s = {"patterns": patterns, "text": text}, self.config.regex_timeout_s
        reply = await self._searchers.ask(question, timeout_s=timeout_s)
        if reply.ending is Ending.TIMED_OUT:  # once more, because this machine may have stalled
            reply = await self._searchers.ask(question, timeout_s=timeout_s)
        if reply.ending in (Ending.DIED, Ending.FAILED):
            raise VerifierError(
                f"no verdict: the search with the row's 'output_regex' {reply.ending}",
                kind=FailureKind.VERIFIER_FAILED,
                retryable=True,
            )
        found: list[str] | None = reply.value if reply.ending is Ending.ANSWERED else None
        return found


def _options(row: Mapping[str, Any]) -> dict[str, str]:
    """Return letter → text. A row holds one mapping, a list of mappings of one letter each, or a list of texts. Arrow
    gives every mapping all letters, with null for those that it does not have."""
    options = row.get("options")
    by_letter: dict[str, str] = {}
    if isinstance(options, Mapping):
        by_letter = {str(letter).upper(): str(text) for letter, text in options.items() if text is not None}
    elif isinstance(options, list):
        for number, option in enumerate(options):
            members = option if isinstance(option, Mapping) else {chr(ord("A") + number): option}
            by_letter |= {str(letter).upper(): str(text) for letter, text in members.items() if text is not None}
    if len(by_letter) < 2 or not all(re.fullmatch("[A-Z]", letter) for letter in by_letter):
        raise RowError(
            'field \'options\' must hold 2 to 26 options, by letter: [{"A": "…"}, {"B": "…"}]',
            field="options",
        )
    return by_letter


def _expected(row: Mapping[str, Any], options: Mapping[str, str]) -> str:
    value = row.get("expected_answer")
    expected = value.strip().upper() if isinstance(value, str) else ""
    if expected not in options:
        raise RowError(
            "field 'expected_answer' must be the letter of one of the row's options", field="expected_answer"
        )
    return expected


def _patterns(row: Mapping[str, Any]) -> list[str]:
    """The row's own regular expressions, which take precedence over its mode: one, or a list in order."""
    metadata = row.get("template_metadata")
    given = metadata.get("output_regex") if isinstance(metadata, Mapping) else None
    patterns = given if isinstance(given, list) else [] if given is None else [given]
    try:
        return [re.compile(pattern).pattern for pattern in patterns]
    except (re.error, TypeError) as error:
        raise RowError(
            f"field 'template_metadata.output_regex' is not a valid regular expression: {error}",
            field="template_metadata",
        ) from None


if __name__ == "__main__":
    McqaEnvironment.run_webserver()
