"""The verdicts as a page of the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nemo_gym.contract.session import Topology
from tests.acceptance.matrix.cells import ROOT, Verdict

PAGE = ROOT / "fern" / "pages" / "matrix.md"
LETTERS = dict(zip(Topology, "ABCD", strict=True))
HEAD = """# Which agents work where

The table has every agent, environment and sandbox of `configs/`. A cell shows in which topologies they work together:
A is `none`, B `env_sandboxed`, C `agent_in_env`, D `whole_interaction` ([the session contract](session-contract.md)).
The bold letter is the topology of a run that does not set `topology=`. A number means that the suite refuses the
combination before anything starts, with the message of that number below the table.

`python -m tests.acceptance.matrix --write` runs every combination that has a letter, in each of its topologies, and
then writes this page; `make test-full` runs them too. Each of these runs has one row, a scripted policy, the agent's
own program and real boxes. The row must be rewarded, and no box may be left. Another test composes every combination
and compares the result with this page.
"""


def render(verdicts: Sequence[Verdict]) -> str:
    sandboxes = sorted({verdict.cell.sandbox for verdict in verdicts})
    by_pair: dict[tuple[str, str], dict[str, Verdict]] = {}
    for verdict in verdicts:
        by_pair.setdefault((verdict.cell.environment, verdict.cell.agent), {})[verdict.cell.sandbox] = verdict
    reasons = list(dict.fromkeys(verdict.reason for verdict in _ordered(by_pair, sandboxes) if verdict.reason))
    lines = [
        HEAD,
        _line("environment", "agent", *(f"`sandbox={sandbox}`" for sandbox in sandboxes)),
        "|---" * (2 + len(sandboxes)) + "|",
    ]
    for (environment, agent), cells in sorted(by_pair.items()):
        lines.append(_line(environment, agent, *(_shown(cells[sandbox], reasons) for sandbox in sandboxes)))
    if reasons:
        lines += ["", "Refusals:", ""]
        lines += [f"{number}. {_sentence(reason)}" for number, reason in enumerate(reasons, 1)]
    return "\n".join(lines) + "\n"


def _ordered(by_pair: dict[tuple[str, str], dict[str, Verdict]], sandboxes: Iterable[str]) -> list[Verdict]:
    return [cells[sandbox] for _, cells in sorted(by_pair.items()) for sandbox in sandboxes]


def _shown(verdict: Verdict, reasons: Sequence[str]) -> str:
    letters = [
        f"**{LETTERS[topology]}**" if topology is verdict.default else LETTERS[topology]
        for topology in verdict.topologies
    ]
    refused = [f"({reasons.index(verdict.reason) + 1})"] if verdict.reason is not None else []
    return " ".join(letters + refused)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _sentence(reason: str) -> str:
    return reason[:1].upper() + reason[1:] + "."
