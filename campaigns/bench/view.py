"""Measure viewing a large run: indexing, the first table, a filter, memory, and a long chain of tokens.

python -m campaigns.bench.view [--rows 100000] [--keep DIRECTORY] [--json]

The result file is generated: rows of 20 kB in the median, with prompts, tool calls, diffs and test lists in the form
of SWE-bench rows, one in a thousand with token chains, one of them of 65,536 tokens. `ng_view` indexes and serves it
in a separate process. The figures of a page come from a headless Chromium, if one is installed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import orjson
import psutil

from campaigns.bench.report import Bar, Samples, argument_parser, print_report

ROWS = 100_000
MEDIAN_BYTES = 15_900
CHAIN_TOKENS = 65_536
LONG_ROW = 777
SAMPLES = 4
FILTERS = (
    {"q": "interval overflow"},
    {"q": "serendipity"},
    {"outcome": "max_turns"},
    {"reward": "0", "sort": "seconds", "descending": "1"},
    {"findings": "1"},
    {"task": "project-12"},
)


def rows(count: int, seed: int = 1) -> Iterator[bytes]:
    """Yield the lines of a result file."""
    chance = random.Random(seed)
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(chance.choices(letters, k=chance.randint(2, 11))) for _ in range(20_000)]
    words += ["interval", "overflow", "off", "by", "one", "test", "fails"]
    weights = [1 / (place + 10) for place in range(len(words))]
    text = " ".join(chance.choices(words, weights, k=400_000))

    def some(length: int) -> str:
        at = chance.randrange(len(text) - length)
        return text[at : at + length]

    for index in range(count):
        size = max(3_000, min(400_000, int(chance.lognormvariate(0, 0.5) * MEDIAN_BYTES)))
        yield orjson.dumps(_row(index, size, chance, some)) + b"\n"


def _row(index: int, size: int, chance: random.Random, some: Any) -> dict[str, Any]:
    task, sample = divmod(index, SAMPLES)
    turns = chance.randint(3, 30)
    of_turn = max(40, int(size * 0.5) // turns)
    output: list[dict[str, Any]] = []
    for turn in range(turns):
        call = f"call_{index}_{turn}"
        command = json.dumps({"command": some(of_turn // 5)})
        output += [
            {"type": "function_call", "call_id": call, "name": "bash", "arguments": command, "id": call},
            {"type": "function_call_output", "call_id": call, "output": some(of_turn * 4 // 5)},
        ]
    answer = some(300) + (" serendipity" if index % 5000 == 17 else "")
    output.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": answer}]})
    reward = float(chance.random() < 0.4)
    failed = ["tests/test_a.py::test_" + some(8).replace(" ", "_")] if not reward else []
    finding = {"kind": "values_not_confirmed", "detail": "d", "evidence": {}}
    row: dict[str, Any] = {
        "instance_id": f"project-{task}",
        "problem_statement": (prompt := some(int(size * 0.1))),
        "patch": some(int(size * 0.1)),
        "test_patch": some(int(size * 0.1)),
        "PASS_TO_PASS": json.dumps([f"tests/test_a.py::test_{n}" for n in range(size // 200)]),
        "agent_ref": {"type": "responses_api_agents", "name": ("mini", "codex")[index % 2]},
        "_ng_task_index": task,
        "_ng_rollout_index": sample,
        "response": {"id": f"resp_{index}", "object": "response", "output": output},
        "valid": True,
        "reward": reward,
        "failure_kind": None,
        "failure_reason": None,
        "findings": [] if chance.random() > 0.01 else [finding],
        "mask_sample": False,
        "reward_reason": None if reward else f"{chance.randint(1, 9)} of 12 tests fail",
        "official": {"resolved": bool(reward), "tests_status": {"FAIL_TO_PASS": {"success": [], "failure": failed}}},
        "ng_model_session": {
            "session_id": f"s{index}",
            "turns": turns,
            "usage": {"input_tokens": size * turns // 8, "output_tokens": size // 4},
        },
        "_ng_rollout_id": f"20261122-000000-abcdef.{task}-{sample}",
        "_ng_attempt_index": 0,
        "task_id": f"project-{task}",
        "responses_create_params": {"input": [{"role": "user", "content": prompt}]},
        "outcome": "max_turns" if turns > 28 else "completed",
        "timings": {"init_s": chance.random(), "run_s": chance.random() * 300, "eval_s": chance.random() * 30},
        "topology": "agent_in_env",
    }
    if index % 1000 == LONG_ROW:
        row["ng_trajectory"] = [_chain(CHAIN_TOKENS if index == LONG_ROW else 2048, chance)]
    return row


def _chain(tokens: int, chance: random.Random) -> dict[str, Any]:
    prompt = tokens // 16
    response = tokens - prompt
    mask = bytes((place // 200) % 2 for place in range(response))
    turns = [
        {
            "start": start,
            "end": min(start + 200, response),
            "finish_reason": "stop",
            "weights_version": "1",
            "details": {},
        }
        for start in range(200, response, 400)
    ]
    return {
        "session_id": "s",
        "index": 0,
        "turns": turns,
        "split_reason": "initial",
        "split_detail": None,
        "message_count": len(turns),
        "reward": 1.0,
        "reward_info": {},
        "multimodal": [],
        "prompt_ids": [chance.randrange(150_000) for _ in range(prompt)],
        "response_ids": [chance.randrange(150_000) for _ in range(response)],
        "response_mask": list(mask),
        "logprobs": [-chance.expovariate(1) if bit else 0.0 for bit in mask],
    }


def write_result(path: Path, count: int) -> Samples:
    """Write a result file; return the lengths of its lines."""
    lengths = []
    with path.open("wb") as file:
        for line in rows(count):
            file.write(line)
            lengths.append(len(line))
    return Samples(lengths)


def index_figures(path: Path) -> dict[str, float]:
    """Read the file once in a separate process, as `ng_show` does."""
    program = (
        "import sys, time, json, resource\n"
        "from pathlib import Path\n"
        "from nemo_gym.view.index import open_result\n"
        "began = time.monotonic()\n"
        "open_result(Path(sys.argv[1]))\n"
        "took = time.monotonic() - began\n"
        "print(json.dumps([took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    seconds, peak_mib = json.loads(done.stdout)
    return {"index_s": seconds, "index_mb_per_s": path.stat().st_size / 1e6 / seconds, "index_peak_mib": peak_mib}


async def served(url: str, key: str) -> dict[str, Any]:
    """Return the milliseconds of the first table, filters, and a chain, with the requests of a page."""
    figures: dict[str, Any] = {}
    base = url.partition("?")[0]
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:

        async def ask(path: str, query: dict[str, str] | None = None) -> tuple[float, bytes]:
            began = time.monotonic()
            async with session.get(f"{base}{path}", params=query or {}) as reply:
                body = await reply.read()
                assert reply.status == 200, body
            return (time.monotonic() - began) * 1e3, body

        await ask(url[len(base) :].lstrip("/"))
        run = f"api/runs/{key}"
        began = time.monotonic()
        await ask(run)
        await ask(f"{run}/table", {"limit": "100"})
        figures["first_table_ms"] = (time.monotonic() - began) * 1e3
        slowest = 0.0
        for query in FILTERS:
            times = [(await ask(f"{run}/table", {**query, "limit": "100"}))[0] for _ in range(5)]
            figures[f"filter {' '.join(query.values())} ms"] = round(median(times), 1)
            slowest = max(slowest, median(times))
        figures["slowest_filter_ms"] = slowest
        rollout = f"20261122-000000-abcdef.{LONG_ROW // SAMPLES}-{LONG_ROW % SAMPLES}"
        figures["chain_ms"], chain = await ask(f"{run}/chain", {"id": rollout, "number": "0"})
        figures["chain_bytes"] = len(chain)
        await ask(f"{run}/tasks", {"limit": "100"})
    return figures


def in_browser(url: str, key: str) -> dict[str, float]:
    """Return the seconds until Chromium shows the first table, and the long chain after a click."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        return {}
    base = url.partition("?")[0]
    rollout = f"20261122-000000-abcdef.{LONG_ROW // SAMPLES}-{LONG_ROW % SAMPLES}"
    figures = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.goto(url)
        page.wait_for_selector("table.rows")
        began = time.monotonic()
        page.goto(f"{base}#/run/{key}")
        page.wait_for_selector("table.rows tbody td.why")
        figures["first_table_in_browser_s"] = time.monotonic() - began
        page.goto(f"{base}#/run/{key}/rollout?id={rollout}")
        page.wait_for_selector("#tab-panel > *")
        began = time.monotonic()
        page.get_by_role("tab", name=re.compile("Tokens")).click()
        page.wait_for_selector(".tokens .token")
        figures["chain_in_browser_s"] = time.monotonic() - began
        browser.close()
    return figures


def main(words: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--keep", metavar="DIRECTORY", help="where the result file is made, or was, and stays")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="view-bench-") as temporary:
        path = Path(options.keep or temporary, "large.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        figures: dict[str, Any] = {"rows": options.rows}
        if not path.exists():
            lengths = write_result(path, options.rows)
            figures["median_row_bytes"] = lengths.median
        figures["file_mb"] = path.stat().st_size / 1e6
        for old in path.parent.glob("large_index.sqlite*"):
            old.unlink()
        figures |= index_figures(path)
        figures["index_mb"] = path.with_name("large_index.sqlite").stat().st_size / 1e6
        command = [str(Path(sys.executable).with_name("ng_view")), str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                url = process.stdout.readline().strip()
                key = hashlib.blake2b(str(path.resolve()).encode(), digest_size=5).hexdigest()
                time.sleep(2)  # until the server has read the index
                figures |= asyncio.run(served(url, key))
                figures |= in_browser(url, key)
                memory = psutil.Process(process.pid).memory_full_info()
                figures["server_rss_mib"] = memory.rss / 2**20
            finally:
                process.terminate()
    figures = {name: round(value, 2) if isinstance(value, float) else value for name, value in figures.items()}
    bars = [
        Bar.at_least("index", figures["index_mb_per_s"], 50, "MB/s"),
        Bar.at_most("first table", figures["first_table_ms"], 1500, "ms"),
        Bar.at_most("slowest filter", figures["slowest_filter_ms"], 300, "ms"),
        Bar.at_most("memory of the server", figures["server_rss_mib"], 300, "MiB"),
    ]
    if "chain_in_browser_s" in figures:
        bars.append(Bar.at_most("first table in a browser", figures["first_table_in_browser_s"], 1.5, "s"))
        bars.append(Bar.at_most("65,536 tokens after the click", figures["chain_in_browser_s"], 1.0, "s"))
    return print_report(figures, bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
