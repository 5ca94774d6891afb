"""A rollout service in a process that can kill itself at a chosen write.

    python -m campaigns.faults.service_process '{"stack": …, "serve": …, "state_dir": …, "kill": "offer after"}'

``kill`` names an operation of the store and the moment: ``before`` its transaction is committed, or ``after`` the
commit and before the caller gets the result.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from nemo_gym._util.tasks import until_signal
from nemo_gym.config.keys import COMPOSITION
from nemo_gym.config.pipeline import ServiceConfig
from nemo_gym.contract.credentials import Role, StackKeys
from nemo_gym.http.client import ServerClient, close_global_aiohttp_client
from nemo_gym.service.routes import host
from nemo_gym.stack.stack import PIPELINE
from nemo_gym.storage import PostgresWriter, SqliteWriter

OPERATIONS = ("offer", "claim", "record_run", "_finish", "requeue", "release", "cancel", "claim_overdue")
"""Methods of `SqlJobStore` that write."""
BOUNDARIES = tuple(f"{operation} {moment}" for operation in OPERATIONS for moment in ("before", "after"))


def kill_at(boundary: str) -> None:
    """Kill this process the first time that the operation reaches this moment and has written something."""
    name, _, moment = boundary.partition(" ")

    def is_meant(request: Any) -> bool:
        return f".{name}.<locals>." in request.operation.__qualname__ and bool(
            request.outcome is None or request.outcome
        )

    for writer in (SqliteWriter, PostgresWriter):
        commit: Callable[..., None] = writer._commit

        def dying(self: Any, *arguments: Any, commit: Callable[..., None] = commit) -> None:
            batch = arguments[-1]
            if moment == "before":
                for request in batch:
                    _die_within(request, is_meant)
            commit(self, *arguments)
            if moment == "after" and any(is_meant(request) for request in batch if request.error is None):
                os.kill(os.getpid(), signal.SIGKILL)

        writer._commit = dying  # type: ignore[method-assign,assignment]


def _die_within(request: Any, is_meant: Callable[[Any], bool]) -> None:
    operation = request.operation

    def dying(connection: Any) -> Any:
        request.outcome = operation(connection)
        if is_meant(request):
            os.kill(os.getpid(), signal.SIGKILL)
        return request.outcome

    dying.__qualname__ = operation.__qualname__
    request.operation = dying


async def serve(given: dict[str, Any]) -> int:
    try:
        client = ServerClient(global_config_dict=given["stack"])
        if given.get("root_key"):
            targets = [name for name in given["stack"] if name != COMPOSITION]
            client.use_credentials(StackKeys.from_hex(given["root_key"]).outgoing(Role.PIPELINE, PIPELINE, targets))
        state_dir = Path(given["state_dir"])
        await host(client, ServiceConfig.parse(given["serve"]), state_dir, lambda text: print(text, flush=True))
    finally:
        await close_global_aiohttp_client()
    return 0


def main() -> int:
    options = json.loads(sys.argv[1])
    if options.get("kill"):
        kill_at(options["kill"])
    return uvloop.run(until_signal(serve(options), stopped=0))


if __name__ == "__main__":
    sys.exit(main())
