"""What a pipeline works on now, for those who look: each attempt's stage, the server it is at, and for how long.

A service tells it over HTTP. A collection leaves it in a file beside its output, which goes when the run ends.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from nemo_gym.contract.verdict import StageName
from nemo_gym.http.client import ServerClient
from nemo_gym.rollouts.interfaces import JobAttempt
from nemo_gym.rollouts.pipeline import AsyncDispatcher

MAX_TOLD = 200
"""The oldest attempts; a run with thousands under way is read by its figures."""
WRITE_EVERY_S = 2.0
STALE_S = 30.0


def under_way(dispatcher: AsyncDispatcher, client: ServerClient) -> list[dict[str, Any]]:
    """The oldest `MAX_TOLD` attempts, the oldest first."""
    now = time.monotonic()
    return [_told(attempt, dispatcher, client, now) for attempt in islice(list(dispatcher.held), MAX_TOLD)]


def _told(attempt: JobAttempt, dispatcher: AsyncDispatcher, client: ServerClient, now: float) -> dict[str, Any]:
    spec, servers = attempt.job.spec, attempt.servers
    place = dispatcher.place_of(attempt)
    is_agents = place is not None and place.stage is StageName.RUN
    instance = servers.agent if is_agents or servers.environment is None else servers.environment
    number = attempt.replicas.get(instance, 0)
    urls = client.replica_urls(instance)
    return {
        "rollout_id": spec.job_id,
        "run_id": spec.run_id,
        "task_id": spec.task_id,
        "sample_index": spec.sample_index,
        "agent": spec.agent,
        "attempt": attempt.job.attempt,
        "stage": None if place is None else place.stage.value,
        "works": place is not None and place.since is not None,
        "stage_seconds": None if place is None or place.since is None else now - place.since,
        "seconds": now - attempt.claimed_at,
        "server": instance if len(urls) == 1 else f"{instance}.{number}",
        "url": urls[number] if number < len(urls) else None,
    }


@asynccontextmanager
async def told_in(path: Path, dispatcher: AsyncDispatcher, client: ServerClient) -> AsyncIterator[None]:
    """Keep ``path`` up to date until the block ends, and remove it then."""

    async def tell() -> None:
        while True:
            held = {"at": time.time(), "running": under_way(dispatcher, client)}
            _replace(path, orjson.dumps(held))  # a few kilobytes, and no sync
            await asyncio.sleep(WRITE_EVERY_S)

    telling = asyncio.create_task(tell(), name="tell what is under way")
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.wait({telling})
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _replace(path: Path, content: bytes) -> None:
    # Who cannot write here hears of it from the store, which ends the run.
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):
        partial.write_bytes(content)
        partial.replace(path)


def told(path: Path) -> list[dict[str, Any]] | None:
    """What a collection said last; ``None`` where it said nothing of late."""
    try:
        held = orjson.loads(path.read_bytes())
        age_s = max(0.0, time.time() - float(held["at"]))
        running = [
            {**each, **{key: each[key] and each[key] + age_s for key in ("seconds", "stage_seconds")}}
            for each in held["running"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return running if age_s < STALE_S else None
