"""What a server's log lines say of the rollout that they are about."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

_SERVER = """
import logging
import structlog
from nemo_gym.config.launch import ServerLaunch
from nemo_gym.http.telemetry import rollout_context
from nemo_gym.http.observability import configure_server_logging

configure_server_logging(ServerLaunch(instance="env", run_id="run", config={}))
log = structlog.get_logger("plugin")
log.info("before")
with rollout_context("r1"):
    log.info("ours")
    logging.getLogger("library").warning("theirs")
    log.info("about another", rollout_id="r2")
log.info("after")
"""


def test_lines_name_the_rollout_that_is_being_worked_on() -> None:
    done = subprocess.run([sys.executable, "-c", _SERVER], capture_output=True, text=True, timeout=60, check=True)
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["event"], line.get("rollout_id")) for line in lines] == [
        ("before", None),
        ("ours", "r1"),
        ("theirs", "r1"),
        ("about another", "r2"),
        ("after", None),
    ]
    assert {line["server"] for line in lines} == {"env"}


def test_log_of_a_server_by_hand_is_plain_text_in_a_file() -> None:
    source = (
        "import structlog; from nemo_gym.http.observability import configure_plain_logging; configure_plain_logging();"
        " structlog.get_logger().warning('engine is slow', url='http://a')"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert "engine is slow" in done.stdout and "url=http://a" in done.stdout and "\x1b" not in done.stdout, done.stdout
