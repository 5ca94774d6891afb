"""Log lines of server processes: one JSON object per line on stderr, which is the server's log file.

Every line names the server's instance, the run and the current rollout, has the values bound in the logging context,
and with traces on the open span's ids. Other libraries' lines get the same format. Known secrets are redacted.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection
from functools import partial
from typing import Any

import structlog

from nemo_gym._util.secrets import redact_tokens, scrub, secret_values
from nemo_gym.config.launch import ServerLaunch
from nemo_gym.http.telemetry import current, is_on, name_rollout


def configure_server_logging(launch: ServerLaunch) -> None:
    """Set up structlog and the standard library's logging for this process."""
    secrets = secret_values(launch.config)
    if launch.credentials is not None:
        secrets |= {launch.credentials.audience_key.hex(), *launch.credentials.outgoing.values()}
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        name_rollout,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _ScrubbingFormatter(
            secrets,
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[
                partial(_identify, launch),
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(default=str),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)


def configure_plain_logging() -> None:
    """Set up logging for a server started by hand: readable lines, and tracebacks without the values of local
    variables, which may be credentials and whose formatting can block a server for seconds."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            name_rollout,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S"),
            structlog.dev.ConsoleRenderer(
                colors=sys.stdout.isatty(), exception_formatter=structlog.dev.plain_traceback
            ),
        ]
    )


def _identify(launch: ServerLaunch, logger: Any, name: str, event: Any) -> Any:
    event.setdefault("server", launch.instance)
    event.setdefault("run_id", launch.run_id)
    if is_on() and (span := current()) is not None:
        event.setdefault("trace_id", span.trace_id)
        event.setdefault("span_id", span.span_id)
    return event


class _ScrubbingFormatter(structlog.stdlib.ProcessorFormatter):
    def __init__(self, secrets: Collection[str], **options: Any) -> None:
        super().__init__(**options)
        self._secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        return redact_tokens(scrub(super().format(record), self._secrets))
