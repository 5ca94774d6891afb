"""``ng_prorl_server``: the ProRL server's object over HTTP."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_gym.cli import command
from nemo_gym.contract.errors import ConfigError, require_whole

NAME = "ng_prorl_server"
KEYS = (
    *("host", "port", "url_file", "insecure", "start", "handlers", "swebench", "math"),
    *("llm_server_addresses", "max_init_workers", "max_run_workers", "max_eval_workers", "allow_skip_eval"),
    *("timeout_s", "max_body_mib", "max_body_values"),
)
DEFAULT_PORT = 8006


def main() -> None:
    command.run(NAME, serve)


@command.outlasts_output()
def serve(argv: Sequence[str]) -> int:
    """Serve until a signal."""
    parser = command.parser(
        NAME,
        "Serve ProRL's routes (/process /start /stop /status /cancel /add_llm_server /clear_llm_server). Prints"
        " PRORL_SERVER_URLS=<url>; where PRORL_SERVER_TOKEN is set, callers must give it. swebench= and math= take the"
        " words of a composition, in quotes; handlers= modules that register more, with ',' between.",
        words="|".join(f"{key}=" for key in KEYS),
    )
    given = words_of(parser.parse_args(argv).settings)

    from nemo_gym.http.observability import configure_plain_logging
    from nemo_gym.prorl import service
    from nemo_gym.prorl.async_server import TIMEOUT_S, OpenHandsServer
    from nemo_gym.prorl.client import TOKEN_ENV
    from nemo_gym.prorl.registry import registered_handlers

    register(given)
    numbers = {key: command.whole_number(key, given[key]) for key in KEYS if key.startswith("max_") and key in given}
    limits = {
        key: require_whole(key, numbers.pop(key), 1) for key in ("max_body_mib", "max_body_values") if key in numbers
    }
    server = OpenHandsServer(
        addresses(given.get("llm_server_addresses", "")),
        **numbers,
        allow_skip_eval=_flag("allow_skip_eval", given.get("allow_skip_eval", "false")),
        timeout_s=_seconds("timeout_s", given.get("timeout_s", str(TIMEOUT_S))),
    )
    token = os.environ.get(TOKEN_ENV) or None
    insecure = _flag("insecure", given.get("insecure", "false"))
    port = command.whole_number("port", given.get("port", str(DEFAULT_PORT)))
    starts = _flag("start", given.get("start", "false"))
    listening = service.Listening.on(given.get("host", "127.0.0.1"), port, secured=token is not None or insecure)
    configure_plain_logging()
    if starts:
        server.start()

    def announce() -> None:
        listening.announce(Path(given["url_file"]) if "url_file" in given else None)
        print(f"{NAME}: data sources: {', '.join(registered_handlers())}", file=sys.stderr)
        print(f"PRORL_SERVER_URLS={listening.url}", flush=True)

    try:
        service.serve(server, listening, token, announce, **limits)
    except KeyboardInterrupt:  # the web server raises it when it has stopped in order
        return command.EXIT_INTERRUPTED
    return command.EXIT_OK


def words_of(settings: Sequence[str]) -> dict[str, str]:
    """Return the command's settings. Raises `ConfigError` for an argument that is not a known setting."""
    for word in settings:
        if "=" not in word:
            raise ConfigError(f"'{word}' is not a setting; settings are key=value", key=word)
    return command.settings_of(settings, KEYS)


def register(given: Mapping[str, str]) -> None:
    """Register the handlers that the command line names."""
    from nemo_gym.prorl.handlers import MathHandler, SweBenchHandler
    from nemo_gym.prorl.registry import register_agent_handler

    for name, kind in (("swebench", SweBenchHandler), ("math", MathHandler)):
        if name in given:
            register_agent_handler(kind(_merged_settings(kind.WORDS, name, given[name])))
    sys.path.insert(0, str(Path.cwd()))
    for module in filter(None, given.get("handlers", "").split(",")):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(f"handlers={module} cannot be imported: {error}", key="handlers") from error


def _merged_settings(defaults: Sequence[str], name: str, text: str) -> list[str]:
    """Return a composition's default settings, overridden by the command line's; check that they compose."""
    from nemo_gym.config.compose import compose

    words = shlex.split(text)
    chosen = {*map(command.key_of, words)}
    words = [*(word for word in defaults if command.key_of(word) not in chosen), *words]
    try:
        compose([*words, "policy_base_url=http://127.0.0.1/v1", "policy_model_name=policy"])
    except ConfigError as error:
        raise ConfigError(f"{name}={text!r}: {error.message}", key=name) from error
    return words


def addresses(text: str) -> list[tuple[str, float]]:
    """Parse ``url,url*2`` into addresses, each with its weight (default 1)."""
    found = []
    for item in filter(None, text.split(",")):
        address, star, weight = item.partition("*")
        found.append((address.strip(), _seconds("llm_server_addresses", weight) if star else 1.0))
    return found


def _seconds(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{key}: '{text}' must be a number", key=key) from None


def _flag(key: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise ConfigError(f"{key}={text} must be true or false", key=key)
    return text == "true"
