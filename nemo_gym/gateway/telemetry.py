"""A model call as a step with the attributes of OpenTelemetry's conventions for generative AI, and its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_gym.contract.session import RolloutIdentity
from nemo_gym.gateway.policy_request import Usage
from nemo_gym.http.metrics import Counter
from nemo_gym.http.tracing import TRACEPARENT, SpanKind, attempt_context, is_on, step

MODEL_TOKENS = Counter("nemo_gym_model_tokens", "Tokens of model calls, by direction: input, output", ("direction",))
PROVIDER = "nemo_gym"
_SAMPLING = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_output_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
}


def model_call(
    model: str,
    dialect: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    rollout: RolloutIdentity | None,
    session_id: str | None,
) -> step:
    """The step around one call. Where its session knows the attempt, a header counts only for a span of the same
    attempt: it may come from a box."""
    if not is_on():
        return step("model_call")
    parent = attempt_context(rollout, headers.get(TRACEPARENT)) if rollout is not None else None
    given = {name: body[key] for key, name in _SAMPLING.items() if isinstance(body.get(key), int | float)}
    named: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": str(body.get("model") or model),
        "gen_ai.response.model": model,
        "gen_ai.conversation.id": session_id,
        "dialect": dialect,
        **given,
    }
    if rollout is not None:
        named |= {"rollout_id": rollout.rollout_id, "attempt": rollout.attempt}
    return step("model_call", title=f"chat {model}", kind=SpanKind.SERVER, parent=parent, **named)


def answered(calling: step, usage: Usage | None, **attributes: Any) -> None:
    """What came of a call; ``usage`` where it is known and counts."""
    if usage is not None:
        MODEL_TOKENS.add("input", amount=usage.input_tokens)
        MODEL_TOKENS.add("output", amount=usage.output_tokens)
        attributes |= {
            "gen_ai.usage.input_tokens": usage.input_tokens,
            "gen_ai.usage.output_tokens": usage.output_tokens,
        }
    calling.set(**attributes)
