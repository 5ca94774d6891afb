"""Measure what a box costs, compared with the bare tool that does the same in the same run.

    python campaigns/bench/sandbox.py [--json] [--provider local --provider docker] [--rounds 12] [--burst 100]

Docker's bare tool is its SDK on the same engine (the CLI is timed too, for orientation); local's is an overlay mount
and `bwrap`. Measurements are interleaved: each round runs ours and theirs one after the other, in alternating order,
and a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

if __name__ == "__main__":  # for a run by path, sys.path has this file's folder instead of the repository
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from campaigns.bench.bare_boxes import BareDocker, BareLocal
from campaigns.bench.report import Bar, Samples, argument_parser, print_report
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.sandbox.archive import pack_bytes
from nemo_gym.sandbox.base import SandboxHandle, SandboxProvider
from nemo_gym.sandbox.facade import create_provider

OPERATIONS = ("create", "exec", "tar_in", "tar_out", "destroy")
TAR = pack_bytes("blob", os.urandom(10_000_000))
LABELS = {"nemo_gym.run": f"bench-{os.getpid()}"}
EXECS_PER_ROUND = 3


class Boxes(Protocol):
    """The operations that are measured on either side; ``box`` is what ``create`` returned."""

    async def create(self) -> Any: ...
    async def exec(self, box: Any) -> None: ...
    async def tar_in(self, box: Any) -> None: ...
    async def tar_out(self, box: Any) -> None: ...
    async def destroy(self, box: Any) -> None: ...


class Ours:
    """A provider of this suite."""

    def __init__(self, provider: SandboxProvider) -> None:
        self._provider = provider
        self._spec = SandboxSpec(ttl_s=600, metadata=LABELS)

    async def create(self) -> SandboxHandle:
        return await self._provider.create(self._spec)

    async def exec(self, box: SandboxHandle) -> None:
        result = await self._provider.exec(box, ["echo", "done"])
        assert result.stdout == "done\n", result

    async def tar_in(self, box: SandboxHandle) -> None:
        await self._provider.put_archive(box, "/srv", chunks(TAR))

    async def tar_out(self, box: SandboxHandle) -> None:
        size = 0
        async for chunk in self._provider.get_archive(box, "/srv/blob"):
            size += len(chunk)
        assert size > 10_000_000

    async def destroy(self, box: SandboxHandle) -> None:
        await self._provider.close(box)


async def chunks(data: bytes, size: int = 1024 * 1024) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def timed(work: Awaitable[Any]) -> tuple[float, Any]:
    """Return the milliseconds that the work took, and its result."""
    start = time.perf_counter()
    result = await work
    return (time.perf_counter() - start) * 1000, result


async def one_round(boxes: Boxes) -> dict[str, float]:
    took: dict[str, float] = {}
    took["create"], box = await timed(boxes.create())
    first, _ = await timed(boxes.exec(box))
    took["create_and_first_exec"] = took["create"] + first
    took["exec"] = statistics.median([(await timed(boxes.exec(box)))[0] for _ in range(EXECS_PER_ROUND)])
    took["tar_in"], _ = await timed(boxes.tar_in(box))
    took["tar_out"], _ = await timed(boxes.tar_out(box))
    took["destroy"], _ = await timed(boxes.destroy(box))
    return took


async def burst(boxes: Boxes, count: int) -> float:
    """Return the milliseconds until ``count`` boxes, requested at once, have each run a command. Their removal is
    not counted."""

    async def start_box() -> Any:
        box = await boxes.create()
        await boxes.exec(box)
        return box

    took, started = await timed(asyncio.gather(*(start_box() for _ in range(count))))
    await asyncio.gather(*(boxes.destroy(box) for box in started))
    return took


async def compare(sides: dict[str, Boxes], rounds: int, burst_size: int, bursts: int) -> dict[str, dict[str, Samples]]:
    """Return operation → side → milliseconds, one value for each round."""
    samples: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    order = list(sides)
    for boxes in sides.values():
        await one_round(boxes)  # warm-up: builds images and opens connections
    for _ in range(rounds):
        order.reverse()
        for side in order:
            for operation, took in (await one_round(sides[side])).items():
                samples[operation][side].append(took)
    for _ in range(bursts):
        order.reverse()
        for side in order:
            if side != "cli":
                samples["burst"][side].append(await burst(sides[side], burst_size))
    return {name: {side: Samples(took) for side, took in by_side.items()} for name, by_side in samples.items()}


def ratio(by_side: dict[str, Samples]) -> float:
    pairs = zip(by_side["ours"].values, by_side["bare"].values, strict=True)
    return statistics.median(ours / bare for ours, bare in pairs)


async def measure(
    name: str, rounds: int, burst_size: int, bursts: int, say: Callable[[str], None]
) -> tuple[dict[str, Any], list[Bar]]:
    config = await asyncio.to_thread(_config, name)
    provider = create_provider(config)
    sides: dict[str, Boxes] = {"ours": Ours(provider)}
    if name == "docker":
        engine = os.environ["DOCKER_HOST"]
        box = await provider.create(SandboxSpec(ttl_s=600, metadata=LABELS))
        image = await asyncio.to_thread(BareDocker.image_of, engine, box.sandbox_id)
        await provider.close(box)
        sides["bare"] = BareDocker(engine, image, TAR)
        sides["cli"] = BareDocker(engine, image, TAR, cli=True)
    else:
        sides["bare"] = BareLocal(TAR)
    say(f"{name}: {rounds} rounds, {bursts} bursts of {burst_size}")
    try:
        results = await compare(sides, rounds, burst_size, bursts)
    finally:
        await provider.reap(LABELS)
        await provider.aclose()
        if name == "local":
            await asyncio.sleep(2)  # until the supervisor has exited
            shutil.rmtree(config[name]["state_dir"], ignore_errors=True)
    figures: dict[str, Any] = {}
    bars = []
    for operation, by_side in results.items():
        label = f"burst_{burst_size}" if operation == "burst" else operation
        figures[f"{name}.{label}_ms"] = {side: samples.summary() for side, samples in by_side.items()}
        figures[f"{name}.{label}_ratio"] = round(ratio(by_side), 3)
        if name == "docker" and operation in (*OPERATIONS, "burst"):
            bars.append(Bar.at_most(f"docker {label} / SDK", ratio(by_side), 1.3, "x"))
    if name == "local":
        value = results["create_and_first_exec"]["ours"].median
        bars.append(Bar.at_most("local create + first exec, median", value, 60, "ms"))
    return figures, bars


def _config(name: str) -> dict[str, Any]:
    if name != "docker":
        # A separate supervisor, so that boxes of other programs cost nothing here.
        return {name: {"state_dir": tempfile.mkdtemp(prefix="bench-boxes-"), "linger_s": 1}}
    from tests.docker_engine import start_engine

    os.environ["DOCKER_HOST"] = start_engine()
    return {"docker": {"base_url": os.environ["DOCKER_HOST"]}}


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--provider", action="append", choices=("local", "docker"))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--burst", type=int, default=100, help="boxes asked for at once")
    parser.add_argument("--bursts", type=int, default=2, help="how often")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    bars: list[Bar] = []

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    for name in options.provider or ("local", "docker"):
        more, its_bars = asyncio.run(measure(name, options.rounds, options.burst, options.bursts, say))
        figures |= more
        bars += its_bars
    return print_report(figures, bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
