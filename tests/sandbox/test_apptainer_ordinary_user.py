"""The apptainer provider works for an ordinary user: rootless is what Apptainer is there for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sandbox.apptainer_program import apptainer
from tests.sandbox.test_local_ordinary_user import as_nobody, place

__all__ = ["apptainer", "place"]

CHECKS = "door or network or commit or stack or escapes or round_trip or cancel or killed or lease"


@pytest.mark.full
def test_ordinary_user_passes_the_same_checks_as_root(apptainer: str, place: Path) -> None:
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={place}/home/pytest", f"--rootdir={place}/checkout"]
    tests = place / "checkout" / "tests" / "sandbox" / "test_conformance_apptainer.py"
    done = as_nobody(place, "-m", "pytest", *options, "-k", CHECKS, str(tests))
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
