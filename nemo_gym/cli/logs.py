"""``ng_logs``: all servers' structured log lines about one rollout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_gym.cli import command
from nemo_gym.contract.errors import ConfigError

NAME = "ng_logs"
KEYS = ("rollout", "run_dir", "output")


def main() -> None:
    command.run(NAME, logs)


def logs(argv: Sequence[str]) -> int:
    """Print the lines in order of time. Return 1 if there are none."""
    parser = command.plain_parser(
        NAME,
        "Print what all servers logged about one rollout, in order. rollout= is its id. output= names the result file"
        " (then task#sample works, too), run_dir= a run's folder; without either, all runs of this user are searched.",
    )
    parser.add_argument("words", nargs="*", metavar="key=value", help="rollout=ID [output=FILE | run_dir=DIR]")
    parser.add_argument("--json", action="store_true", help="print the lines as they stand in the logs")
    arguments = parser.parse_args(argv)
    from nemo_gym._util.terminal import shown
    from nemo_gym.view.logs import lines_of
    from nemo_gym.view.text import one_line

    given = command.settings_of(arguments.words, KEYS)
    if not given.get("rollout"):
        raise ConfigError("rollout=: is missing; ng_show and the result rows name it (_ng_rollout_id)", key="rollout")
    rollout, folders, row = _locate(given)
    lines = lines_of(folders, rollout, row)
    for line in lines:
        if arguments.json:
            print(json.dumps({"server": line.server, "timestamp": line.timestamp, "level": line.level,
                              "event": line.event, "rollout_id": line.rollout_id, **line.more}))  # fmt: skip
            continue
        trace = str(line.more.get("exception", ""))
        extra = (f"{one_line(key)}={one_line(value, 300)}" for key, value in line.more.items() if key != "exception")
        source = " ".join(map(one_line, (line.timestamp, line.server, line.level)))
        print(" ".join((f"{source}: {one_line(line.event, 400)}", *extra)))
        for text in trace.splitlines():
            print(f"    {shown(text)}")
    if not lines:
        searched = ", ".join(str(folder) for folder in folders[:3]) or "no folder"
        command.complain(NAME, f"no server logged anything about '{rollout}' ({searched})")
    return command.EXIT_OK if lines else command.EXIT_FAILED


def _locate(given: dict[str, str]) -> tuple[str, list[Path], dict[str, Any]]:
    """Return the rollout's id, the folders to search, and its result row (empty if there is none)."""
    rollout = given["rollout"]
    if "output" in given:
        from nemo_gym.cli.show import open_shown
        from nemo_gym.view.index import ViewError
        from nemo_gym.view.logs import log_folders
        from nemo_gym.view.queries import find_row

        index = open_shown(given["output"])
        try:
            result = find_row(index, rollout)
        except ViewError:
            return rollout, log_folders(index.files, {}), {}  # it may still be running
        return str(result.columns["rollout_id"]), log_folders(index.files, result.row), result.row
    if "run_dir" in given:
        folder = Path(given["run_dir"], "logs")
        if not folder.is_dir():
            raise ConfigError(f"run_dir=: '{given['run_dir']}' has no folder 'logs'", key="run_dir")
        return rollout, [folder], {}
    from nemo_gym.config.compose import run_directory_root

    root = run_directory_root()
    return rollout, sorted(path for path in root.glob("*/logs") if path.is_dir()) if root.is_dir() else [], {}
