"""Make a policy of `make_policy` loadable by real engines: write weights, warm-start them, and recompute logprobs.

Run by the Python of an engine's environment (``scripts/install-engines --python vllm``), which has PyTorch and
``transformers``; it imports nothing of this project.

    python real_policy.py weights DIR [--seed 0] [--architecture qwen3|gemma3] [--window N]
                                                     write config.json and model.safetensors into DIR; attention sees
                                                     N tokens, or all (gemma3: 512)
    python real_policy.py imitate DIR < LINES        train on conversations, {"ids": […], "said": […]} each, in their
                                                     order; the loss counts the ids whose "said" is 1
    python real_policy.py logprobs DIR < LINES       for each JSON array of token ids, a JSON array with the logprob
                                                     of each token given those before it; the first is null
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

POSITIONS = 131_072
SPREAD = 4.0
"""Factor of the random matrices, large enough that answers vary and end now and then."""
BATCH, PEAK_RATE, RAMP = 8, 3e-3, 20
PIECE_TOKENS = 2_048
"""Tokens per forward pass: a coding agent's whole conversation takes gigabytes for attention masks and logits."""


def config_of(architecture: str, vocabulary: int, window: int | None) -> PreTrainedConfig:
    shape = {
        "vocab_size": vocabulary,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": POSITIONS,
    }
    if architecture == "gemma3":  # all of its first five layers attend to a window
        return Gemma3TextConfig(**shape, query_pre_attn_scalar=32, sliding_window=window or 512)
    windowed = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    return Qwen3Config(**shape, **(windowed if window is not None else {}), tie_word_embeddings=False)


def write_weights(folder: Path, seed: int, architecture: str, window: int | None) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(architecture, max(ids) + 1, window)).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(SPREAD)
    save(model, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))


def save(model: PreTrainedModel, folder: Path) -> None:
    generation = (folder / "generation_config.json").read_bytes()
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_bytes(generation)  # the policy's own, with its stop tokens


def imitate(folder: Path) -> None:
    """Take one step for each `BATCH` lines, with a learning rate that rises and then falls linearly."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.div_(SPREAD)
    lines = [json.loads(line) for line in sys.stdin]
    batches = [lines[start : start + BATCH] for start in range(0, len(lines), BATCH)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step, batch in enumerate(batches):
        longest = max(len(row["ids"]) for row in batch)
        ids = torch.tensor([row["ids"] + [0] * (longest - len(row["ids"])) for row in batch])
        mask = torch.tensor([row["said"] + [0] * (longest - len(row["said"])) for row in batch]).bool()[:, 1:]
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(1.0, (step + 1) / RAMP) * max(0.05, 1 - step / len(batches))
        # Padding is at the end, where no real token attends to it, so no mask is needed.
        states = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[mask]
        loss = torch.nn.functional.cross_entropy(model.lm_head(states), ids[:, 1:][mask])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0 or step + 1 == len(batches):
            print(f"step {step + 1} of {len(batches)}: loss {loss.item():.3f}", flush=True)
    save(model, folder)


@torch.no_grad()
def write_logprobs(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for line in sys.stdin:
        ids = torch.tensor(json.loads(line))
        cache, logprobs = DynamicCache(), []
        for start in range(0, len(ids) - 1, PIECE_TOKENS):
            piece, targets = ids[:-1][start : start + PIECE_TOKENS], ids[1:][start : start + PIECE_TOKENS]
            logits = model(piece[None], past_key_values=cache, use_cache=True).logits[0].float().log_softmax(-1)
            logprobs += logits.gather(1, targets[:, None])[:, 0].tolist()
        sys.stdout.write(json.dumps([None, *logprobs]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("act", choices=["weights", "imitate", "logprobs"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--architecture", choices=["qwen3", "gemma3"], default="qwen3")
    parser.add_argument("--window", type=int)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.act == "weights":
        write_weights(given.folder, given.seed, given.architecture, given.window)
    elif given.act == "imitate":
        imitate(given.folder)
    else:
        write_logprobs(given.folder)


if __name__ == "__main__":
    main()
