"""A plan of `ng_plan_placement` carried out: agent servers and engines on hosts with and without GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.hosts.network import Host, switched_hosts
from tests.acceptance.hosts.stack import until

ENGINE = """
import http.server, sys

class Engine(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = f"{sys.argv[1]}:{sys.argv[2]} {self.client_address[0]}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *given):
        pass

http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Engine).serve_forever()
"""
HANDLER = '''
"""Asks its engine who it is, and who asked."""

import asyncio
import urllib.request

from nemo_gym.prorl.registry import AgentHandler, register_agent_handler


def ask(url):
    with urllib.request.urlopen(url, timeout=30) as reply:
        return reply.read().decode()


class Asks(AgentHandler):
    name = "asks"

    async def init(self, instance, llm_config=None, sid=None, max_iterations=1):
        return None, {"url": llm_config["base_url"]}, {}

    async def run(self, runtime, metadata, config, instance):
        return {"messages": [], "answer": await asyncio.to_thread(ask, metadata["url"])}

    async def eval(self, job_details, sid=None, allow_skip=True):
        return {"report": {"reward": 1.0}}


register_agent_handler(Asks())
'''
TRAINER = """
import asyncio, json, sys
from nemo_gym.prorl.client import ProRLClient

async def main():
    answers = {}
    for url in sys.argv[1].split(","):
        async with ProRLClient([url]) as client:
            tasks = [{"instance_id": f"t{n}", "data_source": "asks"} for n in range(int(sys.argv[2]))]
            jobs = [client.process(task, {}) for task in tasks]
            answers[url] = [each["answer"] for each in await asyncio.gather(*jobs)]
    print(json.dumps(answers))

asyncio.run(main())
"""
PLACE = "/var/lib/placement"
TOKEN = {"PRORL_SERVER_TOKEN": "placement-" + "t" * 20}
GPUS = {"gpu-1": 4, "gpu-2": 4, "cpu-1": 0, "cpu-2": 0}
TP_SIZE = 2
JOBS = 12
Started = Callable[[subprocess.Popen[bytes]], None]


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[str, Host]]:
    with switched_hosts([*GPUS, "trainer"]) as made:
        yield made


@pytest.fixture
def started() -> Iterator[Started]:
    """Keeps what a test started; what runs in a host ends with it."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes.append
    for process in processes:
        process.kill()
        process.wait()


def planned(hosts: dict[str, Host]) -> dict[str, Any]:
    """The command's plan; nodes go by their addresses, as no host knows another's name."""
    nodes = [f"{hosts[name].address}:{gpus}" if gpus else hosts[name].address for name, gpus in GPUS.items()]
    said = hosts["trainer"].run(["ng_plan_placement", *nodes, f"tp_size={TP_SIZE}", "--json"])
    return dict(json.loads(said))


@pytest.mark.full
def test_agent_servers_call_the_engines_that_the_plan_gives_them(
    hosts: dict[str, Host], started: Started, tmp_path: Path
) -> None:
    plan = planned(hosts)
    by_address = {host.address: host for host in hosts.values()}
    urls = {engine["name"]: engine["url"] for engine in plan["engines"]}
    assert len(urls) == 2 * 4 // TP_SIZE
    logs: list[Path] = []
    for engine in plan["engines"]:
        address, port = engine["url"].removeprefix("http://").split(":")
        log = tmp_path / f"engine-{address}-{port}"
        started(by_address[address].start([sys.executable, "-c", ENGINE, address, port], log))
    for server in plan["agent_servers"]:
        host = by_address[server["node"]]
        host.write(f"{PLACE}/asks.py", HANDLER.encode())
        port = server["url"].rpartition(":")[2]
        engines = ",".join(urls[name] for name in server["engines"])
        words = [f"host={host.address}", f"port={port}", "handlers=asks", f"llm_server_addresses={engines}"]
        logs.append(tmp_path / f"agents-{host.name}")
        environment = {**TOKEN, "PYTHONPATH": PLACE}
        started(host.start(["ng_prorl_server", *words, "start=true"], logs[-1], environment=environment))
    until(
        lambda: all("PRORL_SERVER_URLS=" in log.read_text() for log in logs),
        "every agent server listens",
        within_s=60,
    )
    addresses = ",".join(server["url"] for server in plan["agent_servers"])
    command = [sys.executable, "-c", TRAINER, addresses, str(JOBS)]
    answers = json.loads(hosts["trainer"].run(command, environment=TOKEN, timeout_s=120))
    for server in plan["agent_servers"]:
        told = [answer.split() for answer in answers[server["url"]]]
        asked = Counter(engine for engine, _ in told)
        assert {asker for _, asker in told} == {server["node"]}
        assert set(asked) == {urls[name].removeprefix("http://") for name in server["engines"]}
        assert max(asked.values()) - min(asked.values()) <= 1
        if server["local"]:
            assert {engine.partition(":")[0] for engine in asked} == {server["node"]}
    shared = [name for server in plan["agent_servers"] if not server["local"] for name in server["engines"]]
    assert Counter(shared) == Counter(urls.keys())
