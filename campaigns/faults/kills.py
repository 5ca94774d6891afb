#!/usr/bin/env python3
"""Kill -9 the collector, an agent server or the environment while boxes work, and count what is left after the TTL.

    python -m campaigns.faults.kills --json [--sandbox local docker] [--victims collector agent environment]

Prints one JSON object last: ``figures`` (what was seen per case) and ``bars`` (zero leftovers per case).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.report import Bar, print_report
from campaigns.faults.leftovers import Scope, leftovers

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "resources_servers" / "swe_bench" / "data" / "example.jsonl"
LEASE_S = 15.0
GRACE_S = 45.0
"""Time after the lease for the watchdog's next check and the removal itself."""
VICTIMS = ("collector", "agent", "environment")
HANGING_POLICY = {
    "tasks": [
        {
            "name": "hang",
            "when": {"user": "."},
            "turns": [
                {"tool_calls": [{"name": "bash", "arguments": {"command": "(setsid sleep 3000 &); sleep 3000"}}]}
            ],
            "repeat_last": True,
        }
    ]
}


def run_case(sandbox: str, victim: str, workspace: Path) -> dict[str, Any]:
    """Kill the victim in the middle of a run; return what the run left behind."""
    state_dir = workspace / "state"
    docker_host = os.environ.get("DOCKER_HOST") if sandbox == "docker" else None
    scope = Scope(state_dir, run_id=f"kills-{os.getpid()}-{sandbox}-{victim}", docker_host=docker_host)
    script = workspace / "hang.yaml"
    script.write_text(json.dumps(HANGING_POLICY))
    command = [
        str(ROOT / ".venv" / "bin" / "ng_run"),
        "agent=mini_swe_agent",
        "environment=swe_bench",
        f"sandbox={sandbox}",
        "model=scripted",
        f"script={script}",
        f"++mini_swe_agent.responses_api_agents.mini_swe_agent.sandbox_lease_s={LEASE_S}",
        f"input={ROWS}",
        f"output={workspace / 'out.jsonl'}",
        f"run_dir={workspace / 'run'}",
        f"run_id={scope.run_id}",
        "concurrency=4",
    ]
    if sandbox == "local":
        command.append(f"++sandbox.local.state_dir={state_dir}")
    with (workspace / "log").open("wb") as log:
        collector = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
    try:
        boxes_at_kill = _wait_for_boxes(scope, collector, workspace / "log")
        pid = collector.pid if victim == "collector" else _pid_of(workspace / "run" / "stack.json", victim)
        os.kill(pid, signal.SIGKILL)
        if victim != "collector":
            time.sleep(5)  # the supervisor restarts the server and the pipeline retries: that is part of the case
            collector.send_signal(signal.SIGINT)
        exit_code = collector.wait(timeout=120)
        ended_at = time.monotonic()
    finally:
        if collector.poll() is None:
            os.killpg(collector.pid, signal.SIGKILL)
            collector.wait()
    left: dict[str, list[str]] = {}
    while time.monotonic() - ended_at < LEASE_S + GRACE_S:
        left = leftovers(scope)
        if not left:
            break
        time.sleep(1)
    return {
        "sandbox": sandbox,
        "victim": victim,
        "boxes_at_kill": boxes_at_kill,
        "exit_code": exit_code,
        "clean_after_s": None if left else round(time.monotonic() - ended_at, 1),
        "left": left,
    }


def _wait_for_boxes(scope: Scope, collector: subprocess.Popen[bytes], log: Path) -> int:
    """Wait until the hanging command runs in a box; return the number of network namespaces of boxes."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if collector.poll() is not None:
            raise SystemExit(f"the run ended before the kill:\n{log.read_text()}")
        present = leftovers(scope)
        if any("sleep 3000" in process for process in present.get("processes", [])):
            return len({space for space in present.get("namespaces", []) if space.startswith("net:")})
        time.sleep(0.2)
    raise SystemExit(f"no box worked within 180 s:\n{log.read_text()}")


def _pid_of(stack: Path, victim: str) -> int:
    kind = {"agent": "responses_api_agents", "environment": "resources_servers"}[victim]
    servers = json.loads(stack.read_text())["servers"]
    return int(next(server["pid"] for server in servers if server["server_type"] == kind))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print only the report")
    parser.add_argument("--sandbox", nargs="+", default=["local", "docker"], choices=["local", "docker"])
    parser.add_argument("--victims", nargs="+", default=list(VICTIMS), choices=VICTIMS)
    chosen = parser.parse_args(arguments)
    cases = []
    for sandbox in chosen.sandbox:
        prepare = [str(ROOT / ".venv" / "bin" / "ng_prepare"), "swe_bench", f"rows={ROWS}", f"sandbox={sandbox}"]
        subprocess.run(prepare, cwd=ROOT, check=True, stdout=sys.stderr)
        for victim in chosen.victims:
            with tempfile.TemporaryDirectory(prefix="kills-") as workspace:
                cases.append(run_case(sandbox, victim, Path(workspace)))
            if not chosen.json:
                print(json.dumps(cases[-1]), file=sys.stderr)
    bars = [
        Bar(
            name=f"{case['sandbox']}: left after kill -9 of the {case['victim']}",
            value=sum(len(found) for found in case["left"].values()),
            unit="things",
            bar="= 0",
            ok=not case["left"],
        )
        for case in cases
    ]
    return print_report({"cases": cases}, bars, as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
