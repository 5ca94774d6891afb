"""The plan of a preparation, its error, and its progress display: a live table on a terminal, plain lines
elsewhere."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, cast

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from nemo_gym.contract.errors import ConfigError, NemoGymError, reject_unknown_keys
from resources_servers.swe_bench.row import SweBenchRow, content_digest, prepared_image


class PreparationError(NemoGymError):
    """An image could not be prepared, and nothing of it remains. The message gives the failed step and the cause."""

    code = "prepare"


_STYLES = {"built": "green", "cached": "cyan", "failed": "bold red"}
_MAX_ACTIVE_ROWS = 12


class Progress:
    """Shows the rows in progress, their steps and how long they have taken. Finished rows stay visible above."""

    def __init__(self, instances: Sequence[str], console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._total = len(instances)
        self._counts = dict.fromkeys(_STYLES, 0)
        self._active: dict[str, tuple[str, float]] = {}
        self._started = time.monotonic()
        self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()
        self._console.print(
            f"prepared: {self._summary()} in {time.monotonic() - self._started:.0f} s", highlight=False
        )

    def step(self, instance: str, step: str) -> None:
        """Show the current step of an instance."""
        self._active[instance] = (step, time.monotonic())

    def done(
        self, instance: str, status: str, seconds: float, error: str | None = None, controls: str | None = None
    ) -> None:
        """Show the result of an instance, and how well its tests are controlled."""
        self._active.pop(instance, None)
        self._counts[status] += 1
        ended = sum(self._counts.values())
        line = f"[{ended}/{self._total}] {instance}: {status}" + (f" in {seconds:.1f} s" if status == "built" else "")
        line += f" (controls: {controls})" if controls else ""
        self._console.print(line, style=_STYLES[status], markup=False, highlight=False, soft_wrap=True)
        if error:
            self._console.print(f"    {error}", markup=False, highlight=False, soft_wrap=True)

    def _summary(self) -> str:
        return ", ".join(f"{count} {status}" for status, count in self._counts.items())

    def _table(self) -> Table:
        table = Table(title=f"{self._summary()}, of {self._total}", expand=False)
        for column in ("instance", "step", "seconds"):
            table.add_column(column)
        for instance, (step, since) in list(self._active.items())[:_MAX_ACTIVE_ROWS]:
            table.add_row(escape(instance), escape(step), f"{time.monotonic() - since:.0f}")
        return table


PREPARATION_VERSION = 1
"""Increase it when the contents of images change. All images of another version are built again."""
PROJECT_VERSION = 2
"""Increase it when the installation of projects changes. Their images are built again, but not shared environments."""

_ENVIRONMENT_KEYS = ("instance_id", "runtime", "packages", "env", "test_cmd", "seconds")
_TESTS_BEGIN = re.compile(r"^(git checkout [0-9a-f]{7,40}\b|git apply\b|rm -f )")
_TEST_MARKER = ">>>>> Start Test Output"
_NOT_INSTALLING = re.compile(
    r"^(#.*|set -.*|cd .*|source .*|conda activate .*|export .*"
    r"|git (config|status|show|-c|diff|log)\b.*|if ! git diff .*|)$"
)
_PIP_INSTALL = re.compile(r"^(?:python3? -m )?pip3? install (?P<arguments>.+)$")
_TOX = re.compile(r"^(?:\S+=\S+ )*tox\b", re.MULTILINE)
_VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")

RuntimeName = Literal["python", "node"]


@dataclass(frozen=True)
class Runtime:
    """A language runtime with a full or partial version: ``3`` and ``3.11`` both accept 3.11.7."""

    name: RuntimeName
    version: str = ""

    @classmethod
    def parse(cls, text: str, *, where: str) -> Runtime:
        """Parse ``python 3.11``, ``node 20.20.2`` or a name alone, which means any version."""
        name, _, version = text.strip().partition(" ")
        if name not in ("python", "node") or not re.fullmatch(r"(\d+(\.\d+)*)?", version.strip()):
            raise ConfigError(
                f"{where}: runtime is {text!r}; write 'python 3.11', 'node 20', or the name alone", field="runtime"
            )
        return cls(cast(RuntimeName, name), version.strip())

    def accepts(self, version: str) -> bool:
        parts = self.version.split(".") if self.version else []
        return version.split(".")[: len(parts)] == parts

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip()


@dataclass(frozen=True)
class Environment:
    """The environment that a row's tests need in addition to the repository."""

    runtime: Runtime
    packages: tuple[str, ...] | None = None
    """The requirements to install. ``None`` means the environments file has no entry, so the project's own extras are
    installed."""
    env: Mapping[str, str] = field(default_factory=dict)
    """The variables that are set when the environment is activated."""

    def as_data(self) -> dict[str, Any]:
        packages = None if self.packages is None else list(self.packages)
        return {"runtime": str(self.runtime), "packages": packages, "env": dict(self.env)}


@dataclass(frozen=True)
class PipInstall:
    """A ``pip install`` of the repository itself, as in the row's evaluation script."""

    editable: bool
    extras: str = ""
    """``[dev]`` or empty."""

    def arguments(self, *, with_extras: bool) -> list[str]:
        target = f".{self.extras}" if with_extras else "."
        return ["-e", target] if self.editable else [target]


@dataclass(frozen=True)
class RowPlan:
    """One row and everything its image depends on."""

    row: SweBenchRow
    environment: Environment
    installs: tuple[PipInstall | str, ...]
    """The steps of the evaluation script that install the project, in order. A string is a shell command."""
    needs_tox: bool

    @property
    def image(self) -> str:
        return prepared_image(vars(self.row))

    @property
    def pretended_version(self) -> str:
        """The version for projects that derive their version from tags, which a prepared repository does not have."""
        numbers = [str(int(part)) for part in self.row.version.split(".") if part.isdigit()]
        return ".".join([*numbers, "0", "0"][:3]) + ".dev0" if numbers else "0.0.0.dev0"

    def content_key(self, environment_key: str) -> str:
        installs = [step if isinstance(step, str) else [step.editable, step.extras] for step in self.installs]
        row = self.row
        identity = [row.instance_id, row.repo, row.base_commit, self.pretended_version]
        return content_digest(
            [PREPARATION_VERSION, PROJECT_VERSION, environment_key, identity, installs, self.needs_tox]
        )


def install_steps(eval_script: str) -> tuple[PipInstall | str, ...]:
    """Return the commands of an evaluation script that install the project, before it touches any test file."""
    steps: list[PipInstall | str] = []
    for line in eval_script.splitlines():
        if _TESTS_BEGIN.match(line) or _TEST_MARKER in line:
            break
        if _NOT_INSTALLING.match(line.strip()):
            continue
        steps.append(_pip_install(line.strip()) or line.strip())
    return tuple(steps)


def _pip_install(line: str) -> PipInstall | None:
    """Parse the line as an install of the repository itself. Return ``None`` for any other command."""
    match = _PIP_INSTALL.match(line)
    if not match:
        return None
    try:
        arguments = shlex.split(match["arguments"])
    except ValueError:
        return None
    editable = any(argument in ("-e", "--editable") for argument in arguments)
    targets = [argument for argument in arguments if not argument.startswith("-")]
    if len(targets) != 1 or not re.fullmatch(r"\./?(\[[\w,-]+\])?", targets[0]):
        return None
    return PipInstall(editable=editable, extras=targets[0].lstrip("./"))


def default_environment(row: SweBenchRow) -> Environment:
    """Return the environment of a row without an entry: any version of the runtime that its evaluation script uses."""
    return Environment(Runtime("node" if "nvm.sh" in row.eval_script else "python"))


def read_environments(path: Path) -> dict[str, Environment]:
    """Return the environments by instance id.

    Raises:
        ConfigError: the file cannot be read or has a wrong shape. The error names the entry and the field.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"environments={path}: cannot be read as JSON: {error}", path=str(path)) from error
    if not isinstance(entries, list):
        raise ConfigError(f"environments={path}: must be a JSON list of objects with instance_id, runtime, packages")
    environments: dict[str, Environment] = {}
    for number, entry in enumerate(entries):
        where = f"environments={path}: entry {number}"
        if not isinstance(entry, dict) or not isinstance(entry.get("instance_id"), str):
            raise ConfigError(f"{where}: must be an object with a text instance_id")
        where = f"{where} ({entry['instance_id']})"
        reject_unknown_keys(entry, _ENVIRONMENT_KEYS, where=where)
        environments[entry["instance_id"]] = _environment(entry, where)
    return environments


def _environment(entry: Mapping[str, Any], where: str) -> Environment:
    packages, env = entry.get("packages", []), entry.get("env", {})
    if not isinstance(packages, list) or not all(isinstance(item, str) and item.strip() for item in packages):
        raise ConfigError(f"{where}: packages must be a list of requirements", field="packages")
    if any(item.lstrip().startswith("-") for item in packages):
        raise ConfigError(f"{where}: packages must be requirements, not options of pip", field="packages")
    if not isinstance(env, dict) or not all(
        _VARIABLE.match(name) and isinstance(value, str) for name, value in env.items()
    ):
        raise ConfigError(f"{where}: env must be an object of variable names and texts", field="env")
    if not isinstance(entry.get("runtime"), str):
        raise ConfigError(f"{where}: runtime is missing; write 'python 3.11' or 'node 20'", field="runtime")
    return Environment(Runtime.parse(entry["runtime"], where=where), tuple(packages), env)


def make_plans(rows: Iterable[SweBenchRow], environments: Mapping[str, Environment]) -> list[RowPlan]:
    """Return one plan per instance. Repeated rows of an instance are prepared once."""
    plans: dict[str, RowPlan] = {}
    for row in rows:
        plan = RowPlan(
            row=row,
            environment=environments.get(row.instance_id) or default_environment(row),
            installs=install_steps(row.eval_script),
            needs_tox=bool(_TOX.search(row.eval_script)),
        )
        plans.setdefault(plan.image, plan)
    return list(plans.values())
