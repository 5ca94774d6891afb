"""Weights for a policy of `make_policy` that real engines load, and logprobs recomputed from them.

Run by the Python of an engine's environment (``scripts/install-engines --python vllm``), which has PyTorch and
``transformers``; it imports nothing of this project.

    python real_policy.py weights DIR [--seed 0]     write config.json and model.safetensors into DIR
    python real_policy.py logprobs DIR < LINES       for each JSON array of token ids, a JSON array with the logprob
                                                     of each token after those before it; the first is null
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

POSITIONS = 131_072
SPREAD = 4.0
"""Random matrices are multiplied by it: answers are varied then, and end now and then."""


def write_weights(folder: Path, seed: int) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    known = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=max(known) + 1,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(SPREAD)
    generation = (folder / "generation_config.json").read_bytes()
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_bytes(generation)  # the policy's own, with its stop tokens
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))


@torch.no_grad()
def write_logprobs(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for line in sys.stdin:
        ids = torch.tensor(json.loads(line))
        logits = model(ids[None, :-1]).logits[0].float().log_softmax(-1)
        found = logits.gather(1, ids[1:, None])[:, 0].tolist()
        sys.stdout.write(json.dumps([None, *found]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("act", choices=["weights", "logprobs"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.act == "weights":
        write_weights(given.folder, given.seed)
    else:
        write_logprobs(given.folder)


if __name__ == "__main__":
    main()
