"""What trainers of NeMo Gym read in a rollout's ``response``: the exact tokens of each model call, on the last item of
its output.

An item with ``generation_token_ids`` is one turn to train on. Its ``prompt_token_ids`` begin with everything that the
turns before it were given and sampled, so the items of a response are one conversation: of a rollout's trajectories
the one with the most sampled tokens. The others stand in ``ng_trajectory`` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_gym.contract.rows import RESPONSE_KEY
from nemo_gym.openai_types.tokens import TOKEN_FIELDS
from nemo_gym.rollouts.trajectories import TRAJECTORY_KEY

_SAMPLED = frozenset({"reasoning", "function_call", "local_shell_call", "custom_tool_call"})
"""Kinds of output items that the model writes, beside its messages."""
_UNTOLD = "msg_untold_turn_"
"""Ids of items for turns of which the harness tells nothing."""
MASKED = "masked"
"""Among the metadata of a response that stands for none."""


def with_tokens(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the tokens of its trajectory in ``response.output``; unchanged where it has none, or where the
    model server wrote them there itself."""
    response = row.get(RESPONSE_KEY)
    trajectory = _longest(row.get(TRAJECTORY_KEY))
    if trajectory is None or not isinstance(response, Mapping):
        return row
    output = response.get("output")
    items = [item for item in output if isinstance(item, dict)] if isinstance(output, list) else []
    if any(item.get("generation_token_ids") for item in items):
        return row
    return {**row, RESPONSE_KEY: {**response, "output": _attached(items, _turns(trajectory))}}


def masked_response(failure: str, *, created_at: float = 0.0) -> dict[str, Any]:
    """A response for a rollout that has none: complete, so that a trainer can read it, and of one token, which it
    leaves out of the loss because the row is masked. ``failure``: why."""
    return {
        "id": "resp_masked",
        "object": "response",
        "created_at": created_at,
        "model": "",
        "status": "incomplete",
        "metadata": {MASKED: failure},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "output": [_said("msg_masked", [0], [0], [0.0])],
    }


def is_masked(response: Any) -> bool:
    """Whether a response is one of `masked_response`."""
    metadata = response.get("metadata") if isinstance(response, Mapping) else None
    return isinstance(metadata, Mapping) and MASKED in metadata and response.get("id") == "resp_masked"


def without_tokens(response: Any) -> Any:
    """The response as its agent answered it: without what `with_tokens` added."""
    output = response.get("output") if isinstance(response, Mapping) else None
    if not isinstance(output, list):
        return response
    items = [
        {key: value for key, value in item.items() if key not in TOKEN_FIELDS} if isinstance(item, dict) else item
        for item in output
        if not (isinstance(item, dict) and str(item.get("id", "")).startswith(_UNTOLD))
    ]
    return {**response, "output": items}


def _longest(trajectories: Any) -> Mapping[str, Any] | None:
    """The trajectory with the most sampled tokens, the latest of equal ones; nothing without tokens or logprobs."""
    found = [
        each
        for each in (trajectories if isinstance(trajectories, list) else ())
        if isinstance(each, Mapping) and each.get("prompt_ids") and each.get("logprobs") is not None
    ]
    return max(found, key=lambda each: (sum(each["response_mask"]), each["index"]), default=None)


def _turns(trajectory: Mapping[str, Any]) -> list[tuple[list[int], list[int], list[float]]]:
    prompt, response, logprobs = trajectory["prompt_ids"], trajectory["response_ids"], trajectory["logprobs"]
    return [
        (
            [*prompt, *response[: turn["start"]]],
            response[turn["start"] : turn["end"]],
            logprobs[turn["start"] : turn["end"]],
        )
        for turn in trajectory["turns"]
        if turn["end"] > turn["start"]
    ]


def _attached(
    items: Sequence[dict[str, Any]], turns: Sequence[tuple[list[int], list[int], list[float]]]
) -> list[dict[str, Any]]:
    """Each turn on the last item of what the model wrote in it, counted from the end. Turns of which the harness tells
    nothing get an empty message of their own before the others."""
    last_items = [
        number
        for number, item in enumerate(items)
        if _is_sampled(item) and not (number + 1 < len(items) and _is_sampled(items[number + 1]))
    ]
    places = last_items[-len(turns) :] if turns else []
    untold = turns[: len(turns) - len(places)]
    told = dict(zip(places, turns[len(untold) :], strict=True))
    found = [_said(f"{_UNTOLD}{number}", *turn) for number, turn in enumerate(untold)]
    for number, item in enumerate(items):
        if (turn := told.get(number)) is not None:
            found.append({**item, **_token_fields(*turn)})
        else:
            found.append(item)
    return found


def _is_sampled(item: Mapping[str, Any]) -> bool:
    kind = item.get("type", "message")
    return kind in _SAMPLED or (kind == "message" and item.get("role") == "assistant")


def _said(item_id: str, prompt: list[int], generated: list[int], logprobs: list[float]) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "", "annotations": []}],
        **_token_fields(prompt, generated, logprobs),
    }


def _token_fields(prompt: list[int], generated: list[int], logprobs: list[float]) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "generation_token_ids": generated, "generation_log_probs": logprobs}
