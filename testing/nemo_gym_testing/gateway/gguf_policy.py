"""Write a policy of ``real_policy.py`` as one GGUF file, which llama.cpp loads.

Run by the Python of llama.cpp's environment (``scripts/install-engines --python llama-cpp``), which has ``gguf`` and
``safetensors``; it imports nothing of this project.

    python gguf_policy.py DIR FILE      DIR: of architecture gemma3, whose layers attend to a window
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy
from gguf import GGUFWriter, TokenType
from safetensors.numpy import load_file

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Names of a layer's weights: in the policy → in the GGUF file."""
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}


def name_of(name: str) -> str:
    path = name.removesuffix(".weight")
    if path in WHOLE:
        return f"{WHOLE[path]}.weight"
    _, _, layer, rest = path.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def add_shape(out: GGUFWriter, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_key_length(config["head_dim"])
    out.add_value_length(config["head_dim"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_sliding_window(config["sliding_window"])
    out.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    out.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])


def add_tokenizer(out: GGUFWriter, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    pieces = {number: piece for piece, number in tokenizer["model"]["vocab"].items()}
    kinds = dict.fromkeys(pieces, TokenType.NORMAL)
    for token in tokenizer["added_tokens"]:
        pieces[token["id"]] = token["content"]
        # The server omits control tokens from its text, but marks such as <tool_call> must stay in it.
        ends = token["content"].startswith("<|")
        kinds[token["id"]] = TokenType.CONTROL if ends else TokenType.USER_DEFINED
    order = range(len(pieces))
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("llama-bpe")  # the known expression that is closest to the policy's
    out.add_token_list([pieces[number] for number in order])
    out.add_token_types([kinds[number] for number in order])
    out.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    )
    numbers = {piece: number for number, piece in pieces.items()}
    out.add_eos_token_id(numbers[settings["eos_token"]])
    out.add_bos_token_id(numbers[settings.get("bos_token") or settings["eos_token"]])
    out.add_add_bos_token(False)
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    # The generation tag tells trainers which text the policy writes; llama.cpp does not know it.
    out.add_chat_template(re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template))


def main() -> None:
    folder, file = Path(sys.argv[1]), sys.argv[2]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    out = GGUFWriter(file, "gemma3")
    out.add_name("tiny")
    add_shape(out, config)
    add_tokenizer(out, folder)
    for name, weight in load_file(folder / "model.safetensors").items():
        shift = 1 if name.endswith("norm.weight") else 0  # gemma3's norms multiply by their weights plus one
        out.add_tensor(name_of(name), weight.astype(numpy.float32) + numpy.float32(shift))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


if __name__ == "__main__":
    main()
