"""Seeing to it that a watchdog runs for an engine."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from nemo_gym.contract.errors import SandboxCreateError
from nemo_gym.sandbox.providers.docker import watchdog


def lock_path(engine_url: str) -> Path:
    """The file that the watchdog of an engine keeps locked. One of another release may be at work beside it: it does
    not know what ours has to do, and removes nothing that ours would not."""
    configured = os.environ.get("XDG_CACHE_HOME")
    digest = hashlib.sha256(engine_url.encode() + b"\0" + Path(watchdog.__file__).read_bytes())
    cache = Path(configured) if configured else Path("~").expanduser() / ".cache"
    return cache / "nemo-gym" / "watchdogs" / f"docker-{digest.hexdigest()[:16]}.lock"


def ensure_watchdog(engine_url: str) -> None:
    """Start the watchdog of an engine unless it runs. Cheap when it does.

    Raises:
        SandboxCreateError: it cannot be started, so leases could not be kept.
    """
    path = lock_path(engine_url)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held = watchdog.try_lock(str(path))
        if held is None:
            return
        os.close(held)
        argv = [sys.executable, "-I", "-S", watchdog.__file__, str(path), engine_url]
        if not engine_url.startswith("unix://") and os.environ.get("DOCKER_TLS_VERIFY"):
            argv.append(os.environ.get("DOCKER_CERT_PATH") or str(Path("~/.docker").expanduser()))
        with path.with_suffix(".log").open("ab") as log:
            subprocess.run(
                argv,
                check=True,
                timeout=60,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxCreateError(
            f"docker: the watchdog that removes boxes when their lease ends could not be started ({error}); "
            f"see {path.with_suffix('.log')}"
        ) from error
