"""What some sandboxes need that ``ng_run`` does not start."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from nemo_gym._util.files import cache_root
from tests.acceptance.matrix.cells import ROOT, Cell
from tests.docker_engine import start_engine
from tests.sandbox.opensandbox.double import API_KEY
from tests.sandbox.opensandbox.server import opensandbox_server

URL = "OPEN_SANDBOX_URL"


@contextlib.contextmanager
def servers_for(cells: Iterable[Cell]) -> Iterator[None]:
    """A real ``opensandbox-server`` for cells that have their boxes from one, unless the environment names one."""
    if URL in os.environ or not any("opensandbox" in cell.sandbox for cell in cells):
        yield
        return
    with opensandbox_here():
        yield


@contextlib.contextmanager
def opensandbox_here() -> Iterator[None]:
    engine = start_engine()
    # Boxes mount the agents' CLIs, and the composite agent's example.
    mounts = [*(cache_root() / name for name in ("agents", "clis")), ROOT / "responses_api_agents"]
    with (
        TemporaryDirectory(prefix="opensandbox-") as directory,
        opensandbox_server(Path(directory), engine, mounts=mounts) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv(URL, server.url)
        patch.setenv("OPEN_SANDBOX_API_KEY", API_KEY)
        patch.setenv("OPEN_SANDBOX_ENGINE", engine)
        yield
