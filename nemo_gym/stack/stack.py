"""The lifecycle of one stack: from a composition to running servers, and their orderly end."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_gym._util.secrets import redact
from nemo_gym.config.check import free_ports
from nemo_gym.config.compose import run_directory_root
from nemo_gym.config.composition import Composition
from nemo_gym.config.files import find_plugin
from nemo_gym.config.hosts import Hosts
from nemo_gym.config.keys import COMPOSITION
from nemo_gym.config.visibility import Address
from nemo_gym.contract.credentials import Role, StackKeys
from nemo_gym.contract.errors import ConfigError
from nemo_gym.stack.endpoints import StackEntry, remove_stack, require_free
from nemo_gym.stack.ports import DEFAULT_HOST, bind_listeners
from nemo_gym.stack.supervisor import Supervisor
from nemo_gym.stack.venvs import interpreter_for, requirement_lines, unmet

if TYPE_CHECKING:
    from nemo_gym.http.client import ServerClient

CONFIG_FILE = "config.yaml"
PIPELINE = "pipeline"
"""The caller name of the pipeline."""
OPERATOR = "operator"


@asynccontextmanager
async def running_stack(
    composition: Composition, nursery_process: tuple[int, socket.socket], say: Callable[[str], None]
) -> AsyncIterator[Supervisor]:
    """Run the servers of ``composition``, all ready, until the block ends; then stop them in order.

    Raises `ConfigError` (a port in use, a wrong block) or `ServerError` (a server that does not become ready) after
    stopping everything again.
    """
    run_id, run_dir = run_directory(composition)
    _save_config(composition, run_dir)
    hosts = Hosts.of(composition)
    if hosts is not None:
        hosts.require_here()
    places = hosts.local if hosts is not None else None
    interpreters = _interpreters(composition, places, say)
    default_host = str(composition.values.get("default_host") or DEFAULT_HOST)
    free = free_ports(composition.values)
    listeners = bind_listeners(composition.servers.values(), default_host, places, free)
    supervisor = Supervisor(
        composition,
        listeners,
        interpreters,
        run_id=run_id,
        run_dir=run_dir,
        keys=hosts.keys if hosts is not None else StackKeys.generate(),
        hosts=hosts,
        nursery_process=nursery_process,
        say=say,
    )
    try:
        supervisor.start()
        supervisor.write_stack()
        await supervisor.wait_ready()
        yield supervisor
    finally:
        try:
            await supervisor.stop()
        finally:
            remove_stack(run_dir, run_id)


def run_directory(composition: Composition) -> tuple[str, Path]:
    """Return the run's id and its directory, which is created if missing. Raises `ConfigError` if the directory cannot
    be created, or a stack already runs in it."""
    run_id = str(composition.values.get("run_id") or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}")
    configured = composition.values.get("run_dir")
    run_dir = Path(str(configured)).expanduser().resolve() if configured else run_directory_root() / run_id
    try:
        run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"run_dir {run_dir} cannot be made: {os.strerror(error.errno or 0)}; choose another with run_dir=",
            key="run_dir",
        ) from error
    require_free(run_dir)
    return run_id, run_dir


def _save_config(composition: Composition, run_dir: Path) -> None:
    """Save the configuration in the run's directory for later reference, with secrets removed."""
    import yaml

    text = yaml.safe_dump(redact(composition.values), sort_keys=False, allow_unicode=True)
    (run_dir / CONFIG_FILE).write_text(text, encoding="utf-8")


def _interpreters(
    composition: Composition, places: Mapping[str, Address] | None, say: Callable[[str], None]
) -> dict[str, str | None]:
    interpreters: dict[str, str | None] = {}
    for server in composition.servers.values():
        if places is not None and server.instance not in places:
            continue
        plugin = find_plugin(server.server_type, server.implementation, composition.roots)
        missing = unmet(requirement_lines(plugin))
        if missing:
            say(f"{server.instance} runs in an environment of its own, for {', '.join(missing)}")
        interpreters[server.instance] = interpreter_for(plugin) if missing else None
    return interpreters


def pipeline_client(stack: StackEntry) -> ServerClient:
    """Return a client with the pipeline's credentials for all servers of a running stack, on this and other hosts."""
    return _client(stack, Role.PIPELINE, PIPELINE, [name for name in stack.config if name != COMPOSITION])


def operator_client(stack: StackEntry, targets: Sequence[str]) -> ServerClient:
    """Return a client with an operator's credentials, for the servers ``targets`` only."""
    return _client(stack, Role.OPERATOR, OPERATOR, targets)


def _client(stack: StackEntry, role: Role, name: str, targets: Sequence[str]) -> ServerClient:
    from nemo_gym.http.client import ServerClient

    client = ServerClient(global_config_dict=stack.config)
    client.use_credentials(StackKeys.from_hex(stack.root_key).outgoing(role, name, targets))
    return client
