"""Tokens where NeMo Gym's trainers read them. `read_as_nemo_rl` is what NeMo RL does with a response."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_gym.rollouts.result_rows import is_masked, masked_response, with_tokens, without_tokens

PROMPT = [1, 2, 3]


def message(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "id": text, "status": "completed", "content": content}


CALL = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c", "id": "fc"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "4"}
THOUGHT = {"type": "reasoning", "id": "r", "summary": []}


def trajectory(turns: int, *, index: int = 0, logprobs: bool = True) -> dict[str, Any]:
    """Each turn samples two tokens, with one of context before all but the first."""
    ids: list[int] = []
    mask: list[int] = []
    spans = []
    for number in range(turns):
        if number:
            ids.append(900 + number)
            mask.append(0)
        spans.append({"start": len(ids), "end": len(ids) + 2})
        ids += [10 * number, 10 * number + 1]
        mask += [1, 1]
    given = [-float(token) for token in ids] if logprobs else None
    return {
        "index": index,
        "prompt_ids": PROMPT,
        "response_ids": ids,
        "response_mask": mask,
        "logprobs": given,
        "turns": spans,
    }


def row(output: list[dict[str, Any]], *trajectories: dict[str, Any]) -> dict[str, Any]:
    return {"response": {"id": "x", "output": output}, "ng_trajectory": [*trajectories]}


def read_as_nemo_rl(response: dict[str, Any]) -> tuple[list[int], list[int], list[float]]:
    """All tokens, which of them are trained, and their logprobs. Fails where NeMo RL does."""
    seen: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for item in response["output"]:
        if not item.get("generation_token_ids"):
            continue
        prompt, generated = item["prompt_token_ids"], item["generation_token_ids"]
        assert seen == prompt[: len(seen)], "the turns are no one conversation"
        assert len(item["generation_log_probs"]) == len(generated)
        fresh = prompt[len(seen) :]
        mask += [0] * len(fresh) + [1] * len(generated)
        logprobs += [0.0] * len(fresh) + item["generation_log_probs"]
        seen += fresh + generated
    assert seen, "no generation data"
    return seen, mask, logprobs


@pytest.mark.parametrize(
    "output",
    [
        [THOUGHT, CALL, OUTPUT, message("a"), CALL, OUTPUT, message("done")],
        [CALL, CALL, OUTPUT, OUTPUT, THOUGHT, CALL, OUTPUT, THOUGHT, message("done")],
        [message("only the last one is told")],
        [],
        [CALL, OUTPUT] * 5 + [message("more turns than this conversation has")],
    ],
)
def test_trainer_reads_the_trajectory_whatever_the_harness_tells_of_it(output: list[dict[str, Any]]) -> None:
    given = row(output, trajectory(3))
    found = with_tokens(given)
    expected = trajectory(3)
    tokens, mask, logprobs = read_as_nemo_rl(found["response"])
    assert tokens == [*PROMPT, *expected["response_ids"]]
    assert mask == [0, 0, 0, *expected["response_mask"]]
    assert [lp for lp, sampled in zip(logprobs, mask, strict=True) if sampled] == [-0.0, -1, -10, -11, -20, -21]
    assert without_tokens(found["response"]) == given["response"]
    assert given["response"]["output"] == output


def test_tokens_are_on_the_last_item_of_what_the_model_wrote_in_a_turn() -> None:
    output = [THOUGHT, CALL, CALL, OUTPUT, OUTPUT, message("done")]
    items = with_tokens(row(output, trajectory(2)))["response"]["output"]
    assert [bool(item.get("generation_token_ids")) for item in items] == [False, False, True, False, False, True]
    assert items[2]["prompt_token_ids"] == PROMPT
    assert items[5]["prompt_token_ids"] == [*PROMPT, 0, 1, 901]


def test_conversation_with_the_most_sampled_tokens_is_the_response() -> None:
    found = with_tokens(row([message("x")], trajectory(1), trajectory(2, index=1), trajectory(1, index=2)))
    assert read_as_nemo_rl(found["response"])[0] == [*PROMPT, *trajectory(2)["response_ids"]]


def test_tokens_that_the_model_server_wrote_stay() -> None:
    item = {**message("x"), "prompt_token_ids": [7], "generation_token_ids": [8], "generation_log_probs": [-1.0]}
    given = row([item], trajectory(1))
    assert with_tokens(given) is given


def test_tokens_that_the_model_server_wrote_of_two_conversations_give_way_to_the_longest() -> None:
    told = [
        {
            **message(str(number)),
            "prompt_token_ids": prompt,
            "generation_token_ids": [5, 6],
            "generation_log_probs": [-1.0, -1.0],
        }
        for number, prompt in enumerate(([1, 2], [9, 2, 5, 6, 3]))
    ]
    with pytest.raises(AssertionError):
        read_as_nemo_rl({"output": told})
    longest = trajectory(2)
    seen, mask, _ = read_as_nemo_rl(with_tokens(row(told, trajectory(1, index=1), longest))["response"])
    assert seen == PROMPT + longest["response_ids"]
    assert mask == [0] * len(PROMPT) + longest["response_mask"]


@pytest.mark.parametrize(
    "given",
    [
        {"response": {"output": []}},
        {"response": None, "ng_trajectory": [trajectory(1)]},
        row([message("x")], trajectory(1, logprobs=False)),
        row([message("x")], {"index": 0, "prompt_ids": [], "response_ids": [], "messages": []}),
    ],
)
def test_row_without_tokens_or_logprobs_is_unchanged(given: dict[str, Any]) -> None:
    assert with_tokens(given) is given


def test_masked_response_can_be_read_and_is_known() -> None:
    made = masked_response("agent_crashed")
    assert read_as_nemo_rl(made) == ([0, 0], [0, 1], [0.0, 0.0])
    assert is_masked(made) and made["metadata"] == {"masked": "agent_crashed"}
    assert not is_masked({"id": "x", "output": []}) and not is_masked(None)
