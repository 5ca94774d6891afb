"""Commits turns of eight sessions at once until it is killed, and tells each one that was acknowledged.

Usage: python turns_process.py DIRECTORY ROUND
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from nemo_gym.gateway.journal import SessionJournal, SessionRecord, SessionState

SESSIONS = 8


def body(round_number: int, session_id: str, index: int) -> bytes:
    return f"{round_number}/{session_id}/{index}/".encode() * (1 + index % 400)


async def main(directory: Path, round_number: int) -> None:
    journal, replayed = SessionJournal.open(directory, segment_bytes=256 * 1024)
    known = {session.record.session_id for session in replayed}

    async def run(session_id: str) -> None:
        if session_id not in known:
            await journal.opened(SessionRecord(session_id, {}, "i", "c", time.time(), time.time() + 3600))
        while True:
            index, _ = await journal.commit_turn(
                session_id, body(round_number, session_id, journal.turns(session_id)), fingerprint=f"f{round_number}"
            )
            os.write(1, f"{round_number} {session_id} {index}\n".encode())

    async with asyncio.TaskGroup() as group:
        for number in range(SESSIONS):
            if f"s{number}" not in known or journal.state(f"s{number}") is SessionState.OPEN:
                group.create_task(run(f"s{number}"))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
