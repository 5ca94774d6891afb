"""The start of a server process: take over its descriptors, then run the plugin's ``app.py`` as ``__main__``.

Forked processes and those of another interpreter (``python -m nemo_gym.stack.child``) use the same code.
"""

from __future__ import annotations

import atexit
import dataclasses
import importlib
import io
import json
import os
import pkgutil
import re
import signal
import sys
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from nemo_gym._util.suggest import nearest
from nemo_gym.config.keys import OBSERVABILITY
from nemo_gym.config.launch import (
    LAUNCH_FD_ENV,
    ServerLaunch,
    current_launch,
    die_with_parent,
    load_launch_from_fd,
    set_current_launch,
    write_launch,
)
from nemo_gym.contract.errors import ConfigError, NemoGymError

EXIT_CONFIG = 2
ENVIRONMENT_FD_ENV = "NEMO_GYM_ENVIRONMENT_FD"


def start(request: dict[str, Any], fds: Sequence[int]) -> NoReturn:
    """Turn a freshly forked process into the server that ``request`` describes. Never returns.

    ``fds``: the launch data, the listening socket, the ready pipe, the log file.
    """
    launch_fd, socket_fd, ready_fd, log_fd = fds
    code = 1
    try:
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        os.close(log_fd)
        launch = load_launch_from_fd(launch_fd)
        launch = dataclasses.replace(launch, socket_fd=socket_fd, ready_fd=ready_fd, parent_pid=request["parent_pid"])
        if request["python"]:
            _execute(request, launch)
        os.environ.update(request["environment"])
        die_with_parent(launch.parent_pid)
        _set_process_name(launch.instance)
        set_current_launch(launch)
        code = run_app(Path(request["app"]), [Path(root) for root in request["roots"]])
    except BaseException:  # noqa: BLE001  (the last line of defence of a forked process: it must not return to the nursery's loop)
        traceback.print_exc()
    finally:
        _leave(code)


def _execute(request: dict[str, Any], launch: ServerLaunch) -> NoReturn:
    """Replace this process by another interpreter, which inherits the descriptors."""
    for fd in (launch.socket_fd, launch.ready_fd):
        assert fd is not None
        os.set_inheritable(fd, True)
    os.environ[LAUNCH_FD_ENV] = str(write_launch(launch))
    # Variables passed on by name may be secret, so they too go through a descriptor, not the environment block.
    environment_fd = os.memfd_create("nemo-gym-environment", 0)
    os.write(environment_fd, json.dumps(request["environment"]).encode())
    os.lseek(environment_fd, 0, os.SEEK_SET)
    os.environ[ENVIRONMENT_FD_ENV] = str(environment_fd)
    python = request["python"]
    argv = [python, "-P", "-m", "nemo_gym.stack.child", request["app"], *request["roots"]]
    os.execve(python, argv, dict(os.environ))


def main() -> NoReturn:
    """Run ``python -m nemo_gym.stack.child <app.py> <root>…`` with the launch data in ``NEMO_GYM_LAUNCH_FD``."""
    launch = current_launch()
    if launch is None:
        sys.exit(f"this module is started by ng_run only ({LAUNCH_FD_ENV} is not set)")
    with os.fdopen(int(os.environ.pop(ENVIRONMENT_FD_ENV)), "rb") as environment_file:
        os.environ.update(json.load(environment_file))
    die_with_parent(launch.parent_pid)
    _set_process_name(launch.instance)
    _leave(run_app(Path(sys.argv[1]), [Path(root) for root in sys.argv[2:]]))


def run_app(app: Path, roots: Sequence[Path]) -> int:
    """Run a plugin's entrypoint like a script: its folder is the working directory and comes first on ``sys.path``.
    Return the exit code; any exception is logged and reported to the parent in one line."""
    from nemo_gym.http.observability import configure_server_logging, start_server_telemetry

    launch = current_launch()
    assert launch is not None
    configure_server_logging(launch)
    if launch.config.get(OBSERVABILITY):
        start_server_telemetry(launch)
    for stream in (sys.stdout, sys.stderr):
        # Without line buffering, the last lines of a killed server, which show the reason, would be lost.
        cast(io.TextIOWrapper, stream).reconfigure(line_buffering=True)
    os.chdir(app.parent)
    sys.argv = [str(app)]
    app_folder = str(app.parent)
    sys.path[:] = [
        app_folder,
        *(str(root) for root in roots if str(root) != app_folder),
        *(p for p in sys.path if p not in ("", app_folder)),
    ]
    main_module = types.ModuleType("__main__")
    main_module.__file__ = str(app)
    sys.modules["__main__"] = main_module
    try:
        exec(compile(app.read_bytes(), str(app), "exec"), main_module.__dict__)
    except SystemExit as stop:
        return _exit_code(stop)
    except KeyboardInterrupt:
        return 0
    except NemoGymError as error:
        sys.stderr.write(f"{error.code}: {error.message}\n")
        _report(launch, error.code, error.message)
        return EXIT_CONFIG if isinstance(error, ConfigError) else 1
    except ImportError as error:
        traceback.print_exc()
        absent = absent_name(error)
        _report(launch, ConfigError.code if absent else "crash", absent or f"{type(error).__name__}: {error}")
        return EXIT_CONFIG if absent else 1
    except Exception as error:  # noqa: BLE001  (a plugin may raise anything; the parent shows it and decides)
        traceback.print_exc()
        _report(launch, "crash", f"{type(error).__name__}: {error}")
        return 1
    return 0


def absent_name(error: ImportError) -> str | None:
    """Return a message that names the part of ``nemo_gym`` which a plugin imports but does not exist, and what does
    exist there; ``None`` if the failed import is of another package."""
    module = error.name or ""
    if module.split(".")[0] != "nemo_gym":
        return None
    name_match = re.search(r"cannot import name '(\w+)'", str(error))
    if name_match is not None:
        names = [name for name in dir(importlib.import_module(module)) if not name.startswith("_")]
        missing_part = f"'{name_match[1]}' of '{module}', which has none of that name{nearest(name_match[1], names)}"
        return f"the plugin imports {missing_part}; there are: {', '.join(names)}"
    parent, _, last = module.rpartition(".")
    try:
        folder = getattr(importlib.import_module(parent), "__path__", ()) if parent else ()
    except ImportError:
        folder = ()
    names = [found.name for found in pkgutil.iter_modules(folder)]
    return (
        f"the plugin imports '{module}', which does not exist here{nearest(last, names)};"
        f" modules of '{parent}': {', '.join(names) or 'none'}"
    )


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    sys.stderr.write(f"{stop.code}\n")
    return 1


def _report(launch: ServerLaunch, code: str, message: str) -> None:
    if launch.ready_fd is None:
        return
    try:
        os.write(launch.ready_fd, b"error " + json.dumps({"code": code, "message": message[:2000]}).encode() + b"\n")
    except OSError:
        pass  # the server was already ready, so the pipe is closed


def _set_process_name(instance: str) -> None:
    """Set the name that ``ps`` and ``top`` show."""
    import ctypes

    pr_set_name = 15
    ctypes.CDLL(None).prctl(pr_set_name, f"ng:{instance}".encode()[:15])


def _leave(code: int) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
