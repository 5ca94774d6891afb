"""Scrape configuration with which Prometheus reads a run's metrics: its servers, and the token that they require.

    prometheus --config.file=<run_dir>/prometheus.yml

``metrics/*.json`` holds the targets, one file for the servers and one for each pipeline; Prometheus reloads the files
when they change. Only their owner may read the files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nemo_gym._util.files import write_private

TOKEN_FILE = "metrics.token"
SCRAPE_FILE = "prometheus.yml"
TARGETS = "metrics"
JOB = "nemo_gym"


def write_scraping(run_dir: Path, token: str, servers: Sequence[tuple[str, str, str]], run_id: str) -> None:
    """Write the run's scrape configuration. ``servers``: instance, server type and URL of each."""
    folder = run_dir / TARGETS
    folder.mkdir(mode=0o700, exist_ok=True)
    write_private(run_dir / TOKEN_FILE, token)
    job = {
        "job_name": JOB,
        "authorization": {"credentials_file": str(run_dir / TOKEN_FILE)},
        "file_sd_configs": [{"files": [str(folder / "*.json")]}],
    }
    # JSON is YAML.
    write_private(run_dir / SCRAPE_FILE, json.dumps({"scrape_configs": [job]}, indent=1) + "\n")
    targets = [_target(url, server=name, server_type=kind, run_id=run_id) for name, kind, url in servers]
    write_private(folder / "servers.json", json.dumps(targets, indent=1))


@contextmanager
def added_target(run_dir: Path, name: str, url: str, run_id: str) -> Iterator[None]:
    """Add a target to the run until the block ends."""
    folder = run_dir / TARGETS
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{name}-{os.getpid()}.json"
    write_private(path, json.dumps([_target(url, server=name, server_type=name, run_id=run_id)], indent=1))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _target(url: str, **labels: str) -> Mapping[str, Any]:
    parts = urlsplit(url)
    return {"targets": [parts.netloc], "labels": {"__scheme__": parts.scheme, **labels}}
