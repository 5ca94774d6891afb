"""A run in the terminal: ``ng_show`` shows it, one rollout of it, or two runs compared; ``ng_why`` says for each class
of failure what happened, the evidence and what helps; ``ng_logs`` prints all servers' log lines about one rollout."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_gym._util.suggest import nearest
from nemo_gym.cli import command
from nemo_gym.contract.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from nemo_gym.view.index import ResultIndex

NAME = "ng_show"
FILTERS = ("q", "task", "agent", "outcome", "reward", "findings", "turns", "seconds")
KEYS = (*FILTERS, "sort", "descending", "limit", "offset", "prices")
MAX_LINES = 12


def main() -> None:
    command.run(NAME, show)


def show(argv: Sequence[str]) -> int:
    """Print the run, rollout or comparison. Exit with 1 if the rollout does not exist, 2 if the file does not."""
    parser = command.plain_parser(
        NAME,
        "Show a run as a table, worst first; with a rollout (its id, task#sample, or a task) that rollout turn by"
        " turn; with a second result file both runs task by task. Filters and order:"
        f" {', '.join(f'{key}=' for key in KEYS)}"
        " such as q='division by zero' reward=0 sort=seconds descending=1 limit=20.",
    )
    parser.add_argument("output", metavar="OUTPUT", help="result file")
    parser.add_argument("words", nargs="*", metavar="ROLLOUT|OUTPUT|key=value", help="what of it")
    parser.add_argument("--full", action="store_true", help="whole texts, not their beginnings")
    arguments = parser.parse_args(argv)
    index = open_shown(arguments.output)
    words = [word for word in arguments.words if _key_of(word) is None]
    settings = {key: word.partition("=")[2] for word in arguments.words if (key := _key_of(word)) is not None}
    if len(words) > 1:
        raise ConfigError(f"'{words[1]}': name one rollout, or one other result file")
    console = command.result_console()
    if not words:
        _print_run(console, index, settings)
    elif Path(words[0]).suffix == ".jsonl" or Path(words[0]).is_file():
        _refuse_but(("limit",), settings, "a second result file")
        _print_comparison(console, index, open_shown(words[0]), settings)
    else:
        _refuse_but((), settings, "a rollout")
        _print_rollout(console, index, words[0], whole=arguments.full)
    return command.EXIT_OK


def open_shown(path: str) -> ResultIndex:
    """Open the index of a result file; show a line of progress if reading takes more than a second."""
    from nemo_gym.view.index import Reading, open_result

    is_terminal = sys.stderr.isatty()

    def listen(reading: Reading) -> None:
        if is_terminal and reading.seconds > 1:
            percent = 100 * reading.done_bytes // max(1, reading.total_bytes)
            end = "\r" if reading.done_bytes < reading.total_bytes else "\n"
            print(f"reading {reading.path.name}: {percent} %, {reading.mb_per_s:.0f} MB/s", end=end, file=sys.stderr)

    return open_result(Path(path), listen)


def _key_of(word: str) -> str | None:
    key, is_setting, _ = word.partition("=")
    if not is_setting or not key.isidentifier():
        return None
    if key not in KEYS:
        raise ConfigError(f"'{key}' is not a filter{nearest(key, KEYS)}; there are: {', '.join(KEYS)}")
    return key


def _refuse_but(used: Sequence[str], settings: Mapping[str, str], beside: str) -> None:
    """Raise `ConfigError` for settings that have no effect beside what the words name."""
    if unused := [f"{key}=" for key in settings if key not in used]:
        raise ConfigError(f"{', '.join(unused)} would have no effect beside {beside}; leave it out")


def say(console: Console, text: str, style: str = "") -> None:
    """Print one text without wrapping it."""
    from rich.text import Text

    console.print(Text(text, style=style), soft_wrap=True)


def _print_run(console: Console, index: ResultIndex, settings: dict[str, str]) -> None:
    from rich.table import Table
    from rich.text import Text

    from nemo_gym._util.terminal import figure, one_line, seconds_text
    from nemo_gym.rollouts.report import counted, print_titled
    from nemo_gym.view import live
    from nemo_gym.view.queries import Prices, TableQuery, reason_text, summary, table

    prices = settings.pop("prices", None)
    query = TableQuery.of({"limit": "40", **settings})
    totals = summary(index, Prices.read(Path(prices)) if prices else None)
    page = table(index, query)
    for note in totals["notes"]:
        say(console, note, "yellow")
    progress = live.progress(index.files)
    if progress is not None:
        for line in progress_lines(progress):
            say(console, line)
    grid = Table()
    right = {"sample", "reward", "findings", "turns", "time", "attempts"}
    for name in ("task", "sample", "agent", "reward", "outcome", "findings", "turns", "time", "attempts", "why"):
        grid.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in page["rows"]:
        grid.add_row(
            Text(one_line(row["task_id"], 60)),
            str(row["sample_index"]),
            Text(one_line(row["agent"], 24)),
            Text(figure(row["reward"]), style=_style(row)),
            Text(one_line(row["outcome"], 24)),
            str(row["findings"] or ""),
            "" if row["turns"] is None else str(row["turns"]),
            seconds_text(row["seconds"]),
            str(row["attempts"]),
            Text(one_line(reason_text(row), 48)),
        )
    print_titled(console, f"{counted(page['total'], 'rollout')} of {index.files.output}", grid)
    remaining = page["total"] - query.offset - len(page["rows"])
    if remaining > 0:
        console.print(f"… and {remaining} more: offset={query.offset + len(page['rows'])}")
    for line in figure_lines(totals):
        say(console, line)
    if totals["rollouts"] - totals["valid"] or totals["with_findings"]:
        say(console, f"Explained: ng_why {index.files.output}")


def progress_lines(progress: Mapping[str, Any]) -> Iterator[str]:
    """Describe the progress of a run that has not ended."""
    from nemo_gym._util.terminal import one_line, seconds_text

    if progress.get("note"):
        yield progress["note"]
        return
    if progress["ended"] == progress["total"]:
        return
    state = "running" if progress["collecting"] else "stopped; the same ng_run command goes on with it"
    line = f"{progress['ended']} of {progress['total']} rollouts have ended ({state})"
    if progress["collecting"]:
        line += f"; {progress['running_count']} run, {progress['queued']} wait, {progress['retried']} are tried again"
        if progress["waiting_for_retry"]:
            line += f" ({progress['waiting_for_retry']} after a pause)"
        if progress["per_minute"] is not None:
            line += f"; {progress['per_minute']:.1f} per minute"
        if progress["seconds_left"] is not None:
            line += f", about {seconds_text(progress['seconds_left'])} left"
    yield line
    for job in progress["running"][:10]:
        stage = f"{job['stage'] or 'ends'}{'' if job['works'] else ' (waits)'}"
        if job["stage_seconds"] is not None:
            stage += f" for {seconds_text(job['stage_seconds'])}"
        yield (
            f"  {one_line(job['task_id'], 60)} #{job['sample_index']}: {stage} at"
            f" {one_line(job['server'] or job['agent'], 40)}, attempt {job['attempt']}, {seconds_text(job['seconds'])}"
            " in all"
        )


def figure_lines(of: Mapping[str, Any]) -> Iterator[str]:
    """Yield the figures of `queries.summary`, one line each."""
    mean = of["reward"]
    if mean is not None:
        interval = (
            "" if mean["std_err"] is None else f" ± {1.96 * mean['std_err']:.3f} (95 %, over {mean['tasks']} tasks)"
        )
        yield f"reward {mean['value']:.3f}{interval}"
    rates = of["pass_rates"]
    names = [name for name in rates if not name.endswith("/std_err")]
    for name in dict.fromkeys([*names[:1], *names[-1:]]):
        error = rates.get(f"{name}/std_err")
        yield f"{name} {rates[name]:.1f} %" + ("" if error is None else f" ± {error:.1f}")
    yield (
        f"{of['solved']} of {of['tasks']} tasks solved; {of['rollouts'] - of['valid']} of {of['rollouts']} rollouts"
        f" without a verdict, {of['with_findings']} with findings, {of['retried']} tried again"
    )
    cost = "" if of["cost"] is None else f"; cost {of['cost']:.2f}"
    yield f"{of['tokens_in']} tokens in, {of['tokens_out']} out{cost}"


def _style(row: Mapping[str, Any]) -> str:
    return "yellow" if row["reward"] is None else "green" if row["reward"] > 0 else "red"


def _print_rollout(console: Console, index: ResultIndex, rollout: str, *, whole: bool) -> None:
    from nemo_gym._util.terminal import one_line, seconds_text, shown
    from nemo_gym.view.queries import find_row
    from nemo_gym.view.rollout import rollout_view, whole_texts
    from nemo_gym.view.why import explain

    result = find_row(index, rollout)
    with whole_texts() if whole else nullcontext():
        view = rollout_view(index, result)
    tell = partial(say, console)

    def body(text: Mapping[str, Any]) -> None:
        lines = shown(text["text"]).splitlines()
        visible = lines if whole else lines[:MAX_LINES]
        for each in visible:
            tell(f"    {each}")
        if len(visible) < len(lines):
            tell(f"    … {len(lines) - len(visible)} more lines (--full)", "dim")
        elif (hidden := text["chars"] - len(text["text"])) > 0:
            tell(f"    … {hidden} more characters (--full)", "dim")

    tell(
        f"{one_line(view['task_id'])} #{view['sample_index']}  ({one_line(view['agent'])}, {view['rollout_id']})",
        "bold",
    )
    reward = "no verdict" if view["reward"] is None else f"reward {view['reward']:g}"
    stages = ", ".join(f"{each['stage']} {seconds_text(each['seconds'])}" for each in view["timings"])
    tell(f"{reward}, {one_line(view['outcome'])}; {len(view['turns'])} turns; {stages or 'no timings'}", _style(view))
    if (why := explain(result.columns, result.row)) is not None:
        tell(f"{why['title']}: {why['happened']}", "yellow")
        for evidence in why["evidence"]:
            tell(f"  - {one_line(evidence, 400)}")
        tell(f"  What helps: {why['helps']}")
    if len(view["attempts"]) > 1:
        for attempt in view["attempts"]:
            ending = f"{one_line(attempt['kind'] or 'verdict')} {one_line(attempt['reason'], 300)}"
            tell(f"  attempt {attempt['number']}: {ending}")
    for message in view["prompt"]:
        tell(f"\n{one_line(message['role'])}", "bold")
        body(message)
    for turn in view["turns"]:
        tell(f"\nturn {turn['number']}", "bold")
        for item in turn["items"]:
            if item["kind"] == "call":
                tell(f"  {one_line(item['name'])}", "cyan")
                body(item["arguments"])
                if item["result"] is not None:
                    tell("  →", "cyan")
                    body(item["result"])
            else:
                tell(f"  {item['kind']}", "cyan")
                body(item)
    for artifact in view["artifacts"]:
        tell(f"\n{one_line(artifact['name'])} ({artifact['kind']}, {artifact['size']} bytes)", "bold")
        body(artifact)
    if view["evaluation"] is not None:
        tell(f"\nevaluation log: {view['evaluation']['path']}", "bold")
        for line in [each for each in view["evaluation"]["lines"] if each["mark"] in ("fail", "test")][:MAX_LINES]:
            tell(f"    {one_line(line['text'], 200)}", "red")
    for chain in view["chains"]:
        tell(
            f"\nchain {chain['number']}: {one_line(chain['split_reason'])}, {chain['prompt_tokens']} prompt and"
            f" {chain['response_tokens']} response tokens, {chain['sampled']} sampled"
        )


def _print_comparison(console: Console, first: ResultIndex, second: ResultIndex, settings: Mapping[str, str]) -> None:
    from rich.table import Table
    from rich.text import Text

    from nemo_gym._util.terminal import figure, figures, one_line
    from nemo_gym.rollouts.report import counted, print_titled
    from nemo_gym.view.queries import compared

    result = compared(first, second, changed_only=True)
    limit = command.whole_number("limit", settings.get("limit", "40"))
    grid = Table()
    for name in ("task", "A", "B", "B − A"):
        grid.add_column(name, justify="left" if name == "task" else "right")
    for row in result["rows"][:limit]:
        difference = figure(row["difference"], "+.2f")
        grid.add_row(Text(one_line(row["task_id"], 60)), figures(row["a"]), figures(row["b"]), difference)
    print_titled(console, f"A {first.files.output}, B {second.files.output}", grid)
    mean = result["difference"]
    if mean is None:
        console.print("no task has a reward in both runs")
        return
    interval = "" if mean["std_err"] is None else f" (95 %: {mean['low']:+.3f} to {mean['high']:+.3f})"
    console.print(f"B − A: {mean['value']:+.3f}{interval} over {counted(result['tasks'], 'task')}")
    console.print(
        f"{counted(result['wins'], 'task')} better in B, {result['losses']} worse, {result['ties']} the same; solved"
        f" by B alone {result['gained']}, by A alone {result['lost']}; sign test p = {result['p_value']:.3g}"
    )
    if result["only_a"] or result["only_b"]:
        console.print(f"not compared: {counted(result['only_a'], 'task')} in A alone, {result['only_b']} in B alone")


def main_why() -> None:
    command.run("ng_why", why)


def why(argv: Sequence[str]) -> int:
    """Explain the failures. Return 0, also if nothing failed."""
    parser = command.plain_parser(
        "ng_why",
        "Explain why rollouts of a run have no verdict, findings, or no reward: for each class what happened, the"
        " evidence, the servers' log lines, and what usually helps; with a rollout (its id, task#sample, or a task)"
        " for that rollout.",
    )
    parser.add_argument("output", metavar="OUTPUT", help="result file")
    parser.add_argument("rollout", nargs="?", metavar="ROLLOUT", help="one rollout")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
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
        _print_causes(index, classes)
    return command.EXIT_OK


def _print_causes(index: ResultIndex, classes: Sequence[Mapping[str, Any]]) -> None:
    from nemo_gym._util.terminal import one_line
    from nemo_gym.view import live
    from nemo_gym.view.queries import notes

    tell = partial(say, command.result_console())
    for note in notes(index):
        tell(note, "yellow")
    if not classes:
        progress = live.progress(index.files)
        if progress is not None and progress["collecting"] and "total" in progress:
            tell(f"Nothing to explain yet: {progress['ended']} of {progress['total']} rollouts have ended, all well.")
        else:
            tell("Nothing to explain: every rollout has a reward, and none has findings.")
    for each in classes:
        named = ", ".join(one_line(name, 70) for name in each["named"])
        more = ", …" if each["rollouts"] > len(each["named"]) else ""
        tell(f"\n{each['rollouts']} × {each['title']}  ({named}{more})", "bold")
        tell(f"  {each['happened']}")
        for evidence in each["evidence"]:
            tell(f"  evidence: {one_line(evidence, 400)}")
        for line in each["failing_lines"]:
            tell(f"  {one_line(each['evaluation_log'], 120)}: {one_line(line, 160)}", "red")
        for line in each["log_lines"]:
            extra = (f"{one_line(key)}={one_line(value, 200)}" for key, value in line["more"].items())
            source = f"  {line['at']}: {one_line(line['level'])}"
            tell(" ".join((f"{source}: {one_line(line['event'], 200)}", *extra)), "yellow")
        if not each["log_lines"] and each["label"].startswith("no verdict"):
            where = ", ".join(each["log_folders"]) or "their folder is not known, or no longer there"
            tell(f"  no server logged anything about it ({where})", "dim")
        tell(f"  what helps: {each['helps']}")
        if each["rollout_id"] is not None:
            tell(f"  more: ng_show {index.files.output} {each['rollout_id']}", "dim")


def main_logs() -> None:
    command.run("ng_logs", logs)


def logs(argv: Sequence[str]) -> int:
    """Print the lines in order of time. Return 1 if there are none."""
    parser = command.plain_parser(
        "ng_logs",
        "Print what all servers logged about one rollout, in order. rollout= is its id. output= names the result file"
        " (then task#sample works, too), run_dir= a run's folder; without either, all runs of this user are searched.",
    )
    parser.add_argument("words", nargs="*", metavar="key=value", help="rollout=ID [output=FILE | run_dir=DIR]")
    parser.add_argument("--json", action="store_true", help="print the lines as they stand in the logs")
    arguments = parser.parse_args(argv)
    from nemo_gym._util.terminal import one_line, shown
    from nemo_gym.view.logs import lines_of

    given = command.settings_of(arguments.words, ("rollout", "run_dir", "output"))
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
        command.complain("ng_logs", f"no server logged anything about '{rollout}' ({searched})")
    return command.EXIT_OK if lines else command.EXIT_FAILED


def _locate(given: dict[str, str]) -> tuple[str, list[Path], dict[str, Any]]:
    """Return the rollout's id, the folders to search, and its result row (empty if there is none)."""
    rollout = given["rollout"]
    if "output" in given:
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
