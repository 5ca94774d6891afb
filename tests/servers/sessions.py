"""For tests that call servers from their own event loop, which ends with them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from nemo_gym.server_utils import close_global_aiohttp_client


@pytest.fixture(autouse=True)
async def no_session_left() -> AsyncIterator[None]:
    """Close the loop's shared HTTP session; import it into a ``conftest.py``."""
    yield
    await close_global_aiohttp_client()
