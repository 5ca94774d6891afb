"""How tables and pages write texts and figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nemo_gym._util.terminal import shown


def one_line(text: object, chars: int = 100) -> str:
    """``text`` in one line of at most ``chars``."""
    line = " ".join(shown(text).split())
    return line if len(line) <= chars else f"{line[: chars - 1]}…"


def figure(value: float | None, form: str = "g") -> str:
    """A figure in the form of a format specification; a dash if there is none."""
    return "–" if value is None else format(value, "d" if isinstance(value, int) and form == "g" else form)


def figures(values: Iterable[float]) -> str:
    """Figures after one another; a dash if there are none."""
    return ", ".join(map(figure, values)) or "–"


def why(row: Mapping[str, Any]) -> str:
    """What a table's row says of a rollout without a full reward or with findings; empty if nothing needs a word."""
    return str(row["kinds"] or (row["label"] and (row["reason"] or row["label"])) or "")


def seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
