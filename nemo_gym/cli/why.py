"""``ng_why``: for each class of failure of a run, what happened, the evidence, the log lines and what helps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nemo_gym.cli import command

if TYPE_CHECKING:
    from nemo_gym.view.index import ResultIndex
    from nemo_gym.view.logs import LogLine

NAME = "ng_why"
MAX_CLASSES = 30
MAX_LOG_LINES = 6
EXAMPLES = 3


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

    index = open_shown(arguments.output)
    if arguments.rollout:
        explained = _explain_rollout(index, arguments.rollout)
        classes = [] if explained is None else [explained]
    else:
        classes = [*_explain_run(index)]
    if arguments.json:
        print(json.dumps({"output": str(index.files.output), "classes": classes}, indent=2))
    else:
        _print(index, classes)
    return command.EXIT_OK


def _explain_run(index: ResultIndex) -> Iterable[dict[str, Any]]:
    """Yield a class for each way to fail, explained by its first rollout."""
    from nemo_gym.view.queries import reasons

    for group in reasons(index, MAX_CLASSES):
        if group["rank"] == 3:
            continue  # it has a reward
        first = group["named"][0]["rollout_id"]
        explained = _explain_rollout(index, first)
        if explained is not None:
            named = [f"{each['task_id']}#{each['sample_index']}" for each in group["named"][:EXAMPLES]]
            yield {**explained, "rollouts": group["rollouts"], "named": named, "label": group["label"]}
    if (stopped := _stopped(index)) is not None:
        yield stopped


def _stopped(index: ResultIndex) -> dict[str, Any] | None:
    """Explain what a stopped run has left unfinished, with log lines of rollouts that had begun."""
    from nemo_gym.view import live
    from nemo_gym.view.logs import lines_of
    from nemo_gym.view.why import CAUSES

    unfinished = live.left_over(index.files)
    if unfinished is None:
        return None
    count, begun = unfinished
    folders = live.server_logs(index.files)
    lines = [line for each in begun[:EXAMPLES] for line in lines_of(folders, each["rollout_id"])]
    first = [f"{each['task_id']}#{each['sample_index']} in attempt {each['attempt']}" for each in begun[:EXAMPLES]]
    more = ", …" if len(begun) > EXAMPLES else ""
    return {
        **CAUSES["stopped"].as_data(),
        "evidence": [
            f"{count} rollouts have no end, and no command works on them",
            *([f"begun: {', '.join(first)}{more}"] if begun else []),
        ],
        "rollouts": count,
        "named": [f"{each['task_id']}#{each['sample_index']}" for each in begun[:EXAMPLES]],
        "label": "no verdict yet",
        "rollout_id": None,
        "log_lines": [_line(line) for line in lines[-MAX_LOG_LINES:]],
        "log_folders": [str(folder) for folder in folders],
        "evaluation_log": None,
        "failing_lines": [],
    }


def _explain_rollout(index: ResultIndex, rollout: str) -> dict[str, Any] | None:
    from nemo_gym.view.logs import lines_of, log_folders, trouble_of
    from nemo_gym.view.queries import find_row
    from nemo_gym.view.rollout import evaluation_log
    from nemo_gym.view.why import CAUSES, explain

    result = find_row(index, rollout)
    explained = explain(result.columns, result.row)
    if explained is None:
        return None
    folders = log_folders(index.files, result.row)
    lines = lines_of(folders, str(result.columns["rollout_id"]), result.row)
    lines = [line for line in lines if line.is_trouble] or lines
    if not lines and (words := CAUSES[explained["cause"]].log_words):
        lines = trouble_of(folders, words)
    log = evaluation_log(index.files, result.row)
    failing = [line["text"] for line in log["lines"] if line["mark"] in ("fail", "test")] if log else []
    return {
        **explained,
        "rollouts": 1,
        "named": [f"{result.columns['task_id']}#{result.columns['sample_index']}"],
        "label": result.columns["label"],
        "rollout_id": result.columns["rollout_id"],
        "log_lines": [_line(line) for line in lines[-MAX_LOG_LINES:]],
        "log_folders": [str(folder) for folder in folders],
        "evaluation_log": log and log["path"],
        "failing_lines": failing[:MAX_LOG_LINES],
    }


def _line(line: LogLine) -> dict[str, Any]:
    more = {key: value for key, value in line.more.items() if key != "exception"}
    trace = str(line.more.get("exception", "")).strip().splitlines()
    if trace:
        more["exception"] = trace[-1]
    return {
        "at": f"{line.file.name}:{line.number}",
        "timestamp": line.timestamp,
        "server": line.server,
        "level": line.level,
        "event": line.event,
        "more": more,
    }


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
            extra = " ".join(f"{key}={one_line(value, 200)}" for key, value in line["more"].items())
            say(f"  {line['at']}: {line['level']}: {one_line(line['event'], 200)} {extra}".rstrip(), "yellow")
        if not each["log_lines"] and each["label"].startswith("no verdict"):
            where = ", ".join(each["log_folders"]) or "their folder is not known, or no longer there"
            say(f"  no server logged anything about it ({where})", "dim")
        say(f"  what helps: {each['helps']}")
        if each["rollout_id"] is not None:
            say(f"  more: ng_show {index.files.output} {each['rollout_id']}", "dim")
