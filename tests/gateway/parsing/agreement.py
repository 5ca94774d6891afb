"""Whether the parsers that engines bring read the same answers as the ones here, and through the same door.

    python -m tests.gateway.parsing.agreement vllm|sglang|transformers

To be run in an environment that has the package; the suite's own has none of them. Exits with 1 on a disagreement that
is not among those known.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from nemo_gym.contract.errors import ConfigError
from nemo_gym.gateway.parsing import ParsedAnswer, answer_parser
from tests.gateway.parsing.policies import FAMILIES, policy, rendered

PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "items": {"type": "array", "items": {"type": "integer"}},
}
TOOL = {
    "type": "function",
    "function": {"name": "edit", "parameters": {"type": "object", "properties": PROPERTIES, "required": ["text"]}},
}
ARGUMENTS = {"text": 'a <b>\n  c"', "count": 7, "items": [1, 2]}
TOOL_PARSERS = {
    "sglang": {
        "chatml_think": "hermes",
        "qwen3_coder": "qwen3_coder",
        "glm45": "glm45",
        "deepseek_v3": "deepseekv3",
        "deepseek_v31": "deepseekv31",
        "kimi_k2": "kimi_k2",
        "minimax_m2": "minimax-m2",
        "mistral_args": "mistral",
        "inst_strict": "mistral",
        "llama_headers": "llama3",
    },
    "vllm": {
        "chatml_think": "hermes",
        "qwen3_coder": "qwen3_coder",
        "glm45": "glm45",
        "kimi_k2": "kimi_k2",
        "minimax_m2": "minimax_m2",
        "mistral_args": "mistral",
        "inst_strict": "mistral",
    },
}
REASONING_PARSERS = {"sglang": ("qwen3", "deepseek-r1"), "vllm": ("qwen3", "deepseek_r1")}
KNOWN = {
    ("sglang", "inst_strict"): "its Mistral parser wants a space between the token and the list",
    ("vllm", "mistral_args"): "its Mistral parser wants Mistral's own tokenizer for the newer form",
}
REASONED = (
    ("<think>\nhm\n</think>\n\nyes", ""),
    ("hm\n</think>\n\nyes", "<think>\n"),
    ("hm", "<think>\n"),
    ('<think>a</think>\n<tool_call>{"name": "edit", "arguments": {}}</tool_call>', ""),
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
    },
}


def same(one: ParsedAnswer, other: ParsedAnswer) -> bool:
    return [_plain(answer) for answer in (one,)] == [_plain(answer) for answer in (other,)]


def _plain(answer: ParsedAnswer) -> Any:
    calls = [(call.name, json.loads(call.arguments)) for call in answer.calls]
    return (answer.content or "").strip(), (answer.reasoning or "").strip(), calls


def written(family: str) -> str:
    calls = [
        {
            "id": f"functions.edit:{number}",
            "type": "function",
            "function": {"name": "edit", "arguments": json.dumps(ARGUMENTS)},
        }
        for number in range(2 if FAMILIES[family].several_calls else 1)
    ]
    content = "I look." if FAMILIES[family].says_before_calls else ""
    _, text = rendered(family, {"content": content, "tool_calls": calls}, [TOOL])
    return text.split("</think>")[-1].lstrip()


def engine_answers(engine: str) -> bool:
    sound = True
    for family, name in TOOL_PARSERS[engine].items():
        text = written(family)
        ours = answer_parser(policy(family), reasoning_parser="none").parse(text, prompt_tail="", tools=[TOOL])
        theirs = answer_parser(policy(family), tool_parser=f"{engine}:{name}", reasoning_parser="none")
        sound &= report(engine, family, name, ours, theirs.parse(text, prompt_tail="", tools=[TOOL]))
    for name in REASONING_PARSERS[engine]:
        theirs = answer_parser(policy("chatml_think"), reasoning_parser=f"{engine}:{name}")
        ours_parser = answer_parser(policy("chatml_think"))
        for text, tail in REASONED:
            ours = ours_parser.parse(text, prompt_tail=tail, tools=[TOOL])
            found = theirs.parse(text, prompt_tail=tail, tools=[TOOL])
            sound &= report(engine, "chatml_think", name, ours, found)
    for unknown in ({"tool_parser": f"{engine}:hermess"}, {"reasoning_parser": f"{engine}:qwen33"}):
        try:
            answer_parser(policy("chatml_think"), **unknown)
        except ConfigError as error:
            print(f"unknown name refused: {str(error)[:90]}…")
        else:
            sound = False
    return sound


def template_answers() -> bool:
    sound = True
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer_config.json"
        file.write_text(json.dumps({"response_template": RESPONSE_TEMPLATE}))
        theirs = answer_parser(policy("chatml_think"), tool_parser=f"transformers:{folder}")
        ours = answer_parser(policy("chatml_think"))
        for text, tail in (*REASONED, (written("chatml_think"), ""), ("plain <b>", "")):
            prompt = f"<|im_start|>assistant\n{tail}"
            mine = ours.parse(text, prompt_tail=prompt, tools=[TOOL])
            sound &= report("transformers", text[:20], "-", mine, theirs.parse(text, prompt_tail=prompt, tools=[TOOL]))
        broken = "<tool_call>{broken</tool_call>"
        sound &= theirs.parse(broken, prompt_tail="", tools=None) == ParsedAnswer(broken)
    return sound


def report(engine: str, family: str, name: str, ours: ParsedAnswer, theirs: ParsedAnswer) -> bool:
    if same(ours, theirs):
        print(f"{family!r} {engine}:{name} same")
        return True
    known = KNOWN.get((engine, family))
    print(f"{family!r} {engine}:{name} DIFFERS ({known or 'unknown'})\n    ours {ours}\n    its  {theirs}")
    return known is not None


if __name__ == "__main__":
    package = sys.argv[1]
    sys.exit(0 if (template_answers() if package == "transformers" else engine_answers(package)) else 1)
