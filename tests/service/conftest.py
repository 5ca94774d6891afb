"""A service in the test's own process, over small peers in processes of theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.config.pipeline import ServiceConfig
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.http.webserver import served
from nemo_gym.service.client import AsyncRolloutClient
from nemo_gym.service.routes import ServiceRole, ServiceTokens, application
from nemo_gym.service.service import RolloutService, open_service
from tests.rollouts.conftest import Chain, _no_session_left, make_chain, wait_until

__all__ = ["Chain", "_no_session_left", "make_chain"]

TOKENS = {role: [f"{role}-{'t' * 20}"] for role in ServiceRole}


class Served:
    """What a test has of one service."""

    def __init__(self, service: RolloutService, url: str, client: AsyncRolloutClient) -> None:
        self.service, self.url, self.client = service, url, client

    async def wait(self, condition: Callable[[], bool], what: str) -> None:
        await asyncio.to_thread(wait_until, condition, what)


@asynccontextmanager
async def serving(chain: Chain, **keys: Any) -> AsyncIterator[Served]:
    config = ServiceConfig.parse({"port": 0, "retry_delay_s": 0.01, "watch_s": 0.2, "silent_s": 1.0, **keys})
    async with AsyncExitStack() as undo:
        service = await undo.enter_async_context(open_service(chain.client(), config, chain.directory / "state"))

        async def end_streams() -> None:
            service.end_streams()

        app = application(service, ServiceTokens(TOKENS))
        address = BaseServerConfig(host=config.host, port=0)
        url = await undo.enter_async_context(served(app, address, on_stop=end_streams))
        client = AsyncRolloutClient(url, TOKENS[ServiceRole.OPERATE][0], patience_s=2)
        await undo.enter_async_context(client)
        yield Served(service, url, client)


def job(number: int, **members: Any) -> dict[str, Any]:
    row = {"id": f"t{number}", "responses_create_params": {"input": "A or B?"}, "expected_answer": "B"}
    return {"job_id": f"job-{number}", "row": row, "task_index": number, **members}


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"
