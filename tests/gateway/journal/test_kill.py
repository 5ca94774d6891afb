"""A killed process loses no acknowledged turn and doubles none. The process is real, and so is the SIGKILL."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

from nemo_gym.gateway.journal import ReplayedSession, SessionJournal
from tests.gateway.journal.turns_process import SESSIONS, body

ROUNDS = 6
ROOT = Path(__file__).resolve().parents[3]


def one_life(directory: Path, round_number: int, acknowledged: int) -> list[tuple[int, str, int]]:
    """Run the process, kill it after so many acknowledgements; all that it acknowledged."""
    command = [sys.executable, "-m", "tests.gateway.journal.turns_process", str(directory), str(round_number)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(acknowledged)]
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.read().splitlines(keepends=True)
    assert process.returncode == -signal.SIGKILL, "it lived until it was killed"
    told = [line.decode().split() for line in lines if line.endswith(b"\n")]
    return [(int(round_number), session_id, int(index)) for round_number, session_id, index in told]


async def replay(directory: Path) -> dict[str, ReplayedSession]:
    journal, sessions = SessionJournal.open(directory, segment_bytes=256 * 1024)
    await journal.aclose()
    return {session.record.session_id: session for session in sessions}


async def test_acknowledged_turns_survive_when_the_process_is_killed_again_and_again(tmp_path: Path) -> None:
    chance = random.Random(7)
    acknowledged: list[tuple[int, str, int]] = []
    for round_number in range(ROUNDS):
        acknowledged += one_life(tmp_path, round_number, chance.randrange(20, 400))
        sessions = await replay(tmp_path)
        assert len(sessions) == SESSIONS
        for session in sessions.values():
            assert [turn.index for turn in session.turns] == list(range(len(session.turns)))
        for lived, session_id, index in acknowledged:
            turn = sessions[session_id].turns[index]
            assert turn.fingerprint == f"f{lived}" and turn.body == body(lived, session_id, index)
    assert len({(session_id, index) for _, session_id, index in acknowledged}) == len(acknowledged)
