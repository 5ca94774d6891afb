"""Train a policy of one million parameters on the CPU until its tool calls succeed.

    python -m examples.train.arithmetic --json

The script makes the policy, warm-starts it on demonstrations that contain errors, serves it with vLLM behind the
gateway, and trains it with GRPO on batches of the RL sampler. After each step the running engine loads the new
weights; every trajectory names the version it was sampled with. `README.md` here explains the installation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import aiohttp
import structlog
import torch

from campaigns.bench.report import Bar
from examples.train import task
from examples.train.grpo import TokenSource, exact, examples_of, train_step, trajectories
from examples.train.policy import Speller, load_model, make_policy, merges_of, save_step
from examples.train.report import Interval, Usage, interval, plot
from nemo_gym.contract.errors import ConfigError
from nemo_gym.http.client import ServerClient, close_global_aiohttp_client
from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.sampling import MixedOutcomes, NoEffectiveGroupsError, RolloutSampler, ValidSamples, open_sampler
from nemo_gym.stack.background import BackgroundStack
from nemo_gym.stack.stack import pipeline_client
from nemo_gym_testing.gateway.real import EngineMissingError, vllm_server

HERE = Path(__file__).resolve().parent
BatchSource = Literal["sampler", "plain"]
AGENT, ENVIRONMENT, GATEWAY = "simple_agent", "calculator", "policy_model"
ANSWER_TOKENS, TURNS = 40, 4
MAX_MODEL_LEN = 512
RAMP = 5
"""Steps until the learning rate is at its full value: in its first steps, Adam has no estimate of gradient sizes."""
FINAL_RATE = 0.1
"""Fraction of the learning rate at the last step: by then most groups are solved, and the gradient is mostly noise."""
WHOLE = 4
"""The evaluations before and after the run use this many times the rows of an evaluation during the run."""
LOGPROB_TOLERANCE = 0.01
"""Largest accepted difference between the engine's and the trainer's logprobs, both in float32; 1e-5 was measured."""
HOPELESS = 20
"""Groups that may end, for each group that a batch needs, before the run gives up."""
ALL_RIGHT = "all samples are right"


@dataclass(frozen=True)
class Settings:
    seed: int = 0
    tokens: TokenSource = "exact"
    batches: BatchSource = "sampler"
    steps: int = 45
    groups: int = 8
    """Groups in one batch."""
    samples: int = 8
    """Samples in one group."""
    learning_rate: float = 3e-4
    warm_steps: int = 350
    held_out_rows: int = 50
    """Rows of one evaluation during the run."""
    evaluate_every: int = 3
    max_weights_lag: int = 1
    concurrency: int = 64
    threads: int = 1
    """Threads of the trainer; the engine uses one more."""

    def rate(self, step: int) -> float:
        """Return a step's learning rate: a linear rise over `RAMP` steps, then a linear fall to `FINAL_RATE` of it."""
        fall = (step + 1 - RAMP) / max(self.steps - RAMP, 1)
        return self.learning_rate * min((step + 1) / RAMP, 1 - (1 - FINAL_RATE) * fall)


@dataclass
class Step:
    """One training step, as the curve shows it."""

    step: int
    wall_s: float
    cpu_s: float
    rollouts: int
    """Rollouts since the start, without held-out ones."""
    reward: float
    """Mean reward of all rollouts that ended for this batch, whether their groups are effective or not."""
    effective: float
    """Share of effective groups among those that ended for this batch."""
    staleness_mean: float
    staleness_max: int
    tokens_per_s: float
    """Tokens sampled for this batch, per second of the whole step."""
    loss: float | None
    gradient_norm: float | None
    clipped: float | None
    logprob_error: float | None
    held_out: float | None = None


@dataclass
class Engine:
    """The running vLLM and the gateway in front of it."""

    url: str
    client: ServerClient
    http: aiohttp.ClientSession

    async def use(self, folder: Path, version: int) -> None:
        """Load weights into the running engine. Calls in progress pause, then continue with the new weights; for them,
        the gateway records both versions."""
        await self._post("/pause?mode=keep")
        try:
            await self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
            reply = await self.client.post(GATEWAY, "/weights", json={"version": str(version)})
            if reply.status != 200:
                raise RuntimeError(f"the gateway did not take weights version {version}: {await reply.text()}")
        finally:
            await self._post("/resume")

    async def _post(self, route: str, body: Mapping[str, Any] | None = None) -> None:
        async with self.http.post(self.url + route, json=body) as reply:
            if reply.status != 200:
                raise RuntimeError(f"the engine answered {reply.status} to {route}: {(await reply.text())[:500]}")


@asynccontextmanager
async def serving(policy: Path, folder: Path) -> AsyncIterator[Engine]:
    """Run vLLM, and in front of it a stack of agent, environment and gateway."""
    roots = [str(HERE), os.environ.get("NEMO_GYM_EXTRA_ROOTS", "")]
    os.environ["NEMO_GYM_EXTRA_ROOTS"] = os.pathsep.join(root for root in roots if root)
    async with AsyncExitStack() as undo:
        words = ("--no-enable-prefix-caching", "--max-num-seqs", "64", "--max-num-batched-tokens", "8192")
        url = await undo.enter_async_context(
            vllm_server(policy, folder / "vllm.log", *words, max_model_len=MAX_MODEL_LEN, development=True)
        )
        chosen = (f"agent={AGENT}", f"environment={ENVIRONMENT}", "model=vllm", f"policy_path={policy}")
        stack = BackgroundStack(
            [*chosen, f"policy_base_url={url}", "policy_model_name=tiny"], run_dir=folder / "stack"
        )
        undo.push_async_callback(asyncio.to_thread, stack.stop)
        entry = await asyncio.to_thread(stack.start)
        undo.push_async_callback(close_global_aiohttp_client)
        # vLLM closes an idle connection after about the time of one step, so each call opens its own connection.
        connector = aiohttp.TCPConnector(force_close=True)
        http = await undo.enter_async_context(aiohttp.ClientSession(connector=connector))
        yield Engine(url, pipeline_client(entry), http)


def run_keys(settings: Settings) -> dict[str, Any]:
    return {
        "agent_name": AGENT,
        "concurrency": settings.concurrency,
        "temperature": 1.0,
        "max_output_tokens": ANSWER_TOKENS,
        "max_turns": TURNS,
    }


async def collected(
    client: ServerClient, rows: Sequence[Mapping[str, Any]], settings: Settings
) -> list[dict[str, Any]]:
    """Run one rollout for each row; return the results in the order of the rows."""
    helper = RolloutCollectionHelper(client)
    given = [{**row, "_ng_task_index": number, "at": number} for number, row in enumerate(rows)]
    found: dict[int, dict[str, Any]] = {}
    try:
        for ended in helper.run_examples(given, **run_keys(settings)):
            row, result = await ended
            found[row["at"]] = result
    finally:
        await helper.aclose()
    return [found[number] for number in range(len(rows))]


async def held_out_reward(engine: Engine, rows: Sequence[Mapping[str, Any]], settings: Settings) -> list[float]:
    """Return the reward of one rollout per row, at the training temperature; leave out rollouts without a verdict."""
    results = await collected(engine.client, rows, settings)
    return [float(result["reward"]) for result in results if result["reward"] is not None]


@dataclass
class Batch:
    groups: list[list[dict[str, Any]]]
    ended: int
    """Groups that ended for this batch."""
    solved: int = 0
    """How many of the ended groups are left out because all their samples are right."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for group in self.groups for row in group]

    @property
    def reward(self) -> float:
        """Mean reward of all groups that ended; in a group that is left out, samples are all right or all wrong."""
        each = [statistics.fmean(float(row["reward"] or 0.0) for row in group) for group in self.groups]
        return (sum(each) + self.solved) / max(self.ended, 1)

    @property
    def effective(self) -> float:
        mixed = [group for group in self.groups if len({row["reward"] for row in group}) > 1]
        return len(mixed) / max(self.ended, 1)


class Batches(Protocol):
    async def next(self, version: int) -> Batch: ...


class PlainBatches:
    """Batches of the next rows with all their rollouts; the trainer waits until the last rollout has ended."""

    def __init__(self, engine: Engine, rows: Sequence[Mapping[str, Any]], settings: Settings) -> None:
        self._engine, self._rows, self._settings = engine, rows, settings
        self._at = 0

    async def next(self, version: int) -> Batch:
        count, samples = self._settings.groups, self._settings.samples
        rows = [self._rows[(self._at + number) % len(self._rows)] for number in range(count)]
        self._at += count
        results = await collected(self._engine.client, [row for row in rows for _ in range(samples)], self._settings)
        return Batch([results[at : at + samples] for at in range(0, len(results), samples)], count)


class SampledBatches:
    """Batches of effective groups from the RL sampler, which keeps sampling while the trainer computes."""

    def __init__(self, sampler: RolloutSampler, settings: Settings) -> None:
        self._sampler, self._settings = sampler, settings

    async def next(self, version: int) -> Batch:
        batch = await self._sampler.next_batch(self._settings.groups, weights_version=version)
        rows = batch.rows()
        size = self._settings.samples
        groups = [rows[at : at + size] for at in range(0, len(rows), size)]
        return Batch(groups, len(groups) + sum(batch.left_out.values()), batch.left_out.get(ALL_RIGHT, 0))


@asynccontextmanager
async def batches_of(
    engine: Engine, rows: Sequence[Mapping[str, Any]], settings: Settings, folder: Path
) -> AsyncIterator[Batches]:
    if settings.batches == "plain":
        yield PlainBatches(engine, rows, settings)
        return
    keys = {**run_keys(settings), "output": str(folder / "train.jsonl"), "overwrite": True}
    sampling = {
        "samples_per_group": settings.samples,
        "max_weights_lag": settings.max_weights_lag,
        "max_groups_per_batch": settings.groups * HOPELESS,
    }
    filters = (ValidSamples(), MixedOutcomes(solved_from=1.0))
    async with open_sampler(engine.client, keys, rows, sampling=sampling, filters=filters) as sampler:
        yield SampledBatches(sampler, settings)


@dataclass
class Outcome:
    """The outcome of one run."""

    settings: Settings
    engine: str
    parameters: int
    merges: int
    retokenising_changes: float
    """Share of the batches' trajectories whose tokens change when their text is encoded again."""
    before: Interval
    after: Interval
    target: float
    reached: dict[str, float] | None
    """Step, seconds, CPU seconds and rollouts when the held-out reward first reached the target."""
    warm_start_s: float
    wall_s: float
    cpu_s: float
    turns_per_rollout: float
    weights_versions: list[int]
    """The lowest and the highest version among the batches' trajectories."""
    spanning: int
    """Trajectories with more than one version."""
    steps: list[Step] = field(default_factory=list)


class Trainer:
    """The training loop; see `run`."""

    def __init__(self, settings: Settings, folder: Path, say: Any) -> None:
        self.settings, self.folder, self._say = settings, folder, say
        self._usage = Usage()
        training, held_out = task.split_operands(settings.seed)
        draw = random.Random(f"rows:{settings.seed}")
        source = task.sums(training, draw, never=held_out, wide=task.WIDE_SHARE)
        self.rows = [one.row() for one in task.distinct(source, 2_000)]
        unseen = task.sums(held_out, draw)
        self.held_out = [one.row() for one in task.distinct(unseen, WHOLE * settings.held_out_rows)]
        self.steps: list[Step] = []
        self._seen = self._changed = self._turns = self._rollouts = self._spanning = 0
        self._versions: set[int] = set()

    async def run(self, policy: Path, target: float) -> Outcome:
        settings = self.settings
        model, speller = load_model(policy), Speller(policy)
        torch.set_num_threads(settings.threads)
        warm_start_s = json.loads((policy / "warm_start.json").read_text())["cpu_s"]
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        reached: dict[str, float] | None = None
        (self.folder / "steps.jsonl").unlink(missing_ok=True)
        async with serving(policy, self.folder) as engine:
            await engine.use(policy, 0)
            before = interval(await held_out_reward(engine, self.held_out, settings))
            self._say(f"held-out reward before: {before}")
            async with batches_of(engine, self.rows, settings, self.folder) as batches:
                self._usage.start()
                for number in range(settings.steps):
                    started = time.monotonic()
                    batch = await batches.next(number)
                    waited = time.monotonic() - started
                    step = self._observe(number, batch, waited, speller)
                    examples = list(examples_of(batch.groups, settings.tokens, speller))
                    for group in optimizer.param_groups:
                        group["lr"] = settings.rate(number)
                    if examples:
                        report = await asyncio.to_thread(train_step, model, optimizer, examples)
                        step.loss, step.gradient_norm = report.loss, report.gradient_norm
                        step.clipped, step.logprob_error = report.clipped, report.logprob_error
                        if (step.logprob_error or 0.0) > LOGPROB_TOLERANCE:
                            raise RuntimeError(
                                f"step {number + 1}: the engine's logprobs are {step.logprob_error:.3g} away from the"
                                " trainer's: it does not serve the weights that it was given"
                            )
                    await engine.use(save_step(model, self.folder / "weights"), number + 1)
                    step.tokens_per_s = sum_sampled(batch.rows) / (time.monotonic() - started)
                    step.wall_s, step.cpu_s = self._usage.wall_s, self._usage.cpu_s
                    if (number + 1) % settings.evaluate_every == 0:
                        evaluated = self.held_out[: settings.held_out_rows]
                        step.held_out = statistics.fmean(await held_out_reward(engine, evaluated, settings))
                        if reached is None and step.held_out >= target:
                            reached = {
                                "step": number + 1,
                                "wall_s": round(step.wall_s, 1),
                                "cpu_s": round(step.cpu_s, 1),
                                "rollouts": step.rollouts,
                            }
                    self.steps.append(step)
                    with (self.folder / "steps.jsonl").open("a") as file:
                        file.write(json.dumps(asdict(step)) + "\n")
                    self._say(told(step))
                wall_s, cpu_s = self._usage.wall_s, self._usage.cpu_s
            after = interval(await held_out_reward(engine, self.held_out, settings))
            self._say(f"held-out reward after: {after}")
        return Outcome(
            settings,
            "vllm 0.32.0 (CPU, float32), weights replaced in place",
            sum(one.numel() for one in model.parameters()),
            merges_of(policy),
            self._changed / max(self._seen, 1),
            before,
            after,
            target,
            reached,
            warm_start_s,
            wall_s,
            cpu_s,
            self._turns / max(self._seen, 1),
            [min(self._versions), max(self._versions)] if self._versions else [],
            self._spanning,
            self.steps,
        )

    def _observe(self, number: int, batch: Batch, waited: float, speller: Speller) -> Step:
        self._rollouts += batch.ended * self.settings.samples
        staleness = []
        for row in batch.rows:
            for trajectory in trajectories(row):
                ids = exact(trajectory).ids
                self._seen += 1
                self._changed += speller.again(ids).ids != ids
                self._turns += len(trajectory.turns)
                versions = {int(version) for version in trajectory.weights_versions}
                self._versions |= versions
                self._spanning += len(versions) > 1
                staleness.append(number - min(versions, default=number))
                row["staleness"] = staleness[-1]
        return Step(
            number + 1,
            0.0,
            0.0,
            self._rollouts,
            batch.reward,
            batch.effective,
            statistics.fmean(staleness) if staleness else 0.0,
            max(staleness, default=0),
            0.0,
            None,
            None,
            None,
            None,
        )


def sum_sampled(rows: Sequence[Mapping[str, Any]]) -> int:
    return sum(sum(one.response_mask) for row in rows for one in trajectories(row))


def told(step: Step) -> str:
    loss = "no group" if step.loss is None else f"loss {step.loss:+.3f} |g| {step.gradient_norm:.2f}"
    error = "" if step.logprob_error is None else f" Δlogprob {step.logprob_error:.0e}"
    held_out = "" if step.held_out is None else f"  held-out {step.held_out:.2f}"
    return (
        f"step {step.step:3} {step.wall_s:5.0f} s  reward {step.reward:.2f} effective {step.effective:.2f}"
        f" stale {step.staleness_mean:.1f}/{step.staleness_max} {step.tokens_per_s:4.0f} tok/s {loss}{error}{held_out}"
    )


async def until_told(run: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Await the run. SIGTERM cancels it, so that the run can stop the engine."""
    task = asyncio.ensure_future(run)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def bars_of(outcome: Outcome) -> list[Bar]:
    """Return the bars: the policy must learn, and encoding the text again must change enough of its tokens."""
    return [
        Bar.at_most("held_out_before", outcome.before.mean, 0.3),
        Bar.at_least("held_out_after", outcome.after.mean, outcome.target),
        Bar.at_least("retokenising_changes", outcome.retokenising_changes, 0.2),
        Bar.at_most("main_run", outcome.wall_s, 1_200, "s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.train.arithmetic", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--tokens", choices=["exact", "retokenised"], default="exact")
    parser.add_argument("--batches", choices=["sampler", "plain"], default="sampler")
    parser.add_argument(
        "--output", type=Path, default=Path("results/train"), help="folder of policies, runs and curves"
    )
    parser.add_argument("--learning-rate", type=float, default=Settings.learning_rate)
    parser.add_argument("--warm-steps", type=int, default=Settings.warm_steps)
    parser.add_argument("--held-out-rows", type=int, default=Settings.held_out_rows)
    parser.add_argument("--threads", type=int, default=Settings.threads)
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--json", action="store_true", help="print the outcome as one JSON object")
    parser.add_argument("--bars", action="store_true", help="exit with 1 when a bar of the whole run is missed")
    given = parser.parse_args()
    settings = Settings(
        seed=given.seed,
        tokens=given.tokens,
        batches=given.batches,
        steps=given.steps,
        learning_rate=given.learning_rate,
        warm_steps=given.warm_steps,
        held_out_rows=given.held_out_rows,
        threads=given.threads,
    )

    def say(text: str) -> None:
        print(text, file=sys.stderr if given.json else sys.stdout, flush=True)

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    folder = given.output.resolve() / f"seed{settings.seed}-{settings.tokens}-{settings.batches}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        policy = make_policy(
            given.output.resolve() / f"policy{settings.seed}",
            settings.seed,
            settings.warm_steps,
            settings.threads,
            say,
        )
        outcome = asyncio.run(until_told(Trainer(settings, folder, say).run(policy, given.target)))
    except (ConfigError, NoEffectiveGroupsError, EngineMissingError) as error:
        sys.exit(f"error: {error}")
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)
    bars = bars_of(outcome)
    whole = {**asdict(outcome), "bars": [asdict(bar) for bar in bars]}
    (folder / "outcome.json").write_text(json.dumps(whole, indent=1))
    plot([whole], folder / "curve.png")
    if given.json:
        print(json.dumps(whole))
    else:
        reached = outcome.reached or "not reached"
        print(f"held-out reward {outcome.before} -> {outcome.after}; {given.target} reached: {reached}")
        print(f"curve: {folder / 'curve.png'}")
    if given.bars and (missed := [bar.name for bar in bars if not bar.ok]):
        sys.exit(f"missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
