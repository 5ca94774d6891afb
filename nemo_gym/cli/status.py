"""``ng_status``: the stacks and servers that run on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from nemo_gym.cli import command

NAME = "ng_status"


def main() -> None:
    command.run(NAME, status)


def status(argv: Sequence[str]) -> int:
    """Print every running stack of this user. Return 1 if a server is not healthy, else 0 (also if nothing runs)."""
    parser = command.parser(NAME, "Show running stacks and their servers.", words="run_dir=DIR")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    import asyncio

    from nemo_gym.stack.endpoints import find_stack, health_of, pss_mib, public_listing, running_stacks

    given = command.settings_of(arguments.settings, ("run_dir", "run_id"))
    stacks = [find_stack(given.get("run_dir"), given.get("run_id"))] if given else running_stacks()
    report: list[dict[str, Any]] = []
    for stack in stacks:
        health = asyncio.run(health_of(stack))
        servers = public_listing(stack)
        for server in servers:
            server["health"] = health[server["url"]]
            server["pss_mib"] = round(pss_mib([server["pid"]] if server["pid"] else []), 1)
        report.append({"run_id": stack.run_id, "run_dir": stack.run_dir, "pid": stack.pid, "servers": servers})
    if arguments.json:
        print(json.dumps({"stacks": report}, indent=2))
    else:
        _print(report)
    healthy = all(server["health"] == "ok" for stack in report for server in stack["servers"])
    return command.EXIT_OK if healthy else command.EXIT_FAILED


def _print(report: list[dict[str, Any]]) -> None:
    if not report:
        print("no stack runs")
    for stack in report:
        print(f"run {stack['run_id']} (pid {stack['pid']}) in {stack['run_dir']}")
        command.print_columns(
            ("INSTANCE", "TYPE", "IMPLEMENTATION", "URL", "PID", "HEALTH", "PSS MiB", "RESTARTS"),
            [
                (
                    *(server[name] for name in ("instance", "server_type", "implementation", "url")),
                    str(server["pid"] or "-"),
                    server["health"],
                    f"{server['pss_mib']:.1f}",
                    str(server["restarts"]),
                )
                for server in stack["servers"]
            ],
        )
