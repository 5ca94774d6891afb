"""``ng_why``: for each class of failure of a run, what happened, the evidence, the log lines and what helps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nemo_gym.cli import command

if TYPE_CHECKING:
    from nemo_gym.view.index import ResultIndex

NAME = "ng_why"


def main() -> None:
    command.run(NAME, why)


def why(argv: Sequence[str]) -> int:
    """Explain the failures. Return 0, also if nothing failed."""
    parser = command.plain_parser(
        NAME,
        "Explain why rollouts of a run have no verdict, findings, or no reward: for each class what happened, the"
        " evidence, the servers' log lines, and what usually helps; with a rollout (its id, task#sample, or a task)"
        " for that rollout.",
    )
    parser.add_argument("output", metavar="OUTPUT", help="result file")
    parser.add_argument("rollout", nargs="?", metavar="ROLLOUT", help="one rollout")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    from nemo_gym.cli.show import open_shown
    from nemo_gym.view.why import explain_rollout, explain_run

    index = open_shown(arguments.output)
    if arguments.rollout:
        explained = explain_rollout(index, arguments.rollout)
        classes = [] if explained is None else [explained]
    else:
        classes = [*explain_run(index)]
    if arguments.json:
        print(json.dumps({"output": str(index.files.output), "classes": classes}, indent=2))
    else:
        _print(index, classes)
    return command.EXIT_OK


def _print(index: ResultIndex, classes: Sequence[Mapping[str, Any]]) -> None:
    from nemo_gym.cli import show
    from nemo_gym.view import live
    from nemo_gym.view.queries import notes
    from nemo_gym.view.text import one_line

    say = partial(show.say, command.result_console())
    for note in notes(index):
        say(note, "yellow")
    if not classes:
        progress = live.progress(index.files)
        if progress is not None and progress["collecting"] and "total" in progress:
            say(f"Nothing to explain yet: {progress['ended']} of {progress['total']} rollouts have ended, all well.")
        else:
            say("Nothing to explain: every rollout has a reward, and none has findings.")
    for each in classes:
        named = ", ".join(one_line(name, 70) for name in each["named"])
        more = ", …" if each["rollouts"] > len(each["named"]) else ""
        say(f"\n{each['rollouts']} × {each['title']}  ({named}{more})", "bold")
        say(f"  {each['happened']}")
        for evidence in each["evidence"]:
            say(f"  evidence: {one_line(evidence, 400)}")
        for line in each["failing_lines"]:
            say(f"  {one_line(each['evaluation_log'], 120)}: {one_line(line, 160)}", "red")
        for line in each["log_lines"]:
            extra = (f"{one_line(key)}={one_line(value, 200)}" for key, value in line["more"].items())
            source = f"  {line['at']}: {one_line(line['level'])}"
            say(" ".join((f"{source}: {one_line(line['event'], 200)}", *extra)), "yellow")
        if not each["log_lines"] and each["label"].startswith("no verdict"):
            where = ", ".join(each["log_folders"]) or "their folder is not known, or no longer there"
            say(f"  no server logged anything about it ({where})", "dim")
        say(f"  what helps: {each['helps']}")
        if each["rollout_id"] is not None:
            say(f"  more: ng_show {index.files.output} {each['rollout_id']}", "dim")
