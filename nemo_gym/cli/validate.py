"""``ng_validate``: compose and check a configuration without running anything.

``ng_validate --oracle`` runs an environment with gold solutions and with none, and marks it as verified if it
grades both correctly."""

from __future__ import annotations

import datetime
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_gym._util.terminal import shown
from nemo_gym.cli import command
from nemo_gym.contract.errors import ConfigError, NemoGymError
from nemo_gym.contract.verdict import without

if TYPE_CHECKING:
    from nemo_gym.config.composition import Composition

NAME = "ng_validate"
MARKER = "verified.yaml"
"""The file in an environment's folder that records the last oracle run that passed."""
_UNKNOWN = "unknown"
"""Stands for the commit of a folder that is not under version control."""
_RUN = "from nemo_gym.cli.run import main; main()"
_SOURCES = (".", f":(exclude){MARKER}", ":(exclude)*.md", ":(exclude)tests", ":(exclude,glob)**/__pycache__/**")
"""Git's path patterns for the files of the folder that the marker covers."""


def main() -> None:
    command.run(NAME, validate)


def validate(argv: Sequence[str]) -> int:
    """Print what would run, or what is wrong. ``--json`` prints one object, also for errors."""
    parser = command.parser(NAME, "Compose a configuration and check it without running anything.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--dump", action="store_true", help="print the whole configuration, secrets removed")
    parser.add_argument(
        "--oracle",
        action="store_true",
        help="run the environment's gold solutions and none, and mark it as verified (verified.yaml in its folder)",
    )
    arguments = parser.parse_intermixed_args(argv)
    if arguments.oracle:
        problems = check_with_oracle(arguments.settings)
        for problem in problems:
            print(shown(problem), file=sys.stderr)
        print("not verified" if problems else "verified: gold was rewarded and nothing was not")
        return command.EXIT_FAILED if problems else command.EXIT_OK
    try:
        composition, report = inspect(arguments.settings)
    except NemoGymError as error:
        if not arguments.json:
            raise
        message = command.without_secrets(error.message, arguments.settings)
        _print_json({"valid": False, "error": message, "details": error.details})
        return command.exit_code_of(error)
    if arguments.dump:
        from nemo_gym._util.secrets import redact

        report["configuration"] = redact(_as_file(composition))
    if arguments.json:
        _print_json(report)
        return command.EXIT_OK
    if arguments.dump:
        import yaml

        print(yaml.safe_dump(report["configuration"], sort_keys=False), end="")
    # The dump alone is standard output, so that a file of it is a configuration.
    with redirect_stdout(sys.stderr) if arguments.dump else nullcontext():
        _print_report(composition, report)
    return command.EXIT_OK


def _as_file(composition: Composition) -> dict[str, Any]:
    """Return the configuration as a file that composes the same, topology included. It lacks the keys that the
    composition itself sets, and those that only interpolations read: the interpolations are resolved."""
    from nemo_gym.config.keys import COMPOSITION, TOPOLOGY
    from nemo_gym.config.strict import known_keys, unread

    values, chosen = composition.values, composition.chosen
    file = without(values, {COMPOSITION, *unread(values, composition.servers, known_keys())})
    if TOPOLOGY in chosen:
        file[TOPOLOGY] = chosen[TOPOLOGY]
    return file


def _print_report(composition: Composition, report: Mapping[str, Any]) -> None:
    from nemo_gym.rollouts.report import counted

    for server in report["servers"]:
        print(f"{server['instance']}: {server['type']}.{server['implementation']} ({server['source']})")
    if report["topology"]:
        print(f"topology: {report['topology']}")
    if run := report["run"]:
        left = "finished" if run["finished"] else f"{run['left']} left to run"
        print(f"run: {counted(run['rollouts'], 'rollout')} of {counted(run['tasks'], 'task')}, {left}")
    if "environment" in composition.chosen:
        print(f"verified: {marker_sentence(report['verified'])}")
    for notice in report["notices"]:
        print(f"notice: {notice}")
    print(f"valid: {counted(len(report['servers']), 'server')}")


def inspect(words: Sequence[str]) -> tuple[Composition, dict[str, Any]]:
    """Compose ``words`` and check everything that can be checked without starting a server."""
    from nemo_gym.cli.run import is_a_whole_run
    from nemo_gym.cli.sandbox_check import check_sandbox
    from nemo_gym.config.check import check_everything, notices
    from nemo_gym.config.compose import compose
    from nemo_gym.config.hosts import RayConfig
    from nemo_gym.config.run_defaults import complete_run
    from nemo_gym.stack.ports import check_addresses

    composition = compose(words)
    on_ray = RayConfig.of(composition)
    complete_run(composition, wanted=is_a_whole_run(composition))
    topology = check_everything(composition)
    if on_ray is None:
        check_addresses(composition)
    check_sandbox(composition, topology)
    return composition, {
        "valid": True,
        "run": _outlook(composition) if composition.has_run else None,
        "servers": [
            {
                "instance": server.instance,
                "type": server.server_type,
                "implementation": server.implementation,
                "source": server.source,
            }
            for server in composition.servers.values()
        ],
        "composition": composition.chosen,
        "topology": topology and str(topology),
        "verified": marker_of(composition),
        "notices": notices(composition),
    }


def _outlook(composition: Composition) -> dict[str, Any]:
    from nemo_gym.cli.run import check_rollout_run

    _, outlook = check_rollout_run(composition, keep=False)
    recorded = outlook.recorded
    return {
        "tasks": outlook.inputs.tasks,
        "rollouts": outlook.inputs.rollouts,
        "finished": outlook.finished,
        "left": recorded.left if recorded is not None else outlook.inputs.rollouts,
    }


def _print_json(value: Any) -> None:
    import json

    json.dump(value, sys.stdout, indent=2, default=str)
    print()


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
        _write_marker(folder, rows, _providers(composition))
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


def marker_sentence(marker: dict[str, Any] | None) -> str:
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


def _write_marker(folder: Path, rows: Path, providers: list[str]) -> None:
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
