"""Waiting for the servers that other hosts start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nemo_gym._util.backoff import Backoff
from nemo_gym.config.hosts import Hosts
from nemo_gym.config.visibility import Address
from nemo_gym.contract.errors import ServerError
from nemo_gym.stack.endpoints import http_answer, why_not_ready

LONGEST_PAUSE_S = 2.0
WORD_EVERY_S = 10.0


Missing = dict[str, dict[Address, str | None]]
"""By server, the replicas that are not ready, and why, in their own words."""


async def wait_for_others(hosts: Hosts, timeout_s: float, say: Callable[[str], None]) -> None:
    """Until every replica of every server answers ``/ready``. When ``timeout_s`` is over, a server with at least one
    does: the others are said, and get nothing until they can be reached. Raises `ServerError` for a server with none.
    """
    missing: Missing = {name: dict.fromkeys(places) for name, places in hosts.replicas.items()}
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(
                _tell(missing, say), *(_until_ready(p, missing[name]) for name in missing for p in [*missing[name]])
            )
    except TimeoutError:
        pass
    nobody = [name for name, places in missing.items() if len(places) == len(hosts.replicas[name])]
    if nobody:
        raise ServerError(
            f"not ready after {timeout_s:g} s: {_listed({name: missing[name] for name in nobody})}; start ng_run there"
            " with the same words and its host=, or wait longer with startup_timeout_s="
        )
    if left := _listed(missing):
        say(f"going on without {left}")


async def _until_ready(place: Address, missing: dict[Address, str | None]) -> None:
    backoff = Backoff(first_s=0.05, longest_s=LONGEST_PAUSE_S)
    while (answer := await http_answer(place.url, "/ready", timeout_s=5.0)) is None or answer[0] != 200:
        missing[place] = why_not_ready(answer)
        await backoff.again()
    del missing[place]


async def _tell(missing: Missing, say: Callable[[str], None]) -> None:
    since_s = 0.0
    while any(missing.values()):
        await asyncio.sleep(0.1)
        since_s += 0.1
        if since_s >= WORD_EVERY_S:
            since_s = 0.0
            say(f"waiting for {_listed(missing)}")


def _listed(missing: Missing) -> str:
    return ", ".join(
        f"{name} at {place.host}:{place.port}" + (f" ({why})" if why else "")
        for name, places in missing.items()
        for place, why in places.items()
    )
