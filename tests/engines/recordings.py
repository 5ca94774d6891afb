"""What a real engine answers to fixed requests, recorded once: the doubles are held to it in every run of the tests.

    python -m tests.engines.recordings vllm|llama-cpp URL [--update]

asks the engine at ``URL`` (as `tests.engines.conftest` and `tests.engines.test_llama_cpp` start them) and compares the
shape of its answers with the engine's file, or writes the file anew. Values that differ from run to run (ids, times,
sampled tokens) are no part of a shape.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import orjson

FILES = {"vllm": "vllm-0.32.0.json", "llama-cpp": "llama-cpp-0.3.36.json"}
PROMPT = [257, 300, 301, 302]
_SAMPLING = {"temperature": 1.0, "seed": 3, "ignore_eos": True}
_COMPLETION = {
    "model": "tiny",
    "prompt": PROMPT,
    **_SAMPLING,
    "max_tokens": 6,
    "logprobs": 0,
    "return_token_ids": True,
    "add_special_tokens": False,
    "request_id": "recorded",
}
Requests = Mapping[str, tuple[str, str, dict[str, Any] | None]]
_VLLM: Requests = {
    "models": ("GET", "/v1/models", None),
    "tokenize": ("POST", "/tokenize", {"model": "tiny", "prompt": "half of it", "add_special_tokens": False}),
    "completion": ("POST", "/v1/completions", _COMPLETION),
    "stream": (
        "POST",
        "/v1/completions",
        {**_COMPLETION, "stream": True, "stream_options": {"include_usage": True}, "stream_interval": 4},
    ),
    "generate": (
        "POST",
        "/inference/v1/generate",
        {
            "request_id": "recorded-2",
            "token_ids": PROMPT,
            "model": "tiny",
            "sampling_params": {**_SAMPLING, "max_tokens": 6, "logprobs": 0},
        },
    ),
    "too_long": ("POST", "/v1/completions", {**_COMPLETION, "max_tokens": 1_000_000}),
    "unknown_model": ("POST", "/v1/completions", {**_COMPLETION, "model": "another"}),
}


_CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "half of it"}],
    "temperature": 0,
    "max_tokens": 6,
    "logprobs": True,
    "top_logprobs": 1,
}
_LLAMA_CPP: Requests = {
    "models": ("GET", "/v1/models", None),
    "chat": ("POST", "/v1/chat/completions", _CHAT),
    "stream": ("POST", "/v1/chat/completions", {**_CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    "too_long": (
        "POST",
        "/v1/chat/completions",
        {**_CHAT, "messages": [{"role": "user", "content": "one two three " * 100_000}]},
    ),
}
REQUESTS = {"vllm": _VLLM, "llama-cpp": _LLAMA_CPP}


async def ask(engine: str, url: str) -> dict[str, Any]:
    """Every request's status and answer: an object, or the list of a stream's events."""
    found: dict[str, Any] = {}
    # A connection for each: llama.cpp closes one behind a stream, unsaid.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        for name, (method, route, body) in REQUESTS[engine].items():
            async with http.request(method, url + route, json=body) as reply:
                raw = await reply.read()
                streamed = reply.content_type == "text/event-stream"
                answer = _events(raw) if streamed else orjson.loads(raw)
                found[name] = {"status": reply.status, "answer": answer}
    return found


def _events(raw: bytes) -> list[Any]:
    lines = [line.removeprefix(b"data: ") for line in raw.splitlines() if line.startswith(b"data: ")]
    return [orjson.loads(line) if line != b"[DONE]" else "[DONE]" for line in lines]


def recorded(engine: str) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(_file(engine).read_bytes())
    return found


def _file(engine: str) -> Path:
    return Path(__file__).with_name(FILES[engine])


def strange(ours: Any, real: Any, where: str = "") -> list[str]:
    """Where ``ours`` has a key, or a kind of value, that the real answer has not. Null stands for any kind."""
    if ours is None or real is None:
        return []
    if isinstance(ours, Mapping) and isinstance(real, Mapping):
        missing = [f"{where}.{key}: no such key in the real answer" for key in ours if key not in real]
        shared = [key for key in ours if key in real]
        return missing + [one for key in shared for one in strange(ours[key], real[key], f"{where}.{key}")]
    if isinstance(ours, list) and isinstance(real, list):
        return [one for item in ours[:1] if real for one in strange(item, real[0], f"{where}[]")]
    kinds = (int, float) if isinstance(ours, int | float) and not isinstance(ours, bool) else type(ours)
    return [] if isinstance(real, kinds) else [f"{where}: {type(ours).__name__}, really {type(real).__name__}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=[*FILES])
    parser.add_argument("url")
    parser.add_argument("--update", action="store_true")
    given = parser.parse_args()
    found = asyncio.run(ask(given.engine, given.url))
    if given.update:
        _file(given.engine).write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2) + b"\n")
        return 0
    known = recorded(given.engine)
    differences = [one for name in found for one in strange(known[name], found[name], name)]
    sys.stdout.write("\n".join(differences) + "\n" if differences else "as recorded\n")
    return bool(differences)


if __name__ == "__main__":
    raise SystemExit(main())
