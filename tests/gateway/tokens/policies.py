"""Small policies of several template families: chat templates written here, tokenizers trained here."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from nemo_gym.gateway.tokens.policy import PolicyTokenizer
from nemo_gym_testing.gateway.tiny.policies import FAMILIES as TINY_FAMILIES
from nemo_gym_testing.gateway.tiny.policies import chat_template

ODD = Path(__file__).parent / "families"
CORPUS = [
    *("the quick brown fox jumps over the lazy dog and runs the tests again",) * 8,
    *('{"name": "shell", "arguments": {"command": "ls -la"}} user assistant system tool result',) * 8,
    *("  indented\n\n\tlines and   spaces\nLine: 1.0, 2, 3\n",) * 8,
]
# Line breaks are words of their own, as in current policies: a prompt's end does not depend on the answer behind it.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
LLAMA = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
)
INST = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]")
BARS = tuple(
    f"<｜{name}｜>" for name in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁outputs▁begin")
)
HEADERS = ("[gMASK]", "<sop>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")

SPECIAL: dict[str, tuple[tuple[str, ...], str, str]] = {
    "chatml_think": (CHATML, "<|endoftext|>", "<|im_end|>"),
    "llama_headers": (LLAMA, "<|begin_of_text|>", "<|end_of_text|>"),
    "inst_strict": (INST, "<s>", "</s>"),
    "bar_tokens": (BARS, BARS[0], BARS[1]),
    "header_stop": (HEADERS, "<sop>", "<|endoftext|>"),
    "moving_tools": (INST, "<s>", "</s>"),
    "numbered": (CHATML, "<|endoftext|>", "<|im_end|>"),
    "switch_in_text": (CHATML, "<|endoftext|>", "<|im_end|>"),
    "plain_text": (CHATML, "<|endoftext|>", "<|endoftext|>"),
}
FAMILIES = ("chatml_think", "llama_headers", "inst_strict", "bar_tokens", "header_stop")
"""Those that append, and must be continued incrementally."""


def write(folder: Path, family: str) -> Path:
    """A model directory as a model repository would hold it, without the weights."""
    special, bos, eos = SPECIAL[family]
    tokenizer = Tokenizer(models.BPE())
    if family == "inst_strict":  # spaces as a symbol of their own, put before the text's first word
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
        alphabet = [chr(code) for code in range(32, 127)] + ["\n", "\t", "▁"]
        tokenizer.model = models.BPE(unk_token="<s>", byte_fallback=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=alphabet,
        show_progress=False,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in special],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": bos, "eos_token": {"content": eos, "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(
        chat_template(family) if family in TINY_FAMILIES else (ODD / f"{family}.jinja").read_text()
    )
    if family == "llama_headers":
        ids = [tokenizer.token_to_id(text) for text in ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder


@functools.cache
def policy(family: str) -> PolicyTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return PolicyTokenizer.load(write(Path(folder), family))
