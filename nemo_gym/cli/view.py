"""``ng_view``: show runs in a browser."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_gym.cli import command
from nemo_gym.contract.errors import ConfigError

NAME = "ng_view"
PASSWORD_VARIABLE = "NG_VIEW_PASSWORD"


def main() -> None:
    command.run(NAME, view)


def view(argv: Sequence[str]) -> int:
    """Serve until interrupted."""
    parser = command.plain_parser(
        NAME,
        "Show runs in a browser: their progress, tables, single rollouts with turns, diffs, logs and tokens, and two"
        " runs compared. It reads the result files that are named, or stand below folders that are named (default:"
        " results), and follows runs that are under way; with a URL those of a rollout service, live. It listens on"
        " loopback and prints a URL with a token; on"
        f" another --host it wants a password, in {PASSWORD_VARIABLE} or with --password-file.",
    )
    parser.add_argument("paths", nargs="*", metavar="RESULTS|URL", help="result files, folders, services")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (a free one)")
    parser.add_argument("--password-file", metavar="FILE", help="a file whose first line is the password")
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="the token of the service of a URL, or its service.json (NEMO_GYM_SERVICE_TOKEN)",
    )
    parser.add_argument("--docs", metavar="FOLDER", help="the documentation that 'make docs' built (fern/site)")
    parser.add_argument("--prices", metavar="FILE", help="what a million tokens cost, by agent, as YAML")
    arguments = parser.parse_args(argv)
    import uvicorn

    from nemo_gym.config_types import BaseServerConfig
    from nemo_gym.http.webserver import WebServer, bind
    from nemo_gym.view.docs import SITE
    from nemo_gym.view.queries import Prices
    from nemo_gym.view.runs import Runs
    from nemo_gym.view.server import viewer
    from nemo_gym.view.service import WatchedService

    token_file = None if arguments.token_file is None else Path(arguments.token_file)
    services = [WatchedService(each, token_file) for each in arguments.paths if "://" in each]
    if token_file is not None and not services:
        raise ConfigError("--token-file: holds a service's token; name the service's URL, too", key="--token-file")
    paths = [Path(each) for each in arguments.paths or ["results"] if "://" not in each]
    runs = Runs(paths, Prices.read(Path(arguments.prices)) if arguments.prices else None, services)
    docs = SITE if arguments.docs is None else Path(arguments.docs)
    app, token = viewer(runs, arguments.host, _password(arguments.password_file), docs)
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port {arguments.port}: not a valid port", key="port")
    listener = bind(BaseServerConfig(host=arguments.host, port=arguments.port), secured=True, key="--port")
    host, port = listener.getsockname()[:2]
    url_host = f"[{host}]" if ":" in host else host
    runs.start()
    query = f"?token={token}" if token else ""

    def announce() -> None:
        print(f"http://{url_host}:{port}/{query}", flush=True)
        if token is None and not sys.stderr.isatty():
            print(f"{NAME}: the password crosses the network in the clear; put TLS before this", file=sys.stderr)

    config = uvicorn.Config(
        app, access_log=False, log_level="warning", server_header=False, ws="none", lifespan="off", proxy_headers=False
    )
    try:
        WebServer(config, on_ready=announce).run(sockets=[listener])
    except KeyboardInterrupt:  # the web server raises it when it has stopped in order
        return command.EXIT_INTERRUPTED
    finally:
        runs.stop()
    return command.EXIT_OK


def _password(path: str | None) -> str | None:
    if path is None:
        return os.environ.get(PASSWORD_VARIABLE) or None
    try:
        first = Path(path).read_text(encoding="utf-8").partition("\n")[0].strip()
    except OSError as error:
        raise ConfigError(f"--password-file: cannot read '{path}': {error.strerror}") from error
    if not first:
        raise ConfigError(f"--password-file: the first line of '{path}' is empty")
    return first
