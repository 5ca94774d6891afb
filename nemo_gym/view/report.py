"""A report of runs as one file: figures with their intervals, plots, failures, configuration and versions.

HTML includes its style and its plots and loads nothing else; Markdown has the same content without plots.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.metadata import PackageNotFoundError, version

from nemo_gym._util.terminal import figure, figures, one_line, seconds_text, shown
from nemo_gym.rollouts.report import counted
from nemo_gym.view.index import ResultIndex
from nemo_gym.view.queries import (
    Z95,
    Prices,
    TableQuery,
    aggregate_metrics,
    compared,
    histogram,
    reason_text,
    reasons,
    summary,
    table,
)
from nemo_gym.view.why import explain_reason

MAX_ROWS = 200
PACKAGES = ("nemo-gym-suite", "aiohttp", "pydantic", "tokenizers", "swebench", "mini-swe-agent", "math-verify", "mcp")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1d211f;background:#fff}
table{border-collapse:collapse;width:100%;font-size:14px;margin:.5rem 0}
th,td{text-align:left;padding:.25rem .6rem;border-bottom:1px solid #ddd;vertical-align:top;overflow-wrap:anywhere}
th{color:#555}pre{background:#f4f4f0;padding:.6rem;white-space:pre-wrap;overflow-wrap:anywhere;font-size:12.5px}
.faint{color:#5b645f}svg{max-width:100%}
@media(prefers-color-scheme:dark){body{background:#15181a;color:#e3e7e4}th,.faint{color:#9aa5a0}
th,td{border-color:#363c3f}pre{background:#1c2022}text{fill:#e3e7e4}}
"""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and the content below it, in the order of the fields."""

    title: str
    lines: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    plot: str = ""
    """SVG; it holds no text of a row."""
    code: str = ""


def report(indexes: Sequence[ResultIndex], form: str, prices: Prices | None = None) -> str:
    """Return the text of a report, as ``html`` or ``md``."""
    sections = [*_sections(indexes, prices)]
    title = "Report of " + ", ".join(index.files.output.name for index in indexes)
    return _html(title, sections) if form == "html" else _markdown(title, sections)


def _sections(indexes: Sequence[ResultIndex], prices: Prices | None) -> Iterator[Section]:
    for index in indexes:
        yield from _run_sections(index, prices)
    for second in indexes[1:]:
        yield _comparison(indexes[0], second)
    versions = [(name, installed) for name in PACKAGES if (installed := _version(name))]
    system = ("Python", f"{sys.version.split()[0]}, {platform.platform()}")
    yield Section("Versions", header=("package", "version"), rows=(system, *versions))


def _run_sections(index: ResultIndex, prices: Prices | None) -> Iterator[Section]:
    totals = summary(index, prices)
    mean = totals["reward"]
    rates = {name: rate for name, rate in totals["pass_rates"].items() if not name.endswith("/std_err")}
    lines = [
        ("mean reward", "–" if mean is None else _with_error(mean["value"], mean["std_err"], Z95)),
        *(
            (f"{name}, %", _with_error(rate, totals["pass_rates"].get(f"{name}/std_err")))
            for name, rate in rates.items()
        ),
        ("tasks solved", f"{totals['solved']} of {totals['tasks']}"),
        ("rollouts", str(totals["rollouts"])),
        ("without a verdict", str(totals["rollouts"] - totals["valid"])),
        ("with findings", str(totals["with_findings"])),
        ("tokens in, out", f"{totals['tokens_in']:,}, {totals['tokens_out']:,}"),
        ("time of all rollouts", seconds_text(totals["seconds"])),
    ]
    if totals["cost"] is not None:
        lines.append(("cost", f"{totals['cost']:.2f}"))
    yield Section(
        f"{index.files.output}",
        (*totals["notes"], "The reward's ± is a 95 % interval over tasks; that of pass@k is one standard error."),
        ("figure", "value"),
        tuple(lines),
        _plot(index),
    )
    if groups := reasons(index):
        yield Section(
            "Failures",
            header=("rollouts", "what", "reason", "what helps"),
            rows=tuple(
                (str(each["rollouts"]), cause["title"], one_line(each["reason"] or each["label"], 300), cause["helps"])
                for each in groups
                for cause in (explain_reason(each),)
            ),
        )
    page = table(index, TableQuery(limit=MAX_ROWS))
    more = (f"The first {MAX_ROWS} of {page['total']}, worst first.",) if page["total"] > MAX_ROWS else ()
    yield Section(
        "Rollouts",
        more,
        ("task", "sample", "agent", "reward", "outcome", "turns", "time", "why"),
        tuple(
            (
                one_line(row["task_id"], 80),
                str(row["sample_index"]),
                one_line(row["agent"], 40),
                figure(row["reward"]),
                one_line(row["outcome"], 40),
                figure(row["turns"]),
                seconds_text(row["seconds"]),
                one_line(reason_text(row), 120),
            )
            for row in page["rows"]
        ),
    )
    for each in aggregate_metrics(index):
        metrics = each.get("key_metrics")
        name = (each.get("agent_ref") or {}).get("name", "")
        if isinstance(metrics, dict):
            rows = tuple((one_line(key), one_line(value)) for key, value in metrics.items())
            yield Section(f"Key metrics of {one_line(name)}", header=("metric", "value"), rows=rows)
    try:
        configuration = index.files.configuration.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    yield Section("Configuration", ("The servers of the run, secrets removed.",), code=shown(configuration))


def _comparison(first: ResultIndex, second: ResultIndex) -> Section:
    found = compared(first, second, changed_only=True)
    mean = found["difference"]
    difference = "no task has a reward in both" if mean is None else _with_error(mean["value"], mean["std_err"], Z95)
    return Section(
        f"{second.files.output} against {first.files.output}",
        (
            f"Difference of the tasks' mean rewards: {difference}, over {counted(found['tasks'], 'task')}.",
            f"{counted(found['wins'], 'task')} better, {found['losses']} worse, {found['ties']} the same;"
            f" {found['gained']} newly solved, {found['lost']} no longer; sign test p = {found['p_value']:.3g}.",
        ),
        ("task", "before", "after", "difference"),
        tuple(
            (
                one_line(row["task_id"], 80),
                *(figures(row[side]) for side in ("a", "b")),
                figure(row["difference"], "+.2f"),
            )
            for row in found["rows"][:MAX_ROWS]
        ),
    )


def _with_error(value: float, error: float | None, factor: float = 1.0) -> str:
    return f"{value:.3f}" + ("" if error is None else f" ± {factor * error:.3f}")


def _plot(index: ResultIndex) -> str:
    """Draw histograms of rewards and of seconds side by side."""
    parts = []
    for place, column in enumerate(("reward", "seconds")):
        bins = histogram(index, column, 12)
        if not bins:
            continue
        most = max(count for _, _, count in bins) or 1
        left = 20 + place * 340
        for number, (_, _, count) in enumerate(bins):
            height = 90 * count / most
            x = left + number * 25
            parts.append(f'<rect x="{x}" y="{100 - height:.1f}" width="22" height="{height:.1f}" fill="#3d8f68"/>')
        labels = (
            (left, 114, "start", f"{bins[0][0]:g}"),
            (left + 300, 114, "end", f"{bins[-1][1]:.4g}"),
            (left + 150, 114, "middle", column),
            (left, 8, "start", f"{most}"),
        )
        for x, y, anchor, text in labels:
            parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="11">{text}</text>')
    label = "how often each reward and each duration occurs"
    return f'<svg viewBox="0 0 680 120" role="img" aria-label="{label}">{"".join(parts)}</svg>' if parts else ""


def _html(title: str, sections: Sequence[Section]) -> str:
    body = []
    for section in sections:
        body.append(f"<h2>{escape(shown(section.title))}</h2>")
        body += [f"<p>{escape(shown(line))}</p>" for line in section.lines]
        body.append(section.plot)
        if section.rows:
            head = "".join(f"<th>{escape(name)}</th>" for name in section.header)
            rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in section.rows)
            body.append(f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>")
        if section.code:
            body.append(f"<pre>{escape(section.code)}</pre>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(shown(title))}</title><style>{_STYLE}</style></head><body><h1>{escape(shown(title))}</h1>"
        f"{''.join(body)}</body></html>\n"
    )


def _markdown(title: str, sections: Sequence[Section]) -> str:
    lines = [f"# {_cell(title)}", ""]
    for section in sections:
        lines += [f"## {_cell(section.title)}", ""]
        lines += [each for line in section.lines for each in (_cell(line), "")]
        if section.rows:
            lines.append(f"| {' | '.join(section.header)} |")
            lines.append(f"|{'---|' * len(section.header)}")
            lines += [f"| {' | '.join(map(_cell, row))} |" for row in section.rows]
            lines.append("")
        if section.code:
            lines += [*(f"    {line}" for line in section.code.splitlines()), ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Escape text, so that Markdown shows it unchanged."""
    line = " ".join(shown(text).split())
    return "".join(f"\\{char}" if char in "\\`*_[]<>|#!~$" else char for char in line)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
