"""For all tests: marks by what a test needs, and a state directory that is not the user's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests import lanes


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in lanes.MARKS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    config.option.loadscopereorder = False
    config.pluginmanager.register(lanes.Guard())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for lane in sorted(lanes.lanes_of(item)):
            item.add_marker(lane)
    items.sort(key=lanes.order_of)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> lanes.Schedule:
    return lanes.Schedule(config, log)


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What programs keep of a user's runs: the list of runs, controls, supervisors. Caches, which hold what takes
    minutes to fetch or to build, stay the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
