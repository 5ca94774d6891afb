"""Runs the service in this process: opens it over a stack, serves it, and writes its address for local commands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from nemo_gym.config.service import ServiceConfig
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.http.client import ServerClient
from nemo_gym.http.webserver import served
from nemo_gym.service.access import ServiceRole, ServiceTokens
from nemo_gym.service.client import ADDRESS_FILE
from nemo_gym.service.routes import application
from nemo_gym.service.service import open_service, write_address


async def host(client: ServerClient, config: ServiceConfig, run_dir: Path, say: Callable[[str], None]) -> None:
    """Serve until cancelled, or until an error stops the pipeline; then raise that error."""
    tokens = ServiceTokens.load(config.tokens)
    async with AsyncExitStack() as undo:
        service = await undo.enter_async_context(open_service(client, config, run_dir))

        async def end_streams() -> None:
            service.end_streams()

        address = BaseServerConfig(host=config.host, port=config.port)
        app = application(service, tokens)
        url = await undo.enter_async_context(served(app, address, on_stop=end_streams))
        path = run_dir / ADDRESS_FILE
        role_tokens = {role.value: tokens.one_of(role) for role in ServiceRole}
        await asyncio.to_thread(write_address, path, url, role_tokens, service.store_id)
        undo.callback(path.unlink, missing_ok=True)
        say(f"rollouts are served at {url}; tokens in {path}")
        await service.dispatcher.stopped()
