from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Connections on the web server's loop and on Python's own, which differ in what transports do."""
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if item.path.name in ("test_connections.py", "test_long_bodies.py", "test_hostile_servers.py"):
        factories["uvloop"] = uvloop.new_event_loop
    return factories
