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
import contextlib
import dataclasses
import fcntl
import json
import re
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from nemo_gym._util.files import cache_root
from nemo_gym._util.tasks import on_stop_signal
from nemo_gym.config.compose import compose
from nemo_gym.config.composition import backend_of
from nemo_gym.config.files import find_file, plugin_roots
from nemo_gym.contract.errors import ConfigError, NemoGymError, SandboxCreateError, reject_unknown_keys
from nemo_gym.contract.sandbox import SandboxRole
from nemo_gym.sandbox.base import SandboxHandle, SandboxProvider, SupportsSnapshot, box_labels, require
from nemo_gym.sandbox.facade import create_provider
from resources_servers.swe_bench.confirm.controls import ControlStore, RowControls, Strength
from resources_servers.swe_bench.confirm.making import BUDGET_S, Maker
from resources_servers.swe_bench.eval_box import EvalSite
from resources_servers.swe_bench.preparation.boxes import RegistryAccess, build_box, registry_access
from resources_servers.swe_bench.preparation.environments import build_environment
from resources_servers.swe_bench.preparation.examples import example_environments, example_repositories
from resources_servers.swe_bench.preparation.plan import (
    PREPARATION_VERSION,
    Environment,
    PreparationError,
    Progress,
    RowPlan,
    make_plans,
    read_environments,
)
from resources_servers.swe_bench.preparation.repositories import Repositories, build_instance, commit_time, image_env
from resources_servers.swe_bench.preparation.shims import shims_digest_parts
from resources_servers.swe_bench.row import (
    CONTENT_LABEL,
    ENV_LABEL,
    INSTANCE_LABEL,
    PREFIX,
    TESTBED,
    SweBenchRow,
    content_digest,
    dataset_row,
    official_image,
    read_rows,
    resolve_image,
)
from resources_servers.swe_bench.scrub import ScrubError, scrub_box, verify_box

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
_POLL_S = 0.1
Source = Literal["repository", "official"]
Report = Callable[[str, str], None]
"""Called with an instance id and the current step of its preparation."""


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


# Images: each is built once per content, and appears only when it is complete


@dataclass(frozen=True)
class Prepared:
    """The result of preparing one row."""

    instance_id: str
    image: str
    status: Literal["built", "cached", "failed"]
    source: Source
    seconds: float
    error: str | None = None
    controls: Strength | None = None
    """The strength of the weakest test to be fixed; ``None`` if no controls were requested."""
    tests: Mapping[str, int] | None = None
    """Control strength → the number of tests to be fixed that have it."""
    left_out: tuple[str, ...] | None = None
    """Controls that were not made because the time budget was used up."""

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass
class ImageBuilder:
    """Prepares rows on one provider.

    Args:
        base_image: the image to start from; ``None`` means the provider's default.
        report: receives the progress.
        controls: the store of the rows' controls; ``None`` makes none.
        controls_budget_s: the time budget for the controls of one row.
    """

    provider: SandboxProvider
    repositories: Repositories
    registries: RegistryAccess
    run_id: str
    base_image: str | None = None
    force: bool = False
    report: Report = lambda instance, step: None
    controls: ControlStore | None = None
    controls_budget_s: float = BUDGET_S

    def __post_init__(self) -> None:
        require(self.provider, SupportsSnapshot, why="to keep prepared images")
        # Providers that share an image store also share the prepared images.
        self._store = str(getattr(self.provider, "image_store", self.provider.name))
        self._snapshots = cast(SupportsSnapshot, self.provider)
        self._environments: dict[str, asyncio.Task[str]] = {}

    def source(self, plan: RowPlan) -> Source:
        """Return the source of the row's image: a local repository if there is one, else the published image."""
        return "official" if self.repositories.find(plan.row.repo) is None else "repository"

    def _environment_key(self, environment: Environment) -> str:
        return content_digest(
            [PREPARATION_VERSION, self._store, self.base_image, environment.as_data(), shims_digest_parts()]
        )

    def _content_key(self, plan: RowPlan) -> str:
        if self.source(plan) == "official":
            row = plan.row
            return content_digest([PREPARATION_VERSION, self._store, plan.image, official_image({**vars(row)})])
        return plan.content_key(self._environment_key(plan.environment))

    async def prepare(self, plan: RowPlan) -> Prepared:
        """Make sure that the row's image exists and is up to date. Raises the errors of the provider and the steps."""
        started = time.monotonic()
        key, source, instance = self._content_key(plan), self.source(plan), plan.row.instance_id
        status: Literal["built", "cached"] = "cached"
        controls: dict[str, Any] = {}
        async with self._exclusive(key, waiting_instance=instance):
            if self.force or not await self._is_current(plan.image, key):
                status = "built"
                await (self._from_official(plan, key) if source == "official" else self._from_repository(plan, key))
            if self.controls is not None:
                made_now, found = await self._ensure_controls(self.controls, plan, key)
                status = "built" if made_now else status
                controls = {"controls": found.strength, "tests": found.counts(), "left_out": found.left_out or None}
        seconds = round(time.monotonic() - started, 2)
        return Prepared(instance, plan.image, status, source, seconds, **controls)

    @contextlib.asynccontextmanager
    async def _exclusive(self, key: str, *, waiting_instance: str | None = None) -> AsyncIterator[None]:
        """Hold the lock of ``key``, so that only one of this user's processes prepares it. The others wait, and then
        find the work done."""
        home = cache_root() / "preparing"
        home.mkdir(parents=True, exist_ok=True)
        with (home / f"{key}.lock").open("w") as lock:
            reported = False
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if waiting_instance is not None and not reported:
                        self.report(waiting_instance, "waits for another process that prepares it")
                        reported = True
                    await asyncio.sleep(_POLL_S)
            yield

    async def _ensure_controls(self, store: ControlStore, plan: RowPlan, key: str) -> tuple[bool, RowControls]:
        """Return whether the row's controls were made now, and the controls."""
        stored = None if self.force else await asyncio.to_thread(store.load, plan.row, key)
        if stored is not None:
            return False, stored
        self.report(plan.row.instance_id, "controls")
        image = await resolve_image(self.provider, vars(plan.row))
        labels = box_labels(run=self.run_id, rollout=plan.row.instance_id, attempt=1, role=SandboxRole.EVAL)
        site = EvalSite(self.provider, image.name, image.env, labels)
        made = await Maker(site, plan.row, key, budget_s=self.controls_budget_s).make()
        await asyncio.to_thread(store.save, plan.row, made)
        return True, made

    async def _is_current(self, image: str, key: str) -> bool:
        labels = await self._snapshots.image_labels(image)
        return labels is not None and labels.get(CONTENT_LABEL) == key

    async def _from_repository(self, plan: RowPlan, key: str) -> None:
        row, instance = plan.row, plan.row.instance_id
        self.report(instance, "environment")
        environment_image = await self._environment_image(plan.environment)
        self.report(instance, "repository")
        async with self.repositories.clone(row.repo, row.base_commit) as git_dir:
            async with build_box(
                self.provider, environment_image, self.registries, run_id=self.run_id, what=instance
            ) as box:
                self.report(instance, "project")
                await build_instance(box, plan, git_dir)
                self.report(instance, "scrub")
                try:
                    # The clone should hold only this history, so verify that first. Scrubbing copies the history once
                    # more, which takes long for large repositories.
                    await verify_box(self.provider, box.handle, TESTBED, row.base_commit)
                except ScrubError:
                    await scrub_box(self.provider, box.handle, TESTBED, row.base_commit)
                self.report(instance, "commit")
                await self._commit(box.handle, plan, key, image_env(plan))

    async def _from_official(self, plan: RowPlan, key: str) -> None:
        row, instance = plan.row, plan.row.instance_id
        image = official_image(vars(row))
        self.report(instance, "official image")
        async with contextlib.AsyncExitStack() as stack:
            try:
                box_context = build_box(
                    self.provider, image, self.registries, run_id=self.run_id, what=instance, online=False
                )
                box = await stack.enter_async_context(box_context)
            except SandboxCreateError as error:
                name = row.repo.replace("/", "__")
                raise PreparationError(
                    f"{instance}: no local repository of '{row.repo}' (give repos=DIR with {name} in it), and its "
                    f"published image cannot be used: {error}"
                ) from error
            self.report(instance, "scrub")
            # The makers of the image may have committed their own changes on top of the base commit.
            head = await box.run(f"git -c safe.directory='*' -C {TESTBED} rev-parse HEAD", step="reading HEAD")
            await scrub_box(self.provider, box.handle, TESTBED, row.base_commit, head=head.strip())
            self.report(instance, "commit")
            await self._commit(box.handle, plan, key, {})

    async def _commit(self, handle: SandboxHandle, plan: RowPlan, key: str, env: dict[str, str]) -> None:
        labels = {CONTENT_LABEL: key, INSTANCE_LABEL: plan.row.instance_id, ENV_LABEL: json.dumps(env, sort_keys=True)}
        await self._snapshots.commit(handle, plan.image, labels)

    async def _environment_image(self, environment: Environment) -> str:
        """Return the image of a shared layer. If several rows need it at once, the first builds it and all wait."""
        key = self._environment_key(environment)
        task = self._environments.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(self._build_environment(environment, key))
            self._environments[key] = task
        # Shield the build, so that cancelling one waiting row does not cancel it for the others.
        return await asyncio.shield(task)

    async def _build_environment(self, environment: Environment, key: str) -> str:
        image = f"{PREFIX}.env.{environment.runtime.name}.{key[:16]}"
        async with self._exclusive(key):
            if not await self._is_current(image, key):
                what = f"environment {environment.runtime} {key[:8]}"
                async with build_box(
                    self.provider, self.base_image, self.registries, run_id=self.run_id, what=what
                ) as box:
                    await build_environment(box, environment)
                    await self._snapshots.commit(box.handle, image, {CONTENT_LABEL: key})
        return image

    async def aclose(self) -> None:
        """Cancel the builds of shared layers that are still running."""
        tasks: list[Awaitable[str]] = list(self._environments.values())
        for task in self._environments.values():
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
