"""Apptainer for the tests, which is no part of every machine they run on."""

from __future__ import annotations

import shutil

import pytest

WHY_NOT = (
    "NOT TESTED: the apptainer provider. Apptainer is not on this machine; `scripts/install-system --with-apptainer` "
    "installs it on Debian"
)


def find_apptainer() -> str | None:
    """The path of the program; ``None`` where it is not installed."""
    return shutil.which("apptainer") or shutil.which("apptainer", path="/usr/local/bin:/usr/bin")


needs_apptainer = pytest.mark.skipif(find_apptainer() is None, reason=WHY_NOT)


@pytest.fixture(scope="session")
def apptainer() -> str:
    """The path of the program; where it is missing, every test that needs it is skipped with a reason that says so."""
    found = find_apptainer()
    if found is None:
        pytest.skip(WHY_NOT)
    return found
