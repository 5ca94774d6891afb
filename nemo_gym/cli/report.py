"""``ng_report``: one or several runs as a file for a colleague."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_gym.cli import command
from nemo_gym.contract.errors import ConfigError

if TYPE_CHECKING:
    from nemo_gym.view.queries import Prices

NAME = "ng_report"
KEYS = ("format", "file", "prices", "export", "to")
FORMATS = ("html", "md")


def main() -> None:
    command.run(NAME, write_report)


def write_report(argv: Sequence[str]) -> int:
    """Write the report and print its path."""
    parser = command.plain_parser(
        NAME,
        "Write a report of one or several runs: figures with intervals, plots, failures with what helps, the rollouts,"
        " the configuration and versions; later runs are compared with the first. format= is html (default) or md,"
        " file= its path (default: beside the first result file), prices= what a million tokens cost, as YAML."
        " export= gives the runs to another tool instead: mlflow, wandb (offline, into the directory to=) or otel (to"
        " the file or the OTLP endpoint that to= names).",
    )
    parser.add_argument("words", nargs="+", metavar="OUTPUT|key=value", help="result files and settings")
    arguments = parser.parse_args(argv)
    from nemo_gym.cli.show import open_shown
    from nemo_gym.view.queries import Prices
    from nemo_gym.view.report import report

    outputs = [word for word in arguments.words if "=" not in word or not word.partition("=")[0].isidentifier()]
    given = command.settings_of((word for word in arguments.words if word not in outputs), KEYS)
    form = given.get("format", "html")
    if form not in FORMATS:
        raise ConfigError(f"format={form}: must be one of {', '.join(FORMATS)}", key="format")
    if not outputs:
        raise ConfigError("name a result file")
    prices = Prices.read(Path(given["prices"])) if given.get("prices") else None
    first = Path(outputs[0])
    if "export" in given:
        print(_export(outputs, given, prices))
        return command.EXIT_OK
    if "to" in given:
        raise ConfigError(f"to={given['to']} works only with export=; for a report use file=", key="to")
    path = Path(given.get("file") or first.with_name(f"{first.stem}_report.{form}"))
    require_another_file("file", path, outputs)
    text = report([open_shown(each) for each in outputs], form, prices)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"file=: cannot write '{path}': {error.strerror}", key="file") from error
    print(path)
    return command.EXIT_OK


def require_another_file(key: str, path: Path, outputs: Sequence[str | Path]) -> None:
    """Raise `ConfigError` if ``path`` would replace a file that a run wrote."""
    from nemo_gym.rollouts.results import RunFiles

    for files in (RunFiles(Path(each)) for each in outputs):
        for kept in (files.output, files.failures, files.store, files.materialized_inputs, files.configuration):
            with suppress(OSError):  # a missing file is another one; what cannot be written is said when it is
                if path.samefile(kept):
                    raise ConfigError(f"{key}=: '{path}' is a file of the run itself", key=key)


def _export(outputs: Sequence[str], given: Mapping[str, str], prices: Prices | None) -> str:
    """Give the runs to another tool; returns where they are."""
    from nemo_gym.cli.show import open_shown
    from nemo_gym.view.export import EXPORTERS

    if unused := {"format", "file"} & set(given):
        raise ConfigError(
            f"{unused.pop()}= applies to reports only; with export=, give the destination as to=", key="export"
        )
    name = given["export"]
    if name not in EXPORTERS:
        raise ConfigError(f"export={name}: must be one of {', '.join(EXPORTERS)}", key="export")
    first = Path(outputs[0])
    ending = ".jsonl" if name == "otel" else ""
    target = given.get("to") or str(first.with_name(f"{first.stem}_{name}{ending}"))
    require_another_file("to", Path(target), outputs)
    indexes = [open_shown(each) for each in outputs]
    try:
        return EXPORTERS[name](indexes, target, prices)
    except OSError as error:
        raise ConfigError(f"to=: cannot write '{target}': {error.strerror or error}", key="to") from error
