"""What a pipeline shows of itself: its stages and results as metrics, and each attempt as the root of a trace."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from nemo_gym._util.tasks import finish
from nemo_gym.config.observability import ObservabilityConfig
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.contract.verdict import StageFailure
from nemo_gym.http import tracing
from nemo_gym.http.metrics import METRICS_PATH, Counter, Histogram, Reading, add_source
from nemo_gym.http.telemetry import start_traces
from nemo_gym.rollout import Attempt
from nemo_gym.rollouts.stage_pool import StageStatus

PREFIX = "nemo_gym_rollouts_"
PIPELINE = "pipeline"
STAGE_SECONDS = Histogram(f"{PREFIX}stage_seconds", "Stages that ended well, without their queue", ("stage",))
ATTEMPTS = Counter(f"{PREFIX}attempts", "Attempts that ended, by how: done, or the kind of failure", ("outcome",))
FINISHED = Counter(f"{PREFIX}finished", "Rollouts that are over, by state: done, failed, cancelled", ("state",))
REWARDED = Counter(f"{PREFIX}rewarded", "Rollouts that ended with a reward")


class _Rewards:
    """The sum of all rewards; they may be negative, so it is no counter."""

    def __init__(self) -> None:
        self.total = 0.0
        add_source(self, self.readings)

    def readings(self) -> Iterable[Reading]:
        yield Reading(f"{PREFIX}reward_sum", "Sum of all rewards so far", [({}, self.total)])


_REWARDS = _Rewards()


def attempt_begins(attempt: Attempt) -> None:
    context = tracing.attempt_context(attempt.rollout)
    if context is not None:
        named = {"rollout_id": attempt.rollout["rollout_id"], "attempt": attempt.rollout["attempt"]}
        more = {"run_id": attempt.rollout["run_id"], "task_id": attempt.rollout["task_id"]}
        attempt.span = tracing.begin("rollout", context, is_root=True, **named, **more, agent=attempt.servers.agent)


def attempt_succeeds(attempt: Attempt) -> None:
    ATTEMPTS.add("done")
    reward = (attempt.verified or {}).get("reward")
    if isinstance(reward, int | float):
        REWARDED.add()
        _REWARDS.total += reward
        if attempt.span is not None:
            attempt.span.attributes["reward"] = float(reward)


def attempt_fails(attempt: Attempt, failure: StageFailure) -> None:
    ATTEMPTS.add(str(failure.kind))
    if attempt.span is not None:
        attempt.span.attributes |= {"error.type": str(failure.kind), "stage": str(failure.stage)}
        attempt.span.error = failure.reason


def attempt_ends(attempt: Attempt) -> None:
    """Everything is released; a verification that is tried again is still the same attempt."""
    span, attempt.span = attempt.span, None
    if span is not None:
        tracing.end(span, None if attempt.verified is not None else span.error or "given up")


def stage_readings(stages: Sequence[StageStatus]) -> Iterable[Reading]:
    """What the stages of a pipeline do now."""

    def family(name: str, documentation: str, value: Callable[[StageStatus], float]) -> Reading:
        samples = [({"stage": str(stage.stage)}, value(stage)) for stage in stages]
        return Reading(f"{PREFIX}stage_{name}", documentation, samples)

    yield family("queued", "Attempts that wait for a worker", lambda stage: stage.queued)
    yield family("active", "Attempts that are worked on", lambda stage: stage.active)
    yield family("workers", "Workers", lambda stage: stage.workers)
    yield family("oldest_s", "Age of the oldest active attempt", lambda stage: stage.oldest_s)


def server_readings(servers: Sequence[Mapping[str, Any]]) -> Iterable[Reading]:
    """What a pipeline knows of its servers, as `PooledServer.told` says it."""

    def family(name: str, documentation: str, value: Callable[[Mapping[str, Any]], float]) -> Reading:
        samples = [({"server": str(server["server_id"])}, value(server)) for server in servers]
        return Reading(f"{PREFIX}server_{name}", documentation, samples)

    yield family("busy", "Rollouts at a server", lambda server: server["busy"])
    yield family("done", "Rollouts that a server finished", lambda server: server["done"])
    yield family("ready", "Whether a server gets jobs", lambda server: server["health"] == "ready")


@asynccontextmanager
async def pipeline_telemetry(
    config: ObservabilityConfig, *, run_id: str, run_dir: Path, token: str, say: Callable[[str], None]
) -> AsyncIterator[None]:
    """Traces of this process from now on, and its metrics on a port of its own until the block ends, each where
    ``config`` says so. ``token`` is what scrapers show."""
    start_traces(config, server=PIPELINE, run_id=run_id)
    try:
        if config.metrics_port is None:
            yield
            return
        async with _served(config.metrics_port, token) as url:
            from nemo_gym.stack.scraping import added_target

            say(f"metrics of the pipeline: {url}{METRICS_PATH}")
            with added_target(run_dir, PIPELINE, url, run_id):
                yield
    finally:
        await finish(tracing.shut_down())


@asynccontextmanager
async def _served(port: int, token: str) -> AsyncIterator[str]:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from nemo_gym.http.metrics import CONTENT_TYPE, render
    from nemo_gym.http.problems import install_problem_handlers
    from nemo_gym.http.server import Application
    from nemo_gym.http.telemetry import require_scraper
    from nemo_gym.http.webserver import served

    async def metrics(request: Request) -> Response:
        require_scraper(request, None, token, secured=True)
        return Response(render(), media_type=CONTENT_TYPE)

    app = Application(title=PIPELINE, openapi_url=None, docs_url=None, redoc_url=None)
    install_problem_handlers(app)
    app.router.routes.append(Route(METRICS_PATH, metrics, methods=["GET"]))
    async with served(app, BaseServerConfig(host="127.0.0.1", port=port)) as url:
        yield url
