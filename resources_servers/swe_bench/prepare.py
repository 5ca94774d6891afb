"""``ng_prepare swe_bench rows=ROWS.jsonl sandbox=local|docker [repos=DIR] [environments=ENVIRONMENTS.json]``

Makes the images that the rows' boxes start from. If a row's repository is in ``repos`` (``<owner>__<name>``, bare or
not), the image is built from it, with the runtime and packages in the environments file, and the project installed as
the row's evaluation script does it. Any other row uses the published image in its ``image`` field, on providers that
have or can pull it. In both cases the repository is scrubbed of everything after the base commit before the image is
saved.

Finished images are recognized by their content, so an interrupted run continues where it stopped.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_gym._util.tasks import on_stop_signal
from nemo_gym.config.compose import compose
from nemo_gym.config.composition import backend_of
from nemo_gym.config.files import find_file, plugin_roots
from nemo_gym.contract.errors import ConfigError, NemoGymError, reject_unknown_keys
from nemo_gym.sandbox.facade import create_provider
from resources_servers.swe_bench.confirm.controls import ControlStore
from resources_servers.swe_bench.confirm.making import BUDGET_S
from resources_servers.swe_bench.preparation.boxes import registry_access
from resources_servers.swe_bench.preparation.builder import ImageBuilder, Prepared
from resources_servers.swe_bench.preparation.examples import example_environments, example_repositories
from resources_servers.swe_bench.preparation.plan import Progress, RowPlan, make_plans, read_environments
from resources_servers.swe_bench.preparation.repositories import Repositories, commit_time
from resources_servers.swe_bench.row import SweBenchRow, dataset_row, read_rows

USAGE = """\
usage: ng_prepare swe_bench rows=ROWS.jsonl sandbox=PROVIDER [repos=DIR] [environments=FILE] [workers=N]
                  [base_image=IMAGE] [instances=ID,ID] [controls=DIR|off] [controls_budget_s=S] [force=true]
                  [--json]

  rows          rows of SWE-bench 5 or later, one JSON object a line
  sandbox       local, docker, or another installed sandbox provider that can keep images
  repos         directory of local repositories named <owner>__<name>, bare or not; several with ':' between
  environments  JSON list of {instance_id, runtime, packages, env}
  workers       images built at the same time (default 2)
  base_image    what images start from (default: the provider's own default image)
  instances     only these
  controls      where the controls that confirm attempts are kept, for this user alone
                (default: ~/.local/state/nemo-gym/swe-bench/controls); off makes none
  controls_budget_s
                time limit in seconds for making a row's controls (default 300); skipped controls are reported
  force         build again what is up to date
  sandbox.…     settings of the sandbox, as for ng_run (sandbox.docker.base_url=…); config_paths too
  --json        print a summary as one JSON object on standard output
"""


@dataclass(frozen=True)
class Options:
    """The validated command line."""

    rows: Path
    sandbox: tuple[str, ...]
    """The ``key=value`` arguments that choose and configure the sandbox."""
    repos: tuple[Path, ...] = ()
    environments: Path | None = None
    workers: int = 2
    base_image: str | None = None
    instances: frozenset[str] = frozenset()
    controls: str = ""
    controls_budget_s: float = BUDGET_S
    force: bool = False
    json: bool = False

    @classmethod
    def parse(cls, overrides: Sequence[str]) -> Options:
        """Parse ``key=value`` arguments. Raises `ConfigError` that names the key and the fix."""
        values: dict[str, Any] = {}
        sandbox: list[str] = []
        for argument in overrides:
            if argument == "--json":
                values["json"] = True
                continue
            key, separator, value = argument.lstrip("+").partition("=")
            if not separator:
                raise ConfigError(f"'{argument}' is not key=value\n{USAGE}")
            if key == "sandbox" or key.startswith("sandbox.") or key == "config_paths":
                sandbox.append(argument)
                value = argument
            if not key.startswith("sandbox."):
                values[key] = value.strip("'\"")
        values.pop("config_paths", None)
        reject_unknown_keys(values, [field.name for field in dataclasses.fields(cls)], where="ng_prepare swe_bench")
        for required in ("rows", "sandbox"):
            if not values.get(required):
                raise ConfigError(f"ng_prepare swe_bench: {required}= is missing\n{USAGE}")
        for flag in ("force", "json"):
            values[flag] = str(values.get(flag, "false")).lower() in ("true", "1", "yes")
        workers = str(values.pop("workers", "2"))
        if not workers.isdigit() or int(workers) < 1:
            raise ConfigError(f"ng_prepare swe_bench: workers={workers} must be a whole number of at least 1")
        budget = str(values.pop("controls_budget_s", BUDGET_S))
        if not re.fullmatch(r"\d+(\.\d+)?", budget) or not float(budget):
            raise ConfigError(f"ng_prepare swe_bench: controls_budget_s={budget} must be a number of seconds above 0")
        repos = tuple(Path(part).expanduser() for part in values.pop("repos", "").split(":") if part)
        for directory in repos:
            if not directory.is_dir():
                raise ConfigError(f"ng_prepare swe_bench: repos={directory} is not a directory")
        environments = values.pop("environments", None)
        instances = frozenset(part for part in values.pop("instances", "").split(",") if part)
        rows = Path(values.pop("rows")).expanduser()
        return cls(
            rows=rows if rows.exists() else find_file(rows, plugin_roots()) or rows,  # as a run finds its input
            repos=repos,
            environments=Path(environments).expanduser() if environments else None,
            workers=int(workers),
            instances=instances,
            controls_budget_s=float(budget),
            **(values | {"sandbox": tuple(sandbox)}),
        )


def _plans(options: Options) -> list[RowPlan]:
    instances = ((line, dataset_row(row)) for line, row in read_rows(options.rows))
    rows = [
        SweBenchRow.from_mapping(row, path=str(options.rows), line=line)
        for line, row in instances
        if not options.instances or row.get("instance_id") in options.instances
    ]
    unknown = options.instances - {row.instance_id for row in rows}
    if unknown or not rows:
        raise ConfigError(f"rows={options.rows} holds no row {', '.join(sorted(unknown)) or 'at all'}")
    environments = example_environments()
    if options.environments is not None:
        environments |= read_environments(options.environments)
    return make_plans(rows, environments)


def _sandbox_block(options: Options) -> dict[str, dict[str, Any]]:
    """Return the provider and its settings, composed as for a run, so that a run finds the images prepared here."""
    composition = compose(options.sandbox)
    return backend_of(composition, composition.chosen["sandbox"])


def _in_history_order(plans: list[RowPlan], repositories: Repositories) -> list[RowPlan]:
    """Sort the rows of each repository by commit, oldest first, so that each clone can continue the previous one."""

    def key(plan: RowPlan) -> tuple[str, int, str]:
        row = plan.row
        if repositories.find(row.repo) is None:
            return row.repo, 0, row.instance_id
        return row.repo, commit_time(repositories.require(row.repo, row.base_commit), row.base_commit), row.instance_id

    return sorted(plans, key=key)


async def prepare(options: Options) -> list[Prepared]:
    """Prepare every row. A row that fails does not stop the others. Raises `ConfigError` for a problem of all rows."""
    plans = _plans(options)
    with tempfile.TemporaryDirectory(prefix="ng-prepare-") as directory:
        scratch = Path(directory)
        examples = await asyncio.to_thread(example_repositories, {plan.row.repo for plan in plans}, scratch)
        repositories = Repositories([*options.repos, *examples], scratch)
        plans = await asyncio.to_thread(_in_history_order, plans, repositories)
        provider = create_provider(_sandbox_block(options))
        try:
            with Progress([plan.row.instance_id for plan in plans]) as progress:
                builder = ImageBuilder(
                    provider,
                    repositories,
                    await asyncio.to_thread(registry_access),
                    run_id=f"prepare-{uuid.uuid4().hex[:12]}",
                    base_image=options.base_image,
                    force=options.force,
                    report=progress.step,
                    controls=None if options.controls == "off" else ControlStore.of(options.controls or None),
                    controls_budget_s=options.controls_budget_s,
                )
                try:
                    return await _prepare_all(builder, plans, options.workers, progress)
                finally:
                    await builder.aclose()
        finally:
            await provider.aclose()


async def _prepare_all(
    builder: ImageBuilder, plans: Sequence[RowPlan], workers: int, progress: Progress
) -> list[Prepared]:
    slots = asyncio.Semaphore(workers)

    async def one(plan: RowPlan) -> Prepared:
        async with slots:
            try:
                done = await builder.prepare(plan)
            except Exception as error:  # noqa: BLE001 - the text of one row must not end the others' preparation
                why = str(error) if isinstance(error, NemoGymError) else f"{type(error).__name__}: {error}"
                done = Prepared(plan.row.instance_id, plan.image, "failed", builder.source(plan), 0.0, error=why)
            left_out = f"; left out: {', '.join(done.left_out)}" if done.left_out else ""
            progress.done(
                done.instance_id, done.status, done.seconds, done.error, done.controls and done.controls + left_out
            )
            return done

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(plan)) for plan in plans]
    return [task.result() for task in tasks]


def summary(results: Sequence[Prepared]) -> dict[str, Any]:
    """Return the counts of rows by status, of rows and tests to be fixed by control strength, and an entry per row."""
    counts = {status: sum(item.status == status for item in results) for status in ("built", "cached", "failed")}
    strengths = [item.controls for item in results if item.controls is not None]
    controls = {level: strengths.count(level) for level in ("strong", "weak", "none")}
    tests = {level: sum((item.tests or {}).get(level, 0) for item in results) for level in controls}
    totals = {"total": len(results), "controls": controls, "tests": tests}
    return {**counts, **totals, "rows": [item.as_json() for item in results]}


async def _run(options: Options) -> list[Prepared]:
    task = asyncio.ensure_future(prepare(options))
    # A signal cancels the task, so that build boxes are destroyed before the process ends.
    on_stop_signal(task.cancel)
    return await task


def main(overrides: Sequence[str]) -> int:
    """Run the command. Return the exit code: 0 if every row is prepared, 1 if some are not, 2 for bad input."""
    if any(argument in ("-h", "--help") for argument in overrides):
        sys.stdout.write(USAGE)
        return 0
    try:
        options = Options.parse(overrides)
        results = asyncio.run(_run(options))
    except NemoGymError as error:
        sys.stderr.write(f"ng_prepare: {error}\n")
        return 2
    except asyncio.CancelledError:
        sys.stderr.write("ng_prepare: stopped; run the same command again to go on\n")
        return 130
    if options.json:
        sys.stdout.write(json.dumps(summary(results), indent=2) + "\n")
    return 1 if any(item.status == "failed" for item in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
