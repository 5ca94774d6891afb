"""The page on token truth shows what its example prints, and lists what there is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from nemo_gym.gateway.tokens import SplitReason, trajectories_of
from nemo_gym.gateway.tokens.trajectories import write_npz
from tests.architecture.docs import PAGES, ROOT, example_files, table
from tests.gateway.tokens.conversations import said, user
from tests.gateway.tokens.sessions import Session

PAGE = "token-truth.md"


def test_example_prints_what_the_page_shows(tmp_path: Path) -> None:
    files = example_files(PAGE)
    script = tmp_path / "token_truth.py"
    script.write_text(files[script.name], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == files["token_truth.txt"].splitlines()


def test_every_reason_of_a_split_is_listed() -> None:
    assert set(table(PAGES / PAGE, "`split_reason`")) == set(SplitReason)


def test_arrays_are_those_of_an_export(tmp_path: Path) -> None:
    session = Session()
    session.ask([user("a")], said("b"))
    write_npz(tmp_path / "t.npz", trajectories_of(session.forest.turns, "s1"))
    with np.load(tmp_path / "t.npz", allow_pickle=False) as file:
        written = {name: str(file[name].dtype) for name in file.files}
    assert {name: cells[0].split()[0] for name, cells in table(PAGES / PAGE, "array").items()} == written
