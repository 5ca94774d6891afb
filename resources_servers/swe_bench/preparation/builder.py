"""Builds images from plans. Each image is built once per content, and appears only when it is complete."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from nemo_gym._util.files import cache_root
from nemo_gym.contract.errors import SandboxCreateError
from nemo_gym.contract.sandbox import SandboxRole
from nemo_gym.sandbox.base import SandboxHandle, SandboxProvider, SupportsSnapshot, box_labels, require
from resources_servers.swe_bench.confirm.controls import ControlStore, RowControls, Strength
from resources_servers.swe_bench.confirm.making import BUDGET_S, Maker
from resources_servers.swe_bench.eval_box import EvalSite
from resources_servers.swe_bench.preparation.boxes import RegistryAccess, build_box
from resources_servers.swe_bench.preparation.environments import build_environment
from resources_servers.swe_bench.preparation.plan import PREPARATION_VERSION, Environment, PreparationError, RowPlan
from resources_servers.swe_bench.preparation.repositories import Repositories, build_instance, image_env
from resources_servers.swe_bench.preparation.shims import shims_digest_parts
from resources_servers.swe_bench.row import (
    CONTENT_LABEL,
    ENV_LABEL,
    INSTANCE_LABEL,
    PREFIX,
    TESTBED,
    content_digest,
    official_image,
    resolve_image,
)
from resources_servers.swe_bench.scrub import ScrubError, scrub_box, verify_box

_POLL_S = 0.1

Source = Literal["repository", "official"]
Report = Callable[[str, str], None]
"""Called with an instance id and the current step of its preparation."""


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
