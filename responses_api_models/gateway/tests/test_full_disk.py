"""A journal on a disk that fills up, and is freed again while the gateway runs."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from campaigns.faults.gateway_restart import small_disk
from responses_api_models.gateway.tests.conftest import GatewayStack, Opened


def fill(disk: Path) -> Path:
    """Take the whole rest of a disk."""
    path = disk / "others"
    with path.open("ab", buffering=0) as file:
        for size in (64 << 10, 4096, 1):
            while True:
                try:
                    file.write(bytes(size))
                except OSError as error:
                    assert error.errno == errno.ENOSPC
                    break
    return path


async def refused(session: Opened, **body: object) -> None:
    """A call fails as long as the disk is full, so that its caller comes back."""
    reply = await session.post("/chat/completions", {"messages": session.messages, "model": "any", **body})
    error = (await reply.json())["error"]
    assert (reply.status, error["code"]) == (503, "journal_full"), error
    assert "disk of the journal" in error["message"]
    assert reply.headers["x-should-retry"] == "true"
    assert int(reply.headers["retry-after"]) > 0


@pytest.mark.parametrize("durability", ["process", "power_loss"])
async def test_gateway_goes_on_by_itself_once_its_full_disk_has_room_again(
    gateway: GatewayStack, tmp_path: Path, durability: str
) -> None:
    with small_disk(tmp_path / "disk", "1m"):
        disk: dict[str, Any] = {"journal_dir": str(tmp_path / "disk" / "journal"), "durability": durability}
        await gateway.restart(**disk)
        session, other = await gateway.open(), await gateway.open(rollout_id="other")
        await session.say("and then?")
        kept = await session.state()

        others = fill(tmp_path / "disk")
        # A long question of which surely not all fits behind what is there.
        session.messages[-1]["content"] = "why? " * 4000
        other.messages[-1]["content"] = "what? " * 4000
        await refused(session)
        sampled = len(gateway.engine.calls)
        for one in (session, other, session):
            await refused(one)
        assert len(gateway.engine.calls) == sampled, "nothing is sampled that cannot be kept"
        ready = await gateway.stack.client().get("gateway", "/ready")
        assert ready.status == 503
        assert "is full" in await ready.text()
        assert await session.state() == kept

        others.unlink()
        for one in (session, other):
            await one.say("go on")
            await one.say("go on")
        assert (await gateway.stack.client().get("gateway", "/ready")).status == 200

        await gateway.restart(**disk, port=int(session.facts["base_url"].split(":")[2].split("/")[0]))
        for one, turns in ((session, 3), (other, 2)):
            await one.say("still there?")
            summary = await one.finalize(reward=1.0)
            assert summary["turns"] == turns + 1
            assert len(summary["trajectories"]) == 1, "no answer was kept that nobody was given"
            assert len(summary["trajectories"][0]["turns"]) == turns + 1


async def test_ends_of_sessions_that_the_full_disk_did_not_take_can_be_made_again(
    gateway: GatewayStack, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", "1m"):
        disk: dict[str, Any] = {"journal_dir": str(tmp_path / "disk" / "journal")}
        await gateway.restart(**disk)
        sessions = [await gateway.open(rollout_id=f"r{n}") for n in range(3)]
        for session in sessions:
            await session.say("go on")
        others = fill(tmp_path / "disk")
        large = {"reward_info": {"why": "x" * 8192}}
        assert (await sessions[0].control("finalize", large)).status == 503
        assert (await sessions[0].control("finalize", large)).status == 503
        others.unlink()
        first = await sessions[0].control("finalize", large)
        assert first.status == 200
        assert (await first.json())["turns"] == 1
        assert (await sessions[1].control("abort")).status == 200
        await sessions[2].say("go on")
        await gateway.restart(**disk)
        assert (await sessions[0].control("finalize")).status == 200
        assert (await sessions[1].control("finalize")).status == 409
        assert (await sessions[2].finalize())["turns"] == 2
