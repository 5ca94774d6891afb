"""``ng_validate --oracle``: run an environment's gold solutions and no solutions, and mark it as verified if it grades
both as it should."""

from __future__ import annotations

import datetime
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_gym.contract.errors import ConfigError

if TYPE_CHECKING:
    from nemo_gym.config.composition import Composition

MARKER = "verified.yaml"
"""In the environment's folder: what its last oracle campaign that passed was."""
_UNKNOWN = "unknown"
"""The commit of a folder that is under no version control."""
_RUN = "from nemo_gym.cli.run import main; main()"


def check_with_oracle(words: Sequence[str]) -> list[str]:
    """Run gold and nothing for each row with what ``words`` compose, and write the marker.

    Returns a sentence for each row that is not graded as it should be; then the marker stays as it is.

    Raises:
        ConfigError: the words choose no environment, or an agent; it has no rows; the oracle could not be run.
    """
    from nemo_gym.config.compose import compose

    keys = {word.lstrip("+~").partition("=")[0] for word in words}
    if "environment" not in keys or keys & {"agent", "oracle", "output"}:
        raise ConfigError(
            "--oracle takes environment=…, what this needs (sandbox=…) and perhaps input=…; agent, oracle and output"
            " are its own",
            key="environment",
        )
    composition = compose([*words, "agent=oracle", "oracle=gold"])
    folder = folder_of(composition)
    rows = Path(str(composition.run_values().get("input") or folder / "data" / "example.jsonl")).expanduser()
    if not rows.is_file():
        raise ConfigError(f"there are no rows to check with: '{rows}' does not exist; name them: input=…", key="input")
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="nemo-gym-oracle-") as directory:
        for mode in ("gold", "nothing"):
            output = Path(directory, f"{mode}.jsonl")
            own = [f"oracle={mode}", "agent=oracle", f"++input={rows}", f"output={output}"]
            if subprocess.run([sys.executable, "-c", _RUN, *words, *own], check=False).returncode not in (0, 3):
                raise ConfigError(f"the oracle's run with oracle={mode} did not come to its end; see above")
            problems += _judged(output, mode)
    if not problems:
        _write(folder, rows, _providers(composition))
    return problems


def marker_of(composition: Composition) -> dict[str, Any] | None:
    """The marker of the chosen environment, ``changed`` in it where its folder is not the commit's any more."""
    import yaml

    try:
        folder = folder_of(composition)
        stored = yaml.safe_load((folder / MARKER).read_text(encoding="utf-8"))["verified"]
    except (OSError, ConfigError, KeyError, TypeError, yaml.YAMLError):
        return None
    return {**stored, "changed": stored["commit"] != _UNKNOWN and _changed(folder, stored["commit"])}


def sentence(marker: dict[str, Any] | None) -> str:
    """The marker for people."""
    if marker is None:
        return "no; ng_validate environment=… --oracle checks and marks it"
    changed = ", changed since" if marker["changed"] else ""
    on = ", ".join(marker["providers"]) or "no sandbox"
    return f"{marker['date']}, {marker['rows']} rows of {marker['input']}, on {on}, commit {marker['commit']}{changed}"


def folder_of(composition: Composition) -> Path:
    """The plugin folder of the chosen environment. Raises `ConfigError` when none is chosen."""
    from nemo_gym.config.roots import find_plugin

    environment = composition.servers.get(composition.chosen.get("environment", ""))
    if environment is None:
        raise ConfigError("no environment is chosen; add environment=…", key="environment")
    return find_plugin(environment.server_type, environment.implementation, composition.roots)


_SOURCES = (".", f":(exclude){MARKER}", ":(exclude)*.md", ":(exclude)tests", ":(exclude,glob)**/__pycache__/**")
"""What of the folder the marker speaks of."""


def _judged(output: Path, mode: str) -> Iterable[str]:
    """Rows that are not graded as they should be."""
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
    named = environment.values.get("sandbox_provider")
    return [] if named is None else [*backend_of(composition, named)]


def _write(folder: Path, rows: Path, providers: list[str]) -> None:
    """Providers that passed before, with the same sources and rows, stay in the marker."""
    import yaml

    content = rows.read_bytes()
    commit = _git(folder, "rev-parse", "--short=12", "HEAD") or _UNKNOWN
    if commit != _UNKNOWN and _changed(folder, "HEAD"):
        raise ConfigError(
            f"every row is graded as it should be, but {folder} differs from its last commit, which the marker would"
            " name; commit it first"
        )
    marker: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "rows": sum(bool(line.strip()) for line in content.splitlines()),
        "input": str(rows.resolve().relative_to(folder)) if rows.resolve().is_relative_to(folder) else rows.name,
        "input_sha256": hashlib.sha256(content).hexdigest(),
        "commit": commit,
    }
    path = folder / MARKER
    if path.exists():
        before = yaml.safe_load(path.read_text(encoding="utf-8"))["verified"]
        same = before["commit"] == commit or (commit != _UNKNOWN and not _changed(folder, before["commit"]))
        if same and before["input_sha256"] == marker["input_sha256"]:
            providers = sorted({*before["providers"], *providers})
    text = yaml.safe_dump({"verified": {**marker, "providers": providers}}, sort_keys=False)
    path.write_text(f"# Written by ng_validate --oracle: gold was rewarded and nothing was not.\n{text}")


def _changed(folder: Path, commit: str) -> bool:
    """Whether a folder's sources differ from those of a commit."""
    return _git(folder, "diff", "--quiet", commit, "--", *_SOURCES) is None


def _git(folder: Path, *words: str) -> str | None:
    """What git says in a folder; ``None`` when it fails (there is no repository, no such commit, a difference)."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
