"""Set-up of all tests: marks by what a test needs, and a state directory that is not the user's."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.http.observability import configure_plain_logging
from tests import lanes
from tests import properties as properties  # its profiles: --hypothesis-profile names one

# Before numpy is loaded: more test processes than cores run, so second threads for small matrices only wait.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

collect_ignore = ["resources_servers/swe_bench/examples"]  # repositories, whose tests run in boxes of their own

gc.disable()  # during test collection, which makes no garbage: the collector would take an eighth of the time


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported and collected lives to the end: no full collection need walk it
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="only the fast lane: tests without a mark of tests/lanes.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.option.fast and lanes.has_no_fast_test(collection_path) else None


def pytest_configure(config: pytest.Config) -> None:
    if config.option.fast:
        config.option.markexpr = f"not ({' or '.join([*lanes.MARKS, 'full'])})"
    for name, meaning in lanes.MARKS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    config.option.loadscopereorder = False
    config.pluginmanager.register(lanes.Guard())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if lanes.is_full(item):
            item.add_marker("full")
        for lane in sorted(lanes.lanes_of(item)):
            item.add_marker(lane)
    items.sort(key=lanes.order_of)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> lanes.Schedule:
    return lanes.Schedule(config, log)


@pytest.fixture(scope="session", autouse=True)
def _plain_logs() -> None:
    """Log as servers do: structlog's own tracebacks show every value, which takes a second each."""
    configure_plain_logging()


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set one state directory for all processes of a run, where programs keep controls and supervisors. The user's
    caches stay in use: their contents take minutes to fetch or to build."""
    base = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "state"))
        yield
