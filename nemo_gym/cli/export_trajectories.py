"""``ng_export_trajectories``: token trajectories of a run, for a trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_gym.cli import command
from nemo_gym.contract.errors import ConfigError

if TYPE_CHECKING:
    from nemo_gym.gateway.tokens import Trajectory

NAME = "ng_export_trajectories"
KEYS = ("input", "output")
FORMATS = (".jsonl", ".npz")


def main() -> None:
    command.run(NAME, export)


def export(argv: Sequence[str]) -> int:
    """Write the trajectories of result rows. If a row is not of this suite, exit with 2 and write no file."""
    parser = command.parser(
        NAME,
        "Write the token trajectories of a run's result rows to a file, as JSON lines or as arrays (npz).\n"
        "Each has the reward of its row's verdict, and none where the verdict is invalid.",
        words="input=ROWS.jsonl output=FILE.(jsonl|npz)",
    )
    source, target = _files(parser.parse_args(argv).settings)

    from nemo_gym.gateway.tokens.trajectories import write_jsonl, write_npz
    from nemo_gym.rollouts.trajectories import trajectories_of_rows

    rows = with_some = written = rewarded = 0

    def counted() -> Iterator[Trajectory]:
        nonlocal rows, with_some, written, rewarded
        for trajectories in trajectories_of_rows(source):
            rows += 1
            with_some += bool(trajectories)
            written += len(trajectories)
            rewarded += sum(trajectory.reward is not None for trajectory in trajectories)
            yield from trajectories

    if target.suffix == ".npz":
        write_npz(target, [*counted()])
    else:
        write_jsonl(target, counted())
    print(f"{written} trajectories of {with_some} rows in {target} ({rewarded} with a reward)")
    if rows > with_some:
        print(f"{rows - with_some} of {rows} rows hold no trajectories")
    return command.EXIT_OK


def _files(words: Sequence[str]) -> tuple[Path, Path]:
    given = command.settings_of(words, KEYS)
    if missing := [key for key in KEYS if not given.get(key)]:
        raise ConfigError(f"{missing[0]}=: is missing; give {' '.join(f'{key}=FILE' for key in KEYS)}")
    source, target = (Path(given[key]) for key in KEYS)
    if not source.is_file():
        raise ConfigError(f"input=: '{source}' is not a file")
    if target.suffix not in FORMATS:
        raise ConfigError(f"output=: '{target.name}' must end in {' or '.join(FORMATS)}, which says the format")
    if not target.parent.is_dir():
        raise ConfigError(f"output=: there is no directory '{target.parent}'")
    if target.exists() and target.samefile(source):
        raise ConfigError("output=: is the input itself")
    return source, target
