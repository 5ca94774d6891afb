"""The pipeline's word, to an environment that owns an attempt's box, that the attempt is still cared for.

It goes on from seed to harvest, queues included, and ends with this process: then the box's lease ends too.
"""

from __future__ import annotations

import asyncio

import structlog

from nemo_gym.rollouts.attempt import Attempt
from nemo_gym.rollouts.failures import PeerError
from nemo_gym.rollouts.peers import Peers

log = structlog.get_logger(__name__)


def start_heartbeat(attempt: Attempt, peers: Peers, environment: str, every_s: float) -> None:
    """Beat every ``every_s`` seconds from now on; the attempt's close ends it, as `stop_heartbeat` does."""
    if attempt.heartbeat is None:
        beating = _beat(attempt, peers, environment, every_s)
        attempt.heartbeat = asyncio.create_task(beating, name=f"heartbeat {attempt.job.job_id}")
        attempt.closers.append(lambda: stop_heartbeat(attempt))


async def stop_heartbeat(attempt: Attempt) -> None:
    beating = attempt.heartbeat
    if beating is not None and not beating.done():
        beating.cancel()
        await asyncio.wait({beating})


async def _beat(attempt: Attempt, peers: Peers, environment: str, every_s: float) -> None:
    body = {"rollout": attempt.rollout}
    while True:
        await asyncio.sleep(every_s)
        try:
            await peers.post(
                environment,
                "/heartbeat",
                body,
                control_token=attempt.control_token,
                cookies=attempt.cookies,
                idempotent=True,
            )
        except PeerError as error:
            # Whoever works in the box learns by itself that it is gone; an environment that restarts may be back.
            log.warning("heartbeat_not_taken", rollout_id=attempt.job.job_id, error=str(error))
