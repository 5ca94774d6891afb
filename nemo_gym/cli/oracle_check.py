"""``ng_validate --oracle``: run an environment with gold solutions and with none, and mark it as verified if it grades
both correctly."""

from __future__ import annotations

import datetime
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_gym.cli import command
from nemo_gym.contract.errors import ConfigError

if TYPE_CHECKING:
    from nemo_gym.config.composition import Composition

MARKER = "verified.yaml"
"""The file in an environment's folder that records the last oracle run that passed."""
_UNKNOWN = "unknown"
"""Stands for the commit of a folder that is not under version control."""
_RUN = "from nemo_gym.cli.run import main; main()"


def check_with_oracle(words: Sequence[str]) -> list[str]:
    """Compose ``words``, run each row with the gold solution and with none; write the marker if all grades are right.

    Returns a sentence for each row that is graded wrongly; if there are any, the marker is not changed.

    Raises:
        ConfigError: the words choose no environment, or choose an agent; there are no rows; the environment's folder
            differs from its commit; the oracle's run failed.
    """
    from nemo_gym.config.compose import compose
    from nemo_gym.config.overrides import word_of

    keys = {*map(command.key_of, words)}
    if "environment" not in keys or keys & {"agent", "oracle", "output", "output_jsonl_fpath"}:
        raise ConfigError(
            "--oracle needs environment=… (and sandbox=… if the environment does); input=… is optional; it sets agent,"
            " oracle and output itself",
            key="environment",
        )
    composition = compose([*words, "agent=oracle", "oracle=gold"])
    folder = folder_of(composition)
    run = composition.run_values()
    given = run.get("input") or run.get("input_jsonl_fpath") or folder / "data" / "example.jsonl"
    rows = Path(str(given)).expanduser()
    if not rows.is_file():
        raise ConfigError(f"there are no rows to check with: '{rows}' does not exist; name them: input=…", key="input")
    _commit_of(folder)
    problems: list[str] = []
    directory = Path(tempfile.mkdtemp(prefix="nemo-gym-oracle-"))
    for mode in ("gold", "nothing"):
        output = directory / f"{mode}.jsonl"
        more = [
            f"oracle={mode}",
            "agent=oracle",
            word_of("++input", str(rows)),
            "++input_jsonl_fpath=null",
            word_of("output", str(output)),
        ]
        if subprocess.run([sys.executable, "-c", _RUN, *words, *more], check=False).returncode not in (0, 3):
            raise ConfigError(f"the oracle's run with oracle={mode} did not finish; see above")
        problems += _wrong_grades(output, mode)
    if not problems:  # otherwise its results, which the runs have named, tell why
        _write(folder, rows, _providers(composition))
        shutil.rmtree(directory)
    return problems


def marker_of(composition: Composition) -> dict[str, Any] | None:
    """Return the chosen environment's marker, if any; ``changed`` tells whether the folder differs from its commit."""
    import yaml

    try:
        folder = folder_of(composition)
        stored = yaml.safe_load((folder / MARKER).read_text(encoding="utf-8"))["verified"]
    except (OSError, ConfigError, KeyError, TypeError, yaml.YAMLError):
        return None
    return {**stored, "changed": stored["commit"] != _UNKNOWN and _changed(folder, stored["commit"])}


def sentence(marker: dict[str, Any] | None) -> str:
    """Describe the marker in one sentence."""
    if marker is None:
        return "no; ng_validate environment=… --oracle checks and marks it"
    changed = ", changed since" if marker["changed"] else ""
    if marker["commit"] == _UNKNOWN:
        changed = " (the folder is not under version control, so later changes are not seen)"
    on = ", ".join(marker["providers"]) or "no sandbox"
    rows = f"{marker['rows']} row{'' if marker['rows'] == 1 else 's'} of {marker['input']}"
    return f"{marker['date']}, {rows}, on {on}, commit {marker['commit']}{changed}"


def folder_of(composition: Composition) -> Path:
    """The plugin folder of the chosen environment. Raises `ConfigError` when none is chosen."""
    from nemo_gym.config.run_defaults import environment_folder

    folder = environment_folder(composition)
    if folder is None:
        raise ConfigError("no environment is chosen; add environment=…", key="environment")
    return folder


_SOURCES = (".", f":(exclude){MARKER}", ":(exclude)*.md", ":(exclude)tests", ":(exclude,glob)**/__pycache__/**")
"""Git's path patterns for the files of the folder that the marker covers."""


def _wrong_grades(output: Path, mode: str) -> Iterable[str]:
    """Yield a sentence for each row that is graded wrongly."""
    import orjson

    from nemo_gym.rollouts.results import RunFiles

    files = RunFiles(output)
    for path in (files.output, files.failures):
        for line in path.read_bytes().splitlines() if path.exists() else ():
            row = orjson.loads(line)
            reward, task = row.get("reward"), row.get("task_id")
            if reward is None:
                yield f"{task} with oracle={mode}: no verdict ({row.get('failure_reason')})"
            elif (reward < 1.0) if mode == "gold" else (reward > 0.0):
                yield f"{task} with oracle={mode}: reward {reward:g}"


def _providers(composition: Composition) -> list[str]:
    from nemo_gym.config.composition import backend_of

    environment = composition.servers[composition.chosen["environment"]]
    provider = environment.values.get("sandbox_provider")
    return [] if provider is None else [*backend_of(composition, provider)]


def _write(folder: Path, rows: Path, providers: list[str]) -> None:
    """Write the marker. Providers that passed before with the same sources and rows stay in it."""
    import yaml

    content = rows.read_bytes()
    commit = _commit_of(folder)  # once more: it may have changed during the runs
    marker: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "rows": sum(bool(line.strip()) for line in content.split(b"\n")),
        "input": str(rows.resolve().relative_to(folder)) if rows.resolve().is_relative_to(folder) else rows.name,
        "input_sha256": hashlib.sha256(content).hexdigest(),
        "commit": commit,
    }
    path = folder / MARKER
    if path.exists():
        stored = yaml.safe_load(path.read_text(encoding="utf-8"))["verified"]
        same = commit != _UNKNOWN and not _changed(folder, stored["commit"])
        if same and stored["input_sha256"] == marker["input_sha256"]:
            providers = sorted({*stored["providers"], *providers})
    text = yaml.safe_dump({"verified": {**marker, "providers": providers}}, sort_keys=False)
    path.write_text(f"# Written by ng_validate --oracle: gold was rewarded and nothing was not.\n{text}")


def _commit_of(folder: Path) -> str:
    """The commit that the folder's sources are of; `_UNKNOWN` without version control. Raises `ConfigError` if they
    have changed since."""
    commit = _git(folder, "rev-parse", "--short=12", "HEAD") or _UNKNOWN
    if commit != _UNKNOWN and _changed(folder, "HEAD"):
        raise ConfigError(f"{folder} has uncommitted changes, and the marker names a commit; commit first")
    return commit


def _changed(folder: Path, commit: str) -> bool:
    """Whether a folder's sources differ from those of a commit. A file that git does not know is a difference."""
    untracked = _git(folder, "ls-files", "--others", "--exclude-standard", "--", *_SOURCES)
    return untracked != "" or _git(folder, "diff", "--quiet", commit, "--", *_SOURCES) is None


def _git(folder: Path, *words: str) -> str | None:
    """Return git's output in a folder; ``None`` if git fails (there is no repository or commit, or a difference)."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
