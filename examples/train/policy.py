"""Make a policy of one million parameters: tokenizer, chat template, weights and warm start."""

from __future__ import annotations

import json
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.train import task
from nemo_gym.contract.errors import ConfigError
from nemo_gym.gateway.tokens import PolicyTokenizer

SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "[TOOL_CALLS]")
PAD_ID = 0
END = "<|end|>"
MERGES = 1_200
POSITIONS = 512
DROPOUT = 0.1
"""Dropout of merges in demonstrated answers: the policy learns more spellings of a word than the tokenizer makes."""
# Each digit is a separate word, as in Qwen's tokenizers, and so are line breaks.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
ENGLISH = Path(__file__).resolve().parents[2] / "LICENSE"
"""Text from which the tokenizer learns most of its merges: one that stays as it is, so that policies stay the same."""
SPELLINGS = '[TOOL_CALLS]add{"a":1,"b":2} plus minus subtract \\boxed{1}{"result":1}'
"""The task's words, so that the tokenizer learns them whole."""
GIVEN_WEIGHT = 0.1
"""Weight, in the warm-start loss, of tokens that the policy does not write: they teach it to look things up."""


@dataclass(frozen=True, slots=True)
class Size:
    width: int = 128
    layers: int = 4
    heads: int = 4
    inner: int = 384


def write_tokenizer(folder: Path, texts: Iterable[str]) -> None:
    """Write a policy's directory without weights, for the gateway and the engine; learn the BPE from ``texts``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = len(SPECIAL) + len(alphabet) + MERGES
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=alphabet,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copy(_TEMPLATE, folder / "chat_template.jinja")
    end = tokenizer.token_to_id(END)
    names = {"eos_token": END, "pad_token": SPECIAL[PAD_ID], "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "model_max_length": POSITIONS}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end], "pad_token_id": PAD_ID}))


def merges_of(folder: Path) -> int:
    return len(json.loads((folder / "tokenizer.json").read_text())["model"]["merges"])


def make_model(folder: Path, seed: int, size: Size = Size()) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size(),
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        head_dim=size.width // size.heads,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        rope_theta=10_000.0,
        initializer_range=0.05,
        pad_token_id=PAD_ID,
        eos_token_id=SPECIAL.index(END),
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def save_weights(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write ``config.json`` and ``model.safetensors`` beside the tokenizer's files, and keep the latter unchanged."""
    generation = (folder / "generation_config.json").read_bytes()
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_bytes(generation)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The token ids of one conversation, and which of them the policy writes."""

    ids: list[int]
    said: list[bool]


class Speller:
    """Encodes conversations: text around answers as the gateway encodes it, and answers with dropout of merges, so
    that a word has many spellings."""

    def __init__(self, folder: Path, dropout: float = DROPOUT) -> None:
        self._policy = PolicyTokenizer.load(folder)
        self._careless = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._careless.model.dropout = dropout
        self._opening, self._closing = SPECIAL.index("<|assistant|>"), SPECIAL.index(END)

    def tokens(self, messages: Sequence[Mapping[str, Any]]) -> Tokens:
        text = self._policy.render(messages, add_generation_prompt=False)
        opening = SPECIAL[self._opening]
        head, *answers = text.split(opening)
        ids = self._policy.encode(head + opening)
        generated = [False] * len(ids)
        for number, answer in enumerate(answers):
            answer_text, end, context = answer.partition(END)
            answer_ids = self._careless.encode(answer_text + end, add_special_tokens=False).ids
            last = number == len(answers) - 1
            context_ids = [] if last else self._policy.encode(context + opening)
            ids += answer_ids + context_ids
            generated += [True] * len(answer_ids) + [False] * len(context_ids)
        return Tokens(ids, generated)

    def again(self, ids: Sequence[int]) -> Tokens:
        """Decode ``ids`` and encode the text again, as a trainer does that stores text instead of tokens."""
        text = self._policy.decode(ids)
        encoded = self._policy.encode(text)
        generated, is_answer = [], False
        for token in encoded:
            generated.append(is_answer)
            is_answer = token == self._opening or (is_answer and token != self._closing)
        return Tokens(encoded, generated)


def padded(rows: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
    """Return the ids, and the mask of those that the policy writes, padded to [rows, longest row]."""
    longest = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), longest), PAD_ID)
    generated = torch.zeros((len(rows), longest), dtype=torch.bool)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.tensor(row.ids)
        generated[number, : len(row.said)] = torch.tensor(row.said)
    return ids, generated


def logprobs_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logprob of each token but the first, given the tokens before it: [rows, tokens − 1]. Padding is at
    the end, where no real token attends to it, so no mask is needed."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    return -nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")


# Warm start

BATCH, PEAK_RATE, RAMP = 48, 3e-3, 50
LAST = 20
"""The reported loss is the mean over this many steps."""


def make_policy(folder: Path, seed: int, steps: int, threads: int, say: Callable[[str], None]) -> Path:
    """Make a warm-started policy in ``folder``, unless it holds one already. Raises `ConfigError` if the one that it
    holds has had another number of steps."""
    report = folder / "warm_start.json"
    if report.is_file():
        if (made := json.loads(report.read_text())["steps"]) != steps:
            raise ConfigError(
                f"--warm-steps={steps}: {folder} has a policy of {made} steps; remove it, or choose another --output",
                key="warm_steps",
            )
        return folder
    started, cpu = time.monotonic(), time.process_time()
    write_tokenizer(folder, [ENGLISH.read_text(encoding="utf-8"), *[SPELLINGS] * 400])
    torch.set_num_threads(threads)
    model, demonstrated = make_model(folder, seed), demonstrations(seed, Speller(folder))
    losses = imitate(model, demonstrated, steps, say)
    # vLLM 0.32 keeps its old head if the new weights leave the head out because it is tied to the embedding.
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    save_weights(model, folder)
    training = {"seed": seed, "steps": len(losses), "loss": statistics.fmean(losses[-LAST:])}
    durations = {"cpu_s": time.process_time() - cpu, "wall_s": time.monotonic() - started}
    report.write_text(json.dumps({**training, **durations}))
    return folder


def demonstrations(seed: int, speller: Speller) -> Iterator[list[Tokens]]:
    """Yield batches of demonstrated conversations without end."""
    training, held_out = task.split_operands(seed)
    draw = random.Random(f"demonstrations:{seed}")
    source = task.sums(training, draw, never=held_out, wide=task.WIDE_SHARE)
    while True:
        yield [speller.tokens(task.demonstration(next(source), held_out, draw)) for _ in range(BATCH)]


def imitate(
    model: Qwen3ForCausalLM,
    demonstrated: Iterator[list[Tokens]],
    steps: int,
    say: Callable[[str], None],
) -> list[float]:
    """Train ``steps`` steps on demonstrations at a rate that rises, then falls linearly. Return each step's loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    losses: list[float] = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(1.0, (step + 1) / RAMP) * max(0.05, 1 - step / steps)
        ids, generated = padded(next(demonstrated))
        logprobs, answer_mask = logprobs_of(model, ids), generated[:, 1:]
        context_mask = (ids[:, 1:] != PAD_ID) & ~answer_mask
        loss = (
            -(logprobs * answer_mask).sum() / answer_mask.sum()
            - GIVEN_WEIGHT * (logprobs * context_mask).sum() / context_mask.sum()
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            say(f"warm start: step {step + 1} of {steps}, loss {statistics.fmean(losses[-LAST:]):.3f}")
    return losses


def load_model(folder: Path) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def save_step(model: Qwen3ForCausalLM, folder: Path) -> Path:
    """Write only the weights, in the form that the engine reloads."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    written = folder / "model.safetensors.new"
    save_file(weights, written, metadata={"format": "pt"})
    written.replace(folder / "model.safetensors")  # never in place: a reader may have the old file mapped
    return folder
