"""``ng_prorl_server`` as a process, with the handler of a test's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HANDLER = '''
"""Rewards what an instance asks for; ``sleep_s`` takes as long, ``dies`` ends the server that has the file's turn."""

import asyncio
import os
from pathlib import Path

from nemo_gym.prorl.registry import AgentHandler, register_agent_handler


def deep(levels):
    return [deep(levels - 1)] if levels else []


def pit():
    found = []
    for _ in range(100_000):
        found = [found]
    return found


def tree():
    """A node whose children hold it, as parse trees and graphs do."""
    node = {}
    node["children"] = [{"parent": node}, {"parent": node}]
    return node


class Wishes(AgentHandler):
    name = "wishes"

    async def init(self, instance, llm_config=None, sid=None, max_iterations=1):
        return None, {"sid": sid, "llm": {**llm_config, "max_iterations": max_iterations}}, {}

    async def run(self, runtime, metadata, config, instance):
        if os.environ.get("SLOW"):
            await asyncio.sleep(float(os.environ["SLOW"]))
        await asyncio.sleep(instance.get("sleep_s", 0.0))
        if instance.get("fails"):
            raise RuntimeError("as wished")
        odd = {"text": "caf\\udce9", "many": 2**70, "deep": deep(300), "path": Path("x"), "tree": tree()}
        odd |= {"name": Path("caf\\udce9"), "error": ValueError("\\udce9"), "digits": 10**5000, "pit": pit()}
        odd = odd if instance.get("odd") else {}
        return {"messages": [], "sid": metadata["sid"], "llm": metadata["llm"], "pid": os.getpid(), **odd}

    async def eval(self, job_details, sid=None, allow_skip=True):
        rewards = job_details.instance.get("rewards", [1.0])
        with open(os.environ["COUNT"], "ab+") as count:
            count.write(b".")
            count.flush()
            return {"report": {"reward": rewards[count.tell() % len(rewards)]}}


register_agent_handler(Wishes())
'''
DEADLINE_S = 60.0


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE_S)


@contextmanager
def prorl_server(place: Path, *words: str, **variables: str) -> Iterator[Server]:
    """A server that has printed its URL."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "wishes.py").write_text(HANDLER)
    start = [sys.executable, "-c", "from nemo_gym.cli.prorl_server import main; main()"]
    settings = [*words] if any(word.startswith("port=") for word in words) else ["port=0", *words]
    env = {**os.environ, "COUNT": str(place / "count"), **variables}
    with (place / "said.txt").open("a") as said:
        process = subprocess.Popen(
            [*start, "handlers=wishes", "llm_server_addresses=http://127.0.0.1:9", *settings],
            cwd=place,
            env=env,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("PRORL_SERVER_URLS=http://"), (place / "said.txt").read_text()
        yield Server(process, line.strip().partition("=")[2])
    finally:
        if process.poll() is None:
            process.terminate()
        deadline = time.monotonic() + DEADLINE_S
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if process.stdout is not None:
            process.stdout.close()
        assert process.poll() is not None, "the server did not stop"
